"""What another library's configuration becomes: our call, and a word about each of its keys."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from gemini.errors import ConfigError

DONE = "converted"
NOT_NEEDED = "not needed"
BY_HAND = "by hand"
NONE = "no equivalent"

AUTO = "auto"  # in files for transformers' Trainer: it fills the value in
_NOTHING = object()


@dataclass
class Conversion:
    """Options of our call by name, each as the text of its value, and what became of each key."""

    source: str
    model: dict[str, str] = field(default_factory=dict)
    optimizer: dict[str, str] = field(default_factory=dict)  # of the optimizer itself
    optimizer_class: str = "gemini.HybridAdam"
    managed: dict[str, str] = field(default_factory=dict)  # of GeminiOptimizer
    schedule: list[str] = field(default_factory=list)  # lines that make the scheduler
    accumulation: int = 1
    keys: list[tuple[str, str, str]] = field(default_factory=list)  # key, verdict, what to do

    def say(self, key: str, verdict: str, text: str) -> None:
        """Note what became of a key."""
        self.keys.append((key, verdict, text))

    def drive(self, optimizer_class: str) -> None:
        """Have this class make the optimizer."""
        self.optimizer_class = optimizer_class

    def accumulate(self, times: int) -> None:
        """Have a step follow so many batches."""
        self.accumulation = times

    def program(self) -> str:
        """Return our lines, for a program that has ``model`` and ``loader``."""
        call = [f"# from {self.source}", "import gemini", "import torch", ""]
        call += _call("model = gemini.GeminiDDP", ["model"], self.model)
        call += _call(f"optimizer = {self.optimizer_class}", ["model.parameters()"], self.optimizer)
        call += _call("optimizer = gemini.GeminiOptimizer", ["optimizer", "model"], self.managed)
        return "\n".join([*call, *self.schedule, "", *self._loop()]) + "\n"

    def _loop(self) -> Iterator[str]:
        step = ["optimizer.step()", *(["scheduler.step()"] if self.schedule else []), "optimizer.zero_grad()"]
        if self.accumulation == 1:
            yield from ("for batch in loader:", "    optimizer.backward(model(**batch).loss)")
            yield from (f"    {line}" for line in step)
            return
        yield "for index, batch in enumerate(loader, start=1):"
        yield f"    optimizer.backward(model(**batch).loss / {self.accumulation})"
        yield f"    if index % {self.accumulation} == 0:"
        yield from (f"        {line}" for line in step)

    def as_json(self) -> dict[str, Any]:
        """Return all of it as plain data."""
        return {
            "source": self.source,
            "program": self.program(),
            "keys": [{"key": key, "verdict": verdict, "what": text} for key, verdict, text in self.keys],
        }


class Keys:
    """The keys of a configuration, each asked for once; what nobody has asked for is left over."""

    def __init__(self, values: Any, where: str, source: str) -> None:
        if not isinstance(values, dict):
            raise ConfigError(
                f"{source}: {where or 'the whole'} is a {type(values).__name__}, not an object with keys"
            )
        self._left = {str(key): value for key, value in values.items()}
        self._where = where
        self._source = source

    def path(self, key: str) -> str:
        """Return the key with those that it is under."""
        return f"{self._where}.{key}" if self._where else key

    def take(self, key: str, kind: type | tuple[type, ...], default: Any = None) -> Any:
        """Return the value of a key, ``"auto"`` as it is. Raises ConfigError where it is of no such kind."""
        value = self._left.pop(key, _NOTHING)
        if value is _NOTHING or value is None:
            return default
        wanted = kind if isinstance(kind, tuple) else (kind,)
        if value == AUTO and isinstance(value, str):
            return AUTO
        if float in wanted and type(value) in (int, float, str):  # "1e-5" is a text in YAML
            value = self._number(key, value)
        if (isinstance(value, bool) and bool not in wanted) or not isinstance(value, wanted):
            names = " or ".join(each.__name__ for each in wanted)
            raise ConfigError(
                f"{self._source}: {self.path(key)} is {value!r:.100}; it is to be of type {names}"
            )
        return value

    def _number(self, key: str, value: Any) -> float:
        try:
            number = float(value)
        except (ValueError, OverflowError):
            number = math.nan
        if not math.isfinite(number):
            raise ConfigError(f"{self._source}: {self.path(key)} is {value!r:.100}; it is to be a number")
        return number

    def under(self, key: str) -> Keys:
        """Return the keys under one, none where there is none."""
        return Keys(self._left.pop(key, None) or {}, self.path(key), self._source)

    def __contains__(self, key: str) -> bool:
        return key in self._left

    def left(self) -> list[str]:
        """Return the keys that nobody has asked for."""
        return list(self._left)


def _call(name: str, first: list[str], options: dict[str, str]) -> list[str]:
    given = [*first, *(f"{key}={value}" for key, value in options.items())]
    line = f"{name}({', '.join(given)})"
    return [line] if len(line) <= 88 else [f"{name}(", *(f"    {each}," for each in given), ")"]
