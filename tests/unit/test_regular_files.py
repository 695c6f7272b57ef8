"""What a command is given may be any file: none is waited for, and none takes the memory."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gemini.cli.plan_model import ModelOptions, find_model
from gemini.errors import CheckpointError, ConfigError
from gemini.forecast.machine import MachineSpeeds
from gemini.memstats import Trace
from gemini.system.files import open_regular, parse_json, read_regular

READERS: dict[str, Callable[[Path], Any]] = {
    "memstats": Trace.load,
    "machine": MachineSpeeds.load,
    "config": lambda path: find_model(str(path), ModelOptions(seq=1, checkpointing=False)),
}
KINDS = ["fifo", "link to a fifo", "device", "directory", "1 TiB", "nested", "no text"]


def _make(path: Path, kind: str) -> None:
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "link to a fifo":
        os.mkfifo(path.with_name("fifo"))
        path.symlink_to("fifo")
    elif kind == "device":
        path.symlink_to("/dev/zero")
    elif kind == "directory":
        path.mkdir()
    elif kind == "1 TiB":
        path.touch()
        os.truncate(path, 2**40)
    else:
        path.write_bytes(b"\xff\xfe" if kind == "no text" else b"[" * 100_000)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("reader", READERS)
def test_what_is_no_file_of_ours_is_refused_with_its_path(tmp_path: Path, reader: str, kind: str) -> None:
    path = tmp_path / "file.json"
    _make(path, kind)
    with pytest.raises((CheckpointError, ConfigError), match=r"file\.json"):
        READERS[reader](path)


def test_a_link_is_followed_unless_it_must_not_be(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"12")
    (tmp_path / "link").symlink_to("file")
    assert read_regular(tmp_path / "link", 2) == b"12"
    with pytest.raises(OSError, match="it has 2 bytes, more than 1 B"):
        read_regular(tmp_path / "link", 1)
    with pytest.raises(OSError, match="it is a link"):
        open_regular(tmp_path / "link", os.O_NOFOLLOW)


@pytest.mark.parametrize("text", ["", "{", b"\xff", "[" * 100_000, '{"a":' * 100_000, "1" * 5000])
def test_what_is_no_json_is_a_value_error(text: str | bytes) -> None:
    with pytest.raises(ValueError, match=r"."):
        parse_json(text)
