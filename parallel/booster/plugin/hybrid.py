"""HybridParallelPlugin: data, tensor and pipeline parallelism over chunks, as one plugin."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import distributed as dist
from torch import nn

from gemini.errors import ConfigError
from gemini.model.ddp import GeminiDDP
from gemini.model.managed_model import ManagedModel, handle_of
from gemini.optim.cpu_adam import CPUAdam
from gemini.optim.gemini_optimizer import GeminiOptimizer
from gemini.parallel.booster import checkpoint as files
from gemini.parallel.booster.checkpoint.parts import Parts, WholeModel, load_parts, save_parts
from gemini.parallel.booster.checkpoint.parts_of_optimizer import (
    load_parts_of_optimizer,
    save_parts_of_optimizer,
)
from gemini.parallel.booster.mixed_precision import Precision
from gemini.parallel.booster.plugin.base import Boosted, Criterion, Path, Plugin
from gemini.parallel.booster.plugin.options import with_precision
from gemini.parallel.booster.ranks import Ranks, join_launched_group
from gemini.parallel.booster.sequences import count_of_all, mean_over_tokens, own_part
from gemini.parallel.layout import Layout
from gemini.parallel.mesh import Mesh
from gemini.parallel.partition import Partition
from gemini.parallel.pipeline import Executed, Pipeline, Schedule
from gemini.parallel.pipeline.absent import outline_of
from gemini.parallel.pipeline.orders import ranks_of_stages
from gemini.parallel.pipeline.split import Split, StagedModel, choose_ranges, split
from gemini.parallel.pipeline.tied import TiedWeights
from gemini.parallel.pipeline.units import find_units
from gemini.parallel.sequence import SequenceParallel, parallelize_sequence
from gemini.parallel.sequence.parallelize import METHODS
from gemini.parallel.tensor import parallelize
from gemini.parallel.tensor.styles import Style
from gemini.placement import PlacementPolicy
from gemini.system.config import keyword_names, refuse_unknown

T = TypeVar("T")

_MODEL = keyword_names(GeminiDDP) - {"module", "process_group", "model_ranks", "config"}
_OPTIMIZER = keyword_names(GeminiOptimizer) - {"optim", "model"}


class HybridParallelPlugin(Plugin):
    """Train over a grid of ``pp_size`` x data x ``sp_size`` x ``tp_size`` processes: stages of the model,
    parts of the batch, of each sequence, of each layer; what is left of the processes goes over the data.
    Chunks move within budgets on each.

    ::

        plugin = HybridParallelPlugin(tp_size=2, pp_size=2, num_microbatches=4, device_bytes="4GiB")
        booster = Booster(plugin=plugin)
        model, optimizer, criterion, loader, _ = booster.boost(model, optimizer, criterion, loader)
        batches = iter(loader)
        loss = booster.execute_pipeline(batches, model, criterion, optimizer)["loss"]
        optimizer.step()

    The model is an ordinary one, whole, on every rank (on ``meta`` it takes no memory there); each keeps its
    part. See docs/parallel.md.

    Args:
        tp_size, pp_size: over how many processes layers are cut, and how many have stages.
        sp_size, sp_mode: how many have parts of each sequence, and how attention goes across them:
            ``"ulysses"`` or ``"ring"``. Batches are dicts of whole sequences; a criterion returns the mean
            over the labels in its micro-batch, which are shifted already where the model predicts the next
            token, and the loss is the mean over those of all ranks.
        zero_stage: 3: GeminiDDP.
        placement_policy: see GeminiDDP.
        tp_plan, sequence_parallel_norms: see :func:`gemini.parallel.parallelize`.
        pp_style: ``"1f1b"``, ``"gpipe"``, ``"interleaved"``, ``"zero_bubble"``, ``"zbv"`` or ``"dualpipev"``.
        num_model_chunks: stages on each rank; None: 1, with ``zbv`` and ``dualpipev`` 2.
        num_microbatches, microbatch_size: how :meth:`Booster.execute_pipeline` cuts a batch; neither: one
            micro-batch.
        split: where the model is cut into stages: ``"bytes"`` of parameters, ``"layers"``, or names of the
            blocks that stages begin with, but the first.
        costs: of each block, in any unit (seconds, say), in the place of ``split``.
        blocks: names of the modules that run one after another, where they are not the longest list.
        behind: names of what runs behind the blocks although it is registered before them.
        options: further keywords of GeminiDDP (budgets and the rest) and of GeminiOptimizer.

    Raises:
        TypeError: a keyword that none of them has. ConfigError: sizes that cannot be.
    """

    def __init__(
        self,
        tp_size: int = 1,
        pp_size: int = 1,
        sp_size: int = 1,
        *,
        sp_mode: str = "ulysses",
        zero_stage: int = 3,
        placement_policy: str | PlacementPolicy = "auto",
        tp_plan: str | Mapping[str, Style | str] = "auto",
        sequence_parallel_norms: bool = False,
        pp_style: str = "1f1b",
        num_model_chunks: int | None = None,
        num_microbatches: int | None = None,
        microbatch_size: int | None = None,
        split: Split = "bytes",
        costs: Sequence[float] | None = None,
        blocks: Sequence[str] | None = None,
        behind: Collection[str] = (),
        **options: Any,
    ) -> None:
        refuse_unknown("HybridParallelPlugin", options, _MODEL | _OPTIMIZER)
        if zero_stage != 3:
            raise ConfigError(
                f"zero_stage is {zero_stage}; over parts of a model it is 3 (GeminiDDP). LowLevelZeroPlugin "
                "has 1 and 2, TorchDDPPlugin 0, over data parallelism alone"
            )
        self._sizes = Layout(tp=tp_size, pp=pp_size, sp=sp_size)
        _check_sequences(self._sizes, sp_mode)
        self._sp_mode = sp_mode
        chunks = num_model_chunks or (2 if pp_style in ("zbv", "dualpipev") and pp_size > 1 else 1)
        if pp_size == 1:
            pp_style, chunks = "1f1b", 1
        self._rank_of = ranks_of_stages(pp_style, pp_size, chunks)
        self._schedule = Schedule(pp_style, chunks, num_microbatches, microbatch_size)
        self._cut: dict[str, Any] = {"plan": tp_plan, "sequence_norms": sequence_parallel_norms}
        self._split: dict[str, Any] = {"split": split, "costs": costs}
        self._units: dict[str, Any] = {"blocks": blocks, "behind": behind}
        self._model_options = {key: value for key, value in options.items() if key in _MODEL}
        self._model_options["placement_policy"] = placement_policy
        if self._sizes.world_size > 1:
            self._model_options.setdefault("strict_ddp_mode", True)
        self._optimizer_options = {key: value for key, value in options.items() if key in _OPTIMIZER}
        self._mesh: Mesh | None = None
        self.parts: dict[int, Parts] = {}  # by the identity of boosted models
        self._pipelines: dict[int, Pipeline] = {}  # likewise
        self._sequences: dict[int, SequenceParallel] = {}  # likewise
        self._parts_of: WeakKeyDictionary[torch.optim.Optimizer, Parts] = WeakKeyDictionary()

    @property
    def mesh(self) -> Mesh | None:
        """The grid of processes; None where there is one process alone.

        Raises:
            ConfigError: the number of processes is no multiple of ``tp_size * pp_size * sp_size``.
        """
        join_launched_group()
        each = self._sizes.world_size
        world = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
        if world % each:
            raise ConfigError(
                f"tp_size {self._sizes.tp} x pp_size {self._sizes.pp} x sp_size {self._sizes.sp} do not "
                f"divide {world} processes; start a multiple of {each}, or choose sizes whose product "
                f"divides {world}"
            )
        if self._mesh is None and dist.is_available() and dist.is_initialized():
            self._mesh = Mesh(replace(self._sizes, dp=world // each))
        return self._mesh

    def configure(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None,
        criterion: Criterion | None,
        precision: Precision | None,
    ) -> Boosted:
        """See :class:`Plugin`. Raises OutOfBudgetError if this rank's part cannot fit."""
        model_options, optimizer_options = with_precision(
            "HybridParallelPlugin", "mixed_precision", self._model_options, self._optimizer_options, precision
        )
        if optimizer is not None and not isinstance(optimizer, CPUAdam):
            raise ConfigError(
                f"HybridParallelPlugin updates chunks with our Adam, not {type(optimizer).__name__}: make "
                "the optimizer gemini.HybridAdam(model.parameters(), ...)"
            )
        if optimizer is not None:
            model_options = {"optimizer_rule": "adam", **model_options}
        mesh = self.mesh
        parts = self._take_part(model, optimizer, mesh)
        sequence: SequenceParallel | None = None
        if mesh is not None and self._sizes.sp > 1:
            sequence = parallelize_sequence(model, mesh, self._sp_mode, takes_loss=False)
        if optimizer is not None:
            _forget_absent(optimizer, model)
        if mesh is not None:
            model_options = {
                **model_options,
                "process_group": mesh["dp"] if sequence is None else mesh.group("dp", "sp"),
                "model_ranks": parts.model_ranks,
            }
        managed = GeminiDDP(model, **model_options)
        boosted = None if optimizer is None else GeminiOptimizer(optimizer, managed, **optimizer_options)
        parts.tied.watch(handle_of(managed))
        trained = _Managed(handle_of(managed), boosted)
        self.parts[id(managed)] = parts
        if boosted is not None:
            self._parts_of[boosted] = parts
        cut = None if sequence is None else partial(own_part, sequence)
        self._pipelines[id(managed)] = Pipeline(parts.staged, trained, mesh, self._schedule, cut)
        if sequence is not None:
            self._sequences[id(managed)] = sequence
        return Boosted(managed, boosted, criterion)

    def _take_part(
        self, model: nn.Module, optimizer: torch.optim.Optimizer | None, mesh: Mesh | None
    ) -> Parts:
        """Leave ``model`` this rank's part."""
        axis, whole = mesh.axis("pp") if mesh is not None else None, WholeModel.of(model, optimizer)
        if axis is None:
            staged = StagedModel.undivided(model)
            partition = Partition(None, {}) if mesh is None else parallelize(model, mesh, **self._cut)
            tied = TiedWeights(staged, None, self._rank_of)
            return Parts(staged, partition, tied, whole, mesh, self._rank_of)

        def decide() -> tuple[Any, ...]:
            units = find_units(model, **self._units)
            return units, choose_ranges(model, units, len(self._rank_of), **self._split), outline_of(model)

        units, ranges, outline = axis.together(decide)
        assert mesh is not None
        partition = parallelize(model, mesh, **self._cut)
        own = [stage for stage, rank in enumerate(self._rank_of) if rank == axis.rank]
        staged = split(model, units, ranges, own, outline)
        partition.keep_only(dict(model.named_parameters(remove_duplicate=False)))
        tied = TiedWeights(staged, axis, self._rank_of)
        tied.spread()
        return Parts(staged, partition, tied, whole, mesh, self._rank_of)

    def no_sync(
        self, model: nn.Module, optimizer: torch.optim.Optimizer | None
    ) -> AbstractContextManager[Any]:
        """See :class:`Plugin`; the optimizer is not needed."""
        assert isinstance(model, GeminiDDP)
        return model.no_sync()

    def execute_pipeline(
        self, batch: Any, model: nn.Module, criterion: Criterion | None, **options: Any
    ) -> Executed:
        """Run a batch through a boosted model; see :meth:`Booster.execute_pipeline`."""
        if (sequence := self._sequences.get(id(model))) is not None:
            if criterion is not None:
                criterion = mean_over_tokens(sequence, criterion)
            if (count := options.get("count")) is not None:
                options["count"] = count_of_all(sequence.averaging, count)
        return self._pipelines[id(model)].run(batch, criterion, **options)

    def save_model(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None,
        checkpoint: Path,
        layout: files.Layout,
    ) -> None:
        """See :class:`Plugin`: whole tensors, under the names of the whole model."""
        parts = self.parts.get(id(model))
        if parts is None:
            super().save_model(model, optimizer, checkpoint, layout)
            return
        save_parts(model, parts, checkpoint, layout, self.ranks)

    def load_model(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None,
        checkpoint: Path,
        ranks: Ranks | None,
        *,
        strict: bool,
    ) -> None:
        """See :class:`Plugin`: each rank reads its own part of whole tensors."""
        parts = self.parts.get(id(model))
        if parts is None:
            super().load_model(model, optimizer, checkpoint, ranks, strict=strict)
            return
        load_parts(model, parts, checkpoint, self.ranks, strict=strict)

    def save_optimizer(
        self, optimizer: torch.optim.Optimizer, names: files.Names, checkpoint: Path, layout: files.Layout
    ) -> None:
        """See :class:`Plugin`: whole tensors, under the names of the whole model."""
        if self._sizes.world_size == 1:
            super().save_optimizer(optimizer, names, checkpoint, layout)
            return
        assert isinstance(optimizer, GeminiOptimizer)
        save_parts_of_optimizer(optimizer, self._parts_of[optimizer], checkpoint, layout, self.ranks)

    def load_optimizer(self, optimizer: torch.optim.Optimizer, names: files.Names, checkpoint: Path) -> None:
        """See :class:`Plugin`: each rank reads its own part of whole tensors."""
        if self._sizes.world_size == 1:
            super().load_optimizer(optimizer, names, checkpoint)
            return
        assert isinstance(optimizer, GeminiOptimizer)
        load_parts_of_optimizer(optimizer, self._parts_of[optimizer], checkpoint, self.ranks)

    @property
    def data_ranks(self) -> Ranks:
        """Those that divide the data: along ``dp``."""
        mesh = self.mesh
        return Ranks() if mesh is None else Ranks(mesh["dp"].get_group())


def _check_sequences(sizes: Layout, mode: str) -> None:
    """Raise ConfigError for parts of sequences that cannot be."""
    if mode not in METHODS:
        raise ConfigError(f"sp_mode is {mode!r}; it may be {' or '.join(METHODS)}")
    if sizes.sp > 1 and sizes.pp > 1:
        raise ConfigError(
            f"sp_size {sizes.sp} with pp_size {sizes.pp}: stages take whole sequences; choose pp_size=1 "
            "(sp_size goes with tp_size and data parallelism), or sp_size=1"
        )


class _Managed:
    """A model that GeminiDDP manages, as a pipeline trains it."""

    def __init__(self, handle: ManagedModel, optimizer: GeminiOptimizer | None) -> None:
        self._handle, self._optimizer = handle, optimizer

    def forward(self, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return self._handle.forward(call, args, kwargs)

    def run_backward(self, call: Callable[[float | None], T]) -> T:
        if self._optimizer is None:
            return self._handle.run_backward(lambda: call(None))
        return self._optimizer.run_backward(call)

    def no_sync(self) -> AbstractContextManager[None]:
        return self._handle.no_sync() if self._handle.peers is not None else nullcontext()

    def leave(self, why: str) -> None:
        if self._handle.peers is not None:
            self._handle.peers.leave(why)


def _forget_absent(optimizer: torch.optim.Optimizer, model: nn.Module) -> None:
    """Take parameters that other stages have out of the groups."""
    present = {id(param) for param in model.parameters()}
    for group in optimizer.param_groups:
        group["params"] = [param for param in group["params"] if id(param) in present]
