"""Console output of every command, and how it handles streams that cannot be written to."""

from __future__ import annotations

import json
import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import IO, Any

import rich.console

from gemini.errors import printable


class Console(rich.console.Console):
    """A console that never ends the process by itself.

    If nobody reads standard output any longer, writing a result raises BrokenPipeError, which ends the
    command. Progress on standard error is dropped if it cannot be written (its reader has left, or its disk
    is full), and the command continues.
    """

    @property
    def file(self) -> IO[str]:
        """The stream to write to."""
        found = super().file
        return _Progress(found) if self.stderr else found  # type: ignore[return-value]

    @file.setter
    def file(self, new_file: IO[str]) -> None:
        self._file = new_file

    def on_broken_pipe(self) -> None:
        """Re-raise the BrokenPipeError of a write; rich calls this while it is handled."""
        raise


class _Progress:
    """A text stream that drops text that cannot be written."""

    def __init__(self, stream: IO[str]) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        """Write ``text``, or keep it in the buffer, or drop it."""
        with self._taking_what_it_can():
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        """Write the buffer as far as possible."""
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
    """Print a result as JSON; with ``indent=None`` on one line."""
    print(json.dumps(value, indent=indent))


def say_error(error: object) -> None:
    """Print the error that ends the command on standard error, if that can be written to. What a terminal
    would not print as a character, such as an escape in a path, is written out."""
    text = "\n".join(map(printable, str(error).split("\n")))
    with suppress(OSError):
        print(f"gemini: error: {text}", file=sys.stderr)


def discard(descriptor: int) -> None:
    """Redirect ``descriptor`` to the null device: the interpreter flushes once more when it ends."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, descriptor)
    os.close(nowhere)


def silence_packages() -> None:
    """Silence log messages of packages that transformers and peft import: about GPU kernels that were not
    built, and about each other's names."""
    for name in ("torchao", "torch.utils._pytree", "bitsandbytes.backends.cpu.ops"):
        logging.getLogger(name).setLevel(logging.ERROR)


def silence_transformers() -> None:
    """Disable progress bars and log messages of transformers."""
    try:
        from transformers.utils import logging as of_transformers
    except ImportError:
        return  # commands that need it raise their own error
    of_transformers.disable_progress_bar()
    of_transformers.set_verbosity_error()
