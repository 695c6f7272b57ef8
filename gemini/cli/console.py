"""The console of every command: what a stream does that takes no more is decided in one place."""

from __future__ import annotations

import json
import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import IO, Any

import rich.console


class Console(rich.console.Console):
    """A console that never ends the process by itself.

    A result that nobody reads any more raises BrokenPipeError, which the command ends with. Progress on
    standard error is dropped while that takes none (its reader has left, its disk is full), and the work goes
    on.
    """

    @property
    def file(self) -> IO[str]:
        """Where to write."""
        found = super().file
        return _Progress(found) if self.stderr else found  # type: ignore[return-value]

    @file.setter
    def file(self, new_file: IO[str]) -> None:
        self._file = new_file

    def on_broken_pipe(self) -> None:
        """Called where a write raised BrokenPipeError, while it is handled."""
        raise


class _Progress:
    """A text stream that drops what cannot be written."""

    def __init__(self, stream: IO[str]) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        """Write ``text``, or keep it in the buffer, or drop it."""
        with self._taking_what_it_can():
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        """Hand over what is in the buffer, as far as that is taken."""
        with self._taking_what_it_can():
            self._stream.flush()

    @contextmanager
    def _taking_what_it_can(self) -> Iterator[None]:
        try:
            yield
        except BrokenPipeError:  # nobody will ever read it
            discard(self._stream.fileno())
        except OSError:  # a disk may have space again
            return

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def print_json(value: object, *, indent: int | None = 2) -> None:
    """Print a result for another program; with ``indent=None`` on one line."""
    print(json.dumps(value, indent=indent))


def say_error(error: object) -> None:
    """Print on standard error what ends the command, where that can be written to."""
    with suppress(OSError):
        print(f"gemini: error: {error}", file=sys.stderr)


def discard(descriptor: int) -> None:
    """Have what is still written to ``descriptor`` vanish: the interpreter flushes once more as it ends."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, descriptor)
    os.close(nowhere)


def silence_packages() -> None:
    """Keep advice out of the output that packages give when transformers and peft import them: on kernels for
    GPUs that are not built, and on each other's names."""
    for name in ("torchao", "torch.utils._pytree", "bitsandbytes.backends.cpu.ops"):
        logging.getLogger(name).setLevel(logging.ERROR)


def silence_transformers() -> None:
    """Keep progress bars and advice of transformers out of the text."""
    try:
        from transformers.utils import logging as of_transformers
    except ImportError:
        return  # what needs it says so
    of_transformers.disable_progress_bar()
    of_transformers.set_verbosity_error()
