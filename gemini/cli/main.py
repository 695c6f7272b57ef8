"""Entry point of the ``gemini`` command, which ends at Ctrl-C without a traceback from its first moment on.

This module imports neither torch nor the commands at its top, because nothing can handle Ctrl-C there.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from types import FrameType

    from gemini.cli.command_line import AddParser

_INTERRUPTED = 128 + signal.SIGINT
_DEFAULT = signal.default_int_handler


def main(arguments: Sequence[str] | None = None, *, added: Mapping[str, AddParser] | None = None) -> int:
    """Run one command, as :func:`gemini.cli.command_line.run_command` does, and return its exit code.

    Without ``arguments`` it runs the command of this process (``sys.argv``). Ctrl-C during the imports then
    ends the process at once: nothing has started yet, and an import that is interrupted by an exception may
    print it or raise another one. A second Ctrl-C ends the process, too.
    """
    main_thread = threading.current_thread() is threading.main_thread()
    is_ours = arguments is None and main_thread and signal.getsignal(signal.SIGINT) is _DEFAULT
    if is_ours:
        signal.signal(signal.SIGINT, _end)
    try:
        from gemini.cli.command_line import run_command
    finally:
        if is_ours:
            signal.signal(signal.SIGINT, _DEFAULT)
    code = run_command(sys.argv[1:] if arguments is None else arguments, added or {})
    if is_ours and code == _INTERRUPTED:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # the interpreter's end would print a KeyboardInterrupt
    return code


def _end(number: int, frame: FrameType | None) -> None:
    try:
        os.write(2, b"gemini: interrupted\n")
    finally:
        os._exit(_INTERRUPTED)


if __name__ == "__main__":
    sys.exit(main())
