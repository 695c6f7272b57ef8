"""Cut a model on ``meta`` as one rank of tensor parallelism would, without other ranks and without values."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TypeVar

import torch
from torch import nn

from gemini.errors import ConfigError
from gemini.parallel.mesh import Arrival, Axis
from gemini.parallel.partition import Partition
from gemini.parallel.tensor.parallelize import apply_styles, planned
from gemini.parallel.tensor.styles import Style

_T = TypeVar("_T")
Log = Callable[[str, int, int], None]
_MOST = 64  # ranks to try for the list of possible sizes


def outline_part(
    model: nn.Module,
    size: int,
    plan: str | Mapping[str, Style | str] = "auto",
    *,
    sequence_norms: bool = False,
    whole_experts: bool = False,
) -> Partition:
    """Cut ``model``, which is on ``meta``, in place as :func:`parallelize` does for the first of ``size``
    ranks. Afterwards it can run on ``meta``: collectives return tensors of the right shapes.

    Raises:
        ConfigError: it cannot be cut this way; the message lists the possible sizes.
    """
    names = dict(model.named_parameters(remove_duplicate=False))
    if size == 1:
        return Partition(None, names)
    try:
        work = planned(model, size, plan, sequence_norms=sequence_norms, whole_experts=whole_experts)
    except ConfigError as error:
        sizes = [str(each) for each in range(2, min(_MOST, 4 * size) + 1) if _goes(model, each, plan)]
        possible = f"; tp may be {', '.join(['1', *sizes])}" if sizes else "; no size but 1 is possible"
        raise ConfigError(f"tp {size}: {error}{possible}") from error
    axis = OutlineAxis(size)
    partition = Partition(axis, names)
    for param in {id(param): param for param in names.values()}.values():
        cut = work.cuts.get(id(param))
        if cut is not None:
            param.data = cut.part(param.data, axis.rank)
            partition.note(param, cut)
    apply_styles(model, axis, work)
    return partition


def _goes(model: nn.Module, size: int, plan: str | Mapping[str, Style | str]) -> bool:
    try:
        planned(model, size, plan)
    except ConfigError:
        return False
    return True


class OutlineAxis(Axis):
    """A stand-in for the first of ``size`` ranks, without the others: collectives return shapes without
    values.

    ``calls`` and ``sent_bytes`` count what a real rank would send. ``log`` is called for every collective
    with its name, the bytes that this rank passes to it, and the bytes that it sends.
    """

    def __init__(self, size: int, log: Log | None = None) -> None:
        self.name = "outline"
        self._log = log
        self._size = size
        self.calls: Counter[str] = Counter()
        self.sent_bytes: Counter[str] = Counter()
        self._parts: dict[tuple[int, ...], Axis] = {}

    def set_log(self, log: Log) -> None:
        """Call ``log`` from now on, also for calls over sub-axes."""
        self._log = log
        for part in self._parts.values():
            assert isinstance(part, OutlineAxis)
            part.set_log(log)

    @property
    def size(self) -> int:
        return self._size

    @property
    def rank(self) -> int:
        return 0

    def together(self, action: Callable[[], _T]) -> _T:
        return action()

    def note(self, collective: str, nbytes: int, *, kept_bytes: int = 0) -> int:
        sent = super().note(collective, nbytes, kept_bytes=kept_bytes)
        if self._log is not None:
            self._log(collective, nbytes, sent)
        return sent

    def all_reduce(self, tensor: torch.Tensor, *, largest: bool = False) -> None:
        self.note("all_reduce", tensor.nbytes)

    def broadcast(self, tensor: torch.Tensor) -> None:
        pass

    def broadcast_from(self, tensor: torch.Tensor, rank: int) -> None:
        self.note("broadcast", tensor.nbytes if rank == self.rank else 0)

    def reduce_to(self, tensor: torch.Tensor, rank: int) -> None:
        self.note("reduce", tensor.nbytes if rank != self.rank else 0)

    def all_gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        self.note("all_gather", tensor.nbytes)
        return [torch.empty_like(tensor) for _ in range(self._size)]

    def reduce_scatter(self, parts: list[torch.Tensor]) -> torch.Tensor:
        self.note("reduce_scatter", parts[0].nbytes * self._size)
        return torch.empty_like(parts[0])

    def all_to_all(
        self, parts: Sequence[torch.Tensor], shapes: Sequence[Sequence[int]]
    ) -> list[torch.Tensor]:
        self.note("all_to_all", sum(part.nbytes for part in parts), kept_bytes=parts[self.rank].nbytes)
        return [parts[0].new_empty(tuple(shape)) for shape in shapes]

    def pass_on(self, tensor: torch.Tensor) -> Arrival:
        self.note("pass_on", tensor.nbytes)
        return Arrival(torch.empty_like(tensor), tensor, lambda: None)

    def among(self, ranks: Iterable[int], name: str = "some") -> Axis:
        key = tuple(ranks)
        if key not in self._parts:
            self._parts[key] = OutlineAxis(len(key), self._log)
        return self._parts[key]

    def leave(self, why: str) -> None:
        pass
