"""Directories and files as a stranger might make them, by number: the same number is the same input.

What lies outside a directory is watched by the kernel: :class:`Outside` knows whether anything there was
opened, also by a library in another language.
"""

from __future__ import annotations

import ctypes
import json
import os
import pickle
import random
import shutil
import signal
import socket
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from mutants import mutate

_IN_ACCESS, _IN_MODIFY, _IN_OPEN, _IN_CREATE = 0x1, 0x2, 0x20, 0x100
NAMES = [
    "../outside/secret.safetensors", "..", ".", "", "/etc/passwd", "a/b.safetensors", "nul\0l", "\ud800",
    "line\nfeed", "x" * 300, "config.json", "missing.safetensors", 7, None, ["model.safetensors"],
]  # fmt: skip
TEXTS: list[bytes] = [
    b"", b" ", b"null", b"[]", b"3", b'"text"', b"{", b"}", b"[" * 5000, b'{"a":' * 3000, b"\xff\xfe\x00",
    b"NaN", b'{"a": 1, "a": 2}', b"9" * 5000, b'{"a": "\\ud800"}', b"\xef\xbb\xbf{}", b"\0" * 64,
    b'{"a": 1e999}', b"{} {}", b'{"model_type": "llama", "model_type": "gpt2"}', b'{"model_type": {}}',
    b'{"weight_map": []}', b'{"weight_map": {"a": {}}}', b'{"model_type": "' + b"x" * 70000 + b'"}',
]  # fmt: skip


class Hang(BaseException):
    """A reader that waits for ever; no ``except Exception`` takes it."""


@contextmanager
def no_longer_than(seconds: int) -> Iterator[None]:
    """Raise Hang in the block after so many seconds."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise Hang

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


class Outside:
    """A directory that nothing may be opened in, nor made."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._watch = self._libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
        mask = _IN_ACCESS | _IN_MODIFY | _IN_OPEN | _IN_CREATE
        if self._watch < 0 or self._libc.inotify_add_watch(self._watch, os.fsencode(path), mask) < 0:
            raise OSError(ctypes.get_errno(), "inotify")

    def was_touched(self) -> bool:
        """Return whether anything was, since the last call."""
        touched = False
        with suppress(BlockingIOError):
            while os.read(self._watch, 65536):
                touched = True
        return touched

    def close(self) -> None:
        os.close(self._watch)


class _Runs:
    """What writes a file where it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self._marker = marker

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self._marker),)


class Stranger:
    """Spoils copies of a directory in ways that follow from a number."""

    def __init__(self, base: Path, outside: Path) -> None:
        self._base = base
        self._outside = outside

    def make(self, number: int, target: Path) -> str:
        """Make ``target`` and return what is wrong with it."""
        chance = random.Random(number)
        shutil.copytree(self._base, target)
        done = []
        for _ in range(chance.choice([1, 1, 1, 2])):
            way = chance.choice(_WAYS)
            with suppress(Exception):  # what the one before has left may be no document any more
                done.append(f"{way.__name__} {way(self, target, chance)}")
        return "; ".join(done)

    def _file(self, target: Path, chance: random.Random, *endings: str) -> Path:
        files = [
            path
            for path in sorted(target.iterdir())
            if path.name.endswith(endings or (".json", ".safetensors", ".jinja"))
        ]
        # The documents that everybody reads, mostly.
        first = [path for path in files if path.name.startswith(("config", "model", "adapter"))]
        return chance.choice(
            (first if first and chance.random() < 0.6 else files) or [target / "config.json"]
        )

    # -- ways ------------------------------------------------------------------------------------

    def text(self, target: Path, chance: random.Random) -> str:
        path, number = self._file(target, chance, ".json"), chance.randrange(len(TEXTS))
        _replace(path).write_bytes(TEXTS[number])
        return f"{path.name} {number}"

    def truncated(self, target: Path, chance: random.Random) -> str:
        path = self._file(target, chance)
        if _is_small(path):
            data = path.read_bytes()
            _replace(path).write_bytes(data[: chance.randrange(len(data) + 1)])
        return path.name

    def flipped(self, target: Path, chance: random.Random) -> str:
        path = self._file(target, chance)
        if _is_small(path) and path.stat().st_size:
            data = bytearray(path.read_bytes())
            for _ in range(chance.choice([1, 8])):
                data[chance.randrange(min(len(data), 2000))] = chance.randrange(256)
            _replace(path).write_bytes(data)
        return path.name

    def values(self, target: Path, chance: random.Random) -> str:
        path = self._file(target, chance, ".json")
        document = _document(path)
        for _ in range(chance.choice([1, 1, 3])):
            mutate(document, chance)
        _replace(path).write_text(json.dumps(document))
        return path.name

    def kind(self, target: Path, chance: random.Random) -> str:
        path = self._file(target, chance)
        name = chance.choice(sorted(_KINDS))
        _KINDS[name](_replace(path), self._outside)
        return f"{path.name} {name}"

    def header(self, target: Path, chance: random.Random) -> str:
        path = self._file(target, chance, ".safetensors")
        raw = path.read_bytes() if _is_small(path) else b""
        size = struct.unpack("<Q", raw[:8])[0]
        entries, data = json.loads(raw[8 : 8 + size]), raw[8 + size :]
        for _ in range(chance.choice([1, 1, 3])):
            mutate(entries, chance)
        text = json.dumps(entries).encode()
        if chance.random() < 0.2:  # a key twice
            text = text[:-1] + b"," + text[1:]
        if chance.random() < 0.2:
            data = data[:-4] if chance.random() < 0.5 else data + b"\0" * 8
        length = len(text)
        if chance.random() < 0.3:
            length = chance.choice([0, 1, length - 1, length + 1, 2**31, 2**63, 2**64 - 1, 100_000_001])
        _replace(path).write_bytes(struct.pack("<Q", length) + text + data)
        return path.name

    def index(self, target: Path, chance: random.Random) -> str:
        path = target / "model.safetensors.index.json"
        document = _document(path)
        names = document["weight_map"]
        name = chance.choice(NAMES)
        for key in [chance.choice(sorted(names))] if chance.random() < 0.5 else list(names):
            names[key] = name
        _replace(path).write_text(json.dumps(document))
        return repr(name)

    def pickled(self, target: Path, chance: random.Random) -> str:
        for path in target.glob("*.safetensors*"):
            _replace(path)
        name = "adapter_model.bin" if (target / "adapter_config.json").exists() else "pytorch_model.bin"
        value: Any = _Runs(self._outside / "ran")
        if chance.random() < 0.5:
            (target / name).write_bytes(pickle.dumps(value))
        else:
            torch.save(
                {"weight": value} if chance.random() < 0.5 else {"weight": torch.ones(2)}, target / name
            )
        return name

    def code(self, target: Path, chance: random.Random) -> str:
        source = f"import os\nos.mkdir({str(self._outside / 'ran')!r})\n"
        (target / "own.py").write_text(source)
        (target / "custom_generate").mkdir(exist_ok=True)
        (target / "custom_generate" / "generate.py").write_text(source + "def generate(*a, **b): pass\n")
        classes = {
            "AutoConfig": "own.C",
            "AutoModelForCausalLM": "own.M",
            "AutoTokenizer": ["own.T", "own.T"],
        }
        changes: list[dict[str, Any]] = [
            {"auto_map": classes, "model_type": "own"},
            {"auto_map": classes},
            {"attn_implementation": "a/b:own"},
            {"quantization_config": {"quant_method": "own"}},
            {"transformers_weights": "../outside/secret.safetensors"},
            {"model_type": "own"},
            {"megatron_config": {"a": 1}, "megatron_core": "own"},
            {"dtype": "own"},
            {"auto_mapping": {"base_model_class": "C", "parent_library": "own"}},
            {"architectures": ["own.M"]},
        ]
        change = chance.choice(changes)
        for name in ("config.json", "tokenizer_config.json", "adapter_config.json", "generation_config.json"):
            with suppress(ValueError, OSError, TypeError):
                document = _document(target / name)
                _replace(target / name).write_text(json.dumps({**document, **change}))
        return str(sorted(change))

    def another(self, target: Path, chance: random.Random) -> str:
        """Another model altogether, of its smallest size or of its own."""
        from transformers import CONFIG_MAPPING

        kind = chance.choice(sorted(CONFIG_MAPPING.keys()))
        document = _document(target / "config.json") if chance.random() < 0.5 else {}
        _replace(target / "config.json").write_text(json.dumps({**document, "model_type": kind}))
        return kind

    def names(self, target: Path, chance: random.Random) -> str:
        name = chance.choice(
            [b"line\nfeed.json", b"\xff\xfe.safetensors", b"-rf.json", b"a" * 250, b"\x1b[2J.json"]
        )
        with suppress(OSError):
            Path(os.fsdecode(os.fsencode(target) + b"/" + name)).write_bytes(chance.choice(TEXTS))
        return repr(name)

    def gone(self, target: Path, chance: random.Random) -> str:
        path = self._file(target, chance)
        _replace(path)
        return path.name


_WAYS: list[Callable[[Stranger, Path, random.Random], str]] = [
    Stranger.text, Stranger.truncated, Stranger.flipped, Stranger.values, Stranger.values, Stranger.kind,
    Stranger.header, Stranger.header, Stranger.index, Stranger.pickled, Stranger.code, Stranger.names,
    Stranger.gone, Stranger.another,
]  # fmt: skip


def _is_small(path: Path) -> bool:
    return path.is_file() and path.stat().st_size < 2**24


def _document(path: Path) -> Any:
    return json.loads(path.read_text() if _is_small(path) else "")


def _replace(path: Path) -> Path:
    """Remove what is there; return the path."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
    return path


def socket_at(path: Path) -> None:
    """Make a socket."""
    here = Path.cwd()
    os.chdir(path.parent)  # a name of a socket is short
    try:
        with socket.socket(socket.AF_UNIX) as made:
            made.bind(path.name[:90])
    finally:
        os.chdir(here)


def _loop(path: Path, outside: Path) -> None:
    path.symlink_to(path.name)


def _chain(path: Path, outside: Path) -> None:
    path.with_name("link").unlink(missing_ok=True)
    path.with_name("link").symlink_to(outside)
    path.symlink_to(f"link/{_secret(path)}")


def _secret(path: Path) -> str:
    return "secret.safetensors" if path.suffix == ".safetensors" else "secret.json"


_KINDS: dict[str, Callable[[Path, Path], None]] = {
    "fifo": lambda path, outside: os.mkfifo(path),
    "directory": lambda path, outside: path.mkdir(),
    "socket": lambda path, outside: socket_at(path),
    "loop": _loop,
    "dangling": lambda path, outside: path.symlink_to("nowhere"),
    "zero": lambda path, outside: path.symlink_to("/dev/zero"),
    "outside": lambda path, outside: path.symlink_to(outside / _secret(path)),
    "relative": lambda path, outside: path.symlink_to(f"../outside/{_secret(path)}"),
    "chain": _chain,
    "sparse": lambda path, outside: path.touch() or os.truncate(path, 2**40),
}
