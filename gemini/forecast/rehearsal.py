"""One step of a managed model with nothing in its memory: the runtime itself on ``meta`` tensors.

Interception, backward hooks, gradients, the chunk table and the optimizer are those of a real step, so what
is recorded is what a real step would record. Only memory, transfers and kernels are missing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import nn

from gemini import _C
from gemini.chunk import (
    CPU,
    Chunk,
    ChunkManager,
    ChunkSpec,
    ComputeDevice,
    TensorIds,
    TierBudgets,
)
from gemini.chunk.cpu_memory import CpuDevice
from gemini.chunk.disk_file import DiskFile
from gemini.chunk.memory import AnyMemory
from gemini.errors import ConfigError, GeminiError
from gemini.forecast.meter import Meter, Period
from gemini.memstats import Trace
from gemini.model.ddp import GeminiDDP
from gemini.model.managed_model import ManagedModel
from gemini.optim import CPUAdam, GeminiOptimizer
from gemini.optim.chunk_update import ChunkUpdate
from gemini.optim.gradients import visit_gradients
from gemini.optim.rule import Part
from gemini.placement import TierCapacity
from gemini.runtime import ChunkGroup, GeminiManager, ModelStorage
from gemini.runtime.adopt import manage
from gemini.runtime.build import Blueprint, Built
from gemini.runtime.config import GeminiConfig
from gemini.runtime.gate.gate import TensorRef
from gemini.runtime.growth import Growth
from gemini.runtime.intercept.attention_of_cpu import AttentionOfCpu

_UNLIMITED = 2**62

# A scalar to differentiate, from what the model returned and the inputs.
LossFunction = Callable[[Any, Any], torch.Tensor]


@dataclass(frozen=True)
class Recipe:
    """How a step trains. ``accumulation``: forward and backward passes per update. ``most_calls``: of
    operators in one pass."""

    loss: LossFunction
    accumulation: int = 1
    clips_norm: bool = True
    most_calls: int | None = None


@dataclass(frozen=True)
class Rehearsal:
    """What one step does. ``trace`` has no compute times; ``periods`` say what there is to compute.
    ``num_guesses``: how often the model looked at a value, which was not there.
    ``num_calls``: of operators."""

    trace: Trace
    periods: tuple[Period, ...]
    num_guesses: int
    num_calls: int


def rehearse(
    module: nn.Module, inputs: tuple[Any, ...], recipe: Recipe, config: GeminiConfig, blueprint: Blueprint
) -> Rehearsal:
    """Run one training step of ``module``, which is on ``meta`` and is managed from then on.

    Raises:
        ConfigError: the module cannot be managed, or looks at values, which are not there.
        TooManyCalls: as the recipe has it.
    """
    meter = Meter(None if recipe.most_calls is None else recipe.most_calls * recipe.accumulation)
    model = _RehearsedModel(module, config, blueprint, meter)
    optimizer = _RehearsedOptimizer(model, meter, recipe.clips_norm)
    with torch.device("meta"), AttentionOfCpu(), meter:
        for _ in range(recipe.accumulation):
            with _as_refusal():
                loss = recipe.loss(model(*inputs), inputs)
                optimizer.backward(loss)
            del loss
        optimizer.step()
    recorded = model._gemini.manager.trace
    assert recorded is not None
    periods = tuple(meter.finish())
    trace = replace(recorded, non_model_bytes=tuple(period.peak_bytes for period in periods))
    return Rehearsal(trace, periods, meter.num_guesses, meter.num_calls)


@contextmanager
def _as_refusal() -> Iterator[None]:
    """Turn what a module raises on ``meta`` into a ConfigError that says what may be wrong."""
    try:
        yield
    except GeminiError:
        raise
    except RuntimeError as error:
        first_line = str(error).partition("\n")[0]
        raise ConfigError(
            f"the step cannot be rehearsed without values: {first_line}; leave out what depends "
            "on the values of tensors (.item(), float(tensor), the routing of experts), or check the inputs"
        ) from error


class _MetaChunk(Chunk):
    """A chunk whose window is nowhere."""

    __slots__ = ()

    def __init__(self, chunk_id: int, spec: ChunkSpec) -> None:
        self.id = chunk_id
        self.spec = spec
        self.tensor = torch.empty(spec.numel, dtype=spec.dtype, device="meta")


class _Nowhere:
    """Memory of chunks that hold nothing: all that operators ask of it."""

    def follow(self) -> None:
        """Do nothing."""

    def stall_seconds(self) -> float:
        return 0.0

    def address_range(self) -> tuple[int, int]:
        return 0, 1  # where all of ``meta`` is


class _MetaDevice(CpuDevice):
    """The CPU, as far as what is decided goes: what it would hold (buffers) is on ``meta``."""

    torch_device = torch.device("meta")


class _MetaChunks(ChunkManager):
    """The chunk table, with room for everything, over chunks without memory.

    Every moment opens a period of the meter.
    """

    def __init__(self, specs: Sequence[ChunkSpec], meter: Meter) -> None:
        self.budgets = TierBudgets(_UNLIMITED)
        self._expected_bytes = Counter()
        self.table = _C.ChunkTable(_UNLIMITED, 0, 0)
        self.chunks = [_MetaChunk(self.table.add_chunk(spec.nbytes), spec) for spec in specs]
        self.device = CPU
        self._memory = cast(AnyMemory, _Nowhere())
        self._waited_s = 0.0
        self.observer = self.stow = None
        self._park_limit_bytes = _UNLIMITED
        self._parks_always = False
        self._meter = meter
        self._in_flight = {}
        self._disk = DiskFile(self.budgets, 0, self.table)
        self._unfounded = set()
        self._needs_reconcile = self._under_pressure = self._closed = self._runs_behind = False

    def _append(self, spec: ChunkSpec, *, reserved: bool = True, expected: bool = False) -> Chunk:
        self.chunks.append(_MetaChunk(self.table.add_chunk(spec.nbytes), spec))
        return self.chunks[-1]

    def acquire(self, tensors: TensorIds, *, traced: bool, on_host: bool = False) -> None:
        if traced:
            self._meter.open_period()
        super().acquire(tensors, traced=traced, on_host=on_host)

    def link_stats(self) -> dict[str, dict[str, float]]:
        nothing = {"bytes": 0, "seconds": 0.0, "shared_seconds": 0.0}
        return {link: nothing for link in ("h2d", "d2h", "disk_read", "disk_write")}

    def _execute(self, actions: Sequence[_C.Action]) -> None:
        """Allocate and drop: there is nothing to map."""


class _RehearsedManager(GeminiManager):
    """Tells views of a chunk by their storage: addresses on ``meta`` are all 0. Is never resident for good:
    every operator is a moment."""

    def views(self, ref: TensorRef, tensor: torch.Tensor) -> bool:
        chunk = self.chunks.chunks[self.chunks.table.chunk_of(ref.tensors[0])]
        return bool(tensor.untyped_storage()._cdata == chunk.tensor.untyped_storage()._cdata)

    def _fits_for_good(self) -> bool:
        return False


class _RehearsedHandle(ManagedModel):
    def backward(self, loss: torch.Tensor) -> None:
        """Run the engine itself: ``loss.backward()`` would leave the modes that what it recomputes needs."""
        run = torch.autograd.Variable._execution_engine.run_backward
        run((loss,), (torch.ones_like(loss),), False, False, (), allow_unreachable=True, accumulate_grad=True)


class _RehearsedModel(GeminiDDP):
    """A managed model whose chunks hold nothing."""

    def __init__(self, module: nn.Module, config: GeminiConfig, blueprint: Blueprint, meter: Meter) -> None:
        self._blueprint = blueprint
        self.meter = meter
        super().__init__(module, config=config)

    def _open_device(self, device: object, pin_memory: bool | None) -> ComputeDevice:
        return _MetaDevice()

    def _manage(
        self, module: nn.Module, config: GeminiConfig, peers: object, device: ComputeDevice, _parts: object
    ) -> ManagedModel:
        blueprint = self._blueprint
        storage = ModelStorage(
            blueprint.groups,
            blueprint.search.chunk_numel,
            blueprint.budgets,
            lambda specs, budgets, *, expected: _MetaChunks(specs, self.meter),
        )
        room = TierCapacity(_UNLIMITED, 0, 0, non_model_bytes=0)
        manager = _RehearsedManager(storage.chunks, replace(blueprint.context, capacity=room))
        storage.register(manager)
        manager.grow_with(Growth(storage, manager, lambda error, _: error.least_bytes))
        params = dict(module.named_parameters())
        for name, slot in storage.slots.items():
            params[name].data = slot.param_view
            manage(params[name], slot)
            # As wrapping leaves them: with content.
            with manager.operator(slot.param_ref.tensors, slot.param_ref.tensors):
                pass
        manager.name_parameters(storage.parameter_names())
        return _RehearsedHandle(module, config, device, None, Built(storage, manager, blueprint.search))


class _RehearsedUpdate(ChunkUpdate):
    """An update that counts what Adam's kernel would read and write."""

    meter: Meter

    def _prepare(self, parts: Sequence[Part]) -> Callable[[], object]:
        dtype = self._group.param.spec.dtype
        masters = dtype.itemsize < 4
        # Parameter (or its master) and two moments, read and written; the gradient; the copy of a master.
        element_bytes = 3 * 8 + dtype.itemsize * (2 if masters else 1)
        for part in parts:
            numel = part.values.numel()
            self.meter.count_update(numel, numel * element_bytes, dtype)
        return lambda: None


class _RehearsedOptimizer(GeminiOptimizer):
    """Looks at gradients and updates, and has no numbers to decide anything by."""

    update_type = _RehearsedUpdate

    def __init__(self, model: _RehearsedModel, meter: Meter, clips_norm: bool) -> None:
        super().__init__(CPUAdam(model.parameters()), model, max_norm=float(clips_norm))
        self._meter = meter

    def clip_grad_by_norm(self, max_norm: float, norm_type: float | None = None) -> torch.Tensor:
        self._start_clipping("clip_grad_by_norm")
        return self._global_norm(norm_type or self.norm_type)

    def _all_finite(self) -> bool:
        visit_gradients(*self._chunks, lambda _slot, grad: torch.isfinite(grad))
        return True

    def _chunk_updates(self, groups: Iterable[ChunkGroup]) -> list[ChunkUpdate]:
        updates = super()._chunk_updates(groups)
        for update in updates:
            assert isinstance(update, _RehearsedUpdate)
            update.meter = self._meter
        return updates
