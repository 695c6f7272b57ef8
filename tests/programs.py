"""Run Python programs in processes forked from one that has imported torch and gemini.

A program in a process of its own imports both, which takes three seconds of processor time. A forked one has
them already. Otherwise it runs as with ``python program.py``: it has its own ``__main__``, arguments,
environment, directory and outputs. Use ``subprocess`` for tests of imports, of the end of the interpreter, of
variables that libraries read while they are loaded, and for programs that start Python processes from their
own file.
"""

from __future__ import annotations

import atexit
import importlib
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import types
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any, TextIO

_MOST_BYTES = 2**17  # of a request: its environment and a program
_START_SECONDS = 120.0


def run_python(
    arguments: Sequence[str | Path],
    *,
    cwd: Path | None = None,
    env: Mapping[str, str] | None = None,
    stderr: TextIO | None = None,
    imports: Sequence[str] = (),
    timeout: float = 120.0,
) -> subprocess.CompletedProcess[str]:
    """Do what ``subprocess.run([sys.executable, *arguments], capture_output=True, text=True)`` does.

    ``arguments`` are those of Python: ``-W ACTION``, then ``-c TEXT``, ``-m MODULE`` or a file. ``stderr``
    gets the errors, which are not returned then. ``imports`` names modules that the server imports for this
    program and later ones, if they are installed. Operators have one thread, whatever ``OMP_NUM_THREADS``.

    Raises:
        subprocess.TimeoutExpired: it took longer than ``timeout`` seconds, and was killed.
    """
    words = list(map(str, arguments))
    environment = dict(os.environ if env is None else env)
    job = {"arguments": words, "cwd": str(cwd or Path.cwd()), "env": environment, "imports": list(imports)}
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as errors:
        code = _server().run(job, (out.fileno(), (stderr or errors).fileno()), timeout)
        for file in (out, errors):
            file.seek(0)
        return subprocess.CompletedProcess([sys.executable, *words], code, out.read(), errors.read())


class _Server:
    """The process that all programs of this one are forked from."""

    def __init__(self) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            number = theirs.fileno()
            environment = {**os.environ, "OMP_NUM_THREADS": "1"}
            command = [sys.executable, __file__, str(number)]
            self._process = subprocess.Popen(command, pass_fds=[number], env=environment)
        self._socket.settimeout(_START_SECONDS)
        atexit.register(self.close)

    def run(self, job: dict[str, Any], outputs: tuple[int, int], timeout: float) -> int:
        """Run a program; return its exit code, or the negative number of the signal that ended it."""
        socket.send_fds(self._socket, [json.dumps(job).encode()], outputs)
        self._socket.settimeout(_START_SECONDS)
        pid = json.loads(self._socket.recv(_MOST_BYTES))
        self._socket.settimeout(timeout)
        try:
            return int(json.loads(self._socket.recv(_MOST_BYTES)))
        except TimeoutError as error:
            os.kill(pid, signal.SIGKILL)
            self._socket.settimeout(_START_SECONDS)
            self._socket.recv(_MOST_BYTES)
            raise subprocess.TimeoutExpired(job["arguments"], timeout) from error

    def close(self) -> None:
        """End the process."""
        self._socket.close()
        self._process.wait()


@cache
def _server() -> _Server:
    return _Server()


# ------------------------------------------------------------------------------------ in the server
def _next_program(channel: socket.socket) -> list[str]:
    """Fork for each request; return the arguments in the process that is to run them. The server itself ends
    with the process that started it."""
    while True:
        message, files, _, _ = socket.recv_fds(channel, _MOST_BYTES, 2)
        if not message:
            os._exit(0)
        job = json.loads(message)
        for name in job["imports"]:
            with suppress(ModuleNotFoundError):
                importlib.import_module(name)
        pid = os.fork()
        if pid == 0:
            channel.close()
            return _become(job, files)
        for file in files:
            os.close(file)
        channel.send(json.dumps(pid).encode())
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        channel.send(json.dumps(code).encode())


def _become(job: dict[str, Any], outputs: list[int]) -> list[str]:
    """Give this process what a program of its own would have."""
    nothing = os.open(os.devnull, os.O_RDONLY)
    for number, file in enumerate((nothing, *outputs)):
        os.dup2(file, number)
        os.close(file)
    os.chdir(job["cwd"])
    os.environ.clear()
    os.environ.update(job["env"])
    sys.path[:0] = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    return list(job["arguments"])


def _run(arguments: list[str]) -> None:
    while arguments[0] == "-W":
        warnings.simplefilter(arguments[1])  # type: ignore[arg-type]
        arguments = arguments[2:]
    if arguments[0] == "-m":
        sys.argv = arguments[1:]
        sys.path.insert(0, os.getcwd())  # noqa: PTH109 - a text, as Python has it
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
        return
    text = arguments[1] if arguments[0] == "-c" else Path(arguments[0]).read_text()
    name = "<string>" if arguments[0] == "-c" else arguments[0]
    sys.argv = ["-c", *arguments[2:]] if arguments[0] == "-c" else arguments
    sys.path.insert(0, "" if arguments[0] == "-c" else str(Path(name).parent))
    main = types.ModuleType("__main__")
    if arguments[0] != "-c":
        main.__file__ = name
    sys.modules["__main__"] = main
    exec(compile(text, name, "exec"), main.__dict__)


def _import_what_takes_long() -> None:
    import torch

    import gemini

    for name in gemini.__all__:
        getattr(gemini, name)
    torch.set_num_threads(1)


def _end(run: Callable[[], None]) -> None:
    """Call ``run`` and end as an interpreter does, but for taking all modules apart, which takes a second."""
    try:
        run()
        code: object = 0
    except SystemExit as asked:
        code = asked.code or 0
    except BaseException:
        sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
        code = 1
    if not isinstance(code, int):
        sys.stderr.write(f"{code}\n")
        code = 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    with suppress(OSError, ValueError):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)
    del sys.path[0]  # that of this file
    _import_what_takes_long()
    words = _next_program(socket.socket(fileno=int(sys.argv[1])))
    _end(lambda: _run(words))
