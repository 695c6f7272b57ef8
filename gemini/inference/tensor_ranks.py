"""TensorRanks: ranks of tensor parallelism that run an engine together. Sends the lead's orders, agrees on
each pass, and recovers if one rank failed in it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from gemini.comm.ranks import Rank
from gemini.errors import ConfigError, GeminiError, StateError, in_words
from gemini.inference.passes import RanksLostError
from gemini.parallel.layout import Layout
from gemini.parallel.mesh import Axis, Mesh
from gemini.parallel.tensor.region import Region
from gemini.system.device import default_budget_bytes

T = TypeVar("T")


class TensorRanks:
    """Processes that each have a part of every layer. The first one leads: it decides what is computed and
    tells the others. All methods are collective; properties are not.
    """

    def __init__(self, rank: Rank) -> None:
        """``rank``: this process among at least two, which must be all processes of torch.distributed."""
        self._rank = rank
        mesh = Mesh(Layout(tp=rank.count))
        axis = mesh.axis("tp")
        assert axis is not None
        self._alone, self._axis = mesh["dp"], axis
        self._region: Region | None = None

    @property
    def count(self) -> int:
        """The number of ranks."""
        return self._rank.count

    @property
    def is_lead(self) -> bool:
        """Whether this is the first rank."""
        return self._rank.index == 0

    @property
    def axis(self) -> Axis:
        """The axis over which the layers communicate."""
        return self._axis if self._region is None else self._region.axis

    def smallest(self, number: int) -> int:
        """Return the minimum of ``number`` over the ranks."""
        return min(int(said) for said in self._rank.collect(lambda: str(number)))

    def load(
        self,
        directory: Path,
        *,
        adapter: str | os.PathLike[str] | None,
        device: str,
        host_bytes: int | str | None,
        **options: Any,
    ) -> Any:
        """Return this rank's part of a model, managed separately.

        Raises:
            ConfigError: an option works in one process only, or the model cannot be cut.
            OutOfBudgetError: the part cannot fit.
        """
        from gemini.integrations.parts_loading import load_part

        if adapter is not None:
            raise ConfigError(
                "adapters cannot be divided over ranks; merge them into the model (gemini finetune "
                "--merge), or use one process"
            )
        if device != "cpu":
            raise ConfigError(
                f"device is {device!r}, but several ranks compute only on the CPU; leave device out"
            )
        if host_bytes is None:
            host_bytes = default_budget_bytes() // (2 * self.count)
        model, self._region = load_part(
            directory, self._axis, process_group=self._alone, host_bytes=host_bytes, **options
        )
        return model

    def tell(self, order: Any) -> None:
        """As the lead, send an order to the other ranks. Raises RanksLostError."""
        self._exchange(json.dumps(order))

    def hear(self) -> Any:
        """As another rank, wait for the lead's next order and return it. Raises RanksLostError."""
        return json.loads(self._exchange("")[0])

    def together(self, compute: Callable[[], T]) -> T:
        """Compute one pass on all ranks; return this rank's result once all have succeeded.

        If one rank fails, those that wait for it in a layer fail as well, and all are ready for another pass.

        Raises:
            Exception: the error on this rank, or a GeminiError with the reason of another rank.
            RanksLostError: a rank is gone.
        """
        failure: Exception | None = None
        try:
            result = compute()
        except Exception as error:  # the model's code may raise anything
            failure = error
            self.axis.leave(f"has failed in a pass: {_named(error)}")
        said = self._exchange("" if failure is None else _named(failure))
        if not any(said):
            return result
        self._go_on_over_new_axis()
        if failure is not None and not _waited_in_vain(failure):
            raise failure
        reasons = [f"rank {rank} of {self.count}: {text}" for rank, text in enumerate(said) if text]
        own = sorted(reasons, key=lambda reason: _IN_VAIN in reason)
        raise GeminiError(own[0]) from failure

    def _go_on_over_new_axis(self) -> None:
        """Replace the axis: connections that a rank has broken off cannot be used again."""
        if self._region is None:
            return
        try:
            self._region.go_on()
        except (RuntimeError, GeminiError) as error:
            raise _lost(error) from error

    def _exchange(self, text: str) -> list[str]:
        try:
            return list(self._rank.exchange(text))
        except (RuntimeError, GeminiError) as error:
            raise _lost(error) from error


_IN_VAIN = "will not come"


def _waited_in_vain(error: Exception) -> bool:
    return isinstance(error, StateError) and _IN_VAIN in str(error)


def _named(error: Exception) -> str:
    return f"{type(error).__name__}: {in_words(error)}"


def _lost(error: Exception) -> RanksLostError:
    return RanksLostError(f"a rank that has a part of the model is lost: {in_words(error)}")
