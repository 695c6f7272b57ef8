"""The process that measures: ``python -m gemini_bench.worker '{"task": ..., "options": {...}}'``.

Prints one JSON object to standard output. Whatever a library prints goes to standard error. Once the result
is written, the process ends without tearing down the interpreter: gloo's threads live on after
``destroy_process_group``, and one of them that needs the GIL by then aborts the process.
"""

from __future__ import annotations

import atexit
import importlib
import json
import os
import sys
from collections.abc import Callable
from typing import Any, NoReturn

from gemini.errors import ConfigError

Task = Callable[[dict[str, Any]], dict[str, Any]]


def find_task(name: str) -> Task:
    """Return the task with a name such as ``"resident.paired"``: ``TASKS["paired"]`` of that module."""
    case, _, entry = name.partition(".")
    try:
        tasks: dict[str, Task] = importlib.import_module(f"gemini_bench.{case}").TASKS
        return tasks[entry]
    except (ImportError, AttributeError, KeyError) as error:
        raise ConfigError(f"no benchmark task is called {name!r}") from error


def main(arguments: list[str]) -> NoReturn:
    """Run the task that the only argument describes, print its result, and end the process."""
    request = json.loads(arguments[0])
    result_fd = os.dup(sys.stdout.fileno())
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    result = find_task(request["task"])(request["options"])
    with os.fdopen(result_fd, "w") as out:
        json.dump(result, out)
    atexit._run_exitfuncs()  # temporary directories go; threads of ours end
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1:])
