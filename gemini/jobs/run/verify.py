"""Verifies a run: an unmanaged run with the same seed must give the same losses and weights, bit for bit."""

from __future__ import annotations

import errno
import math
import os
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import IO, Any

import numpy as np
import torch
from torch import Tensor

from gemini.system.files import io_errors

_MAX_LISTED = 8


@dataclass(frozen=True)
class Difference:
    """One loss or weight that differs: its name, both values, and their distance."""

    name: str
    managed: str
    unmanaged: str
    max_abs: float


@dataclass(frozen=True)
class Verdict:
    """The outcome of a comparison. ``differences`` has only the first ones; the counts include all."""

    losses_compared: int
    losses_different: int
    weights_compared: int
    weights_different: int
    differences: tuple[Difference, ...] = ()

    @property
    def identical(self) -> bool:
        """Whether every loss and every weight is the same."""
        return self.losses_different == 0 and self.weights_different == 0

    def to_dict(self) -> dict[str, Any]:
        """Return plain data for summary.json."""
        return {"identical": self.identical, **asdict(self)}


class WeightFile:
    """Stores weights in one flat fp32 file, so that two models need not be in memory together.

    The file has no name, and ends with this context manager or the process. ``directory`` None means the
    system's temporary directory; the directory must exist when :meth:`write` is called. Failures raise
    IoError.
    """

    def __init__(self, directory: Path | None) -> None:
        self._directory = directory
        self._place = directory or tempfile.gettempdir()
        self._file: IO[bytes] | None = None
        self._shapes: dict[str, tuple[int, ...]] = {}

    def __enter__(self) -> WeightFile:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._file is not None:
            self._file.close()

    def write(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Write ``weights`` one after another. Extra memory: one weight."""
        with io_errors("save the weights for --verify", self._place):
            # Unbuffered: close() would write the buffer of a failed write again.
            self._file = tempfile.TemporaryFile(dir=self._directory, buffering=0)  # noqa: SIM115 - closed in __exit__
        for name, weight in weights:
            self._write(weight.detach().float().contiguous().numpy().reshape(-1).view(np.uint8).data)
            self._shapes[name] = tuple(weight.shape)

    def read(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the weights in the order written."""
        assert self._file is not None, "read before write"
        position = 0
        for name, shape in self._shapes.items():
            values = np.empty(math.prod(shape), dtype=np.float32)
            self._read(values.view(np.uint8).data, position)
            position += values.nbytes
            yield name, torch.from_numpy(values).view(shape)

    def _write(self, data: memoryview) -> None:
        assert self._file is not None
        with io_errors("save the weights for --verify", self._place):
            while data:
                data = data[self._file.write(data) :]

    def _read(self, data: memoryview, position: int) -> None:
        assert self._file is not None
        with io_errors("read back the weights for --verify", self._place):
            while data:
                count = os.preadv(self._file.fileno(), [data], position)
                if count == 0:
                    raise OSError(errno.EIO, "the file ends early")
                data, position = data[count:], position + count


class LossComparison:
    """Compares losses while the unmanaged run produces them. ``managed`` maps 0-based steps to losses."""

    def __init__(self, managed: dict[int, float]) -> None:
        self._managed = managed
        self.different: list[Difference] = []

    def add(self, step: int, loss: float) -> None:
        """Compare the loss of ``step``, if the managed run has one."""
        want = self._managed.get(step)
        if want is not None and want != loss:
            self.different.append(
                Difference(f"loss of step {step + 1}", repr(want), repr(loss), abs(want - loss))
            )


def compare_weights(
    managed: Iterable[tuple[str, Tensor]], unmanaged: Iterable[tuple[str, Tensor]]
) -> tuple[int, list[Difference]]:
    """Return the number of compared weights, and those that are missing or not ``torch.equal``."""
    others = dict(unmanaged)
    different: list[Difference] = []
    count = 0
    for name, weight in managed:
        count += 1
        other = others.pop(name, None)
        if other is None:
            different.append(Difference(f"weight {name}", "present", "missing", math.inf))
        elif not torch.equal(weight, other):
            different.append(_weight_difference(name, weight, other))
    missing = [Difference(f"weight {name}", "missing", "present", math.inf) for name in others]
    return count + len(missing), different + missing


def verdict(losses: LossComparison, num_losses: int, weights: tuple[int, Sequence[Difference]]) -> Verdict:
    """Combine both comparisons."""
    num_weights, different = weights
    return Verdict(
        losses_compared=num_losses,
        losses_different=len(losses.different),
        weights_compared=num_weights,
        weights_different=len(different),
        differences=tuple([*losses.different[:_MAX_LISTED], *different[:_MAX_LISTED]]),
    )


def _weight_difference(name: str, managed: Tensor, unmanaged: Tensor) -> Difference:
    if managed.shape != unmanaged.shape:
        shapes = (str(tuple(managed.shape)), str(tuple(unmanaged.shape)))
        return Difference(f"weight {name}", *shapes, math.inf)
    wrong = torch.nonzero(managed != unmanaged, as_tuple=True)
    first = tuple(int(axis[0]) for axis in wrong)
    distance = float((managed.double() - unmanaged.double()).abs().max())
    index = ", ".join(map(str, first))
    return Difference(
        f"weight {name}[{index}] ({len(wrong[0])} of {managed.numel()} elements)",
        repr(float(managed[first])),
        repr(float(unmanaged[first])),
        distance,
    )
