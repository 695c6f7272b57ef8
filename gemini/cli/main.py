"""Entry point of the ``gemini`` command."""

from __future__ import annotations

import argparse
import errno
import logging
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from gemini._C import build_info
from gemini.cli import check, ckpt, convert_config, finetune, mode_speeds, plan, run, simulate, trace, train
from gemini.cli.added import AddParser, added_commands
from gemini.cli.console import discard, say_error
from gemini.cli.usage import CommandParser, WarningFormatter
from gemini.errors import ConfigError, GeminiError

EXIT_ERROR = 2
EXIT_INTERRUPTED = 130

COMMANDS: dict[str, AddParser] = {
    "check": check.add_parser,
    "plan": plan.add_parser,
    "train": train.add_parser,
    "finetune": finetune.add_parser,
    "run": run.add_parser,
    "ckpt": ckpt.add_parser,
    "convert-config": convert_config.add_parser,
    "trace": trace.add_parser,
    "simulate": simulate.add_parser,
    "benchmark": mode_speeds.add_parser,
}

EPILOG = """\
start here:
  gemini check                         what this machine and this build have, and what is missing
  gemini plan gpt2 --device-bytes 1GiB --disk-dir .
                                       will it fit, how long is a step, what bounds it
  gemini train --device-bytes 64MiB --disk-dir .
                                       train a GPT on Python's own sources in 64 MiB of memory
  gemini train --help                  every option, with its unit and default
  gemini finetune --model DIR --data chats.jsonl --output out/tuned
                                       fine-tune a checkpoint of Hugging Face within budgets
  gemini run --nproc-per-node 4 train.py
                                       a program on four ranks; --host a,b for two machines
  gemini ckpt verify out/run           inspect, verify and convert its checkpoints
  gemini convert-config ds_config.json our call for a configuration of DeepSpeed or Accelerate
  gemini trace --device-bytes 64MiB --disk-dir .
                                       see where the time of its steps goes, as a page for any browser
  gemini simulate --help               what a recorded step would take elsewhere
  gemini benchmark --gpus 4            the modes of tensor parallelism over 4 GPUs, or 4 processes
  gemini bench --help                  measure on this machine (installed by itself: pip install ./benchmarks)

Sizes are bytes: 65536, 64KiB, 512MiB, 4GiB.
"""


def build_parser(added: Mapping[str, AddParser] | None = None) -> argparse.ArgumentParser:
    """Return the parser of the whole command, with ``added`` commands after its own."""
    parser = CommandParser(
        prog="gemini",
        description="Train PyTorch models several times larger than the memory they are allowed.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
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
        return parser.parse_args(arguments)
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
