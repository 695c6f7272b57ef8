"""Layout: the number of processes for each kind of parallelism, and its configuration form."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from gemini.errors import ConfigError

MODES = ("1d", "2d", "2.5d", "3d", "sequence")

_FORMS = "tensor=dict(size=4, mode='2d') and tensor=dict(size=8, mode='2.5d', depth=2)"


@dataclass(frozen=True)
class Layout:
    """``dp * pp * sp * tp`` processes: data, pipeline, sequence and tensor parallelism.

    ``mode`` is the way to cut tensors, None if they are not cut; ``depth`` is the depth of mode 2.5d. Each
    ``ep`` consecutive processes of ``dp`` divide the experts of a mixture.
    """

    dp: int = 1
    pp: int = 1
    sp: int = 1
    tp: int = 1
    mode: str | None = None
    depth: int | None = None
    ep: int = 1

    def __post_init__(self) -> None:
        for name in ("dp", "pp", "sp", "tp", "ep"):
            _checked_size(name, getattr(self, name))
        if self.dp % self.ep:
            raise ConfigError(
                f"experts cannot be divided among {self.ep} of {self.dp} processes of data parallelism, as "
                f"{self.ep} does not divide {self.dp}; choose {_divisors(self.dp)}"
            )
        if self.tp > 1 and self.mode is None:
            object.__setattr__(self, "mode", "1d")

    @property
    def world_size(self) -> int:
        """The number of processes."""
        return self.dp * self.pp * self.sp * self.tp

    @classmethod
    def from_config(cls, parallel: Mapping[str, Any] | None, world_size: int) -> Layout:
        """Read ``parallel=dict(pipeline=, tensor=, data=, moe=)`` for ``world_size`` processes.

        ``pipeline`` is an int or ``dict(size=int)``; ``tensor`` is ``dict(size=int, mode=str)``, with
        ``depth=int`` for 2.5d; ``data`` is an int; ``moe`` is an int or ``dict(size=int)``, the number of
        processes of data parallelism that divide the experts. A missing key means 1, except ``data``, which
        gets the remaining processes.

        Raises:
            ConfigError: an entry has another form, or the sizes do not multiply to ``world_size``.
        """
        said = dict(parallel or {})
        _refuse_unknown("parallel", said, ("data", "moe", "pipeline", "tensor"))
        moe = said.get("moe", 1)
        ep = _size_of("moe", moe, ()) if isinstance(moe, Mapping) else _checked_size("moe", moe)
        pipeline = said.get("pipeline", 1)
        if isinstance(pipeline, Mapping):
            pipeline = _size_of("pipeline", pipeline, ())
        pp = _checked_size("pipeline", pipeline)
        size, mode, depth = _read_tensor(said.get("tensor"))
        if world_size % (pp * size):
            raise ConfigError(
                f"parallel: pipeline {pp} x tensor {size} do not divide {world_size} processes; start a "
                f"multiple of {pp * size}, or {_possible(world_size, mode, depth)}"
            )
        rest = world_size // (pp * size)
        dp = _checked_size("data", said.get("data", rest))
        if dp != rest:
            raise ConfigError(
                f"parallel: data {dp} x pipeline {pp} x tensor {size} are {dp * pp * size} processes, and "
                f"there are {world_size}; start as many, leave data out ({rest} here), or "
                f"{_possible(world_size, mode, depth)}"
            )
        if mode == "sequence":
            return cls(dp, pp, sp=size, mode=mode, ep=ep)
        return cls(dp, pp, tp=size, mode=mode, depth=depth, ep=ep)


def _read_tensor(tensor: object) -> tuple[int, str | None, int | None]:
    """Return size, mode and depth of the entry ``tensor``."""
    if tensor is None:
        return 1, None, None
    if not isinstance(tensor, Mapping):
        raise ConfigError(f"parallel: tensor={tensor!r} has no mode; write for example {_FORMS}")
    size = _size_of("tensor", tensor, ("mode", "depth"))
    mode = tensor.get("mode")
    if mode is None and size > 1:
        raise ConfigError(f"parallel: tensor has size {size} and no mode; write for example {_FORMS}")
    if mode is not None and mode not in MODES:
        raise ConfigError(f"parallel: tensor has mode {mode!r}; the modes are {', '.join(MODES)}")
    depth = tensor.get("depth")
    if depth is not None:
        _checked_size("depth", depth)
    if mode == "2.5d" and depth is None:
        raise ConfigError("parallel: mode '2.5d' needs depth: tensor=dict(size=8, mode='2.5d', depth=2)")
    if mode != "2.5d" and depth is not None:
        raise ConfigError(
            f"parallel: depth={depth} works only with mode '2.5d', but the mode is {mode!r}; leave depth out"
        )
    if not _fits(size, mode, depth):
        fitting = [n for n in range(1, 4 * size + 1) if _fits(n, mode, depth)]
        raise ConfigError(
            f"parallel: mode {mode!r} over {size} processes: its size must be {_RULES[str(mode)]}, "
            f"for example {', '.join(map(str, fitting[-3:]))}"
        )
    return size, mode, depth


_RULES = {"2d": "a square q * q", "2.5d": "q * q * depth", "3d": "a cube q * q * q"}


def _fits(size: int, mode: str | None, depth: int | None) -> bool:
    """Return whether ``mode`` can run over ``size`` processes."""
    if mode == "2d":
        return bool(math.isqrt(size) ** 2 == size)
    if mode == "2.5d":
        depth = depth or 1
        return size % depth == 0 and math.isqrt(size // depth) ** 2 * depth == size
    if mode == "3d":
        return bool(round(size ** (1 / 3)) ** 3 == size)
    return True


def _possible(world_size: int, mode: str | None, depth: int | None) -> str:
    """Return, as text, the pipeline and tensor sizes that are possible over ``world_size`` processes."""
    found = [
        f"{pp} x {size}"
        for pp in range(1, world_size + 1)
        for size in range(1, world_size + 1)
        if world_size % (pp * size) == 0 and _fits(size, mode, depth)
    ]
    return f"pipeline x tensor may be {', '.join(found)}"


def _size_of(name: str, entry: Mapping[str, Any], options: tuple[str, ...]) -> int:
    _refuse_unknown(name, entry, ("size", *options))
    if "size" not in entry:
        raise ConfigError(f"parallel: {name} has no size; write {name}=dict(size=2, ...)")
    return _checked_size(f"{name} size", entry["size"])


def _checked_size(name: str, size: object) -> int:
    if isinstance(size, bool) or not isinstance(size, int) or size < 1:
        raise ConfigError(f"parallel: {name} is {size!r}; give a whole number of processes, 1 or more")
    return size


def _divisors(size: int) -> str:
    """Return the divisors of ``size``, as text."""
    return " or ".join(str(each) for each in range(1, size + 1) if size % each == 0)


def _refuse_unknown(name: str, entry: Mapping[str, Any], known: tuple[str, ...]) -> None:
    unknown = [key for key in entry if key not in known]
    if unknown:
        raise ConfigError(f"{name} has {unknown[0]!r}; it may have {', '.join(known)}")
