"""What ``gemini convert-config`` prints trains, in each target, at the rates that DeepSpeed documents."""

from __future__ import annotations

import ast
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from deepspeed_files import RATES, UPDATES, configurations, fenced, one_cycle_momentum
from programs import run_python

from gemini.cli.conversion import NOT_SUPPORTED, TAKEN, Conversion, Target
from gemini.cli.conversion_programs import program
from gemini.cli.convert_config import convert

NAMES = tuple(configurations("."))
# Those that run for every target; the others run for the one that follows from the file.
EVERYWHERE = (
    "infinity",
    "fp16, fixed scale",
    "adam, l2",
    "sgd",
    "linear decay",
    "one cycle",
    "muon",
    "accelerate, fsdp 2",
)
GUESSED = {
    "trainer, stage 2": Target.TRAINER,
    "trainer, stage 3": Target.TRAINER,
    "fsdp of the trainer": Target.TRAINER,
    "page": Target.TRAINER,
}
LEARNING_RATE = 5e-5  # of TrainingArguments


def number(found: Conversion, group: str, name: str, default: int) -> int:
    """Return the value of an option, on one process."""
    return int(eval(found.of(group).get(name, f"{default}"), {"ranks": 1, "max": max}))


def rows(found: Conversion) -> int:
    """Return how many rows a program needs for so many updates: the Trainer has three epochs."""
    if found.target is not Target.TRAINER:
        group = "loop" if found.target is Target.LOOP else "accelerator"
        name = "accumulation" if found.target is Target.LOOP else "gradient_accumulation_steps"
        return UPDATES * number(found, group, name, 1)
    batch = number(found, "arguments", "per_device_train_batch_size", 8)
    return UPDATES // 3 * batch * number(found, "arguments", "gradient_accumulation_steps", 1)


class Runs:
    """All conversions, and what their programs did."""

    def __init__(self, folder: Path) -> None:
        disk = folder / "disk"
        disk.mkdir()
        self.documents = configurations(str(disk))
        self.found: dict[str, Conversion] = {}
        for name, document in self.documents.items():
            file = folder / ("a.yaml" if name.startswith("accelerate") else "a.json")
            file.write_text(json.dumps(document))
            self.found[name] = convert(file)
            for target in Target if name in EVERYWHERE else ():
                self.found[f"{name} {target.value}"] = convert(file, target)
        self._folder = folder
        self._results: dict[Target, dict[str, dict[str, Any]]] = {}

    def did(self, name: str) -> dict[str, Any]:
        """Return what the program of a conversion did; all of its target run in one process."""
        target = self.found[name].target
        if target not in self._results:
            self._results[target] = self._run(target)
        return self._results[target][name]

    def _run(self, target: Target) -> dict[str, dict[str, Any]]:
        folder = self._folder / target.value
        folder.mkdir()
        jobs = [
            {"name": name, "program": program(found), "rows": rows(found), "target": target.value}
            for name, found in self.found.items()
            if found.target is target
        ]
        (folder / "jobs").write_text(json.dumps(jobs))
        here = Path(__file__).parent / "converted_runs.py"
        done = run_python([here, folder / "jobs", folder / "results"])
        assert done.returncode == 0, done.stderr
        results: dict[str, dict[str, Any]] = json.loads((folder / "results").read_text())
        return results

    def names(self, name: str) -> list[str]:
        """Return the names of the conversions of a configuration."""
        return [name, *(f"{name} {target.value}" for target in Target if name in EVERYWHERE)]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(tmp_path_factory.mktemp("converted"))


def test_there_are_forty_configurations() -> None:
    assert len(NAMES) >= 40


@pytest.mark.parametrize(
    "target",
    [
        pytest.param(Target.LOOP, marks=pytest.mark.dear("trains fifty programs, in a new process")),
        Target.ACCELERATE,
        pytest.param(Target.TRAINER, marks=pytest.mark.dear("imports transformers' Trainer")),
    ],
)
def test_what_is_printed_trains_as_often_as_it_says(target: Target, runs: Runs) -> None:
    for name, found in runs.found.items():
        if found.target is target:
            did = runs.did(name)
            assert len(did["updates"]) == UPDATES, name
            assert did["steps"] == UPDATES or "float16" in did["precision"], name  # an overflow skips one


def test_the_program_follows_from_the_file(runs: Runs) -> None:
    for name in NAMES:
        wanted = Target.ACCELERATE if name.startswith("accelerate") else GUESSED.get(name, Target.LOOP)
        assert runs.found[name].target is wanted, name


SCHEDULED = [name for name, document in configurations(".").items() if "scheduler" in document]


@pytest.mark.parametrize("name", SCHEDULED)
def test_every_update_has_the_rate_that_deepspeed_documents(name: str, runs: Runs) -> None:
    section = runs.documents[name]["scheduler"]
    for each_name in runs.names(name):
        found, did = runs.found[each_name], runs.did(each_name)
        assert found.said[("scheduler", "type")][0] == TAKEN
        params = {key: value for key, value in section["params"].items() if value != "auto"}
        if found.target is Target.TRAINER and "auto" in section["params"].values():
            filled = {"warmup_max_lr": LEARNING_RATE, "warmup_num_steps": 1, "total_num_steps": UPDATES}
            params = {**filled, **params}
        wanted = [RATES[section["type"]](params, update, 2e-3) for update in range(UPDATES)]
        assert [each["lr"] for each in did["updates"]] == pytest.approx(wanted, rel=1e-9, abs=1e-15)
        if section["type"] == "OneCycle" and "SGD" not in found.optimizer_class:
            momenta = [one_cycle_momentum(params, update) for update in range(UPDATES)]
            assert [each["betas"][0] for each in did["updates"]] == pytest.approx(momenta)
            assert {each["betas"][1] for each in did["updates"]} == {0.99}


def test_a_program_trains_the_same_weights_in_a_loop_and_in_accelerate(runs: Runs) -> None:
    for name in ("adam, l2", "sgd", "linear decay", "one cycle", "muon", "infinity"):
        loop, accelerate = (runs.did(f"{name} {target}") for target in ("loop", "accelerate"))
        assert loop["weights"] == pytest.approx(accelerate["weights"], rel=1e-5), name


def test_values_arrive_in_the_optimizer_and_the_model(runs: Runs) -> None:
    for name, wanted in {
        "adam": {"eps": 1e-8, "weight_decay": [3e-7]},
        "adamw of torch": {"weight_decay": [0.01]},  # torch's default
        "cpu adam": {"weight_decay": [0.0]},
        "adam, l2 trainer": {"weight_decay": [0.1]},  # of all parameters, as with DeepSpeed's optimizer
        "lamb": {"weight_decay": [0.01], "eps": 1e-8},
        "1-bit lamb": {"weight_decay": [0.01], "eps": 1e-8},
        "muon, two rates": {"weight_decay": [0.1, 0.1]},
        "bf16 states": {"precision": "torch.bfloat16"},
        "fp16": {"precision": "torch.float16"},
        "fp16 off": {"precision": "None"},
        "accelerate, fsdp 2": {"recomputes": True, "precision": "torch.bfloat16"},
        "fsdp of the trainer": {"recomputes": True},
        "recomputed": {"recomputes": False},
    }.items():
        assert {key: runs.did(name)[key] for key in wanted} == wanted, name


def leaves(document: Any, above: str = "") -> Iterator[str]:
    """Yield the path of each key of a document that has no keys below it."""
    if isinstance(document, dict) and document:
        for key, value in document.items():
            yield from leaves(value, f"{above}{key}.")
    else:
        yield above[:-1]


@pytest.mark.parametrize("name", NAMES)
def test_every_key_has_one_verdict_and_a_sentence(name: str, runs: Runs) -> None:
    for found in map(runs.found.__getitem__, runs.names(name)):
        said = [key for key, _, _ in found.keys]
        assert sorted(said) == sorted(leaves(runs.documents[name])) or not runs.documents[name]
        for key, verdict, text in found.keys:
            assert text, key
            assert "unknown key" not in text, (key, verdict)
            assert "{" not in text.replace("={...}", ""), (key, text)


@pytest.mark.parametrize(
    ("name", "keys"),
    [
        ("zero++", ("zero_quantized_weights", "zero_hpz_partition_size", "zeropp_loco_param.reset_T")),
        ("compressed", ("different_groups.wq1.modules",)),
        ("staged", ("pipeline.stages", "moe.num_experts", "tp.tp_size", "sequence_parallel_size")),
        ("watched", ("elasticity.max_gpus", "curriculum_learning.enabled", "compile.deepcompile")),
        ("recomputed", ("partition_activations",)),
    ],
)
def test_what_there_is_not_is_said_with_a_way_out(name: str, keys: tuple[str, ...], runs: Runs) -> None:
    said = runs.found[name].keys
    for key in keys:
        (verdict,) = [verdict for path, verdict, _ in said if path.endswith(key)]
        assert verdict == NOT_SUPPORTED, key


def test_the_page_shows_what_is_printed(tmp_path: Path) -> None:
    """The page's configuration is in the matrix, too, and trains there."""
    file = tmp_path / "ds_config.json"
    file.write_text(fenced("json"))
    assert program(convert(file)) == fenced("python")


def test_a_program_is_of_plain_statements(runs: Runs) -> None:
    for name, found in runs.found.items():
        text = program(found)
        assert ast.parse(text).body, name
        assert max(map(len, text.splitlines())) <= 110, name
