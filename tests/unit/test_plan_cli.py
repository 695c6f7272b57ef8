"""``gemini plan`` says what it found, and what is wrong with what it was given."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from forecast_models import KIB, MIB, machine

from gemini.cli import plan as plan_command
from gemini.cli.command_line import build_parser
from gemini.cli.main import main
from gemini.cli.plan_model import PRESETS, ModelOptions, find_model
from gemini.errors import ConfigError
from gemini.forecast.machine import MachineSpeeds
from gemini.system.config import format_bytes

GPT = "gpt:layers=2,hidden=64,heads=4"
FACTORY = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(32, 64), nn.Linear(64, 8)
    def forward(self, x):
        return {"logits": self.second(self.first(x).relu())}

def plain(): return Net(), torch.ones(1, 32)
def sized(batch): return Net(), (torch.ones(batch, 32),), lambda out, inputs: out["logits"].square().mean()
def real():
    with torch.device("cpu"): return Net(), torch.ones(1, 32)
def wrong(): return 3
def paramless(): return nn.ReLU(), torch.ones(1, 32)
def failing(): return Net(), torch.ones(1, 32), lambda out, inputs: out["missing"]
def deciding():
    class Deciding(Net):
        def forward(self, x): return super().forward(x * float(x.sum()))
    return Deciding(), torch.ones(1, 32)
"""


@pytest.fixture
def described(tmp_path: Path) -> list[str]:
    """Options that name a machine in a file."""
    path = tmp_path / "machine.json"
    machine().save(path)
    return ["--machine", str(path), "--seq", "32"]


@pytest.fixture
def factories(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "plan_factories.py").write_text(FACTORY)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "plan_factories", raising=False)
    return "plan_factories"


def plan(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> tuple[int, dict[str, Any]]:
    code = main(["plan", *arguments, "--json"])
    return code, json.loads(capsys.readouterr().out)


def test_json_has_the_verdict_and_the_numbers(
    described: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = ["--device-bytes", "8MiB", "--disk-bytes", "16MiB"]
    code, found = plan([GPT, *described, *sizes, "--batch", "2"], capsys)
    assert code == 0
    assert found["fits"]
    assert found["largest_batch"] >= 2
    assert found["units_per_step"] == 2 * 32
    assert found["step"]["seconds"] >= found["step"]["bound_seconds"] > 0


def test_what_does_not_fit_is_exit_code_one_and_says_why(
    described: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    code, found = plan([GPT, *described, "--device-bytes", str(300 * KIB), "--batch", "64"], capsys)
    assert code == 1
    assert not found["fits"]
    assert found["step"] is None
    assert "device_bytes" in found["obstacles"][0]


def test_what_is_said_has_the_length_it_is_for_and_options_as_they_are_given(
    described: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", GPT, *described, "--device-bytes", str(300 * KIB), "--batch", "64"]) == 1
    said = " ".join(capsys.readouterr().out.replace("\u2502", " ").split())
    assert "batch 64 of 32 tokens" in said
    assert "raise --device-bytes" in said


def test_a_device_of_nothing_is_refused(described: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", GPT, *described, "--device-bytes", "0"]) == 2
    assert "device_bytes is 0" in capsys.readouterr().err


@pytest.mark.parametrize("device_bytes", ["300KiB", "2MiB", "1GiB"])
def test_people_get_the_verdict_in_words(
    device_bytes: str, described: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    main(["plan", GPT, *described, "--device-bytes", device_bytes, "--disk-bytes", "1GiB"])
    out = capsys.readouterr().out
    assert ("It fits." in out) != ("It does not fit." in out)
    assert ("gemini.GeminiDDP" in out) == ("It fits." in out)


@pytest.mark.parametrize("device_bytes", ["300KiB", "2MiB"])
def test_each_peak_says_what_it_is_of_and_how_peaks_go_together(
    device_bytes: str, described: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [GPT, *described, "--device-bytes", device_bytes, "--disk-bytes", "1GiB"]
    _, found = plan(arguments, capsys)
    main(["plan", *arguments])
    said = " ".join(capsys.readouterr().out.split())
    assert f"all model data {format_bytes(found['model_data_bytes'])}" in said
    assert f"DEVICE peak, activations and temporaries {format_bytes(found['non_model_bytes'])}" in said
    budget = format_bytes(found["budgets"]["device"])
    if not found["fits"]:
        assert f"DEVICE peak, model data - {budget}" in said
        assert (
            f"No step was simulated. Model data and activations share the DEVICE budget of {budget}" in said
        )
        return
    peaks = found["step"]["peak_bytes"]
    assert f"DEVICE peak, model data {format_bytes(peaks['device'])} {budget}" in said
    assert f"DISK peak, model data {format_bytes(peaks['disk'])}" in said
    assert f"model data, activations and temporaries together never exceed {budget}" in said
    assert "tiers may add up to more than all model data" in said


def test_this_machine_is_measured_and_can_be_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    kept = tmp_path / "here.json"
    options = [
        "--seq",
        "32",
        "--device-bytes",
        "3MiB",
        "--disk-dir",
        str(tmp_path),
        "--save-machine",
        str(kept),
    ]
    code, found = plan([GPT, *options], capsys)
    assert code == 0
    assert found["step"]["sampled_share"] > 0.5
    assert {link.name for link in MachineSpeeds.load(kept).links} == {"disk_read", "disk_write"}


@pytest.mark.parametrize("function", ["plain", "sized"])
def test_a_factory_may_return_inputs_and_a_loss(
    function: str, factories: str, described: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    name = f"{factories}:{function}"
    code, found = plan([name, *described, "--device-bytes", "4MiB", "--batch", "16"], capsys)
    assert code == 0
    assert found["parameters"] == 32 * 64 + 64 + 64 * 8 + 8
    assert found["units_per_step"] == 16


@pytest.mark.parametrize(
    ("function", "what"),
    [
        ("real", "made with memory"),
        ("wrong", "must be a module"),
        ("missing", "cannot import"),
        ("paramless", "nothing to train"),
        ("deciding", "values"),
    ],
)
def test_a_factory_that_will_not_do_is_one_line(
    function: str, what: str, factories: str, described: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", f"{factories}:{function}", *described, "--device-bytes", str(MIB)]) == 2
    error = capsys.readouterr().err
    assert what in error
    assert error.startswith("gemini: error: ")


def test_what_a_model_raises_is_shown_whole_and_is_no_verdict(
    factories: str, described: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", f"{factories}:failing", *described, "--device-bytes", str(MIB)]) == 2
    error = capsys.readouterr().err
    assert "plan_factories.py" in error
    assert error.endswith("KeyError: 'missing'\n")


@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("broken:x", "invalid syntax (broken.py, line 1)"),
        ("..:x", "package.module:function"),
        ("./a:x", "path"),
    ],
)
def test_a_module_that_cannot_be_imported_is_one_line(
    name: str, what: str, factories: str, described: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    Path("broken.py").write_text("def wrong(:\n")
    assert main(["plan", name, *described]) == 2
    assert what in capsys.readouterr().err


@pytest.mark.parametrize(
    ("key", "value", "most"),
    [("layers", 10**7, "10000"), ("hidden", 10**15, "10000000"), ("vocab", int("9" * 300), "10000000")],
)
def test_a_gpt_that_nobody_would_see_built_is_refused_with_the_bound(
    key: str, value: int, most: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", f"gpt:{key}={value}"]) != 0
    assert f"it must be at most {most}" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("key", "value"), [("n_layer", 10**7), ("num_experts", 10**7), ("depths", [2, 10**400])]
)
def test_a_config_with_more_modules_than_are_built_is_refused_with_the_bound(
    key: str, value: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("transformers")
    config = tmp_path / "config.json"
    config.write_text(json.dumps({"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], key: value}))
    assert main(["plan", str(config)]) != 0
    assert f"{key} is 1e+" in (said := capsys.readouterr().err)
    assert "more than the 10000 that are built" in said


@pytest.mark.parametrize("name", ["no-such-model", "gpt:layers=x", "gpt:wheels=4"])
def test_an_unknown_model_is_refused_with_what_there_is(name: str) -> None:
    with pytest.raises(ConfigError, match="gpt"):
        find_model(name, ModelOptions(32, checkpointing=False))


def test_presets_have_the_published_sizes() -> None:
    published = {
        "gpt2": 124e6,
        "gpt2-medium": 355e6,
        "gpt2-large": 774e6,
        "gpt2-xl": 1558e6,
        "gpt3-13b": 13e9,
    }
    for name, parameters in published.items():
        module = find_model(name, ModelOptions(1024, checkpointing=False)).example(1).module
        assert sum(each.numel() for each in module.parameters()) == pytest.approx(parameters, rel=0.02)
    assert published.keys() < PRESETS.keys()


def test_help_teaches_by_examples(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        build_parser().parse_args(["plan", "--help"])
    assert capsys.readouterr().out.count("  gemini plan ") >= 4


@pytest.mark.parametrize(
    ("options", "what"),
    [
        (["--disk-bytes", "1GiB"], "--disk-dir"),
        (["--machine", "/nonexistent"], "cannot read"),
    ],
)
def test_a_machine_that_cannot_be_known_is_refused(
    options: list[str], what: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", GPT, "--device-bytes", "8MiB", *options]) == 2
    assert what in capsys.readouterr().err


def test_a_disk_without_space_to_measure_it_is_refused_with_the_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("gemini.placement.probe.probe_links", lambda **_options: ())
    monkeypatch.setattr(shutil, "disk_usage", lambda _path: SimpleNamespace(free=64 * KIB, total=2**30))
    assert main(["plan", GPT, "--device-bytes", "8MiB", "--disk-dir", str(tmp_path)]) == 2
    assert "needs 8.0 MiB, and 64.0 KiB are free" in capsys.readouterr().err


def test_a_described_machine_needs_the_links_of_its_tiers(
    described: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", GPT, *described, "--device-bytes", "8MiB", "--host-bytes", "8MiB"]) == 2
    assert "d2h, h2d" in capsys.readouterr().err


@pytest.mark.parametrize("option", ["--batch", "--seq"])
@pytest.mark.parametrize("count", ["9999999999999999", "9" * 5000])
def test_a_count_beyond_the_sizes_of_tensors_is_refused(
    option: str, count: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        main(["plan", GPT, "--device-bytes", "8MiB", option, count])
    assert end.value.code == 2
    assert f"argument {option}" in capsys.readouterr().err


def test_a_model_that_was_misspelled_is_refused_with_a_guess(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "gpt2xl"]) == 2
    assert "did you mean gpt2-xl?" in capsys.readouterr().err


def test_the_schedules_are_those_of_pipelines() -> None:
    from gemini.parallel.pipeline.orders import SCHEDULES

    assert set(plan_command.SCHEDULES) == set(SCHEDULES)
