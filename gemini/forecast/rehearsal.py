"""Rehearses one step of a managed model without memory: the real runtime on ``meta`` tensors.

Interception, backward hooks, gradients, the chunk table and the optimizer are those of a real step, so the
recorded trace is that of a real step. Only memory, transfers and kernels are missing. ModelSource builds the
model for any batch size.

If a model runs token by token and has too many tokens to rehearse, the step is extrapolated from three
shorter ones. Times follow a parabola, because the gradient of one token's slice has the size of the whole
tensor. Memory follows a line. It is underestimated if the model also keeps all products of queries and keys
outside the loop.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import nn

from gemini.chunk import ChunkManager, TierBudgets
from gemini.chunk.chunk import ChunkSpec, TensorIds
from gemini.chunk.cpu_memory import CpuDevice
from gemini.chunk.memory import AnyMemory, ComputeDevice
from gemini.errors import ConfigError, GeminiError
from gemini.forecast.meter import Meter, Period
from gemini.memstats import Trace
from gemini.memstats.trace import OPTIMIZER
from gemini.model.ddp import GeminiDDP
from gemini.model.handle import ManagedModel
from gemini.offload.async_file import AsyncFile
from gemini.optim import CPUAdam, GeminiOptimizer
from gemini.optim.chunk_update import ChunkUpdate
from gemini.optim.gradients import visit_gradients
from gemini.optim.rule import Part
from gemini.placement import TierCapacity
from gemini.runtime import GeminiManager, init_on
from gemini.runtime.adopt import manage, manage_quantized
from gemini.runtime.build import Blueprint, Built
from gemini.runtime.config import GeminiConfig
from gemini.runtime.gate.gate import TensorRef
from gemini.runtime.growth import Growth
from gemini.runtime.intercept.cpu_operators import CpuAttention
from gemini.runtime.intercept.nested import map_tensors
from gemini.runtime.intercept.precision import is_quantized
from gemini.runtime.intercept.quantized import form_of, like
from gemini.runtime.intercept.quantized_operators import QuantizedParameter
from gemini.runtime.storage.model_storage import ChunkGroup, ManagedSlot, ModelStorage

_UNLIMITED = 2**62

# (outputs, inputs) -> the scalar to differentiate.
LossFunction = Callable[[Any, Any], torch.Tensor]


@dataclass(frozen=True)
class Recipe:
    """How a step trains. ``accumulation``: forward and backward passes per update. ``most_calls``: limit on
    operator calls per pass."""

    loss: LossFunction
    accumulation: int = 1
    clips_norm: bool = True
    most_calls: int | None = None


@dataclass(frozen=True)
class Rehearsal:
    """The record of one step.

    Attributes:
        trace: the recorded trace, without compute times.
        periods: the operators of each period.
        num_guesses: how often the model asked for a value of a tensor.
        num_calls: number of operator calls.
    """

    trace: Trace
    periods: tuple[Period, ...]
    num_guesses: int
    num_calls: int


def rehearse(
    module: nn.Module, inputs: tuple[Any, ...], recipe: Recipe, config: GeminiConfig, blueprint: Blueprint
) -> Rehearsal:
    """Run one training step of ``module``, which is on ``meta`` and is managed afterwards.

    Raises:
        ConfigError: the module cannot be managed, or reads values of tensors.
        TooManyCalls: a pass makes more operator calls than the recipe permits.
    """
    meter = Meter(None if recipe.most_calls is None else recipe.most_calls * recipe.accumulation)
    model = _RehearsedModel(module, config, blueprint, meter)
    optimizer = _RehearsedOptimizer(model, meter, recipe.clips_norm)
    with torch.device("meta"), CpuAttention(), meter:
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
    """Convert a RuntimeError of a module on ``meta`` to a ConfigError with a likely cause."""
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


class _NoWindow:
    """The window of a chunk without memory."""

    address = 0  # every meta tensor has the address 0
    mapped = False


_NO_WINDOW = _NoWindow()


class _MetaMemory:
    """Memory for chunks on ``meta``; everything fits. See :class:`gemini.chunk.memory.ChunkMemory`. The
    methods that only transfers use are missing, because there are no transfers."""

    mapped_bytes = parked_bytes = 0

    def __init__(self) -> None:
        self._largest_bytes = 1  # largest chunk: the address of a meta tensor is its offset in its storage

    def windows(
        self, nbytes: int, *, later: bool = False, floats: bool = False, follows: bool = False
    ) -> tuple[_NoWindow, None]:
        self._largest_bytes = max(self._largest_bytes, nbytes)
        return _NO_WINDOW, None

    def tensor(self, window: _NoWindow, dtype: torch.dtype, numel: int) -> torch.Tensor:
        return torch.empty(numel, dtype=dtype, device="meta")

    def follow(self) -> None:
        """Do nothing."""

    def map(self, window: _NoWindow, *, zero: bool) -> None:
        """Do nothing."""

    def settle(self) -> None:
        """Do nothing."""

    def stall_seconds(self) -> float:
        return 0.0

    def link_stats(self) -> dict[str, dict[str, float]]:
        nothing = {"bytes": 0, "seconds": 0.0, "shared_seconds": 0.0}
        return {link: nothing for link in ("h2d", "d2h", "disk_read", "disk_write")}

    def address_range(self) -> tuple[int, int]:
        return 0, self._largest_bytes

    def close(self, windows: object, exposed: object) -> None:
        """Do nothing."""


class _MetaDevice(CpuDevice):
    """The CPU with chunks and buffers on ``meta``. Decisions are those for a real CPU."""

    torch_device = torch.device("meta")
    cuts_chunks = False

    def open(
        self, sizes: Sequence[int], budgets: TierBudgets, file: AsyncFile | None, *, spare_bytes: int = 0
    ) -> AnyMemory:
        return cast(AnyMemory, _MetaMemory())


class _MeteredChunks(ChunkManager):
    """Chunks without memory, with room for everything. Every moment opens a period of the meter."""

    def __init__(self, specs: Sequence[ChunkSpec], meter: Meter) -> None:
        super().__init__(specs, TierBudgets(_UNLIMITED), _MetaDevice())
        self._meter = meter

    def acquire(self, tensors: TensorIds, *, traced: bool, on_host: bool = False) -> None:
        if traced:
            self._meter.open_period()
        super().acquire(tensors, traced=traced, on_host=on_host)


class _RehearsedManager(GeminiManager):
    """A manager that recognizes views of a chunk by their storage, because addresses on ``meta`` begin at 0
    in each storage. It never becomes permanently resident, so every operator is a moment."""

    def viewed(self, ref: TensorRef, tensor: torch.Tensor) -> TensorRef | None:
        chunk = self.chunks.chunks[self.chunks.table.chunk_of(ref.tensors[0])]
        is_there = tensor.untyped_storage()._cdata == chunk.tensor.untyped_storage()._cdata
        return ref if is_there else None

    def _fits_for_good(self) -> bool:
        return False


class _RehearsedHandle(ManagedModel):
    def backward(self, loss: torch.Tensor) -> None:
        """Call the autograd engine directly. ``loss.backward()`` would leave the dispatch modes that
        recomputation needs."""
        run = torch.autograd.Variable._execution_engine.run_backward
        run((loss,), (torch.ones_like(loss),), False, False, (), allow_unreachable=True, accumulate_grad=True)


class _RehearsedModel(GeminiDDP):
    """A managed model with chunks on ``meta``."""

    def __init__(self, module: nn.Module, config: GeminiConfig, blueprint: Blueprint, meter: Meter) -> None:
        self._blueprint = blueprint
        self.meter = meter
        super().__init__(module, config=config)

    def _find_peers(self, process_group: object | None) -> None:
        return None  # one rank may rehearse while the others wait for it

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
            lambda specs, budgets, *, expected: _MeteredChunks(specs, self.meter),
        )
        room = TierCapacity(_UNLIMITED, 0, 0, non_model_bytes=0)
        manager = _RehearsedManager(storage.chunks, replace(blueprint.context, capacity=room))
        storage.register(manager)
        manager.set_growth(Growth(storage, manager, lambda error, _: error.least_bytes))
        params = dict(module.named_parameters())
        for name, slot in storage.slots.items():
            if is_quantized(params[name]):
                _manage_quantized(module, params[name], slot)
            else:
                params[name].data = slot.param_view
                manage(params[name], slot)
            # Give the chunks content, as wrapping does.
            with manager.operator(slot.param_ref.tensors, slot.param_ref.tensors):
                pass
        manager.name_parameters(storage.parameter_names())
        return _RehearsedHandle(module, config, device, None, Built(storage, manager, blueprint.search))


def _manage_quantized(module: nn.Module, param: nn.Parameter, slot: ManagedSlot) -> None:
    """Replace ``param`` with a managed weight with inner tensors on ``meta``."""
    owner = module.get_submodule(slot.name.rpartition(".")[0])
    made = like(param, owner, without_values=True)
    for each in module.modules():
        for key, held in each._parameters.items():
            if held is param:
                each._parameters[key] = made
    manage_quantized(made, form_of(slot.name, made, owner), slot, owner)


class _RehearsedUpdate(ChunkUpdate):
    """An update that counts the bytes that Adam's kernel would read and write."""

    meter: Meter

    def _prepare(self, parts: Sequence[Part]) -> Callable[[], object]:
        dtype = self._group.param.spec.dtype
        masters = dtype.itemsize < 4
        # fp32 parameter (or master) and two moments, read and written; the gradient; the copy of a master.
        element_bytes = 3 * 8 + dtype.itemsize * (2 if masters else 1)
        for part in parts:
            numel = part.values.numel()
            self.meter.count_update(numel, numel * element_bytes, dtype)
        return lambda: None


class _RehearsedOptimizer(GeminiOptimizer):
    """An optimizer that accesses gradients and updates as usual, but makes no decision by values."""

    update_type = _RehearsedUpdate

    def __init__(self, model: _RehearsedModel, meter: Meter, clips_norm: bool) -> None:
        params = [param for param in model.parameters() if not isinstance(param, QuantizedParameter)]
        super().__init__(CPUAdam(params), model, max_norm=float(clips_norm))
        self._meter = meter

    def clip_grad_by_norm(self, max_norm: float, norm_type: float | None = None) -> torch.Tensor:
        self._start_clipping("clip_grad_by_norm")
        return self._global_norm(norm_type or self.norm_type)

    def _all_finite(self) -> bool:
        visit_gradients(*self._chunks, lambda _slot, grad: torch.isfinite(grad))
        return True

    def _chunk_updates(self, groups: Iterable[ChunkGroup], *, by_part: bool = False) -> list[ChunkUpdate]:
        updates = super()._chunk_updates(groups, by_part=by_part)
        for update in updates:
            assert isinstance(update, _RehearsedUpdate)
            update.meter = self._meter
        return updates


@dataclass(frozen=True)
class Example:
    """A model on ``meta``, and arguments for a call.

    ``is_wrapped``: ``module`` was made around the user's model, its only child, to accept these arguments.
    """

    module: nn.Module
    inputs: tuple[Any, ...]
    is_wrapped: bool = False

    @property
    def model(self) -> nn.Module:
        """The user's model, with its original parameter names."""
        return next(self.module.children()) if self.is_wrapped else self.module

    def around(self, model: nn.Module) -> nn.Module:
        """Return a module that accepts the inputs, around ``model``, which is like the user's."""
        return type(self.module)(model) if self.is_wrapped else model


@dataclass(frozen=True)
class ModelSource:
    """Builds a model and inputs of any batch size.

    Attributes:
        build: takes the batch size and makes the model again. It runs while torch makes all tensors on
            ``meta``.
        tokens: how much one sample counts in the report, in ``unit``.
        notes: lines for the report about decisions made for the user.
        resized: takes a number of tokens per sample and returns the source with that many; None if
            impossible.
        spans: the numbers of tokens to rehearse instead of ``tokens``.
    """

    name: str
    build: Callable[[int], Example]
    loss: LossFunction
    tokens: int = 1
    unit: str = "samples"
    notes: tuple[str, ...] = ()
    resized: Callable[[int], ModelSource] | None = None
    spans: tuple[int, int, int] | None = None

    def example(self, batch: int) -> Example:
        """Return the model and inputs for ``batch``.

        Raises:
            ConfigError: the model has parameters with memory or none to train, or its inputs are not tensors.
        """
        with init_on("meta"):
            example = self.build(batch)
        params = example.module.named_parameters()
        real = [name for name, param in params if not param.is_meta and not is_quantized(param)]
        if real:
            raise ConfigError(
                f"{self.name}: parameter {real[0]!r} (one of {len(real)}) was made with memory; build it "
                "with torch's default device, which is 'meta' while the factory runs"
            )
        if not any(param.requires_grad for param in example.module.parameters()):
            raise ConfigError(
                f"{self.name} has no parameter that requires a gradient: there is nothing to train"
            )
        example.module.train()
        return replace(example, inputs=map_tensors(example.inputs, lambda tensor: tensor.to("meta")))


def mean_of_outputs(outputs: Any, _inputs: Any) -> torch.Tensor:
    """Return a scalar that depends on the outputs: their ``loss`` if they have one, otherwise the mean of the
    first floating-point tensor.

    Raises:
        ConfigError: there is no such tensor.
    """
    loss = getattr(outputs, "loss", None)
    if isinstance(loss, torch.Tensor):
        return loss
    found: list[torch.Tensor] = []
    map_tensors(outputs, lambda tensor: found.append(tensor) or tensor)  # type: ignore[func-returns-value]
    for tensor in found:
        if tensor.is_floating_point() and tensor.requires_grad:
            return tensor.float().mean()
    raise ConfigError(
        f"the model returned {type(outputs).__name__} without a floating-point tensor to train on; "
        "have the factory return (module, inputs, loss) with loss(outputs, inputs) -> scalar"
    )


Spans = tuple[int, int, int]


@dataclass(frozen=True)
class Stretch:
    """Rehearsals of ``spans`` tokens, each with twice as many as the one before, to extrapolate to ``wanted``
    tokens."""

    rehearsals: tuple[Rehearsal, ...]
    spans: Spans
    wanted: int

    @property
    def longest(self) -> Rehearsal:
        """The last rehearsal. Its moments represent those of the wanted step."""
        return self.rehearsals[-1]

    def rehearsal(self) -> Rehearsal:
        """Return the longest rehearsal with the non-model data of the wanted step."""
        trace: Trace = self.longest.trace
        values = [list(map(float, each.trace.non_model_bytes)) for each in self.rehearsals]
        reserves = tuple(map(math.ceil, self._values(values, max, self._line)))
        return replace(self.longest, trace=replace(trace, non_model_bytes=reserves))

    def growth(self, seconds: Callable[[Period], float]) -> tuple[float, ...]:
        """Return for each moment the ratio of its time in the wanted step to its time in the longest
        rehearsal.

        ``seconds`` must be deterministic for equal work: measured times vary by more than a few tokens add.
        """
        values = [[seconds(period) for period in each.periods] for each in self.rehearsals]
        stretched = self._values(values, sum, self._parabola)
        return tuple(new / old if old > 0 else 1.0 for new, old in zip(stretched, values[-1], strict=True))

    def _values(
        self,
        values: list[list[float]],
        total: Callable[[Sequence[float]], float],
        curve: Callable[[Sequence[float]], float],
    ) -> list[float]:
        """Extrapolate moment by moment. If the number of moments grows too, scale all moments by the ratio of
        the totals."""
        phases = [each.trace.phases for each in self.rehearsals]
        if phases[0] == phases[1] == phases[2]:
            return [curve(each) for each in zip(*values, strict=True)]
        totals = [
            total([value for value, phase in zip(each, names, strict=True) if phase != OPTIMIZER])
            for each, names in zip(values, phases, strict=True)
        ]
        ratio = curve(totals) / totals[-1] if totals[-1] > 0 else 1.0
        return [
            value if phase == OPTIMIZER else value * ratio
            for value, phase in zip(values[-1], phases[-1], strict=True)
        ]

    def _line(self, values: Sequence[float]) -> float:
        _, more, most = self.spans
        slope = max(values[2] - values[1], 0) / (most - more)
        return values[2] + slope * (self.wanted - most)

    def _parabola(self, values: Sequence[float]) -> float:
        few, more, most = self.spans
        slopes = (values[1] - values[0]) / (more - few), (values[2] - values[1]) / (most - more)
        bend = max(slopes[1] - slopes[0], 0) / (most - few)
        return self._line(values) + bend * (self.wanted - most) * (self.wanted - more)


def spans(few: int, few_calls: int, more_calls: int, most_calls: int) -> Spans | None:
    """Return the numbers of tokens to rehearse instead of all; None if the number of calls does not grow as
    in a loop over tokens.

    Args:
        few: number of tokens of the first step.
        few_calls: its operator calls.
        more_calls: operator calls of a step with twice as many tokens.
        most_calls: limit for the three rehearsals together, unless half of ``few`` tokens already exceeds it.
    """
    if more_calls < 1.25 * few_calls:
        return None
    per_token = (more_calls - few_calls) / few
    room = most_calls - 3 * (few_calls - per_token * few)
    first = max(few // 2, 1)
    while 2 * 7 * first * per_token <= room:
        first *= 2
    return first, 2 * first, 4 * first
