"""The options of ``gemini train``."""

from __future__ import annotations

import argparse
import dataclasses
import math
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from gemini.cli import train
from gemini.cli.command_line import COMMANDS, added_commands, build_parser
from gemini.cli.main import main
from gemini.errors import CheckpointError, ConfigError
from gemini.jobs.gpt.config import TrainConfig
from gemini.jobs.run.run_directory import RunDirectory
from gemini.jobs.run.training import lr_factor


def parse(*arguments: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    train.add_parser(parser.add_subparsers())
    return parser.parse_args(["train", *arguments])


def test_no_options_are_the_defaults_of_the_config() -> None:
    options = parse()
    assert train.config_from(options) == TrainConfig()
    assert options.run is train.run


def test_every_field_of_the_config_has_an_option_with_help(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse("--help")
    shown = capsys.readouterr().out
    for field in dataclasses.fields(TrainConfig):
        assert f"--{field.name.replace('_', '-')}" in shown


def test_an_unknown_option_is_refused_with_the_help_of_its_command(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit):
        main(["train", "--batch-size", "2"])
    said = capsys.readouterr().err
    assert "gemini train: error: unrecognized arguments: --batch-size" in said
    assert "all options: gemini train --help" in said


def parsers_of(parser: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    yield parser
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for each in action.choices.values():
                yield from parsers_of(each)


def test_no_parser_of_any_command_takes_shortened_options() -> None:
    parsers = list(parsers_of(build_parser(added_commands("", set(COMMANDS)))))
    assert len(parsers) > len(COMMANDS) + 3  # those of gemini ckpt, too
    assert [parser.prog for parser in parsers if parser.allow_abbrev] == []


def test_a_shortened_option_is_answered_with_all_that_it_may_stand_for(
    capsys: pytest.CaptureFixture[str],
) -> None:
    for given, guess in (("--res", "--resume"), ("--act=plan", "--activations"), ("--disk", "--disk-dir")):
        with pytest.raises(SystemExit):
            main(["train", given])
        said = capsys.readouterr().err
        assert f"unrecognized arguments: {given} (did you mean " in said
        assert guess in said.rpartition("(")[2]
    with pytest.raises(SystemExit):
        main(["run", "--told"])  # an option that is not shown is no guess
    assert "--told-by-stdin" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "guess"),
    [
        (["train", "--disc-dir", "x"], "gemini train: error: .*--disk-dir"),
        (["finetune", "--disc-dir=x"], "gemini finetune: error: .*--disk-dir"),
        (["ckpt", "verfy", "x"], "gemini ckpt: error: .*verify"),
        (["fientune"], "gemini: error: .*finetune"),
        (["train", "--policy", "atuo"], "gemini train: error: .*auto"),
    ],
)
def test_what_was_misspelled_is_answered_by_its_command_in_three_lines_with_a_guess(
    arguments: list[str], guess: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        main(arguments)
    lines = capsys.readouterr().err.splitlines()
    assert end.value.code == 2
    assert len(lines) == 3
    assert re.match(rf"{guess}\?", lines[2].replace("did you mean ", ""))


@pytest.mark.parametrize(
    ("option", "text", "kind"), [("--steps", "2.5", "a whole number"), ("--lr", "small", "a number")]
)
def test_what_is_no_number_is_refused_in_words(
    option: str, text: str, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        main(["train", option, text])
    assert end.value.code == 2
    assert f"argument {option}: {text!r} is not {kind}; give one" in capsys.readouterr().err


def test_sizes_take_units_and_refuse_nonsense(capsys: pytest.CaptureFixture[str]) -> None:
    config = train.config_from(parse("--device-bytes", "24MiB", "--host-bytes", "0"))
    assert (config.device_bytes, config.host_bytes) == (24 * 2**20, 0)
    with pytest.raises(SystemExit):
        parse("--device-bytes", "lots")
    assert "lots" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--resume"], "--resume needs --checkpoint DIR"),
        (["--resume", "auto"], "--resume needs --checkpoint DIR"),
        (["--checkpoint-every", "5"], "--checkpoint-every needs --checkpoint DIR"),
        (["--resume", "--overwrite", "--checkpoint", "run"], "give one of them"),
        (["--steps", "0"], "--steps is 0"),
        (["--lr", "nan"], "--lr is nan"),
        (["--clip", "-1"], "--clip is -1"),
        (["--hidden", "30", "--heads", "4"], "use hidden 32"),
        (["--activations", "plan"], "--activations plan needs a tier below DEVICE; add --disk-dir"),
        (["--activations", "offload", "--disk-dir", "disk", "--policy", "cpu"], "needs --policy auto"),
        (
            ["--activations", "plan", "--disk-dir", "disk", "--device", "cuda"],
            "supports only the CPU, .*--device cuda; use",
        ),
    ],
)
def test_options_that_cannot_work_are_refused_by_name(arguments: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        train.config_from(parse(*arguments))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["--device-bytes", "64KiB"],
            "raise --device-bytes to at least [0-9.]+.iB .* give --disk-dir and --disk-bytes of",
        ),
        (["--disk-bytes", "1MiB"], "--disk-bytes is given without --disk-dir"),
        (["--device", "xpu"], "device 'xpu' cannot compute here; pass 'cpu' or 'cuda'"),
    ],
)
def test_what_the_runtime_refuses_is_said_in_options(
    arguments: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = tmp_path / "text"
    text.write_text("all work and no play " * 100)
    assert main(["train", "--data", str(text), "--layers", "1", "--hidden", "16", *arguments]) == 2
    assert re.search(message, capsys.readouterr().err)


def test_ranks_of_torchrun_are_refused_before_each_trains_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    arguments = ["--layers", "1", "--hidden", "16", "--steps", "1", "--checkpoint", str(tmp_path / "run")]
    assert main(["train", *arguments]) == 2
    assert "torchrun started 2; run it without torchrun" in " ".join(capsys.readouterr().err.split())
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("steps", [1, 5, 40, 5000])
def test_learning_rate_warms_up_then_falls_to_a_tenth(steps: int) -> None:
    factors = [lr_factor(step, steps=steps) for step in range(steps)]
    peak = factors.index(max(factors))
    assert max(factors) == 1.0
    assert peak < max(1, min(100, steps // 10))
    assert factors[:peak] == sorted(factors[:peak])
    assert factors[peak:] == sorted(factors[peak:], reverse=True)
    assert math.isclose(lr_factor(steps, steps=steps), 1.0 if steps == 1 else 0.1)


def test_a_run_is_resumed_with_its_options_but_for_those_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    first = train.config_from(
        parse("--layers", "2", "--data", "book.txt", "--steps", "9", "--device-bytes", "1MiB", "--verify")
    )
    RunDirectory("run", lambda _: True).start(first.identity(), first.options())
    config = train.config_from(parse("--checkpoint", "run", "--resume", "--device-bytes", "2MiB"))
    wanted = dataclasses.replace(
        first,
        data=str(tmp_path / "book.txt"),
        device_bytes=2**21,
        verify=False,
        checkpoint="run",
        resume="yes",
    )
    assert config == wanted
    automatic = parse("--checkpoint", "run", "--resume", "auto", "--device-bytes", "2MiB")
    assert train.config_from(automatic) == dataclasses.replace(wanted, resume="auto")
    assert train.config_from(parse("--checkpoint", "run", "--overwrite")).layers == TrainConfig().layers
    assert train.config_from(parse("--checkpoint", "none", "--resume", "auto")).layers == TrainConfig().layers


@pytest.mark.parametrize(
    "text",
    [
        '{"options": {"layers": "4"}}',
        '{"options": {"layers": true}}',
        '{"options": {"resume": true}}',
        '{"options": {"data": 5}}',
        '{"options": {"device_bytes": "4"}}',
        '{"options": {"disk_dir": "a\\u0000b"}}',
        '{"options": {"lr": 1' + 400 * "0" + "}}",
        '{"options": "no"}',
        "no",
        "[1]",
        '[["layers", 4]]',
        "\0\0",
        100_000 * "[",
    ],
    ids=range(13),
)
def test_options_of_a_run_that_are_none_are_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"run\.json .*; repair it, or start over"):
        train.config_from(parse("--checkpoint", str(tmp_path), "--resume"))
