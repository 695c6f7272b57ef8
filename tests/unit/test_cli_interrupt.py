"""Ctrl-C from the first moment of a command on: one line, code 130, no traceback."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

INTERRUPTED = "gemini: interrupted\n"
# A finder of modules that finds none: it sends Ctrl-C where one is looked for.
WHILE_IMPORTING = """
import signal, sys
class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == {name!r}:
            signal.raise_signal(signal.SIGINT)
sys.meta_path.insert(0, Finder())
from gemini.cli.main import main
sys.argv = ["gemini", "check"]
sys.exit(main())
"""
AT_THE_END = """
import atexit, signal, sys
def add_parser(subparsers):
    subparsers.add_parser("stop").set_defaults(run=lambda options: signal.raise_signal(signal.SIGINT))
from gemini.cli.main import main
sys.argv = ["gemini", "stop"]
code = main(added={"stop": add_parser})
print(code, flush=True)
atexit.register(signal.raise_signal, signal.SIGINT)
"""


def ended(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)


@pytest.mark.parametrize(
    "name", ["gemini.cli.command_line", "torch", "torch._C", "torch.nn.functional", "rich.console"]
)
def test_ctrl_c_while_the_commands_are_imported(name: str) -> None:
    done = ended(WHILE_IMPORTING.format(name=name))
    assert (done.returncode, done.stderr) == (128 + signal.SIGINT, INTERRUPTED)


def test_a_second_ctrl_c_as_the_process_ends() -> None:
    done = ended(AT_THE_END)
    assert (done.stdout, done.stderr) == ("130\n", INTERRUPTED)
    assert done.returncode == -signal.SIGINT
