"""Options of ``gemini serve``, and the reader of configuration files in the format of the OPT service's
documentation."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gemini.errors import ConfigError
from gemini.inference.batching import Batching
from gemini.system.files import read_regular
from gemini.system.input_files import MAX_DOCUMENT_BYTES, errors_of

# Name in a configuration file -> option of ServeConfig.
_TAKEN = {
    "checkpoint": "model",
    "executor_max_batch_size": "max_batch",
    "cache_size": "cache_size",
    "cache_list_size": "cache_list_size",
    "port": "port",
    "server_port": "port",
    "host": "host",
    "server_host": "host",
    "queue_size": "queue_size",
    "tp_init_size": "tp",
}


@dataclass(frozen=True)
class ServeConfig:
    """Options of ``gemini serve``. Sizes are in bytes; None lets the runtime choose. Raise ConfigError for
    impossible options.

    Attributes:
        max_tokens: limit on the tokens of an answer.
        timeout_s: limit on the seconds of a request.
        body_bytes: limit on the bytes of a request.
        drain_s: seconds for running requests after a signal to stop.
        tp: number of processes that each have a part of every layer. ``device_bytes``, ``host_bytes``,
            ``kv_bytes`` and ``kv_device_bytes`` are per process.
    """

    model: Path
    adapter: Path | None = None
    name: str | None = None
    host: str = "127.0.0.1"
    port: int = 8020
    device: str = "cpu"
    device_bytes: int | None = None
    host_bytes: int | None = None
    disk_dir: str | None = None
    kv_bytes: int | None = None
    kv_device_bytes: int | None = None
    max_batch: int = 16
    max_pass_tokens: int = 512
    queue_size: int = 256
    batching: Batching = "continuous"
    cache_size: int = 0
    cache_list_size: int = 1
    max_tokens: int = 1024
    timeout_s: float | None = None
    body_bytes: int = 4 * 2**20
    drain_s: int = 30
    tp: int = 1

    def __post_init__(self) -> None:
        if not 0 <= self.port < 65536:
            raise ConfigError(f"--port is {self.port}; it must be from 0 (any that is free) to 65535")
        for name in ("max_tokens", "body_bytes", "tp"):
            if getattr(self, name) < 1:
                raise ConfigError(
                    f"--{name.replace('_', '-')} is {getattr(self, name)}; it must be at least 1"
                )
        if self.timeout_s is not None and not self.timeout_s > 0:
            raise ConfigError(f"--timeout is {self.timeout_s}; it must be above 0")
        if self.drain_s < 0:
            raise ConfigError(f"--drain is {self.drain_s}; it must be at least 0")


@dataclass(frozen=True)
class ConfigFile:
    """The contents of a configuration file: ``options`` of ServeConfig, and the names that are ignored."""

    options: dict[str, Any]
    ignored: tuple[str, ...]


def read_config_file(path: Path) -> ConfigFile:
    """Read the options in a file such as the documents' ``opt_config.py``. The file is parsed, not executed;
    only numbers, texts and names are used.

    Raises:
        ConfigError: it cannot be read.
    """
    with errors_of(f"{path} cannot be read as a configuration"):
        said = dict(_assignments(ast.parse(read_regular(path, MAX_DOCUMENT_BYTES))))
    options: dict[str, Any] = {}
    for name in [name for name in said if name in _TAKEN]:
        value, option = said.pop(name), _TAKEN[name]
        wanted = str if option in ("model", "host") else int
        if not isinstance(value, wanted) or isinstance(value, bool):
            raise ConfigError(
                f"{path} has {name} = {value!r}; it must be {'a string' if wanted is str else 'a number'}"
            )
        options[option] = Path(str(value)) if option == "model" else value
    said.pop("model_class", None)  # the checkpoint's config.json has it
    return ConfigFile(options, tuple(sorted(said)))


def _assignments(tree: ast.Module) -> Iterator[tuple[str, Any]]:
    for statement in tree.body:
        if not isinstance(statement, ast.Assign):
            continue
        try:
            value = ast.literal_eval(statement.value)
        except ValueError:
            value = ast.unparse(statement.value)
        for target in statement.targets:
            if isinstance(target, ast.Name):
                yield target.id, value
