"""``gemini bench inference``: its cases run, and its verdicts follow from its figures."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from pairs import first

from gemini.cli.main import main
from gemini_bench import inference, inference_engine, inference_experts, inference_llama
from gemini_bench.session import Session


@pytest.mark.dear("one real run of a case: two programs, each of which imports transformers")
@pytest.mark.parametrize("case", first(inference.CASES))
def test_a_quick_run_measures_every_row_of_a_case(
    case: str, capsys: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("accelerate")
    out = tmp_path / "record.json"
    monkeypatch.chdir(tmp_path)
    assert main(["bench", "inference", "--quick", "--only", case, "--json", "--out", str(out)]) == 0
    rows = json.loads(capsys.readouterr().out)["cases"][case]["rows"]
    assert rows
    assert all(row["value"] is not None or row["not_measured"] for row in rows)
    assert list(tmp_path.iterdir()) == [out]


def test_verdicts_of_experts_follow_from_what_passes_read_and_used() -> None:
    def run(read: int, prompt: float, peak: int) -> dict[str, Any]:
        seconds = {"cpu_seconds": 0.3, "resident_cpu_seconds": 0.1}
        sizes = {"used_bytes": 100, "device_bytes": 50, "peak_bytes": peak}
        return {"read_bytes": read, "prompt_reads": prompt, **sizes, **seconds}

    rows = {
        row.what: row
        for row in inference_experts.rows_of({"a 1": run(45, 0.8, 50), "a 8": run(75, 1.2, 51)}, (1, 8))
    }
    what = "bytes read / bytes of the experts used"
    assert (rows[f"a 1: {what}"].value, rows[f"a 1: {what}"].met) == (0.45, True)
    assert rows[f"a 8: {what}"].met is False
    assert [rows[f"a {batch}: the same, of a long prompt"].met for batch in (1, 8)] == [True, False]
    assert [rows[f"a {batch}: most on DEVICE / budget"].met for batch in (1, 8)] == [True, False]


def test_verdicts_of_an_engine_follow_from_one_client_and_many() -> None:
    def run(seconds: float, outside: float, peak: float) -> dict[str, Any]:
        one = {"seconds": 1.0, "cpu_seconds": 2.0, "read_bytes": 100.0, "outside": 0.0}
        many = {"seconds": seconds, "cpu_seconds": 0.5, "read_bytes": 10.0, "outside": outside}
        return {"one": one, "many": many, "peak": peak}

    found = {
        "streamed": run(0.1, 0.01, 1.01),
        "resident": run(0.2, 0.06, 0.5),
        "generate": {"cpu_seconds": 0.25},
        "left": {"requests": 1000, "growth_bytes": 2**23, "files": 1, "kv_bytes": 0},
    }
    rows = {row.what: row for row in inference_engine.rows_of(found, 16)}
    assert rows["streamed: seconds per token, 16 clients / 1"].met is True
    assert rows["streamed: bytes read per token, 16 clients / 1"].value == 0.1
    assert rows["resident: processor time per token of 16, engine / generate()"].value == 2.0
    outside = "time outside of passes / within, 16 clients"
    assert [rows[f"{kind}: {outside}"].met for kind in ("streamed", "resident")] == [True, False]
    assert rows["streamed: most of weights, keys and values / budget"].met is False
    assert rows["1,000 requests: growth of memory"].met is True
    assert rows["the same: files opened"].met is False


def test_verdicts_follow_from_bytes_and_processor_time() -> None:
    def run(cpu: float, read: int, beside: int = 0) -> dict[str, Any]:
        sizes = {"weight_bytes": 300, "device_bytes": 100, "beside_bytes": beside}
        return {"cpu_seconds": [cpu], "read_bytes": [read], **sizes}

    found = {
        "resident 1": run(1.0, 0, beside=300 + 2**20),  # its weights, and a MiB for answering
        "manage 1": run(1.2, 208, beside=17 * 2**20),
        "ddp 1": run(1.2, 220, beside=2**30),
        "accelerate 1": run(3.0, 0),
    }
    rows = {row.what: row for row in inference.decode_rows(found, [1])}
    read = "bytes read by a pass / (weights - budget)"
    assert rows[f"manage(): {read}"].value == pytest.approx(1.04)
    assert rows[f"manage(): {read}"].met
    assert rows[f"GeminiDDP(model).module: {read}"].met is False
    added = "of it, more than a resident model takes beside its weights"
    assert (rows[f"manage(): {added}"].value, rows[f"manage(): {added}"].met) == (16 * 2**20, True)
    assert rows[f"GeminiDDP(model).module: {added}"].met is False
    ratio = rows["batch 1: beyond the resident pass, manage() / accelerate"]
    assert (ratio.value, ratio.met) == (pytest.approx(0.1), True)


def test_verdicts_of_llama_follow_from_the_bytes_of_both() -> None:
    def run(read: int, seconds: float) -> dict[str, Any]:
        return {"read_bytes": [read, read], "seconds": [seconds] * 2, "cpu_seconds": [seconds] * 2}

    files = {"weight_bytes": 300}
    ours = {"ours 1": run(210, 0.2), "ours 8": run(210, 0.4)}
    peer = {"16-bit 1": run(300, 0.8), "16-bit 8": run(300, 0.8)}
    small = {"4-bit 1": run(0, 0.1), "4-bit 8": run(30, 0.2)}
    found = {"files": files, **ours, **peer, **small}
    rows = {row.what: row for row in inference_llama.rows_of(found, (1, 8))}
    what = "bytes read by a pass, ours / llama.cpp"
    assert [rows[f"batch {batch}: {what}"].value for batch in (1, 8)] == [0.7, 0.7]
    assert [rows[f"batch {batch}: {what}"].met for batch in (1, 8)] == [True, False]
    assert rows["batch 1: seconds, llama.cpp / ours"].value == pytest.approx(4)
    assert rows["batch 8: seconds, llama.cpp in 4 bits / ours"].value == pytest.approx(0.5)
    assert rows["batch 8: bytes read by a pass / weights, llama.cpp in 4 bits"].value == 0.1


def test_llama_is_not_measured_without_the_package_or_a_group(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inference_llama, "PACKAGE", "no_such_package")
    record = inference.run(Session(disk_dir=tmp_path), ["llama"], ["gemini"])
    assert len(record["not_measured"]) == 2
    assert all("pip install 'llama-cpp-python" in what for what in record["not_measured"])
    monkeypatch.setattr(inference_llama, "PACKAGE", "gguf")
    monkeypatch.setattr(inference_llama, "MEMBERSHIP", tmp_path / "cgroup")
    (tmp_path / "cgroup").write_text("0::/somewhere\n")
    pytest.importorskip("gguf")
    assert "no memory cgroup of version 1" in str(inference_llama.lacking())
    (tmp_path / "cgroup").write_text("4:memory:/somewhere\n")
    monkeypatch.setattr(inference_llama, "MOUNTS", tmp_path / "absent")
    assert "run as root" in str(inference_llama.lacking())
