"""Builds the runtime of a module from a configuration: chunks on tiers and a manager over them.

Outline: the description of the parameters from which chunks are laid out; it has no values and outlives the
parameters.
"""

from __future__ import annotations

import errno
import logging
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import NamedTuple, TypeVar

import torch
from torch import nn

from gemini.chunk import ChunkManager, TierBudgets, search_chunk_size
from gemini.chunk.cpu_memory import CPU
from gemini.chunk.layout import ChunkLayout, SearchResult, page_elements
from gemini.chunk.memory import ComputeDevice
from gemini.comm.peers import ModelRanks, OwnExperts, Peers, Share, require_equal
from gemini.errors import ConfigError, IoError, OutOfBudgetError
from gemini.offload.async_file import checked_directory
from gemini.placement import ModelDataSize, PlacementPlan, TierCapacity
from gemini.placement.policies import DeviceTooSmallError, make_policy
from gemini.runtime.activation.activations import ActivationOffload
from gemini.runtime.activation.recompute import Recompute
from gemini.runtime.activation.saved_tensors import KeepPlan
from gemini.runtime.adopt import Adopted, adopt_module, adopt_without_values, check_apart, unique_parameters
from gemini.runtime.config import MOST_STATES, GeminiConfig, check_offload, states_by_rule
from gemini.runtime.growth import Growth, least_gathered, with_gathered
from gemini.runtime.intercept.compiled import is_compiled
from gemini.runtime.intercept.precision import BYTES, compute_types, is_quantized
from gemini.runtime.intercept.quantized import QuantizedForm, form_of
from gemini.runtime.manager import GeminiManager
from gemini.runtime.step.order import PlacementContext
from gemini.runtime.storage.data_sizes import (
    DataSizes,
    GroupSpec,
    Kept,
    Needs,
    chunk_bytes,
    data_sizes,
    largest_operator,
    needs_of,
    plan_groups,
)
from gemini.runtime.storage.experts import ExpertSet, apart, choices, expert_sets
from gemini.runtime.storage.model_storage import ModelStorage
from gemini.sharding.sharding import Sharding
from gemini.system.device import default_budget_bytes
from gemini.system.process import paused_collector

logger = logging.getLogger(__name__)
_Result = TypeVar("_Result")


@dataclass(frozen=True)
class Outline:
    """The parameters of a module by name, in initialization order, as tensors on ``meta``.

    ``types``: the dtype in which each computes. ``trainable``: parameters that were not frozen.
    ``operators``: submodules, each with the parameters that its operator needs at once. ``experts``: sets of
    experts; a pass uses a part of each. ``own``: parameters of experts that other ranks do not have.
    ``forms``: the format key of each quantized weight.
    """

    params: Mapping[str, torch.Tensor]
    types: Mapping[str, torch.dtype]
    trainable: frozenset[str]
    operators: tuple[tuple[str, tuple[str, ...]], ...]
    experts: tuple[ExpertSet, ...] = ()
    own: frozenset[str] = frozenset()
    forms: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        module: nn.Module,
        config: GeminiConfig,
        manager: GeminiManager | None = None,
        own: OwnExperts | None = None,
    ) -> Outline:
        """Return the outline of an unmanaged module. With ``manager``: of the parameters that it does not
        manage yet, but with all operators. ``own``: this rank's experts, if ranks have divided them.

        Raises:
            ConfigError: a parameter cannot be managed.
        """
        params = list(unique_parameters(module, manager))
        check_apart(params)
        # Modules that keep_fp32 names may have left since.
        types = compute_types(module, config.precision, config.keep_fp32, strict=manager is None)
        forms = {
            name: form_of(name, param, module.get_submodule(name.rpartition(".")[0]))
            for name, param in params
            if is_quantized(param)
        }
        return cls(
            {name: _outline_of(param, forms.get(name)) for name, param in params},
            {name: BYTES if name in forms else types[id(param)] for name, param in params},
            frozenset(name for name, param in params if param.requires_grad),
            tuple(_operators(module)),
            tuple(expert_sets(module)) if manager is None else (),
            frozenset() if own is None else own.names(module),
            {name: str(form) for name, form in forms.items()},
        )


def _outline_of(param: nn.Parameter, form: QuantizedForm | None) -> torch.Tensor:
    """Return a parameter on ``meta``; a quantized one as its bytes."""
    if form is not None:
        return torch.empty(form.nbytes, dtype=BYTES, device="meta")
    return torch.empty_strided(param.shape, param.stride(), dtype=param.dtype, device="meta")


def _operators(module: nn.Module) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Yield submodules with a known operator, and the parameters that it needs at once.

    Known are torch's own layers, with the parameters that the submodule holds directly; attention, which also
    needs its output projection's; and compiled modules, which need all. The operators of other submodules
    show only when they run.
    """
    names = {id(param): name for name, param in module.named_parameters()}
    for name, owner in module.named_modules():
        home = type(owner).__module__
        whole = is_compiled(owner)
        if not whole and (not home.startswith("torch.nn.modules.") or home == nn.ParameterList.__module__):
            continue
        used = owner.parameters(recurse=whole or isinstance(owner, nn.MultiheadAttention))
        found = tuple(names[id(param)] for param in used)
        if found:
            yield name or type(owner).__name__, found


Trained = Mapping[str, Kept]  # parameters that train, with the states kept of each

# DEVICE must hold the chunks of one update (parameter, gradient, up to three states) and those prefetched for
# the next one.
_CHUNKS_ON_DEVICE = 10

# 1 / share of DEVICE for whole parameter chunks over ranks, unless an operator needs more.
_GATHERED_SHARE = 4
# 1 / share of all parameter chunks that may be whole: backward gathers the rest again.
_WHOLE_SHARE = 2

# Chunks of activations keep their places in the DISK file while unused, so the file has this multiple of the
# DISK budget in places.
_SPARE_PLACES = 8
# Pieces of updates. Any user's config may lead to more, which would take minutes to lay out.
_MOST_PIECES = 2**18


@dataclass(frozen=True)
class Blueprint:
    """All decisions about a model before memory is allocated. ``context`` has the size of model data during
    training, ``held`` the size before there is an optimizer."""

    groups: tuple[GroupSpec, ...]
    search: SearchResult
    context: PlacementContext
    held: ModelDataSize
    budgets: TierBudgets
    gather_bytes: int = 0  # for whole parameter chunks over several ranks

    def refuse_misfit(self) -> PlacementPlan:
        """Return the warmup plan for training. Raises OutOfBudgetError if the policy cannot fit the model
        into the budgets during training."""
        return self.context.policy.warmup_plan(self.context.size, self.context.capacity)

    def refuse_unheld(self) -> PlacementPlan:
        """Return the warmup plan for a model without an optimizer. Raises OutOfBudgetError as
        :meth:`refuse_misfit`."""
        return self.context.policy.warmup_plan(self.held, self.context.capacity)


class Built(NamedTuple):
    """A module's chunks, their manager, the result of the chunk-size search, and the records of the original
    parameters."""

    storage: ModelStorage
    manager: GeminiManager
    search: SearchResult
    adopted: Sequence[Adopted] = ()


def _refuse_quantized(outline: Outline) -> None:
    """Raise ConfigError for quantized weights, which tensor and pipeline parallelism cannot divide."""
    for name in outline.forms:
        raise ConfigError(
            f"{len(outline.forms)} parameters (first {name!r}) are quantized weights, which tensor "
            "and pipeline parallelism (model_ranks) cannot divide; divide the batch among ranks "
            "instead (ZeRO, process_group), or use a base model with floating-point weights"
        )


def _require_few_pieces(outline: Outline, piece_numel: int) -> None:
    """Raise OutOfBudgetError for a model that is far too large for DEVICE."""
    numels = [param.numel() for param in outline.params.values()]
    pieces = sum(-(-numel // piece_numel) for numel in numels)
    if pieces > _MOST_PIECES:
        raise OutOfBudgetError(
            f"the model has {sum(numels):.3g} parameters, which DEVICE would hold in {pieces:.3g} pieces of "
            f"{piece_numel}, more than the {_MOST_PIECES} that are laid out; raise device_bytes, or correct "
            "the sizes in its config"
        )


@paused_collector()
def build_runtime(
    module: nn.Module,
    config: GeminiConfig,
    peers: Peers | None = None,
    device: ComputeDevice = CPU,
    model_ranks: ModelRanks | None = None,
    *,
    experts: OwnExperts | None = None,
    without_values: bool = False,
) -> Built:
    """Lay the module's parameters out in chunks, move them there, and return the chunks and their manager;
    over ``peers``, this rank's shards of the first rank's parameters.

    Args:
        device: where operators run.
        model_ranks: the ranks that hold the other parts of the model.
        experts: this rank's experts, if ``peers`` have divided them.
        without_values: the module is on ``meta``, and the caller writes its parameters and buffers afterwards
            (:func:`gemini.runtime.adopt.adopt_without_values`), the same buffers on all ranks.

    Raises:
        OutOfBudgetError: the budgets cannot hold the model, or not while the announced optimizer updates it;
            the module is unchanged.
        ConfigError, IoError: see :func:`gemini.runtime.adopt.adopt_module`; or the ranks' models differ.
    """
    every = [each for each in (peers, model_ranks.peers if model_ranks is not None else None) if each]
    together = partial(_together, every)
    share = peers.share if peers is not None else None
    ranks_here = peers.ranks_on_this_host if peers is not None else 1

    def draw() -> tuple[Drawing, Blueprint]:
        cuts = share is None and device.cuts_chunks
        outline = Outline.of(module, config, own=experts)
        if model_ranks is not None:
            _refuse_quantized(outline)
        own_share = None if experts is None else experts.share
        drawing = Drawing(outline, share, device, ranks_here, cuts, own_share)
        return drawing, drawing.draw(config)

    drawing, blueprint = together(draw)
    said = (blueprint.context.chunk_signature, blueprint.gather_bytes)
    alike = every
    if model_ranks is not None and model_ranks.alike is not None:
        alike = [*([peers] if peers is not None else []), *model_ranks.alike]
    for each in alike:
        options = f"{config.reduce_dtype} {config.strict_ddp_mode}"
        require_equal(each, f"{said} {options} {drawing.outline.forms}")
    offload = config.activation_offload
    made: list[ModelStorage] = []

    def make_storage() -> ModelStorage:
        plan = _check(blueprint, config, drawing)
        check_offload(config, blueprint.context.capacity, measured=plan.sample_non_model)
        storage = ModelStorage(
            blueprint.groups,
            blueprint.search.chunk_numel,
            blueprint.budgets,
            partial(ChunkManager, device=device),
            share,
            device.block_bytes,
            expected_states=MOST_STATES,
        )
        made.append(storage)
        if config.optimizer_rule is not None:
            needs = needs_of(blueprint.groups, trained_by(config.optimizer_rule, drawing.outline, config))
            _refuse_full_disk(storage, [need.kept for need in needs])
        return storage

    try:
        storage = together(make_storage)
    except BaseException:  # perhaps on another rank
        for storage in made:
            storage.chunks.close()
        raise
    context = replace(blueprint.context, size=blueprint.held)
    # The chunks of activations are made by the first step: no trace can name them before.
    manager = GeminiManager(storage.chunks, context, memstats=None if offload else config.memstats)
    storage.register(manager)
    for groups, members in choices(drawing.outline.experts, storage.slots) if drawing.cuts else ():
        storage.add_choice(groups, members)
    if peers is not None:
        sharding = Sharding(
            manager,
            storage,
            peers,
            blueprint.gather_bytes,
            reduce_dtype=config.reduce_dtype,
            strict=config.strict_ddp_mode,
            experts=experts,
        )
        manager.shard(sharding)
    if model_ranks is not None:
        manager.set_part(model_ranks.bind(module))
    manager.set_growth(Growth(storage, manager, partial(_least_to_train, config, drawing)))
    if without_values:
        adopted = adopt_without_values(module, storage, manager)
    else:
        awaited = frozenset[str]() if experts is None else experts.awaited(module)
        adopted = adopt_module(module, storage, manager, awaited)
    manager.shortage.modules.add(module)
    device.settle()
    if manager.sharding is not None and not without_values:
        for buffer in module.buffers():
            manager.sharding.agree_on(buffer)
    if offload:
        keep = KeepPlan() if offload == "auto" else None
        recompute = Recompute(manager.order, module) if config.activation_recompute else None
        manager.offload_activations(ActivationOffload(manager, keep, recompute))
    manager.name_parameters(storage.parameter_names())
    return Built(storage, manager, blueprint.search, adopted)


def _check(blueprint: Blueprint, config: GeminiConfig, drawing: Drawing) -> PlacementPlan:
    """Return the plan for a model without an optimizer.

    A model that the budgets cannot train may be evaluated. Without an announced optimizer this is a warning
    here, and an error when an optimizer is created.

    Raises:
        OutOfBudgetError: there is no room for the parameters, or for the announced optimizer's update.
    """

    def checked(check: Callable[[Blueprint], PlacementPlan]) -> PlacementPlan:
        try:
            return check(blueprint)
        except DeviceTooSmallError as error:
            raise error.asking(_least_device_bytes(error, config, lambda c: check(drawing.draw(c)))) from None

    plan: PlacementPlan | None = None
    with suppress(OutOfBudgetError):
        plan = blueprint.refuse_unheld()
    try:
        checked(Blueprint.refuse_misfit)
    except OutOfBudgetError as error:
        if config.optimizer_rule is not None or plan is None:
            raise
        logger.warning("the model can be evaluated, but not trained with Adam: %s", error)
    return plan if plan is not None else checked(Blueprint.refuse_unheld)


def refuse_unfit(module: nn.Module, config: GeminiConfig) -> None:
    """Raise OutOfBudgetError or ConfigError if :func:`build_runtime` would, in one process on the CPU,
    because the budgets cannot hold ``module``, which may be on ``meta``. Changes nothing."""
    drawing = Drawing(Outline.of(module, config), None, CPU, 1, CPU.cuts_chunks)
    _check(drawing.draw(config), config, drawing)


def _refuse_full_disk(storage: ModelStorage, kept: Sequence[Kept]) -> None:
    """Raise IoError if the disk has no space for the states that are ``kept`` of each group that trains."""
    each = zip(storage.groups, kept, strict=True)
    missing = storage.missing({group: kept for group, kept in each if group.grad is not None})
    lack = storage.chunks.lacking_place(missing)
    if lack is not None:
        raise IoError(errno.ENOSPC, lack, storage.chunks.budgets.disk_dir or "")


def _least_to_train(
    config: GeminiConfig, drawing: Drawing, error: DeviceTooSmallError, trained: Trained
) -> int:
    """Return a DEVICE budget that avoids ``error`` while the parameters in ``trained`` train, see
    :meth:`Drawing.draw`."""
    return _least_device_bytes(error, config, lambda c: drawing.draw(c, trained).refuse_misfit())


def _together(every: Sequence[Peers], action: Callable[[], _Result]) -> _Result:
    """Run ``action`` on the ranks of all groups; raise on all of them if it fails on one."""
    for peers in every:
        action = partial(peers.together, action)
    return action()


def _least_device_bytes(
    error: DeviceTooSmallError, config: GeminiConfig, check: Callable[[GeminiConfig], object]
) -> int:
    """Return a DEVICE budget that avoids ``error``. Chunks grow with the budget, so candidates are tried in
    turn."""
    while True:
        try:
            check(replace(config, device_bytes=error.least_bytes))
        except DeviceTooSmallError as larger_error:
            error = larger_error
        except OutOfBudgetError:  # from a policy of the user's own
            return error.least_bytes
        else:
            return error.least_bytes


def draw_blueprint(
    module: nn.Module,
    config: GeminiConfig,
    share: Share | None = None,
    device: ComputeDevice = CPU,
    ranks_here: int = 1,
    *,
    cuts: bool = False,
) -> Blueprint:
    """Lay out the parameters of ``module``, which are not managed yet, in chunks; see :meth:`Drawing.draw`.
    ``cuts``: experts move by themselves.
    Raises ConfigError as that method, and if a parameter cannot be managed."""
    return Drawing(Outline.of(module, config), share, device, ranks_here, cuts).draw(config)


@dataclass(frozen=True)
class Drawing:
    """The inputs of a blueprint besides options: a model's outline; this rank's ``share`` of its chunks; the
    computing device; the number of ranks that share this machine's memory (``ranks_here``); whether experts
    have chunks of their own (``cuts``); and this rank's share of the chunks of divided experts
    (``own_share``)."""

    outline: Outline
    share: Share | None
    device: ComputeDevice
    ranks_here: int
    cuts: bool = False
    own_share: Share | None = None

    def draw(self, config: GeminiConfig, trained: Trained | None = None) -> Blueprint:
        """Lay the parameters out in chunks; change nothing. ``trained``: the parameters that train, each with
        the states that are kept; None: all that were not frozen, with the states of the announced rule, or
        Adam's.

        Raises:
            ConfigError: no chunk size is possible.
        """
        outline, device, share = self.outline, self.device, self.share
        device_bytes = config.device_bytes
        if device_bytes is None:
            device.release_cache()  # memory cached by torch's allocator is free as well
            device_bytes = default_budget_bytes(device.free_bytes())
        room = device_bytes - (config.non_model_bytes or 0)
        itemsize = _least_itemsize(outline)
        found = search_chunk_size(
            list(outline.params.values()),
            search_range_mb=config.search_range_mb,
            min_chunk_size_mb=config.min_chunk_size_mb,
            hidden_dim=config.hidden_dim,
            itemsize=itemsize,
            max_chunk_bytes=max(device.block_bytes, room * itemsize // (4 * _CHUNKS_ON_DEVICE)),
            align_bytes=device.align_bytes,
        )
        _require_few_pieces(outline, found.chunk_numel)
        groups = lay_out(outline, config, found.chunk_numel, device, cut=self.cuts, own_share=self.own_share)
        plans = plan_groups(groups, found.chunk_numel, share, device.block_bytes)
        operator = largest_operator(outline.operators, chunk_bytes(groups, device.block_bytes))
        windows = data_sizes((plan, Needs()) for plan in plans)
        gather_bytes = _gather_bytes(windows, operator[0], room, config) if share is not None else 0

        def size(trained: Trained) -> ModelDataSize:
            needs = needs_of(groups, trained)
            return with_gathered(data_sizes(zip(plans, needs, strict=True)), gather_bytes, *operator)

        may_train = [name for name, dtype in outline.types.items() if dtype is not BYTES]
        everything = size(dict.fromkeys(may_train, Kept(MOST_STATES)))
        capacity = _capacity(config, device_bytes, everything, device, self.ranks_here)
        signature = "+".join(spec.layout.signature() for spec in groups)
        signature += "+activations" if config.activation_offload else ""
        signature += f"/{share.size}" if share is not None else ""
        signature += f"/experts/{self.own_share.size}" if self.own_share is not None else ""
        if trained is None:
            trained = trained_by(config.optimizer_rule or "adam", outline, config)
        policy = make_policy(config.placement_policy)
        context = PlacementContext(policy, size(trained), capacity, signature)
        budgets = _budgets(config, capacity, reserve_disk=outline.trainable == outline.params.keys())
        return Blueprint(tuple(groups), found, context, size({}), budgets, gather_bytes)


def _gather_bytes(sizes: DataSizes, operator_bytes: int, room: int, config: GeminiConfig) -> int:
    """Return the DEVICE bytes for whole parameter chunks over ranks."""
    least = least_gathered(sizes, operator_bytes)
    wanted = config.gather_bytes
    if wanted is None:
        wanted = min(room // _GATHERED_SHARE, sizes.windows // _WHOLE_SHARE)
    return min(sizes.windows, max(least, wanted))


def _least_itemsize(outline: Outline) -> int:
    return min((dtype.itemsize for dtype in outline.types.values()), default=4)


def trained_by(rule: str, outline: Outline, config: GeminiConfig) -> Trained:
    """Return the parameters that an optimizer with ``rule`` would train (all that were not frozen), with the
    states that it would keep."""
    found = {}
    for name in outline.trainable if rule != "none" else ():
        dtype = outline.types[name]
        updated = torch.float32 if dtype == config.precision else dtype  # masters
        states = states_by_rule(rule, name, outline.params[name].dim(), updated)
        found[name] = Kept(states, rule == "muon")
    return found


def lay_out(
    outline: Outline,
    config: GeminiConfig,
    chunk_numel: int,
    device: ComputeDevice,
    *,
    cut: bool = False,
    own_share: Share | None = None,
) -> list[GroupSpec]:
    """Split parameters by (dtype, trainable, whether they are this rank's own experts, states that the
    announced optimizer keeps) and lay out each part in chunks of ``chunk_numel`` elements. ``cut``: each
    expert gets chunks of its own. ``own_share``: this rank's share of the chunks of own experts."""
    itemsize = _least_itemsize(outline)
    frozen = [name for name in outline.params if name not in outline.trainable]
    experts = apart(outline.experts, outline.params, frozen, page_elements(itemsize)) if cut else {}
    trained = trained_by(config.optimizer_rule or "none", outline, config)
    parts: dict[tuple[torch.dtype, bool, bool, Kept], list[tuple[str, torch.Tensor]]] = {}
    for name, param in outline.params.items():
        kept = trained.get(name, Kept())
        kind = outline.types[name], name in outline.trainable, name in outline.own, kept
        parts.setdefault(kind, []).append((name, param))
    order = config.memstats.param_order if config.memstats is not None else ()
    return [
        GroupSpec(
            layout=ChunkLayout.build(
                members,
                chunk_numel,
                itemsize=itemsize,
                order=[name for name in order if name in dict(members)] or None,
                align_bytes=device.align_bytes,
                apart=experts,
            ),
            dtype=dtype,
            trainable=trainable,
            master=dtype == config.precision,
            own_share=own_share if is_own else None,
        )
        for (dtype, trainable, is_own, _), members in parts.items()
    ]


def _capacity(
    config: GeminiConfig, device_bytes: int, size: ModelDataSize, device: ComputeDevice, ranks_here: int
) -> TierCapacity:
    """Return the budgets with defaults filled in."""
    host_bytes = config.host_bytes
    if host_bytes is None and device.has_own_memory:
        # Page-locked memory cannot be used by others: take half of the free memory.
        host_bytes = default_budget_bytes() // (2 * ranks_here)
        if not config.activation_offload:
            host_bytes = min(size.total_bytes, host_bytes)
    elif host_bytes is None:
        # Without a GPU DEVICE is host memory already: HOST is only for placement 'cpu', for chunks that do
        # not fit.
        has_room = size.total_bytes <= device_bytes - (config.non_model_bytes or 0)
        needs_host = config.disk_dir is None and (config.activation_offload or not has_room)
        host_bytes = size.total_bytes if config.placement_policy == "cpu" and needs_host else 0
    disk_bytes = config.disk_bytes
    if disk_bytes is None:
        disk_bytes = size.total_bytes
        if config.activation_offload and config.disk_dir is not None:
            # Disk space is taken only as it is used.
            disk_bytes += shutil.disk_usage(checked_directory(config.disk_dir)).free // 2
    return TierCapacity(
        device_bytes=device_bytes,
        host_bytes=host_bytes,
        disk_bytes=disk_bytes if config.disk_dir is not None or config.reads_files else 0,
        non_model_bytes=config.non_model_bytes,
    )


def _budgets(config: GeminiConfig, capacity: TierCapacity, *, reserve_disk: bool) -> TierBudgets:
    return TierBudgets(
        capacity.device_bytes,
        capacity.host_bytes,
        capacity.disk_bytes,
        os.fspath(config.disk_dir) if config.disk_dir is not None else None,
        _SPARE_PLACES * capacity.disk_bytes if config.activation_offload else 0,
        reserve_disk,
        config.reads_files,
    )
