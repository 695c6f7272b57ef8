"""The process that measures: ``python -m gemini_bench.worker '{"task": ..., "options": {...}}'``.

Prints one JSON object to standard output. Whatever a library prints goes to standard error.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from collections.abc import Callable
from typing import Any

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


def main(arguments: list[str]) -> int:
    """Run the task that the only argument describes, and print its result."""
    request = json.loads(arguments[0])
    result_fd = os.dup(sys.stdout.fileno())
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    result = find_task(request["task"])(request["options"])
    with os.fdopen(result_fd, "w") as out:
        json.dump(result, out)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
