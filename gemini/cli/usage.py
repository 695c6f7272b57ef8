"""What a command line that is wrong is answered with: a few lines that guess what was meant."""

from __future__ import annotations

import argparse
import logging
from collections.abc import Callable
from typing import Any, NoReturn

from gemini.system.config import did_you_mean

_EXIT_USAGE = 2


class CommandParser(argparse.ArgumentParser):
    """A parser whose errors take three lines, not the usage of every option. Its subcommands are of its
    class, and each refuses what it does not know itself."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:
        """Parse, and end the process where an option is unknown."""
        options, unknown = super().parse_known_args(args, namespace)
        if unknown:
            known = [text for action in self._actions for text in action.option_strings]
            named = " ".join(
                f"{each}{did_you_mean(each.partition('=')[0], known)}" if each.startswith("-") else each
                for each in unknown
            )
            self.error(f"unrecognized arguments: {named}")
        return options, unknown

    def error(self, message: str) -> NoReturn:
        """Print ``message`` under one line on how the command is called, and exit with code 2."""
        self.exit(_EXIT_USAGE, f"{self._short_usage()}\n{self.prog}: error: {message}\n")

    def _short_usage(self) -> str:
        positional = [
            f"[{action.metavar}]" if action.nargs == "?" else str(action.metavar or action.dest)
            for action in self._actions
            if not action.option_strings
        ]
        called = " ".join([self.prog, "[options]", *positional])
        return f"usage: {called}\nall options: {self.prog} --help"

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is not None and value not in action.choices:
            there = [str(choice) for choice in action.choices]
            raise argparse.ArgumentError(
                action,
                f"there is no {value!r}{did_you_mean(str(value), there)}; choose from {', '.join(there)}",
            )


class WarningFormatter(logging.Formatter):
    """Formats a record of the library as ``warning: ...``, in the words that ``translate`` makes of it."""

    def __init__(self, translate: Callable[[str], str]) -> None:
        super().__init__()
        self._translate = translate

    def format(self, record: logging.LogRecord) -> str:
        """Return the line."""
        return f"{record.levelname.lower()}: {self._translate(super().format(record))}"
