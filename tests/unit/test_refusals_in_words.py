"""Refusals that come of Python's own errors say in words what was wrong, not a bare key."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import gemini
from gemini.checkpoint import plain_data
from gemini.checkpoint.sealed_file import making_sense_of
from gemini.cli.main import main
from gemini.errors import CheckpointError, ConfigError, in_words
from gemini.parallel import Booster
from gemini.system import rng


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (KeyError("weight_map"), "'weight_map' is missing or unknown"),
        (KeyError(7), "7 is missing or unknown"),
        (KeyError("no such\nformat"), "no such format"),
        (KeyError(), "KeyError"),
        (IndexError("out of range"), "a list is shorter than it should be (out of range)"),
        (RecursionError("maximum recursion depth exceeded"), "it is nested too deeply"),
        (ValueError(), "ValueError"),
        (ValueError("a\n  b"), "a b"),
        (ConfigError("x" * 500), "x" * 500),
    ],
)  # fmt: skip
def test_an_error_in_words(error: Exception, words: str) -> None:
    assert in_words(error) == words


def index_without_files(directory: Path) -> Path:
    index = directory / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}}))
    return index


def load_into_chunks(directory: Path) -> None:
    gemini.from_pretrained(index_without_files(directory).parent, lambda: nn.Linear(2, 2))


def load_by_booster(directory: Path) -> None:
    Booster().load_model(nn.Linear(2, 2), index_without_files(directory).parent)


def read_a_pickle(directory: Path) -> None:
    (directory / "pytorch_model.bin").write_bytes(b"\x80\x02h\x07.")  # a memo that there is not
    Booster().load_model(nn.Linear(2, 2), directory)


def read_a_manifest(directory: Path) -> None:
    with making_sense_of(directory / "manifest.json"):
        json.loads("{}")["params"]


def read_a_short_list(directory: Path) -> None:
    with making_sense_of(directory / "manifest.json"):
        json.loads("[]")[0]


def read_generators(directory: Path) -> None:
    rng.parse({"python": [3, [], None]})


def read_plain_data(directory: Path) -> None:
    plain_data.decode({"type": "sett"})


def load_states(directory: Path) -> None:
    model = nn.Linear(2, 2)
    optimizer = gemini.CPUAdam(model.parameters())
    booster = Booster()
    _, boosted, *_ = booster.boost(model, optimizer)
    save_file({"weight": torch.ones(2, 2)}, directory / "optimizer.safetensors")
    booster.load_optimizer(boosted, directory)


READERS: list[Callable[[Path], None]] = [
    load_into_chunks, load_by_booster, read_a_pickle, read_a_manifest, read_a_short_list,
    read_generators, read_plain_data, load_states,
]  # fmt: skip


@pytest.mark.parametrize("reader", READERS, ids=lambda reader: reader.__name__)
def test_no_refusal_of_a_reader_shows_a_bare_key(reader: Callable[[Path], None], tmp_path: Path) -> None:
    with pytest.raises(CheckpointError) as refused:
        reader(tmp_path)
    said = str(refused.value)
    assert not re.search(r"KeyError|IndexError|(: |\()'?[\w.]+'?\)?$", said), said


def test_a_model_config_that_lacks_a_key_is_refused_in_words(
    tmp_path: Path, capsys: pytest.CaptureFixture[Any]
) -> None:
    pytest.importorskip("transformers")
    config = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_act": "no_such_act"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert main(["plan", str(tmp_path)]) != 0
    said = capsys.readouterr().err
    assert "Traceback" not in said
    assert "'no_such_act' is missing or unknown; correct the config" in said
