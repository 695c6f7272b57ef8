"""The ``gemini`` command: its subcommands, its command line and its exit codes.

Other distributions add commands by entry points in the group ``gemini.commands``: ``NAME =
"module:function"`` adds ``gemini NAME``. The function gets argparse's subparsers, adds a parser of that name,
and sets its default ``run(options) -> exit code``. Errors in the command line are answered with a few lines
that suggest the correct option.
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
from gemini.cli.options import with_options
from gemini.errors import ConfigError, GeminiError
from gemini.system.config import did_you_mean

GROUP = "gemini.commands"
AddParser = Callable[[Any], object]

# Commands of this project that are installed separately, and how.
ELSEWHERE = {"bench": "pip install ./benchmarks, in a checkout of gemini-runtime"}


def added_commands(called: str, known: Collection[str]) -> dict[str, AddParser]:
    """Return the commands that installed distributions add, by name, except ``known`` ones. A command that
    cannot be loaded is left out, so that it does not break other commands.

    Raises:
        ConfigError: the command that was ``called`` cannot be loaded, or is not installed.
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
    """A parser that accepts only whole option names, and reports an error in three lines.

    The meaning of an abbreviated option could change when another option is added. argparse uses this class
    for the parsers of subcommands too; each of them refuses unknown options.
    """

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **{**settings, "allow_abbrev": False})

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:
        """Parse, and end the process if an option is unknown."""
        options, unknown = super().parse_known_args(args, namespace)
        if unknown:
            self.error(f"unrecognized arguments: {' '.join(each + self._guess(each) for each in unknown)}")
        return options, unknown

    def error(self, message: str) -> NoReturn:
        """Print ``message`` after a short usage line, and exit with code 2."""
        self.exit(_EXIT_USAGE, f"{self._short_usage()}\n{self.prog}: error: {message}\n")

    def _guess(self, unknown: str) -> str:
        """Return, in brackets, the options that begin like ``unknown``, or otherwise the most similar ones;
        "" if there are none."""
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
                raise  # types other than numbers raise their own message
            raise argparse.ArgumentError(action, f"{arg_string!r} is not {kind}; give one") from None

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is not None and value not in action.choices:
            there = [str(choice) for choice in action.choices]
            raise argparse.ArgumentError(
                action,
                f"there is no {value!r}{did_you_mean(str(value), there)}; choose from {', '.join(there)}",
            )


class WarningFormatter(logging.Formatter):
    """Formats a log record of the library as ``warning: ...``. ``translate`` is applied to its text."""

    def __init__(self, translate: Callable[[str], str]) -> None:
        super().__init__()
        self._translate = translate

    def format(self, record: logging.LogRecord) -> str:
        """Return the line."""
        return f"{record.levelname.lower()}: {self._translate(super().format(record))}"


EXIT_ERROR = 2
# Reasons for which the system takes no path of such a name, whatever is to be done there.
_NO_PATH = (errno.ENAMETOOLONG, errno.ELOOP)
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
    """Help formatter that accounts for the indent of commands, so that the longest name and its help are on
    one line."""

    def add_argument(self, action: argparse.Action) -> None:
        """Measure the width of ``action``."""
        super().add_argument(action)
        if isinstance(action, argparse._SubParsersAction):
            self._action_max_length += self._indent_increment


def build_parser(added: Mapping[str, AddParser] | None = None) -> argparse.ArgumentParser:
    """Return the parser of the whole command. ``added`` commands come after the built-in ones."""
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


def run_command(arguments: Sequence[str], added: Mapping[str, AddParser]) -> int:
    """Run one command, and return its exit code. ``added``: commands besides the installed ones.

    A GeminiError is printed as one line on standard error, with code 2; Ctrl-C gives code 130. Any other
    exception, for example of a model's own code, prints a traceback and also gives code 2, because 1 is
    reserved for verdicts of commands. It is no error if the reader of standard output has left (head, less);
    a full disk is one.
    """
    try:
        code = _run(list(arguments), added)
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
        if error.errno in _NO_PATH and error.filename is not None:
            say_error(f"{error.filename!s:.200}: {error.strerror}; check the path")
            code = EXIT_ERROR
        elif error.errno != errno.ENOSPC or error.filename is not None:
            code = _unexpected(error)
        else:
            code = _lost(error)  # standard output could not be written to a full disk
    except SystemExit as end:  # from --help, --version and usage errors
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
    if logging.lastResort is not None:  # not the root logger, which a traced script may configure
        is_ours = arguments[0] in ("train", "finetune") or (arguments[0] == "trace" and not options.script)
        logging.lastResort.setFormatter(WarningFormatter(with_options if is_ours else str))
    if not getattr(options, "script", None):  # do not change the output of a user's script
        silence_packages()
    _require_directory()
    perform: Callable[[argparse.Namespace], int] = options.run
    return perform(options)


def _require_directory() -> None:
    """Raise ConfigError if the working directory was removed: torch and Python need its name."""
    try:
        Path.cwd()
    except OSError as error:
        raise ConfigError(
            f"cannot read the working directory ({error.strerror}); change to another directory (cd)"
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
    """Flush the standard streams now, because a failure at the interpreter's end would change the exit code.
    Return the code of a failure to write the result, otherwise 0. A stream that the caller has closed is
    None."""
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
