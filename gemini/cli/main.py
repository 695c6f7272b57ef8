"""Entry point of the ``gemini`` command.

Other distributions add commands by entry points of the group ``gemini.commands``: ``NAME =
"module:function"`` adds ``gemini NAME``; the function gets the subparsers of argparse, adds a parser of that
name, and gives it a default ``run(options) -> exit code``. A command line that is wrong is answered with a
few lines that guess what was meant.
"""

from __future__ import annotations

import argparse
import errno
import logging
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import Any, NoReturn

from gemini._C import build_info
from gemini.cli import (
    check,
    ckpt,
    convert_config,
    export,
    finetune,
    merge,
    mode_speeds,
    plan,
    run,
    sample,
    serve,
    simulate,
    trace,
    train,
)
from gemini.cli.console import discard, say_error, silence_packages
from gemini.errors import ConfigError, GeminiError
from gemini.system.config import did_you_mean

GROUP = "gemini.commands"
AddParser = Callable[[Any], object]

# Commands of this project that are installed by themselves, and how.
ELSEWHERE = {"bench": "pip install ./benchmarks, in a checkout of gemini-runtime"}


def added_commands(called: str, known: Collection[str]) -> dict[str, AddParser]:
    """Return what installed distributions add, by name, besides the commands that are ``known`` already.

    One that cannot be loaded is left out, so that it stops no other command.

    Raises:
        ConfigError: it is the one that was ``called``, or that one is not installed.
    """
    found: dict[str, AddParser] = {}
    for entry in sorted(metadata.entry_points(group=GROUP), key=lambda entry: entry.name):
        if entry.name in known:
            continue
        try:
            found[entry.name] = entry.load()
        except (ImportError, AttributeError) as error:
            if entry.name == called:
                origin = entry.dist.name if entry.dist is not None else entry.value
                raise ConfigError(
                    f"gemini {called}, which {origin} adds, cannot be loaded ({error}); install {origin} anew"
                ) from error
    if called in ELSEWHERE and called not in {*known, *found}:
        raise ConfigError(f"gemini {called} is not installed: {ELSEWHERE[called]}")
    return found


_EXIT_USAGE = 2
_MOST_GUESSES = 3


class CommandParser(argparse.ArgumentParser):
    """A parser that takes options by their whole names only, and reports an error in three lines.

    A shortened option could change its meaning with the next option that is added. argparse makes the
    parsers of subcommands of this class, too; each of them refuses the options that it does not know.
    """

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **{**settings, "allow_abbrev": False})

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:
        """Parse, and end the process where an option is unknown."""
        options, unknown = super().parse_known_args(args, namespace)
        if unknown:
            self.error(f"unrecognized arguments: {' '.join(each + self._guess(each) for each in unknown)}")
        return options, unknown

    def error(self, message: str) -> NoReturn:
        """Print ``message`` under one line on how the command is called, and exit with code 2."""
        self.exit(_EXIT_USAGE, f"{self._short_usage()}\n{self.prog}: error: {message}\n")

    def _guess(self, unknown: str) -> str:
        """Return in brackets the options that begin like ``unknown``, or else the nearest; "" for none."""
        if not unknown.startswith("-"):
            return ""
        name = unknown.partition("=")[0]
        shown = [action for action in self._actions if action.help != argparse.SUPPRESS]
        known = [text for action in shown for text in action.option_strings]
        longer = [text for text in known if text.startswith(name)]
        if 0 < len(longer) <= _MOST_GUESSES:
            return f" (did you mean {' or '.join(longer)}?)"
        return did_you_mean(name, known)

    def _short_usage(self) -> str:
        positional = [
            f"[{action.metavar}]" if action.nargs == "?" else str(action.metavar or action.dest)
            for action in self._actions
            if not action.option_strings
        ]
        called = " ".join([self.prog, "[options]", *positional])
        return f"usage: {called}\nall options: {self.prog} --help"

    def _get_value(self, action: argparse.Action, arg_string: str) -> Any:
        try:
            return super()._get_value(action, arg_string)
        except argparse.ArgumentError:
            kinds: dict[object, str] = {int: "a whole number", float: "a number"}
            if (kind := kinds.get(action.type)) is None:
                raise  # such a type says itself what it takes
            raise argparse.ArgumentError(action, f"{arg_string!r} is not {kind}; give one") from None

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


EXIT_ERROR = 2
EXIT_INTERRUPTED = 130

COMMANDS: dict[str, AddParser] = {
    "check": check.add_parser,
    "plan": plan.add_parser,
    "train": train.add_parser,
    "finetune": finetune.add_parser,
    "merge": merge.add_parser,
    "sample": sample.add_parser,
    "serve": serve.add_parser,
    "export": export.add_parser,
    "run": run.add_parser,
    "ckpt": ckpt.add_parser,
    "convert-config": convert_config.add_parser,
    "trace": trace.add_parser,
    "simulate": simulate.add_parser,
    "benchmark": mode_speeds.add_parser,
}

DESCRIPTION = """\
Train PyTorch models that do not fit in memory. Parameters, gradients and
optimizer states live on tiers (DEVICE, HOST, DISK), each with a budget in bytes.
"""
EPILOG = """\
start here:
  gemini check
  gemini plan gpt2 --device-bytes 1GiB --disk-dir .
  gemini train --device-bytes 64MiB --disk-dir .
      trains on Python's own sources, in 64 MiB of memory
  gemini finetune --model DIR --data chats.jsonl --output out/tuned
  gemini COMMAND --help
      shows every option with its unit and default, and more examples

gemini bench is a package of its own: pip install ./benchmarks in a checkout.
Sizes are bytes: 65536, 64KiB, 512MiB, 4GiB.
"""


class _HelpFormatter(argparse.RawDescriptionHelpFormatter):
    """Leaves room for the indent of commands, so that the longest name has its help beside it."""

    def add_argument(self, action: argparse.Action) -> None:
        """Measure ``action``."""
        super().add_argument(action)
        if isinstance(action, argparse._SubParsersAction):
            self._action_max_length += self._indent_increment


def build_parser(added: Mapping[str, AddParser] | None = None) -> argparse.ArgumentParser:
    """Return the parser of the whole command, with ``added`` commands after its own."""
    parser = CommandParser(
        prog="gemini",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=_HelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"gemini {build_info()['version']}")
    subparsers = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for add_parser in (*COMMANDS.values(), *(added or {}).values()):
        add_parser(subparsers)
    return parser


def main(arguments: Sequence[str] | None = None, *, added: Mapping[str, AddParser] | None = None) -> int:
    """Run one command and return its exit code. ``added`` commands are there beside those that are installed.

    An error of ours is one line on standard error and code 2; Ctrl-C is code 130. Any other exception, of a
    model's own code for one, is shown as Python does, and is code 2 as well: 1 is a verdict of the command. A
    reader of standard output that has left (head, less) is no error; a full disk under it is one.
    """
    try:
        code = _run(list(sys.argv[1:] if arguments is None else arguments), added or {})
    except GeminiError as error:
        say_error(error)
        code = EXIT_ERROR
    except KeyboardInterrupt:
        with suppress(OSError):
            print("gemini: interrupted", file=sys.stderr)
        code = EXIT_INTERRUPTED
    except BrokenPipeError:
        code = 0
    except OSError as error:
        if error.errno != errno.ENOSPC or error.filename is not None:
            code = _unexpected(error)
        else:
            code = _lost(error)  # what Python and rich write in between
    except SystemExit as end:  # of --help, --version and wrong usage
        if (lost := _flush()) and not end.code:
            return lost
        raise
    except Exception as error:
        code = _unexpected(error)
    except BaseException:
        _flush()
        raise
    return _flush() or code


def _run(arguments: list[str], added: Mapping[str, AddParser]) -> int:
    options = _parsed(arguments, added)
    if logging.lastResort is not None:  # not the root logger, which a script that is traced may configure
        is_ours = arguments[0] in ("train", "finetune") or (arguments[0] == "trace" and not options.script)
        logging.lastResort.setFormatter(WarningFormatter(train.with_options if is_ours else str))
    if not getattr(options, "script", None):  # what a script says is its own
        silence_packages()
    _require_directory()
    perform: Callable[[argparse.Namespace], int] = options.run
    return perform(options)


def _require_directory() -> None:
    """Raise ConfigError where the working directory was removed: torch and Python ask for its name."""
    try:
        Path.cwd()
    except OSError as error:
        raise ConfigError(
            f"the working directory cannot be had ({error.strerror}); go to another (cd)"
        ) from None


def _parsed(arguments: list[str], added: Mapping[str, AddParser]) -> argparse.Namespace:
    called = arguments[0] if arguments else ""
    parser = build_parser({**added, **added_commands(called, {*COMMANDS, *added})})
    if called != "trace":
        return parser.parse_args(arguments, argparse.Namespace(called=tuple(arguments)))
    own, script = trace.split_script(arguments)
    options = parser.parse_args(own)
    options.script = script
    return options


def _unexpected(error: Exception) -> int:
    sys.excepthook(type(error), error, error.__traceback__)
    return EXIT_ERROR


def _flush() -> int:
    """Write what the standard streams still hold; left to the interpreter's end, a failure would be the code.
    Return that of a failure to write the result, else 0. A stream that the caller has closed is None."""
    if sys.stderr is not None:
        try:
            sys.stderr.flush()
        except OSError:
            discard(sys.stderr.fileno())
    try:
        if sys.stdout is not None:
            sys.stdout.flush()
    except BrokenPipeError:
        discard(sys.stdout.fileno())
    except OSError as error:
        return _lost(error)
    return 0


def _lost(error: OSError) -> int:
    discard(sys.stdout.fileno())
    say_error(f"what was to be printed is lost: {error}; free some space")
    return EXIT_ERROR


if __name__ == "__main__":
    sys.exit(main())
