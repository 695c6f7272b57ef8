"""From a module and a configuration to chunks on tiers and a manager over them."""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

import torch
from torch import nn

from gemini.chunk import (
    CPU,
    ChunkLayout,
    ChunkManager,
    ComputeDevice,
    SearchResult,
    TierBudgets,
    search_chunk_size,
)
from gemini.device import default_budget_bytes
from gemini.errors import OutOfBudgetError
from gemini.offload.async_file import checked_directory
from gemini.placement import ModelDataSize, PlacementPlan, TierCapacity, make_policy
from gemini.placement.plan import DeviceTooSmallError
from gemini.runtime.activations import ActivationOffload, check_offload
from gemini.runtime.adopt import adopt_module, check_apart, unique_parameters
from gemini.runtime.config import GeminiConfig
from gemini.runtime.gemini_mgr import GeminiManager
from gemini.runtime.keep_plan import KeepPlan
from gemini.runtime.learned import PlacementContext
from gemini.runtime.precision import compute_types
from gemini.runtime.recompute import Recompute
from gemini.runtime.storage import DataSizes, GroupSpec, ModelStorage, largest_operator, model_data_sizes
from gemini.zero.model_ranks import ModelRanks
from gemini.zero.peers import Peers, require_equal
from gemini.zero.sharding import Sharding
from gemini.zero.share import Share

logger = logging.getLogger(__name__)

_Result = TypeVar("_Result")

# DEVICE must hold the chunks of one update (parameter, gradient, up to three states) and those fetched for
# the next.
_CHUNKS_ON_DEVICE = 10

# The share of DEVICE that whole parameter chunks may take over ranks, where no operator needs more.
_GATHERED_SHARE = 4
# The share of all of them that it may be: the rest is gathered again by backward.
_WHOLE_SHARE = 2

# Chunks of activations keep their places in the DISK file, used or not: as many times what it may hold.
_SPARE_PLACES = 8


@dataclass(frozen=True)
class Blueprint:
    """What is decided about a model before any memory is touched."""

    groups: tuple[GroupSpec, ...]
    search: SearchResult
    context: PlacementContext
    budgets: TierBudgets
    gather_bytes: int = 0  # for whole parameter chunks, over several ranks

    def refuse_misfit(self) -> PlacementPlan:
        """Return the plan of the warmup. Raises OutOfBudgetError where the policy cannot fit the model into
        the budgets."""
        return self.context.policy.warmup_plan(self.context.size, self.context.capacity)


def build_runtime(
    module: nn.Module,
    config: GeminiConfig,
    peers: Peers | None = None,
    device: ComputeDevice = CPU,
    model_ranks: ModelRanks | None = None,
) -> tuple[ModelStorage, GeminiManager, SearchResult]:
    """Lay the module's parameters out in chunks, move them there, and return what manages them; over
    ``peers``, this rank's shards of the first rank's parameters. Operators run on ``device``; ``model_ranks``
    hold the other parts of the model.

    Raises:
        OutOfBudgetError: the model cannot fit the budgets; the module is unchanged.
        ConfigError, IoError: see :func:`gemini.runtime.adopt.adopt_module`; the ranks' models differ.
    """
    every = [each for each in (peers, model_ranks.peers if model_ranks is not None else None) if each]
    together = partial(_together, every)
    share = peers.share if peers is not None else None
    ranks_here = peers.ranks_on_this_host if peers is not None else 1

    def draw(config: GeminiConfig) -> Blueprint:
        return draw_blueprint(module, config, share, device, ranks_here)

    blueprint = together(lambda: draw(config))
    said = (blueprint.context.chunk_signature, blueprint.gather_bytes)
    for each in every:
        require_equal(each, f"{said} {config.reduce_dtype} {config.strict_ddp_mode}")
    offload = config.activation_offload
    made: list[ModelStorage] = []

    def make_storage() -> ModelStorage:
        try:
            plan = blueprint.refuse_misfit()
        except DeviceTooSmallError as error:
            raise error.asking(_least_device_bytes(error, config, draw)) from None
        check_offload(config, blueprint.context.capacity, measured=plan.sample_non_model)
        storage = ModelStorage(
            blueprint.groups,
            blueprint.search.chunk_numel,
            blueprint.budgets,
            partial(ChunkManager, device=device),
            share,
            device.block_bytes,
        )
        made.append(storage)
        return storage

    try:
        storage = together(make_storage)
    except BaseException:  # perhaps on another rank
        for storage in made:
            storage.chunks.close()
        raise
    # The chunks of activations are made by the first step: no trace can name them before.
    manager = GeminiManager(storage.chunks, blueprint.context, memstats=None if offload else config.memstats)
    storage.register(manager)
    if peers is not None:
        manager.sharding = Sharding(
            manager,
            storage,
            peers,
            blueprint.gather_bytes,
            reduce_dtype=config.reduce_dtype,
            strict=config.strict_ddp_mode,
        )
    manager.part = model_ranks.bind(module) if model_ranks is not None else None
    adopt_module(module, storage, manager)
    manager.shortage.modules.add(module)
    device.settle()
    if manager.sharding is not None:
        for buffer in module.buffers():
            manager.sharding.agree_on(buffer)
    if offload:
        manager.activations = ActivationOffload(
            manager,
            KeepPlan() if offload == "auto" else None,
            Recompute(manager, module) if config.activation_recompute else None,
        )
    manager.name_parameters(storage.parameter_names())
    return storage, manager, blueprint.search


def _together(every: Sequence[Peers], action: Callable[[], _Result]) -> _Result:
    """Run ``action`` on the ranks of all groups; raise on all of them where it fails on one."""
    for peers in every:
        action = partial(peers.together, action)
    return action()


def _least_device_bytes(
    error: DeviceTooSmallError, config: GeminiConfig, draw: Callable[[GeminiConfig], Blueprint]
) -> int:
    """Return a DEVICE that holds what ``error`` says it cannot; chunks grow with it, so it is tried."""
    while True:
        try:
            draw(replace(config, device_bytes=error.least_bytes)).refuse_misfit()
        except DeviceTooSmallError as larger_error:
            error = larger_error
        except OutOfBudgetError:  # of a policy of the user's own
            return error.least_bytes
        else:
            return error.least_bytes


def draw_blueprint(
    module: nn.Module,
    config: GeminiConfig,
    share: Share | None = None,
    device: ComputeDevice = CPU,
    ranks_here: int = 1,
) -> Blueprint:
    """Lay the module's parameters out in chunks for ``device``, of which this rank has ``share``; change
    nothing. ``ranks_here``: how many have this machine's memory together.

    Raises:
        ConfigError: a parameter cannot be managed, or a size allows no chunk.
    """
    params = list(unique_parameters(module))
    check_apart(params)
    device_bytes = config.device_bytes
    if device_bytes is None:
        device.release_cache()  # what torch's allocator keeps from earlier work is free as well
        device_bytes = default_budget_bytes(device.free_bytes())
    room = device_bytes - (config.non_model_bytes or 0)
    types = compute_types(module, config.precision, config.keep_fp32)
    itemsize = min((types[id(param)].itemsize for _, param in params), default=4)
    found = search_chunk_size(
        [param for _, param in params],
        search_range_mb=config.search_range_mb,
        min_chunk_size_mb=config.min_chunk_size_mb,
        hidden_dim=config.hidden_dim,
        itemsize=itemsize,
        max_chunk_bytes=max(device.block_bytes, room * itemsize // (4 * _CHUNKS_ON_DEVICE)),
        align_bytes=device.align_bytes,
    )
    groups = _group(params, types, config, found.chunk_numel, itemsize, device.align_bytes)
    sizes = model_data_sizes(groups, found.chunk_numel, share, device.block_bytes)
    operator_bytes, operator_name = largest_operator(module, groups, device.block_bytes)
    gather_bytes = _gather_bytes(sizes, operator_bytes, room, config) if share is not None else 0
    size = _with_gathered(sizes, gather_bytes, operator_bytes, operator_name)
    capacity = _capacity(config, device_bytes, size, device, ranks_here)
    signature = "+".join(spec.layout.signature() for spec in groups)
    signature += "+activations" if config.activation_offload else ""
    signature += f"/{share.size}" if share is not None else ""
    context = PlacementContext(make_policy(config.placement_policy), size, capacity, signature)
    return Blueprint(tuple(groups), found, context, _budgets(config, capacity), gather_bytes)


def _gather_bytes(sizes: DataSizes, operator_bytes: int, room: int, config: GeminiConfig) -> int:
    """Return what whole parameter chunks may take: at least those of an operator, the next chunk, and the
    small ones."""
    least = max(operator_bytes, sizes.largest_window) + sizes.largest_window + sizes.small_windows
    wanted = config.gather_bytes
    if wanted is None:
        wanted = min(room // _GATHERED_SHARE, sizes.windows // _WHOLE_SHARE)
    return min(sizes.windows, max(least, wanted))


def _with_gathered(
    sizes: DataSizes, gather_bytes: int, operator_bytes: int, operator_name: str
) -> ModelDataSize:
    """Return what a placement policy needs to know; what is whole at times counts as being there always."""
    # A gradient is made while another is exchanged, which takes the room of a third.
    whole = gather_bytes + 3 * sizes.largest_gradient
    working = max(sizes.working, operator_bytes) + whole
    return ModelDataSize(sizes.total + whole, working, sizes.largest, operator_bytes, operator_name)


def _group(
    params: Sequence[tuple[str, nn.Parameter]],
    types: Mapping[int, torch.dtype],
    config: GeminiConfig,
    chunk_numel: int,
    itemsize: int,
    align_bytes: int,
) -> list[GroupSpec]:
    """Split parameters by (dtype, trainable) and lay out each part."""
    parts: dict[tuple[torch.dtype, bool], list[tuple[str, torch.Tensor]]] = {}
    for name, param in params:
        parts.setdefault((types[id(param)], param.requires_grad), []).append((name, param))
    order = config.memstats.param_order if config.memstats is not None else ()
    return [
        GroupSpec(
            layout=ChunkLayout.build(
                members,
                chunk_numel,
                itemsize=itemsize,
                order=[name for name in order if name in dict(members)] or None,
                align_bytes=align_bytes,
            ),
            dtype=dtype,
            trainable=trainable,
            master=trainable and dtype == config.precision,
        )
        for (dtype, trainable), members in parts.items()
    ]


def _capacity(
    config: GeminiConfig, device_bytes: int, size: ModelDataSize, device: ComputeDevice, ranks_here: int
) -> TierCapacity:
    """Return the budgets with defaults filled in."""
    host_bytes = config.host_bytes
    if host_bytes is None and device.has_own_memory:
        # Page-locked memory is nobody else's: half of what is free.
        host_bytes = default_budget_bytes() // (2 * ranks_here)
        if not config.activation_offload:
            host_bytes = min(size.total_bytes, host_bytes)
    elif host_bytes is None:
        # Without a GPU DEVICE is host memory already; only 'cpu' asks for a HOST tier of its own.
        host_bytes = size.total_bytes if config.placement_policy == "cpu" and config.disk_dir is None else 0
    disk_bytes = config.disk_bytes
    if disk_bytes is None:
        disk_bytes = size.total_bytes
        if config.activation_offload and config.disk_dir is not None:
            # Taken only as far as it is used.
            disk_bytes += shutil.disk_usage(checked_directory(config.disk_dir)).free // 2
    return TierCapacity(
        device_bytes=device_bytes,
        host_bytes=host_bytes,
        disk_bytes=disk_bytes if config.disk_dir is not None else 0,
        non_model_bytes=config.non_model_bytes,
    )


def _budgets(config: GeminiConfig, capacity: TierCapacity) -> TierBudgets:
    disk_dir = os.fspath(config.disk_dir) if config.disk_dir is not None else None
    spare_bytes = _SPARE_PLACES * capacity.disk_bytes if config.activation_offload else 0
    return TierBudgets(capacity.device_bytes, capacity.host_bytes, capacity.disk_bytes, disk_dir, spare_bytes)
