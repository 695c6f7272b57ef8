"""Pipeline: a model whose stages are on the ranks along an axis of the mesh, trained batch by batch."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from gemini.comm.peers import digest_of
from gemini.errors import ConfigError, StateError
from gemini.parallel.mesh import Mesh
from gemini.parallel.pipeline.batches import cut_batch, form_of
from gemini.parallel.pipeline.engine import Criterion, Engine, Trained
from gemini.parallel.pipeline.orders import make_order
from gemini.parallel.pipeline.passing import Passing
from gemini.parallel.pipeline.split import StagedModel

logger = logging.getLogger(__name__)

Count = Callable[[Any], float]


@dataclass(frozen=True)
class Schedule:
    """How a batch goes through the stages: ``style`` is a name in ``SCHEDULES``, with ``chunks`` stages on
    each rank; ``num_microbatches`` or ``microbatch_size`` says how a batch is cut."""

    style: str = "1f1b"
    chunks: int = 1
    num_microbatches: int | None = None
    microbatch_size: int | None = None


@dataclass
class Executed:
    """``loss`` is the mean over all micro-batches and ranks, on every rank; ``outputs`` those of this rank's
    micro-batches, where the last stage is."""

    loss: torch.Tensor | None
    outputs: list[Any] | None


class Pipeline:
    """Runs batches through the stages of a model; all ranks of the mesh make the same calls.

    Ranks along ``pp`` and ``tp`` are given the same batch, those along ``dp`` each its own.
    """

    def __init__(self, staged: StagedModel, trained: Trained, mesh: Mesh | None, schedule: Schedule) -> None:
        """``mesh``: None where one process trains alone."""
        self._mesh, self._schedule = mesh, schedule
        self._axis = mesh.axis("pp") if mesh is not None else None
        self._losses = mesh.axis("pp", "dp") if mesh is not None else None
        self._data = mesh.axis("dp") if mesh is not None else None
        self._passing = Passing(self._axis) if self._axis is not None else None
        self._rank = self._axis.rank if self._axis is not None else 0
        self._engine = Engine(staged, trained, self._passing, self._rank)
        self._has_last = len(staged.ranges) - 1 in {stage.index for stage in staged.stages}
        self._cause = _Cause()

    def run(
        self,
        batch: Any,
        criterion: Criterion | None,
        *,
        count: Count | None = None,
        return_loss: bool = True,
        return_outputs: bool = False,
    ) -> Executed:
        """Cut a batch, run it through all stages, forward and backward (forward alone where gradients are not
        enabled); gradients are exchanged in the last backward pass of each stage.

        ``criterion(output, micro_batch)`` returns the mean loss of a micro-batch. It counts as any other or,
        with ``count(micro_batch)``, by the number that returns (of tokens, say).

        Raises:
            ConfigError: the batch cannot be cut so; ranks of one pipeline have batches of other shapes.
            StateError: another rank has failed; the message says which one and why. What this rank itself
                raises is let through. Neither can go on: start again from the last checkpoint.
        """
        try:
            return self._run(batch, criterion, count, return_loss, return_outputs)
        except BaseException as error:
            raise self._failed(error) from (None if isinstance(error, StateError) else error.__cause__)

    def _run(
        self, batch: Any, criterion: Criterion | None, count: Count | None, return_loss: bool, keeps: bool
    ) -> Executed:
        self._engine.begin("the beginning of a pass through the pipeline")
        plan = self._schedule
        batches = cut_batch(batch, plan.num_microbatches, plan.microbatch_size)
        ranks = self._axis.size if self._axis is not None else 1
        order = make_order(plan.style, ranks, len(batches), plan.chunks)
        self._agree(batches)
        weights = self._weigh(batches, count)
        if torch.is_grad_enabled() and criterion is None:
            raise ConfigError("training needs a criterion: a function of (outputs, micro_batch)")
        done = self._engine.run(order, batches, criterion, weights, keep_outputs=keeps)
        self._engine.begin("the loss of a pass through the pipeline")
        loss = self._mean(done.losses, weights) if return_loss and criterion is not None else None
        return Executed(loss, done.outputs if keeps and self._has_last else None)

    def _agree(self, batches: Sequence[Any]) -> None:
        """Raise ConfigError, on all ranks, where those of one pipeline have other batches."""
        if self._axis is None:
            return
        said = torch.tensor(
            [len(batches), digest_of(str([form_of(batch) for batch in batches]))], device="cpu"
        )
        every = self._axis.all_gather(said)
        if any(not torch.equal(said, other) for other in every):
            counts = [int(each[0]) for each in every]
            raise ConfigError(
                f"the stages of a pipeline were given batches of different shapes ({counts} micro-batches, "
                "by stage): ranks along pp and tp take the same batches; plugin.prepare_dataloader() cuts "
                "the data over dp alone"
            )

    def _weigh(self, batches: Sequence[Any], count: Count | None) -> list[float]:
        """Return by what the loss of each micro-batch counts in this rank's: gradients are the mean over
        dp."""
        if count is None:
            return [1 / len(batches)] * len(batches)
        counts = torch.tensor([float(count(batch)) for batch in batches], dtype=torch.float64, device="cpu")
        total = counts.sum().reshape(1)
        if self._data is not None:
            self._data.all_reduce(total)
        if not float(total) > 0:
            raise ConfigError(f"count() returned {counts.tolist()}; all micro-batches together count nothing")
        copies = self._data.size if self._data is not None else 1
        return [float(number) * copies / float(total) for number in counts]

    def _mean(self, losses: Sequence[torch.Tensor], weights: Sequence[float]) -> torch.Tensor:
        mean = torch.zeros(1, dtype=torch.float64, device="cpu")
        for loss, weight in zip(losses, weights, strict=False):
            mean += loss.double().cpu().reshape(1) * weight
        if self._losses is not None:
            self._losses.all_reduce(mean)
        copies = self._data.size if self._data is not None else 1
        return (mean[0] / copies).float()

    def _failed(self, error: BaseException) -> BaseException:
        """Tell the other ranks of an error; return what to raise here: it, or what it came of elsewhere."""
        if self._axis is None and self._losses is None:
            return error
        where = f"{self._engine.place} (rank {dist.get_rank()})"
        own = f"{where}: {type(error).__name__}: {error}"
        cause = self._cause.tell(own)
        reason = f"failed: {cause}"
        self.leave(reason)
        if self._passing is not None:
            self._passing.abandon()
        if cause == own or not isinstance(error, (StateError, RuntimeError)):
            return error
        return StateError(f"{cause}. It was noticed in {where}")

    def leave(self, why: str) -> None:
        """Tell the ranks that wait for this one that it makes no more calls, and ``why``."""
        if self._mesh is not None:
            self._mesh.leave(why)
        self._engine.leave(why)


class _Cause:
    """What the first rank that failed said: it outlives that rank's process."""

    def __init__(self) -> None:
        self._store: Any = None
        if dist.is_available() and dist.is_initialized():
            store = dist.distributed_c10d._get_default_store()
            self._store = dist.PrefixStore("gemini-pipeline", store)  # type: ignore[attr-defined]

    def tell(self, why: str) -> str:
        """Say why this rank failed; return what the first one said."""
        if self._store is None:
            return why
        with suppress(RuntimeError):  # who keeps the store is gone
            first: bytes = self._store.compare_set("cause", "", why)
            return first.decode(errors="replace")
        return why
