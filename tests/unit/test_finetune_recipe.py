"""What ``gemini finetune`` is told: options and recipes; nothing here needs transformers."""

from __future__ import annotations

import argparse
import dataclasses
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from gemini.cli import finetune
from gemini.errors import ConfigError
from gemini.jobs.finetune.config import FineTuneConfig
from gemini.jobs.finetune.recipe import read_recipe
from gemini.jobs.run.run_directory import RunDirectory
from gemini.jobs.run.training import shaped_factor

RECIPES = Path(__file__).resolve().parents[2] / "recipes"
NEEDED = ["--model", "m", "--data", "d", "--output", "o"]


def parse(*arguments: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    finetune.add_parser(parser.add_subparsers())
    return parser.parse_args(["finetune", *arguments])


def recipe(directory: Path, text: str, name: str = "r.toml") -> Path:
    path = directory / name
    path.write_text(text)
    return path


def test_no_options_are_the_defaults_and_every_field_has_an_option(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert finetune.config_from(parse(*NEEDED)) == FineTuneConfig(model="m", data="d", output="o")
    with pytest.raises(SystemExit):
        parse("--help")
    shown = capsys.readouterr().out
    for field in dataclasses.fields(FineTuneConfig):
        assert f"--{field.name.replace('_', '-')}" in shown


@pytest.mark.parametrize("name", ["r.toml", "r.yaml"])
def test_a_recipe_has_options_by_their_names_and_options_win(name: str, tmp_path: Path) -> None:
    texts = {
        "r.toml": 'model = "m"\nlr = 1e-4\n[budgets]\ndevice-bytes = "2MiB"\nhost_bytes = "auto"\n'
        '[more]\nlora = 2\nlora_targets = ["a", "b"]\nlora_target_parameters = ["c", "d"]\nclip = 1\n'
        "resume = true\n",
        "r.yaml": "model: m\nlr: 1.0e-4\nbudgets:\n  device-bytes: 2MiB\n  host_bytes: auto\n"
        "lora: 2\nlora_targets: [a, b]\nlora_target_parameters: [c, d]\nclip: 1\nresume: true\n",
    }
    if name == "r.yaml":
        pytest.importorskip("yaml", reason="pyyaml comes with transformers")
    given = read_recipe(recipe(tmp_path, texts[name], name))
    assert given == {
        "model": str(tmp_path / "m"),
        "lr": 1e-4,
        "device_bytes": 2**21,
        "host_bytes": None,
        "lora": 2,
        "lora_targets": "a,b",
        "lora_target_parameters": "c,d",
        "clip": 1.0,
        "resume": "yes",
    }
    more = ["--data", "d", "--output", str(tmp_path / "o"), "--lr", "1e-3"]
    config = finetune.config_from(parse(str(tmp_path / name), *more))
    assert (config.lr, config.device_bytes, config.model) == (1e-3, 2**21, str(tmp_path / "m"))


@pytest.mark.parametrize("path", sorted(RECIPES.iterdir()), ids=lambda path: path.name)
def test_recipes_that_ship_are_complete_but_for_paths(path: Path) -> None:
    config = finetune.config_from(parse(str(path), *NEEDED))
    assert config.device_bytes
    assert config.checkpoint_every


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("learning_rat = 1", "'learning_rat', which is not an option"),
        ("bach = 1", "did you mean 'batch'"),
        ("devicebytes = 1", "did you mean 'device_bytes'"),
        ("xyzzy = 1", "there are model, data"),
        ('lr = "fast"', "lr = 'fast', which is not a number"),
        ("batch = 1.5", "batch = 1.5, which is not a whole number"),
        ("packing = 1", "packing = 1, which is not true or false"),
        ('device_bytes = "lots"', "device_bytes in .* is 'lots'"),
        ("batch = 1\n[a]\nbatch = 2", "'batch' twice"),
        ("batch = ", "is not valid TOML"),
    ],
)
def test_recipes_that_mean_nothing_are_refused_by_key(text: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        read_recipe(recipe(tmp_path, text))


def test_options_take_back_what_a_recipe_says_of_adapters(tmp_path: Path) -> None:
    path = recipe(tmp_path, "lora = 4\nlora_dropout = 0.1\n")
    with pytest.raises(ConfigError, match="--lora-dropout is an option of adapters"):
        finetune.config_from(parse(str(path), *NEEDED, "--lora", "0"))
    taken_back = ["--lora", "0", "--lora-dropout", "0"]
    assert finetune.config_from(parse(str(path), *NEEDED, *taken_back)) == finetune.config_from(
        parse(*NEEDED)
    )


def test_a_recipe_that_is_not_there_or_no_recipe_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"the recipe .*none\.toml does not exist; name a \.toml or"):
        read_recipe(tmp_path / "none.toml")
    with pytest.raises(ConfigError, match="cannot read the recipe"):
        read_recipe(tmp_path)
    with pytest.raises(ConfigError, match="is neither"):
        read_recipe(recipe(tmp_path, "{}", "r.json"))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--data", "d", "--output", "o"], "--model is missing"),
        ([*NEEDED, "--seq", "1"], "--seq is 1; it must be at least 2"),
        ([*NEEDED, "--epochs", "0"], "--epochs is 0"),
        ([*NEEDED, "--lr", "nan"], "--lr is nan"),
        ([*NEEDED, "--warmup", "1"], "--warmup is 1"),
        ([*NEEDED, "--merge"], "--merge .* give --lora RANK"),
        ([*NEEDED, "--dora"], "--dora is a variant of LoRA; give --lora RANK"),
        ([*NEEDED, "--rslora"], "--rslora is a variant of LoRA; give --lora RANK"),
        ([*NEEDED, "--lora", "4", "--lora-alpha", "0"], "--lora-alpha is 0"),
        ([*NEEDED, "--lora-alpha", "8"], "--lora-alpha is an option of adapters.* give --lora RANK"),
        ([*NEEDED, "--lora-dropout", "0.1"], "--lora-dropout is an option of adapters"),
        ([*NEEDED, "--lora-targets", "q_proj"], "--lora-targets is an option of adapters"),
        ([*NEEDED, "--lora-targets", "all-linear"], "--lora-targets is an option of adapters"),
        (
            [*NEEDED, "--lora-target-parameters", "experts.up"],
            "--lora-target-parameters is an option of adapters",
        ),
        ([*NEEDED, "--lora", "4", "--lora-targets", "none"], "none leaves no layer for adapters"),
        (
            [*NEEDED, "--lora", "4", "--lora-target-parameters", "experts.up", "--dora"],
            "--dora does not go with --lora-target-parameters",
        ),
        ([*NEEDED, "--dpo-beta", "0.1"], "--dpo-beta is .* give --objective dpo"),
        ([*NEEDED, "--quantize", "nf4"], "--quantize nf4 freezes the base.* add --lora 16"),
        ([*NEEDED, "--lora", "4", "--quantize", "nf4", "--merge"], "--quantize nf4 and --merge"),
        ([*NEEDED, "--eval-every", "3"], "add --eval-share"),
        ([*NEEDED, "--keep-best"], "--keep-best needs held-out records"),
        ([*NEEDED, "--eval-data", "e", "--eval-share", "0.1"], "--eval-data and .* give one of them"),
        ([*NEEDED, "--resume", "auto", "--overwrite"], "give one of them"),
        ([*NEEDED, "--no-packing", "--documents", "cut"], "--no-packing gives each its own row"),
        ([*NEEDED, "--data-keys", "question"], "has 'question'; write NAME=KEY"),
        ([*NEEDED, "--data-keys", "promt=q"], r"did you mean prompt\?.* NAME is one of text, prompt"),
        ([*NEEDED, "--data-keys", "q=prompt"], r"did you mean prompt=q\?"),
        ([*NEEDED, "--show", "-1"], "--show is -1"),
        ([*NEEDED, "--activations", "plan"], "needs a tier below DEVICE"),
        ([*NEEDED, "--activations", "plan", "--host-bytes", "1GiB", "--tp", "2"], "this run has 2; use"),
        (
            [*NEEDED, "--activations", "plan", "--host-bytes", "1GiB", "--device", "cuda"],
            "plan supports only the CPU",
        ),
    ],
)
def test_options_that_cannot_work_are_refused_by_name(arguments: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        finetune.config_from(parse(*arguments))


def test_what_is_only_shown_needs_no_output() -> None:
    assert finetune.config_from(parse("--model", "m", "--data", "d", "--show", "3")).show == 3
    with pytest.raises(ConfigError, match="--output is missing"):
        finetune.config_from(parse("--model", "m", "--data", "d"))


def test_a_run_is_resumed_with_its_options_but_for_those_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    first = finetune.config_from(parse(*NEEDED, "--lora", "4", "--lora-alpha", "8", "--no-packing"))
    RunDirectory("o", lambda _: True).start(first.identity(), first.options())
    config = finetune.config_from(parse("--output", "o", "--resume", "auto", "--device-bytes", "2MiB"))
    wanted = {"model": str(tmp_path / "m"), "data": str(tmp_path / "d"), "resume": "auto"}
    assert config == dataclasses.replace(first, device_bytes=2**21, lr=2e-4, **wanted)


@pytest.mark.parametrize(("shape", "last"), [("cosine", 0.0), ("linear", 0.0), ("constant", 1.0)])
def test_learning_rate_rises_over_the_warmup_then_goes_its_way(shape: str, last: float) -> None:
    factors = [shaped_factor(step, steps=10, warmup=4, shape=shape) for step in range(11)]
    assert factors[:5] == [0.25, 0.5, 0.75, 1.0, 1.0]
    assert factors[4:] == sorted(factors[4:], reverse=True)
    assert factors[10] == pytest.approx(last)


def test_packages_of_extras_are_imported_on_use_alone() -> None:
    modules: Any = ["transformers", "tokenizers", "peft", "yaml", "pyarrow", "datasets"]
    code = f"""
import sys, json
import gemini.cli.command_line, gemini.jobs.finetune.job, gemini.cli.finetune
print(json.dumps([name for name in {modules} if name in sys.modules]))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == []
