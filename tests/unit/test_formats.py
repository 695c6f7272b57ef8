"""Formats of documents: one of another release is named as what it is, and nothing of it is lost."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_models import assert_same, start
from resealed import read
from safetensors.torch import load_file

import gemini
from gemini import checkpoint
from gemini.checkpoint.directory import FORMAT
from gemini.errors import CheckpointError
from gemini.memstats.trace import Trace
from gemini.system.files import KEY, Format

pytestmark = pytest.mark.usefixtures("one_thread")

NOTES = Format("notes", 3, older={1: "write them again"})


@pytest.mark.parametrize(
    ("said", "version", "is_read"),
    [
        ("notes-3", 3, True),
        ("notes-2", 2, False),
        ("notes-1", 1, False),
        ("notes-4", 4, False),
        ("notes-0", 0, False),
        ("note-3", None, False),
        ("notes-3 ", None, False),
        ("notes-3\n", None, False),
        ("notes--3", None, False),
        ("notes-\u0663", None, False),
        ("notes-" + "9" * 5000, None, False),
        (3, None, False),
        (None, None, False),
        (["notes-3"], None, False),
    ],
)
def test_a_document_says_which_version_it_is_of(said: Any, version: int | None, is_read: bool) -> None:
    assert NOTES.version_of({KEY: said}) == version
    assert NOTES.is_read({KEY: said}) is is_read


@pytest.mark.parametrize("document", [None, [], "notes-3", {}, 3])
def test_what_says_nothing_is_of_no_version(document: Any) -> None:
    assert NOTES.version_of(document) is None
    assert NOTES.refusal(document, "a.json") == "a.json is not a notes-3 file"


def test_a_refusal_says_what_a_document_is() -> None:
    assert NOTES.refusal({KEY: "notes-1"}, "a.json") == (
        "a.json is a notes-1 file of an earlier release, which this one does not read: write them again"
    )
    newer = NOTES.refusal({KEY: "notes-4"}, "a.json")
    assert newer.startswith("a.json is a notes-4 file, written by a newer version of gemini-runtime")
    assert "\x1b" not in NOTES.refusal({}, "a\x1b[31m.json")


def _as_version(checkpoint_path: Path, version: int) -> None:
    """Make a checkpoint one that another release wrote, as far as anyone can tell."""
    for name in ("seal.json", "manifest.json"):
        document = read(checkpoint_path / name)
        document[KEY] = f"gemini-checkpoint-{version}"
        (checkpoint_path / name).write_text(json.dumps(document, indent=1, sort_keys=True) + "\n")


@pytest.mark.parametrize(
    ("version", "said"),
    [
        (FORMAT.version + 1, "written by a newer version"),
        (2, "of an earlier release"),
        (1, "earlier release"),
    ],
)
def test_a_checkpoint_of_another_version_is_no_damaged_one(tmp_path: Path, version: int, said: str) -> None:
    path = start().train(1).save(tmp_path / "run")
    _as_version(path, version)
    for look in (checkpoint.latest, checkpoint.CheckpointReader):
        with pytest.raises(CheckpointError, match=rf"gemini-checkpoint-{version} .*{said}"):
            look(path)  # type: ignore[operator]
    with pytest.raises(CheckpointError, match=said) as refused:
        start(seed=7).load(tmp_path / "run")
    assert "damaged" not in str(refused.value)


def test_a_save_removes_no_checkpoint_of_a_newer_version(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = start().train(1)
    path = run.save(tmp_path / "run")
    _as_version(path, FORMAT.version + 1)
    content = {file.name: file.read_bytes() for file in path.iterdir()}
    for _ in range(3):
        run.train(1).save(tmp_path / "run", keep=1)
    assert {file.name: file.read_bytes() for file in path.iterdir()} == content
    other = start(seed=7)
    with caplog.at_level(logging.WARNING, "gemini"):
        other.load(tmp_path / "run")
    assert_same(other, run)
    assert "written by a newer version" in caplog.text


def _trace(path: Path) -> None:
    Trace.load(path)


@pytest.mark.parametrize(("name", "load"), [("gemini-trace", _trace)])
def test_other_documents_of_a_newer_version_are_named(
    tmp_path: Path, name: str, load: Callable[[Path], None]
) -> None:
    path = tmp_path / "file.json"
    path.write_text(json.dumps({KEY: f"{name}-9"}))
    with pytest.raises(CheckpointError, match=rf"file\.json is a {name}-9 file, written by a newer version"):
        load(path)


# Written by the release of development b31e781: two linear layers of 8 x 8 after two steps of Adam.
BEFORE = Path(__file__).parent / "written_before" / "gemini-checkpoint-3"


def test_what_an_earlier_release_has_written_is_read(tmp_path: Path) -> None:
    path = tmp_path / "run" / "step-00000002"
    shutil.copytree(BEFORE, path)
    torch.manual_seed(1)
    model = gemini.GeminiDDP(torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)))
    optimizer = gemini.GeminiOptimizer(gemini.HybridAdam(model.parameters(), lr=1.0), model)
    checkpoint.load(tmp_path / "run", model, optimizer)
    weights = load_file(path / "model-00001-of-00001.safetensors")
    assert_close = partial(torch.testing.assert_close, rtol=0, atol=0)
    assert_close(dict(model.state_dict()), weights)
    written = load_file(path / "optimizer-rank-00000-of-00001-00001.safetensors")
    found = optimizer.state_dict()
    assert {key: found["param_groups"][0][key] for key in ("lr", "weight_decay")} == {
        "lr": 0.01,
        "weight_decay": 0.1,
    }
    for index, name in enumerate(weights):
        state = found["state"][index]
        assert state["step"] == 2
        for moment in ("exp_avg", "exp_avg_sq"):
            assert_close(state[moment].flatten(), written[f"{name}.{moment}[0:{state[moment].numel()}]"])
