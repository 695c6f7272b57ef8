"""HybridParallelPlugin: data, tensor and pipeline parallelism over chunks, as one plugin."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar, cast
from weakref import WeakKeyDictionary

import torch
from torch import distributed as dist
from torch import nn

from gemini.errors import ConfigError
from gemini.model.ddp import GeminiDDP
from gemini.model.handle import handle_of
from gemini.parallel.booster.checkpoint.parts import Parts, WholeModel
from gemini.parallel.booster.mixed_precision import Precision
from gemini.parallel.booster.plugin.base import Boosted, Criterion, Path
from gemini.parallel.booster.plugin.hybrid_data import Group, choose_data_parallelism
from gemini.parallel.booster.plugin.parts_plugin import PartsPlugin
from gemini.parallel.booster.ranks import Ranks, join_launched_group
from gemini.parallel.booster.sequences import count_of_all, mean_over_tokens, own_part
from gemini.parallel.expert_ranks import ExpertRanks, checked_ep_size
from gemini.parallel.layout import Layout
from gemini.parallel.layout_plan import LayoutChoices, LayoutPlan, plan_layout
from gemini.parallel.mesh import Axis, Mesh
from gemini.parallel.moe.divide import expert_ranks_of
from gemini.parallel.partition import Partition, refuse_quantized
from gemini.parallel.pipeline.batches import contents_of, refuse_different
from gemini.parallel.pipeline.built_stages import BuiltStages, join_stages
from gemini.parallel.pipeline.orders import SCHEDULES, ranks_of_stages, unknown_schedule
from gemini.parallel.pipeline.pipeline import Executed, Pipeline, Schedule
from gemini.parallel.pipeline.remote_modules import RemoteModule, meta_copy_of
from gemini.parallel.pipeline.split import Split, StagedModel, choose_ranges, split
from gemini.parallel.pipeline.tied_weights import TiedWeights
from gemini.parallel.pipeline.units import find_units
from gemini.parallel.plan import ParallelPlan
from gemini.parallel.sequence import parallelize_sequence
from gemini.parallel.sequence.outline import SequenceOutline
from gemini.parallel.sequence.parallelize import (
    CUTS,
    METHODS,
    SequenceParallel,
    choose_cut,
    refuse_unfit_model,
)
from gemini.parallel.tensor import parallelize
from gemini.parallel.tensor.nn.grid_layer import partition_along
from gemini.parallel.tensor.styles import Style
from gemini.parallel.zero import LowLevelZeroOptimizer
from gemini.parallel.zero.options import parse_precision
from gemini.placement import PlacementPolicy
from gemini.runtime.activation.block_groups import Names, flat_names
from gemini.runtime.activation.recomputed_blocks import recompute_blocks, refuse_unfit_blocks
from gemini.runtime.intercept.nested import map_tensors
from gemini.runtime.manager import StepClock

_Init = TypeVar("_Init", bound=Callable[..., None])


def _taking_plan(init: _Init) -> _Init:
    """Decorate ``__init__`` to add the keywords of its ``plan`` to those given. Only a wrapper knows which
    keywords were given.
    """
    signature = inspect.signature(init)

    @functools.wraps(init)
    def with_plan(self: HybridParallelPlugin, *args: Any, **kwargs: Any) -> None:
        given = dict(signature.bind(self, *args, **kwargs).arguments)
        plan = given.get("plan")
        if plan is None:
            init(self, *args, **kwargs)
            return
        if not isinstance(plan, ParallelPlan):
            plan = ParallelPlan.load(plan)
        given |= given.pop("options", {})
        del given["self"], given["plan"]
        init(self, plan=plan, **plan.joined(plan.plugin_options(), given))

    return cast(_Init, with_plan)


class HybridParallelPlugin(PartsPlugin):
    """Train over a grid of ``pp_size`` x data x ``sp_size`` x ``tp_size`` processes. They hold stages of the
    model, and parts of the batch, of each sequence and of each layer. The number of processes along the data
    axis is the rest. On each rank, chunks move within budgets.

    ::

        plugin = HybridParallelPlugin(tp_size=2, pp_size=2, num_microbatches=4, device_bytes="4GiB")
        booster = Booster(plugin=plugin)
        model, optimizer, criterion, loader, _ = booster.boost(model, optimizer, criterion, loader)
        batches = iter(loader)
        loss = booster.execute_pipeline(batches, model, criterion, optimizer)["loss"]
        optimizer.step()

    The model is an ordinary whole model on every rank (on ``meta`` it takes no memory); each rank keeps its
    part. ``BuiltStages(stage)`` is a model that the program has cut itself. See docs/parallel.md.

    Args:
        tp_size, pp_size: the number of processes that layers are cut over, and the number with stages.
        sp_size, sp_mode: the number of processes with parts of each sequence, and the attention across them:
            ``"ulysses"`` or ``"ring"``. Batches are dicts of whole sequences. A criterion returns the mean
            over the labels in its micro-batch; they are already shifted for a causal model of transformers,
            and as given for your own model. The loss is the mean over the labels of all ranks.
        sp_cut: ``"batch"``: each rank runs the model on its part of a batch. ``"blocks"``: each rank runs it
            on whole batches, and only the blocks have parts of sequences; the criterion sees whole outputs.
            ``"auto"``: ``"blocks"`` for models that compute from whole sequences outside their blocks
            (classifiers, prompt tuning), and for a transformers model inside a module of your own.
        ep_size: the number of neighbouring ranks of data parallelism that divide the experts of a mixture;
            see docs/experts.md.
        zero_stage: what ranks with the same part divide. 3: also weights, in chunks (GeminiDDP); 2: gradients
            and states; 1: states; 0: nothing, gradients are averaged. All give the same numbers, except for
            the order of sums. 0 to 2 take any element-wise torch optimizer (LowLevelZeroOptimizer).
        placement_policy: see GeminiDDP; only ``zero_stage=3`` has chunks to place.
        tp_plan, tp_check, sequence_parallel_norms: see :func:`gemini.parallel.parallelize`.
        pp_style: ``"1f1b"``, ``"gpipe"``, ``"interleaved"``, ``"zero_bubble"``, ``"zbv"`` or ``"dualpipev"``.
        num_model_chunks: stages on each rank; None means 1, or 2 for ``zbv`` and ``dualpipev``.
        num_microbatches, microbatch_size: how :meth:`Booster.execute_pipeline` cuts a batch; with neither,
            into one micro-batch.
        split: where to cut the model into stages: ``"bytes"`` balances parameter bytes, ``"layers"`` the
            number of blocks; or the names of the first blocks of all stages except the first.
        costs: the cost of each block, in any unit (for example seconds), instead of ``split``.
        blocks: the names of the modules that run one after another, if they are not the longest list.
        behind, before: names of modules that run behind all blocks, or before the blocks in the same module,
            if neither ``forward`` nor the order of registration shows it.
        recompute: names of the blocks that recompute their activations in backward, with the same bits. A
            tuple of names is a group of consecutive blocks that keep only the input of the first.
        plan: a :class:`gemini.parallel.ParallelPlan`, or its file. It sets the sizes, the schedule, where
            stages begin, the micro-batches, ``zero_stage``, the budgets, ``recompute`` and the precision, but
            not the other options (``disk_dir``, ``max_norm``). It must be for this model and number of
            processes.
        options: further keywords of GeminiDDP (budgets and the rest) and of GeminiOptimizer. With
            ``zero_stage`` 0 to 2: ``mixed_precision``, ``keep_fp32``, ``cast_inputs``, ``max_norm``,
            ``norm_type``, those of the loss scale, and of LowLevelZeroPlugin ``reduce_bucket_size_in_m``,
            ``communication_dtype``, ``overlap_communication`` and ``cpu_offload``.

    Raises:
        TypeError: none of these classes has such a keyword.
        ConfigError: sizes are impossible, or a keyword is not for this ``zero_stage`` or contradicts the
            plan.
    """

    @_taking_plan
    def __init__(
        self,
        tp_size: int = 1,
        pp_size: int = 1,
        sp_size: int = 1,
        *,
        ep_size: int = 1,
        sp_mode: str = "ulysses",
        sp_cut: str = "auto",
        zero_stage: int = 3,
        placement_policy: str | PlacementPolicy = "auto",
        tp_plan: str | Mapping[str, Style | str] = "auto",
        tp_check: bool | None = None,
        sequence_parallel_norms: bool = False,
        pp_style: str = "1f1b",
        num_model_chunks: int | None = None,
        num_microbatches: int | None = None,
        microbatch_size: int | None = None,
        split: Split = "bytes",
        costs: Sequence[float] | None = None,
        blocks: Sequence[str] | None = None,
        behind: Collection[str] = (),
        before: Collection[str] = (),
        recompute: Collection[Names] = (),
        plan: ParallelPlan | Path | None = None,
        **options: Any,
    ) -> None:
        self._plan = plan if isinstance(plan, ParallelPlan) else None
        self._recompute = tuple(map(_as_names, recompute))
        self._sizes = Layout(tp=tp_size, pp=pp_size, sp=sp_size)
        self._ep_size = checked_ep_size(ep_size)
        self.divides_experts = ep_size > 1
        self._zero_stage = zero_stage
        self._data = choose_data_parallelism(
            zero_stage, placement_policy, options, alone=self._sizes.world_size == 1 and ep_size == 1
        )
        if sp_mode not in METHODS:
            raise ConfigError(f"sp_mode is {sp_mode!r}; it may be {' or '.join(METHODS)}")
        if sp_cut not in ("auto", *CUTS):
            raise ConfigError(f"sp_cut is {sp_cut!r}; it may be auto, {' or '.join(CUTS)}")
        if sp_cut == "blocks" and pp_size > 1:
            raise ConfigError(
                "sp_cut='blocks' needs all blocks on one rank; set pp_size=1, or leave sp_cut at 'auto'"
            )
        self._sp_mode, self._sp_cut = sp_mode, sp_cut
        chunks = num_model_chunks or (2 if pp_style in ("zbv", "dualpipev") and pp_size > 1 else 1)
        if pp_size == 1:
            if pp_style not in SCHEDULES:
                raise unknown_schedule(pp_style)
            pp_style, chunks = "1f1b", 1
        self._rank_of = ranks_of_stages(pp_style, pp_size, chunks)
        self._schedule = Schedule(pp_style, chunks, num_microbatches, microbatch_size)
        self._tp_check = tp_check
        self._cut: dict[str, Any] = {
            "plan": tp_plan,
            "sequence_norms": sequence_parallel_norms,
            "whole_experts": ep_size > 1,
        }
        self._split: dict[str, Any] = {"split": split, "costs": costs}
        self._units: dict[str, Any] = {"blocks": blocks, "behind": behind, "before": before}
        super().__init__()
        self._mesh: Mesh | None = None
        # By boosted model: a program may have several, one after another.
        self._pipelines: WeakKeyDictionary[nn.Module, Pipeline] = WeakKeyDictionary()
        self._sequences: WeakKeyDictionary[nn.Module, SequenceParallel] = WeakKeyDictionary()
        # By boosted model without chunks: the plan's prediction for a step, and the clock that measures
        # steps.
        self._watched: WeakKeyDictionary[nn.Module, tuple[dict[str, float], StepClock]] = WeakKeyDictionary()

    @property
    def pp_size(self) -> int:
        """The number of processes with stages."""
        return self._sizes.pp

    @property
    def mesh(self) -> Mesh | None:
        """The grid of processes; None for a single process.

        Raises:
            ConfigError: the number of processes is no multiple of ``tp_size * pp_size * sp_size``.
        """
        join_launched_group()
        each = self._sizes.world_size
        world = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
        if world % each:
            raise ConfigError(
                f"tp_size {self._sizes.tp} x pp_size {self._sizes.pp} x sp_size {self._sizes.sp} do not "
                f"divide {world} processes; start a multiple of {each}, or choose sizes with a product that "
                f"divides {world}"
            )
        if self._mesh is None and dist.is_available() and dist.is_initialized():
            self._mesh = Mesh(replace(self._sizes, dp=world // each, ep=self._ep_size))
        return self._mesh

    def configure(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None,
        criterion: Criterion | None,
        precision: Precision | None,
    ) -> Boosted:
        """See :class:`Plugin`. Raises OutOfBudgetError if this rank's part cannot fit."""
        if self._sizes.world_size > 1:
            refuse_quantized(model)
        self._refuse_unplanned(model, precision)
        refuse_unfit_blocks(model, self._recompute)
        mesh = self.mesh
        self._apply_stage_budgets(mesh)
        wrap = self._data.prepared(model, optimizer, precision)
        sp_cut = self._choose_cut(model, mesh)
        types = self._data.types(model, precision)
        sharing = self._expert_ranks(model, mesh)
        parts, sequence = self._keep_own_part(model, optimizer, mesh, types, sp_cut)
        if sharing is not None:
            parts.divide_experts(sharing)
        recompute_blocks(model, self._recomputed_here(model))
        if optimizer is not None:
            _forget_absent(optimizer, model)
            parts.partition.cut_states(optimizer)
        group: Group = None
        if mesh is not None:
            group = mesh["dp"] if sequence is None else mesh.group("dp", "sp")
        boosted, updating, trained = wrap(model, optimizer, parts, group)
        self._watch(boosted, updating)
        parts.refuse_as_whole(boosted)
        self.note_parts(parts, boosted, updating)
        cut = None
        if sequence is not None and not sequence.takes_whole_batches:
            cut = partial(own_part, sequence)
            self._sequences[boosted] = sequence
        self._pipelines[boosted] = Pipeline(parts.staged, trained, mesh, self._schedule, cut)
        if mesh is not None and (shared := mesh.axis("tp")) is not None:
            boosted.register_forward_pre_hook(partial(_compare_batches, shared, "tp"), with_kwargs=True)
        if sequence is not None and sequence.takes_whole_batches and sequence.axis is not None:
            compare = partial(_compare_batches, sequence.axis, "sp")
            boosted.register_forward_pre_hook(compare, with_kwargs=True)
        return Boosted(boosted, updating, criterion)

    def _refuse_unplanned(self, model: nn.Module, precision: Precision | None) -> None:
        """Raise ConfigError on all ranks if on any of them the plan does not fit the model or the ranks."""
        if (plan := self._plan) is None:
            return
        if isinstance(model, BuiltStages):
            raise ConfigError(
                "a plan describes a whole model, but BuiltStages are already parts; leave out plan="
            )
        if precision is not None and precision.dtype != parse_precision(plan.dtype):
            raise ConfigError(
                f"the booster has mixed_precision={precision.name!r}, but the plan says {plan.dtype}; leave "
                "mixed_precision out of the booster"
            )
        self.ranks.together(partial(plan.check, model, self.ranks.size), failure=ConfigError)

    def _apply_stage_budgets(self, mesh: Mesh | None) -> None:
        """Use the plan's budgets for this rank, if they differ between stages."""
        plan = self._plan
        if plan is not None and plan.stage_budgets is not None:
            axis = None if mesh is None else mesh.axis("pp")
            self._data.set_budgets(plan.budget_options(0 if axis is None else axis.rank))

    def _watch(self, model: nn.Module, optimizer: torch.optim.Optimizer | None) -> None:
        """Give :meth:`stats` the plan's prediction for this rank, and measure its steps."""
        if (plan := self._plan) is None:
            return
        axis = None if self.mesh is None else self.mesh.axis("pp")
        predicted = plan.predicted.of_rank(0 if axis is None else axis.rank)
        if isinstance(model, GeminiDDP):
            handle_of(model).compare_with(predicted)
            return
        clock = StepClock()
        self._watched[model] = predicted, clock
        model.register_forward_pre_hook(lambda *_: clock.begin() if torch.is_grad_enabled() else None)
        if optimizer is not None:
            optimizer.register_step_post_hook(lambda *_: clock.end())

    def stats(self, model: nn.Module) -> dict[str, Any]:
        """Return ``"predicted"`` and ``"measured"`` of the last step on this rank if a plan is run.

        Both have ``step_seconds`` and ``device_bytes``, the most on DEVICE (only predicted with
        ``zero_stage`` 0 to 2). For a GeminiDDP this returns its own ``stats()``, which contain them.
        """
        if isinstance(model, GeminiDDP):
            return model.stats()
        if model not in self._watched:
            return {}
        predicted, clock = self._watched[model]
        measured = {} if clock.seconds is None else {"step_seconds": clock.seconds}
        return {"predicted": dict(predicted), "measured": measured}

    def _refuse_around(self, blocks: Sequence[str]) -> None:
        """Raise ConfigError if a module that contains some of ``blocks`` is to be recomputed."""
        for name in flat_names(self._recompute):
            if any(block.startswith(f"{name}.") for block in blocks):
                raise ConfigError(
                    f"recompute names {name!r}, which contains the blocks between which stages are cut; name "
                    "blocks, or modules within them"
                )

    def _refuse_divided(self, stages: Sequence[Sequence[str]]) -> None:
        """Raise ConfigError if the blocks of a recomputed group are in several stages."""
        for group in self._recompute:
            names = flat_names(group)
            if len({at for at, stage in enumerate(stages) for each in names if each in stage}) > 1:
                raise ConfigError(
                    f"one group of recompute has {names[0]!r} and {names[-1]!r}, which are in different "
                    "stages; make one group for each stage, or cut the stages (split=) where the group "
                    "begins"
                )

    def _recomputed_here(self, model: nn.Module) -> tuple[Names, ...]:
        """Return the names and groups to recompute that this rank has."""

        def is_here(name: str) -> bool:
            return not isinstance(model.get_submodule(name), RemoteModule)

        found = tuple(each for each in self._recompute if all(map(is_here, flat_names(each))))
        if not SCHEDULES[self._schedule.style].splits:
            return found
        # checkpoint() would compute for every call of autograd: once for the input's half of a backward pass
        # and once for each group of weights of the other. A group keeps what it has computed.
        return tuple((each,) if isinstance(each, str) else each for each in found)

    def _keep_own_part(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None,
        mesh: Mesh | None,
        types: Mapping[int, torch.dtype],
        sp_cut: str,
    ) -> tuple[Parts, SequenceParallel | None]:
        """Keep only this rank's part of ``model``, and make its attention use the other ranks' parts of
        sequences. ``types``: the dtypes in which parameters will compute, by their ids. ``sp_cut``: where
        sequences are cut; "" if they are not.
        """
        if isinstance(model, BuiltStages):
            return self._join(model, optimizer, mesh), None
        axis, whole = mesh.axis("pp") if mesh is not None else None, WholeModel.of(model, optimizer)
        if axis is None:
            staged = StagedModel.undivided(model)
            partition = (
                Partition(None, {})
                if mesh is None
                else parallelize(model, mesh, check=self._tp_check, **self._cut)
            )
            sequence = self._cut_sequences(model, mesh, sp_cut)
            tied = TiedWeights(staged, None, self._rank_of)
            return Parts(staged, partition, tied, whole, mesh, self._rank_of), sequence

        def decide() -> tuple[Any, ...]:
            units = find_units(model, **self._units)
            ranges = choose_ranges(model, units, len(self._rank_of), **self._split)
            self._refuse_around(units.blocks)
            self._refuse_divided([units.blocks[first:last] for first, last in ranges])
            return units, ranges, meta_copy_of(model, types)

        units, ranges, outline = axis.together(decide)
        assert mesh is not None
        # No check: no rank runs the whole model to compare outputs with.
        partition = parallelize(model, mesh, check=False, **self._cut)
        # Before the split: stages copy the modules around blocks as they are then.
        sequence = self._cut_sequences(model, mesh, sp_cut)
        if sequence is not None:
            sequence.attend_in(outline)
        own = [stage for stage, rank in enumerate(self._rank_of) if rank == axis.rank]
        staged = split(model, units, ranges, own, outline)
        partition.keep_only(dict(model.named_parameters(remove_duplicate=False)))
        tied = TiedWeights(staged, axis, self._rank_of)
        tied.spread()
        return Parts(staged, partition, tied, whole, mesh, self._rank_of), sequence

    def _expert_ranks(self, model: nn.Module, mesh: Mesh | None) -> ExpertRanks | None:
        """Return the ranks that divide the experts of the whole ``model``; None if each rank has all."""
        if self._ep_size == 1:
            return None
        if isinstance(model, BuiltStages):
            raise ConfigError(
                f"ep_size {self._ep_size}: experts are divided in a whole model, but BuiltStages are already "
                "parts; leave out ep_size"
            )
        data, sp = None, self._sizes.sp
        if mesh is not None:
            data = mesh.axis("dp") if sp == 1 else mesh.axis("dp", "sp")
        return expert_ranks_of(model, data, self._ep_size, apart=sp)

    def _choose_cut(self, model: nn.Module, mesh: Mesh | None) -> str:
        """Return where sequences are cut, before layers are cut. Raises ConfigError if they cannot be."""
        axis = None if mesh is None else mesh.axis("sp")
        if axis is None:
            return ""

        def choose() -> str:
            if self._sp_cut == "auto" and self._plan is None:
                return choose_cut(model, has_stages=self._sizes.pp > 1)
            cut = "batch" if self._sp_cut == "auto" else self._sp_cut  # a plan is made for batches
            refuse_unfit_model(model, cuts_blocks=cut == "blocks")
            return cut

        return axis.together(choose)

    def _cut_sequences(self, model: nn.Module, mesh: Mesh | None, cut: str) -> SequenceParallel | None:
        """Return the object that cuts sequences for ranks along ``sp``; None if they stay whole."""
        if mesh is None or not cut:
            return None
        return parallelize_sequence(model, mesh, self._sp_mode, cut=cut, takes_loss=False)

    def _join(self, built: BuiltStages, optimizer: torch.optim.Optimizer | None, mesh: Mesh | None) -> Parts:
        """Join the stages that ranks have built to one model. Raises ConfigError if they do not fit."""
        if self._sizes.sp > 1:
            raise ConfigError(f"sp_size {self._sizes.sp}: BuiltStages take whole sequences; set sp_size=1")
        axis = None if mesh is None else mesh.axis("pp")
        staged = StagedModel.undivided(built) if axis is None else join_stages(built, axis, self._rank_of)
        partition = Partition(None, {}) if mesh is None else partition_along(built, mesh.axis("tp"))
        whole = WholeModel.of(built, optimizer).joined(axis, partition)
        tied = TiedWeights(staged, axis, self._rank_of)
        tied.spread()
        return Parts(staged, partition, tied, whole, mesh, self._rank_of)

    def plan(
        self, model: nn.Module, run: Callable[..., torch.Tensor], batch: Any = None, *, data_ranks: int = 1
    ) -> LayoutPlan:
        """Return what each rank would hold of the whole ``model``, which is not changed, over ``tp_size *
        pp_size * sp_size * data_ranks`` processes: the bytes of parameters, gradients, Adam's states and
        activations, and the fraction of a step in which it is idle. Needs no other process.

        Args:
            run: ``run(model)`` runs the model, a copy on ``meta``, on one micro-batch and returns the loss;
                with a ``batch`` it is ``run(model, batch)``.
            batch: one micro-batch, on any device. ``run`` gets it on ``meta``; with ``sp_size`` above 1 it
                gets this rank's part, cut as by ``execute_pipeline``.

        Raises:
            ConfigError: the model cannot be cut over so many ranks (the message says over how many it can),
                it cannot work on parts of sequences, or ``batch`` is missing or cannot be cut into them.
        """
        if isinstance(model, BuiltStages):
            raise ConfigError(
                "plan() cuts a whole model, but BuiltStages are already parts; pass the whole model"
            )
        if self._ep_size > 1:
            raise ConfigError(
                f"plan() assumes all experts on each rank, but ep_size is {self._ep_size}; plan with "
                "ep_size=1"
            )
        if self._sizes.sp > 1 and batch is None:
            raise ConfigError(
                f"sp_size {self._sizes.sp}: plan() needs a micro-batch of whole sequences, as plan(model, "
                "run, batch); it calls run(model, batch) with this rank's part of the batch"
            )

        def run_part(model: nn.Module, sequence: SequenceOutline | None) -> torch.Tensor:
            if batch is None:
                return run(model)
            mine = map_tensors(batch, lambda tensor: tensor.to("meta"))
            return run(model, mine if sequence is None else own_part(sequence, mine))

        choices = LayoutChoices(
            replace(self._sizes, dp=data_ranks),
            self._sp_mode,
            self._schedule.style,
            self._schedule.chunks,
            self._schedule.num_microbatches or 1,
            self._zero_stage,
            self._split["split"],
            self._split["costs"],
            self._units,
            self._cut,
        )
        return plan_layout(model, run_part, choices)

    def no_sync(
        self, model: nn.Module, optimizer: torch.optim.Optimizer | None
    ) -> AbstractContextManager[Any]:
        """See :class:`Plugin`; with ``zero_stage`` 0 to 2 the optimizer is needed."""
        if isinstance(model, GeminiDDP):
            return model.no_sync()
        if not isinstance(optimizer, LowLevelZeroOptimizer):
            raise ConfigError(
                "no_sync() needs an optimizer, which keeps the gradients: the model was boosted without one"
            )
        return optimizer.no_sync()

    def execute_pipeline(
        self, batch: Any, model: nn.Module, criterion: Criterion | None, **options: Any
    ) -> Executed:
        """Run a batch through a boosted model; see :meth:`Booster.execute_pipeline`."""
        if model in self._watched and torch.is_grad_enabled():
            self._watched[model][1].begin()
        if (sequence := self._sequences.get(model)) is not None:
            if criterion is not None:
                criterion = mean_over_tokens(sequence, criterion)
            if (count := options.get("count")) is not None:
                options["count"] = count_of_all(sequence.averaging, count)
        return self._pipelines[model].run(batch, criterion, **options)

    @property
    def data_ranks(self) -> Ranks:
        """The ranks along ``dp``, which divide the data."""
        mesh = self.mesh
        return Ranks() if mesh is None else Ranks(mesh["dp"].get_group())


class MoeHybridParallelPlugin(HybridParallelPlugin):
    """:class:`HybridParallelPlugin` with the signature of programs for mixtures of experts: ``ep_size`` ranks
    divide the experts, and ``zero_stage`` defaults to 1.
    """

    def __init__(
        self, tp_size: int = 1, pp_size: int = 1, ep_size: int = 1, *, zero_stage: int = 1, **options: Any
    ) -> None:
        super().__init__(tp_size, pp_size, ep_size=ep_size, zero_stage=zero_stage, **options)


def _as_names(names: Names) -> Names:
    """Convert a group of names from nested lists to nested tuples."""
    return names if isinstance(names, str) else tuple(map(_as_names, names))


def _compare_batches(
    axis: Axis, name: str, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    """Raise ConfigError if ranks along ``axis``, called ``name``, call a model with different inputs."""
    mine = torch.tensor([contents_of((args, kwargs))], dtype=torch.int64, device="cpu")
    refuse_different([int(each) for each in axis.all_gather(mine)], f"along {name}")


def _forget_absent(optimizer: torch.optim.Optimizer, model: nn.Module) -> None:
    """Remove parameters that other stages have from the groups, with their names and states."""
    present = {id(param) for param in model.parameters()}
    for group in optimizer.param_groups:
        kept = [id(param) in present for param in group["params"]]
        for key in ("params", "param_names"):
            if key in group:
                group[key] = [each for each, stays in zip(group[key], kept, strict=True) if stays]
    for param in [param for param in optimizer.state if id(param) not in present]:
        del optimizer.state[param]
