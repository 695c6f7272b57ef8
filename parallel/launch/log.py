"""Loggers that write on some ranks only."""

from __future__ import annotations

import logging
from collections.abc import Collection
from pathlib import Path
from typing import Any

from gemini.parallel.launch.context import global_context

_FORMAT = "[%(asctime)s] %(levelname)s %(name)s: %(message)s"


class DistributedLogger:
    """A logger of :mod:`logging` with methods that take ``ranks=``, the ranks that write; None means all."""

    def __init__(self, name: str) -> None:
        self.logger = logging.getLogger(name)

    def debug(self, message: object, *args: object, ranks: Collection[int] | None = None) -> None:
        """Log at level DEBUG."""
        self._log(logging.DEBUG, message, args, ranks)

    def info(self, message: object, *args: object, ranks: Collection[int] | None = None) -> None:
        """Log at level INFO."""
        self._log(logging.INFO, message, args, ranks)

    def warning(self, message: object, *args: object, ranks: Collection[int] | None = None) -> None:
        """Log at level WARNING."""
        self._log(logging.WARNING, message, args, ranks)

    def error(self, message: object, *args: object, ranks: Collection[int] | None = None) -> None:
        """Log at level ERROR."""
        self._log(logging.ERROR, message, args, ranks)

    def set_level(self, level: int | str) -> None:
        """Set the lowest level to log, by name or number."""
        self.logger.setLevel(level)

    def log_to_file(
        self, path: str | Path, mode: str = "a", level: int | str = "INFO", suffix: str = ""
    ) -> logging.FileHandler:
        """Also write to ``rank_<rank><suffix>.log`` in the directory ``path``, which is created. Return the
        handler; its ``close()`` stops this.
        """
        directory = Path(path)
        directory.mkdir(parents=True, exist_ok=True)
        name = f"rank_{global_context.get_global_rank()}{suffix}.log"
        handler = logging.FileHandler(directory / name, mode)
        handler.setLevel(level)
        handler.setFormatter(logging.Formatter(_FORMAT))
        self.logger.addHandler(handler)
        return handler

    def _log(self, level: int, message: object, args: Any, ranks: Collection[int] | None) -> None:
        if ranks is None or global_context.get_global_rank() in ranks:
            self.logger.log(level, message, *args, stacklevel=3)


def get_dist_logger(name: str = "gemini_program") -> DistributedLogger:
    """Return the logger of a program. If :mod:`logging` is not configured, it writes INFO and above to
    standard error.
    """
    found = DistributedLogger(name)
    if not found.logger.hasHandlers():
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter(_FORMAT))
        found.logger.addHandler(handler)
    if found.logger.level == logging.NOTSET:
        found.logger.setLevel(logging.INFO)
    return found


def disable_existing_loggers(
    include: Collection[str] | None = None, exclude: Collection[str] = ("gemini",)
) -> None:
    """Limit existing loggers to warnings and errors: those named in ``include`` (None: all), except those in
    ``exclude`` and below.
    """
    names = list(logging.root.manager.loggerDict) if include is None else include
    for name in names:
        if not any(name == kept or name.startswith(f"{kept}.") for kept in (*exclude, "gemini_program")):
            logging.getLogger(name).setLevel(max(logging.getLogger(name).level, logging.WARNING))
