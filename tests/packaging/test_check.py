"""The ``gemini`` command and ``gemini check``."""

from __future__ import annotations

import copy
import io
import json
import platform
import re
from pathlib import Path

import pytest
from rich.console import Console

from gemini.cli import check, main
from gemini.cli.command_line import EXIT_ERROR
from gemini.errors import ConfigError


def test_json_has_every_section_and_only_plain_data(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main.main(["check", "--json", "--dir", str(tmp_path)]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert set(facts) == {"versions", "compiled", "cpu", "memory", "io", "gpu", "missing"}
    assert facts["cpu"]["adam_isa"] in facts["cpu"]["adam_isas"]
    assert 0 < facts["memory"]["free_bytes"] <= facts["memory"]["total_bytes"]
    assert facts["io"]["directory"] == str(tmp_path)


def test_a_directory_with_brackets_is_shown_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "run[old]").mkdir()
    screen = Console(file=io.StringIO(), width=500)
    check.render(check.collect(tmp_path / "run[old]"), screen)
    assert f"{tmp_path}/run[old]" in screen.file.getvalue()


def test_check_leaves_nothing_in_the_directory(tmp_path: Path) -> None:
    check.collect(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_markdown_names_versions_and_the_disk_but_nobodys_machine(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    versions = check.versions() | {"peft": None, "transformers": "5.0|x"}
    monkeypatch.setattr(check, "versions", lambda: versions)
    assert main.main(["check", "--markdown", "--dir", str(tmp_path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    for told in (str(tmp_path), tmp_path.name, platform.node(), str(Path.home())):
        assert not any(told in line for line in lines), told
    assert "|  | transformers | 5.0\\|x |" in lines
    assert any(line.startswith("|  | system | Linux ") for line in lines)
    assert any(line.startswith("|  | file system | ") for line in lines)
    assert not any("peft" in line for line in lines)
    assert {len(re.findall(r"(?<!\\)\|", line)) for line in lines} == {4}


def test_check_of_a_missing_directory_is_an_error_that_names_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    absent = tmp_path / "absent"
    assert main.main(["check", "--dir", str(absent)]) == EXIT_ERROR
    printed = capsys.readouterr().err
    assert printed.startswith("gemini: error: ")
    assert str(absent) in printed
    assert "create it or name another" in printed


@pytest.mark.parametrize(
    ("section", "key", "value", "what"),
    [
        ("versions", "matplotlib", None, "matplotlib"),
        ("compiled", "uring", False, "liburing"),
        ("memory", "huge_pages", "never", "huge pages"),
        ("io", "direct", False, "direct I/O"),
    ],
)
def test_what_is_missing_is_shown_with_a_command(
    section: str, key: str, value: object, what: str, tmp_path: Path
) -> None:
    facts = copy.deepcopy(check.collect(tmp_path))
    facts[section][key] = value
    entry = next(entry for entry in check.missing(facts) if entry[0] == what)
    facts["missing"] = [dict(zip(("what", "why", "command"), entry, strict=True))]
    out = io.StringIO()
    check.render(facts, Console(file=out, width=200))
    assert what in out.getvalue()
    assert entry[2] in out.getvalue()


def test_cuda_is_missed_only_where_there_is_a_gpu(tmp_path: Path) -> None:
    facts = check.collect(tmp_path)
    facts["compiled"]["cuda"] = facts["gpu"]["torch_cuda"] = None
    for driver, expected in ((False, set()), (True, {"CUDA part", "torch with CUDA"})):
        facts["gpu"]["driver"] = driver
        found = {what for what, _, _ in check.missing(facts)}
        assert found & {"CUDA part", "torch with CUDA"} == expected


def test_the_installation_alone_names_versions_compiled_parts_and_cuda(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shut = tmp_path / "absent"  # no directory is tried
    for option in ("-i", "--installation"):
        assert main.main(["check", option, "--json", "--dir", str(shut)]) == 0
        facts = json.loads(capsys.readouterr().out)
        assert set(facts) == {"versions", "compiled", "compatibility", "gpu", "missing"}
        assert facts["compatibility"]["torch"] == "yes"
    assert main.main(["check", "-i"]) == 0
    shown = capsys.readouterr().out
    for told in (facts["versions"]["torch"], "CUDA part and torch", "io_uring part", "torch's CUDA"):
        assert told in shown


@pytest.mark.parametrize(
    ("built", "torch_cuda", "driver", "problem", "pair", "runs"),
    [
        (None, None, False, None, "not needed without the CUDA part", "no NVIDIA driver on this machine"),
        (None, "13.0", True, None, "not needed without the CUDA part", "not needed without the CUDA part"),
        ("13.0.88", None, True, None, "not needed without torch's CUDA", "yes"),
        ("13.0.88", "13.1", True, None, "yes", "yes"),
        ("12.8", "13.0", True, "too old", "no: CUDA part 12.8, torch's CUDA 13.0", "no: too old"),
        ("1.2", "12.0", True, None, "no: CUDA part 1.2, torch's CUDA 12.0", "yes"),
    ],
)
def test_cuda_versions_agree_by_their_major_number(
    built: str | None, torch_cuda: str | None, driver: bool, problem: str | None, pair: str, runs: str
) -> None:
    found = check.compatibility(
        {
            "versions": {"torch": "2.9.1+cu130"},
            "compiled": {"cuda": built},
            "gpu": {"driver": driver, "torch_cuda": torch_cuda, "problem": problem},
        }
    )
    assert found["torch"] == "yes"
    assert found["CUDA part and torch"].startswith(pair)
    assert found["driver"] == runs


def test_an_older_torch_is_named_with_the_first_that_fits() -> None:
    facts = {"compiled": {"cuda": None}, "gpu": {"driver": False, "torch_cuda": None, "problem": None}}
    assert check.compatibility({**facts, "versions": {"torch": "2.7.1"}})["torch"].startswith(
        "no: torch is 2.7.1"
    )
    assert check.compatibility({**facts, "versions": {"torch": "2.10.0"}})["torch"] == "yes"


@pytest.mark.parametrize(
    ("raised", "code", "printed"),
    [
        (ConfigError("bad size"), 2, "gemini: error: bad size"),
        (KeyboardInterrupt(), 130, "gemini: interrupted"),
    ],
)
def test_errors_are_one_line_and_an_exit_code(
    raised: BaseException,
    code: int,
    printed: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def fail(directory: Path) -> check.Facts:
        raise raised

    monkeypatch.setattr(check, "collect", fail)
    assert main.main(["check"]) == code
    assert capsys.readouterr().err == f"{printed}\n"


@pytest.mark.parametrize(
    "command",
    [
        "check",
        "plan",
        "train",
        "ckpt",
        "ckpt inspect",
        "ckpt verify",
        "ckpt convert",
        "trace",
        "simulate",
        "benchmark",
    ]
    + [
        f"bench {name}"
        for name in ("adam", "io", "nvme", "placement", "zero", "gpu", "runtime", "checkpoint")
    ],
)
def test_every_command_has_help(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main.main([*command.split(), "--help"])
    assert ended.value.code == 0
    assert f"usage: gemini {command}" in capsys.readouterr().out


@pytest.mark.parametrize("arguments", [["plan", "gpt2"], ["train"], ["ckpt", "inspect", "/tmp"]])
def test_a_working_directory_that_is_gone_is_said(
    arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    assert main.main(arguments) == 2
    assert "change to another directory (cd)" in capsys.readouterr().err


def test_help_names_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main.main(["--help"])
    out = capsys.readouterr().out
    assert all(f"gemini {command}" in out for command in ("check", "train", "bench"))
