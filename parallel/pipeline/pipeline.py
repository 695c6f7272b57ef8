"""Pipeline: trains a model with stages on the ranks along an axis of the mesh, batch by batch."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from gemini.comm.peers import digest_of
from gemini.errors import ConfigError, GeminiError, StateError
from gemini.parallel.mesh import Mesh
from gemini.parallel.pipeline.batches import (
    ENDED,
    Criterion,
    contents_of,
    cut_batch,
    different_batches,
    form_of,
)
from gemini.parallel.pipeline.engine import Engine, Trained
from gemini.parallel.pipeline.numbers import draw_seed
from gemini.parallel.pipeline.orders import Order, make_order
from gemini.parallel.pipeline.split import StagedModel
from gemini.parallel.pipeline.stage_messages import StageMessages
from gemini.parallel.pipeline.tied_weights import SharedTrainability

logger = logging.getLogger(__name__)

_REFUSED, _ENDED = -1, -2  # sent instead of the number of micro-batches

Count = Callable[[Any], float]
# The number of pipelines so far, by the group of all ranks.
_PIPELINES: WeakKeyDictionary[dist.ProcessGroup, int] = WeakKeyDictionary()


@dataclass(frozen=True)
class Schedule:
    """How a batch passes through the stages. ``style`` is a name in ``SCHEDULES``, with ``chunks`` stages on
    each rank; ``num_microbatches`` or ``microbatch_size`` determines how to cut a batch.
    """

    style: str = "1f1b"
    chunks: int = 1
    num_microbatches: int | None = None
    microbatch_size: int | None = None


@dataclass
class Executed:
    """The result of a pass. ``loss`` is the mean over all micro-batches and ranks, on every rank; ``outputs``
    are those of this rank's micro-batches, on ranks with the last stage.
    """

    loss: torch.Tensor | None
    outputs: list[Any] | None


class Pipeline:
    """Runs batches through the stages of a model; all ranks of the mesh make the same calls.

    Ranks along ``pp``, ``sp`` and ``tp`` get the same batch, ranks along ``dp`` each their own.
    """

    def __init__(
        self,
        staged: StagedModel,
        trained: Trained,
        mesh: Mesh | None,
        schedule: Schedule,
        own_part: Callable[[Any], Any] | None = None,
    ) -> None:
        """``mesh``: None if one process trains alone; ``own_part`` returns this rank's part of a batch of
        whole sequences, and raises ConfigError if it cannot be cut.
        """
        self._own_part = own_part
        self._mesh, self._schedule = mesh, schedule
        self._axis = mesh.axis("pp") if mesh is not None else None
        self._losses = mesh.axis("pp", "dp") if mesh is not None else None
        self._everyone = mesh.axis("pp", "dp", "sp", "tp") if mesh is not None else None
        self._data = mesh.axis("dp") if mesh is not None else None
        sequences = mesh.axis("sp") if mesh is not None else None
        self._sequence_place = sequences.rank if sequences is not None else 0
        self._messages = StageMessages(self._axis) if self._axis is not None else None
        self._num_ranks = self._axis.size if self._axis is not None else 1
        rank = self._axis.rank if self._axis is not None else 0
        self._engine = Engine(staged, trained, self._messages, rank)
        self._shared = SharedTrainability(staged)
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
        """Cut a batch and run it through all stages, forward and backward (only forward if gradients are
        disabled). Gradients are exchanged in the last backward pass of each stage.

        ``criterion(output, micro_batch)`` returns the mean loss of a micro-batch. All micro-batches have the
        same weight or, with ``count(micro_batch)``, weights in proportion to its result (for example tokens).

        Raises:
            ConfigError: on all ranks, with nothing done: a batch cannot be cut this way, or the batches of
                one pipeline's ranks differ in shape or content.
            StateError: another rank has failed; the message says which one and why. This rank's own errors
                are raised unchanged. Neither rank can continue: restart from the last checkpoint.
        """
        with self._reporting_errors():
            refusal, batches, order, seed = self._agree(batch, lacks_loss=criterion is None)
        if batch is ENDED and (refusal is None or self._everyone is None):
            raise StopIteration
        if refusal is not None:
            raise refusal  # on all ranks, before anything was done: they may continue with another batch
        assert order is not None
        with self._reporting_errors():
            if self._axis is not None:
                self._engine.learn(batches, self._axis.say)
            weights = self._weigh(batches, count)
            done = self._engine.run(
                order, batches, criterion, weights, keep_outputs=return_outputs, seed=seed
            )
            self._engine.begin("the loss of a pass through the pipeline")
            loss = self._mean(done.losses, weights) if return_loss and criterion is not None else None
        return Executed(loss, done.outputs if return_outputs and self._has_last else None)

    @contextmanager
    def _reporting_errors(self) -> Iterator[None]:
        """Report an error raised inside the block to the other ranks."""
        try:
            yield
        except BaseException as error:
            failure = self._failed(error)
            if failure is error:
                raise
            raise failure from error

    def _agree(
        self, batch: Any, *, lacks_loss: bool
    ) -> tuple[GeminiError | None, list[Any], Order | None, int | None]:
        """Agree with all ranks of the mesh on a pass. Return the error if any rank refuses its batch, else
        the micro-batches, the order, and a seed that the stages of a pipeline share.
        """
        self._engine.begin("the beginning of a pass through the pipeline")
        plan, batches, content = self._schedule, [], 0
        order: Order | None = None
        refusal: GeminiError | None = None
        seed: int | None = None
        try:
            if batch is ENDED:
                raise ConfigError("the data iterator ended on this rank, but not on all others")
            if lacks_loss and torch.is_grad_enabled():
                raise ConfigError("training needs a criterion; pass a function of (outputs, micro_batch)")
            content = contents_of(batch) if self._everyone is not None else 0
            if self._own_part is not None:
                batch = self._own_part(batch)
            batches = cut_batch(batch, plan.num_microbatches, plan.microbatch_size)
            order = make_order(plan.style, self._num_ranks, len(batches), plan.chunks)
        except GeminiError as error:
            refusal = error
        if self._everyone is not None:
            place = self._data.rank if self._data is not None else 0
            digest = digest_of(str([form_of(each) for each in batches]))
            trained = digest_of(str(self._engine.trainable()))
            number = len(batches) if refusal is None else _ENDED if batch is ENDED else _REFUSED
            said = [place, number, digest, trained, self._sequence_place]
            said.append(content)
            changes = self._shared.changes()
            said += changes
            if self._axis is not None:
                said.append(draw_seed())
            mine = torch.tensor(said, dtype=torch.int64, device="cpu")
            every = [each.tolist() for each in self._everyone.all_gather(mine)]
            self._engine.follow(str([each[3] for each in every]))
            self._shared.apply_changes([each[6 : 6 + len(changes)] for each in every])
            refusal = _different([(*each[:3], each[5]) for each in every], refusal)
            if self._axis is not None:  # each rank along dp and along sp has its own seed
                seed = next(each[-1] for each in every if (each[0], each[4]) == (place, self._sequence_place))
        return refusal, batches, order, seed

    def _weigh(self, batches: Sequence[Any], count: Count | None) -> list[float]:
        """Return the weights of the micro-batches' losses on this rank; gradients are averaged over dp."""
        if count is None:
            return [1 / len(batches)] * len(batches)
        counts = torch.tensor([float(count(batch)) for batch in batches], dtype=torch.float64, device="cpu")
        total = counts.sum().reshape(1)
        if self._data is not None:
            self._data.all_reduce(total)
        if not float(total) > 0:
            raise ConfigError(
                f"count() returned {counts.tolist()}, so all micro-batches together count nothing; give "
                "batches with something to count"
            )
        copies = self._data.size if self._data is not None else 1
        return [float(number) * copies / float(total) for number in counts]

    def _mean(self, losses: Sequence[torch.Tensor], weights: Sequence[float]) -> torch.Tensor:
        # An empty micro-batch has the loss NaN.
        own = sum(float(loss) * weight for loss, weight in zip(losses, weights, strict=False) if weight)
        mean = torch.tensor([own], dtype=torch.float64, device="cpu")
        if self._losses is not None:
            self._losses.all_reduce(mean)
        copies = self._data.size if self._data is not None else 1
        return (mean[0] / copies).float()

    def _failed(self, error: BaseException) -> BaseException:
        """Report an error to the other ranks. Return the error to raise here: it, or the one on another rank
        that caused it.
        """
        if self._everyone is None:
            return error
        where = f"{self._engine.place} (rank {dist.get_rank()})"
        own = f"{where}: {type(error).__name__}: {error}"
        cause = self._cause.tell(own)
        reason = f"failed: {cause}"
        self.leave(reason)
        if self._messages is not None:
            self._messages.abandon()
        if cause == own or not isinstance(error, (StateError, RuntimeError)):
            return error
        return StateError(f"{cause}. It was noticed in {where}")

    def leave(self, why: str) -> None:
        """Tell the ranks that wait for this one that it makes no further calls, and ``why``."""
        if self._mesh is not None:
            self._mesh.leave(why)
        self._engine.leave(why)


def _different(every: Sequence[Sequence[int]], own: GeminiError | None) -> GeminiError | None:
    """Return the error if ranks' batches do not match, or this rank refuses its batch (``own``). ``every``
    has, for each rank, its index along dp, the number of its micro-batches, and digests of their shapes and
    contents.
    """
    counts = [said[1] for said in every]
    if ended := [rank for rank, count in enumerate(counts) if count == _ENDED]:
        if len(ended) == len(counts):
            return None
        return ConfigError(
            f"the data iterators of ranks {ended} (of the mesh) ended before those of other ranks; give all "
            "ranks the same number of batches (prepare_dataloader(drop_last=True))"
        )
    if own is not None:
        return own
    if _REFUSED in counts:
        return ConfigError(
            f"ranks {[rank for rank, count in enumerate(counts) if count < 0]} (of the mesh) refused their "
            "batches; their own errors say why"
        )
    if len(set(counts)) > 1:
        return ConfigError(
            f"ranks have different numbers of micro-batches, by rank: {counts}; give all of them batches of "
            "one size (prepare_dataloader(drop_last=True))"
        )
    for rank, (place, _, digest, _) in enumerate(every):
        first = next(other for other, said in enumerate(every) if said[0] == place)
        if every[first][2] != digest:
            return ConfigError(
                f"ranks {first} and {rank} (of the mesh) hold parts of one model but got batches of "
                "different shapes: ranks along pp, sp and tp take the same batches; divide the data over dp "
                "only, with plugin.prepare_dataloader()"
            )
    for place, _, _, content in every:
        sharing = [rank for rank, said in enumerate(every) if said[0] == place]
        if others := [rank for rank in sharing if every[rank][3] != content]:
            alike = [rank for rank in sharing if rank not in others]
            return different_batches(alike, others, "of the mesh")
    return None


class _Cause:
    """The message of the first rank that failed; it outlives that rank's process. Each pipeline of a program
    has its own; ranks create pipelines in the same order.
    """

    def __init__(self) -> None:
        self._store: Any = None
        self._key = ""
        if dist.is_available() and dist.is_initialized():
            assert dist.group.WORLD is not None
            number = _PIPELINES[dist.group.WORLD] = _PIPELINES.get(dist.group.WORLD, 0) + 1
            self._key = f"cause {number}"
            store = dist.distributed_c10d._get_default_store()
            self._store = dist.PrefixStore("gemini-pipeline", store)  # type: ignore[attr-defined]

    def tell(self, why: str) -> str:
        """Store why this rank failed, if it is the first; return the message of the first."""
        if self._store is None:
            return why
        with suppress(RuntimeError):  # the process that keeps the store is gone
            first: bytes = self._store.compare_set(self._key, "", why)
            return first.decode(errors="replace")
        return why
