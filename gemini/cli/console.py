"""The rich console of every command: what a pipe does whose reader has left is decided in one place."""

from __future__ import annotations

import json
import os
import sys

import rich.console


class Console(rich.console.Console):
    """A console that never ends the process by itself.

    A result that nobody reads any more raises BrokenPipeError, which the command ends with; progress on
    standard error falls silent, and the work goes on.
    """

    def on_broken_pipe(self) -> None:
        """Called where a write raised BrokenPipeError, while it is handled."""
        if not self.stderr:
            raise
        self.quiet = True
        discard(self.file.fileno())


def print_json(value: object, *, indent: int | None = 2) -> None:
    """Print a result for another program; with ``indent=None`` on one line."""
    print(json.dumps(value, indent=indent))


def say_error(error: object) -> None:
    """Print on standard error what ends the command."""
    print(f"gemini: error: {error}", file=sys.stderr)


def discard(descriptor: int) -> None:
    """Have what is still written to ``descriptor`` vanish: the interpreter flushes once more as it ends."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, descriptor)
    os.close(nowhere)
