"""Which layouts operators support: the rules of torch's DTensor, and our own rules where those are missing.

This is the only file that uses DTensor's private rules. They are queried for a mesh of one axis; on a mesh of
several axes, each axis follows its own rule. Every strategy is tried on ``meta``: an output part must have
the shape that its layout says.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import fx
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor._op_schema import OpSchema, OpSpec, OpStrategy, TupleStrategy
from torch.distributed.tensor._ops.single_dim_strategy import _ShardingPlaceholder

from gemini.planner.operators.conversions import OperatorLayout
from gemini.planner.operators.local import RANDOM, SIZE_ARGUMENTS, local_call, tensors_of

_aten = torch.ops.aten

# A placement along one axis: the dimension that is cut, or one of these.
WHOLE, SUM, MEAN = -1, -2, -3
# Exceptions of private rules for arguments that they do not support.
_REFUSALS = (
    RuntimeError,
    ValueError,
    TypeError,
    AssertionError,
    KeyError,
    IndexError,
    AttributeError,
)
# Arguments that name sizes: an operator that has one and is not in SIZE_ARGUMENTS is not cut.
_SIZE_NAMES = frozenset(
    ("size", "sizes", "input_sizes", "self_sizes", "output_size", "shape", "N", "C", "HxW", "num_weights")
)
# Operators with DTensor rules that are wrong in this planner.
_NEVER_CUT = frozenset(
    (
        _aten.native_batch_norm.default,
        _aten.native_batch_norm_backward.default,
        _aten._native_batch_norm_legit.default,
        _aten._native_batch_norm_legit_functional.default,
        _aten._batch_norm_with_update_functional.default,
        _aten.batch_norm_backward.default,
    )
)


class OperatorRule(NamedTuple):
    """The placements of outputs (None: no tensor) and tensor inputs along one axis."""

    outputs: tuple[int | None, ...]
    inputs: tuple[int, ...]


@dataclass(frozen=True)
class Strategy:
    """One way to run an operator on a mesh: the layouts of its outputs (None: no tensor) and of its tensor
    inputs, in the order of :func:`tensors_of`. ``scale``: factor for the outputs, because some DTensor rules
    average where we add up."""

    outputs: tuple[OperatorLayout | None, ...]
    inputs: tuple[OperatorLayout, ...]
    scale: float = 1.0

    @cached_property
    def axes(self) -> frozenset[int]:
        """The mesh axes along which ranks divide the work."""
        found: frozenset[int] = frozenset()
        for each in (*self.outputs, *self.inputs):
            found |= each.cut if each is not None else frozenset()
        return found

    def shards(self, sizes: Sequence[int]) -> int:
        """Return the number of ranks that divide the work."""
        return math.prod(sizes[axis] for axis in self.axes)


def values_of(node: fx.Node) -> tuple[torch.Tensor | None, ...]:
    """Return the outputs of a node as FakeTensors; None for outputs that are not tensors."""
    value = node.meta.get("val")
    found = value if isinstance(value, (tuple, list)) else (value,)
    return tuple(each if isinstance(each, torch.Tensor) else None for each in found)


class Rules:
    """The strategies of nodes on a mesh of these ``sizes``, computed once for each kind of node."""

    def __init__(self, sizes: Sequence[int]) -> None:
        self.sizes = tuple(sizes)
        self._known: dict[Any, tuple[tuple[Strategy, ...], bool]] = {}
        self._meshes = {size: _mesh(size) for size in set(self.sizes)}

    def strategies(self, node: fx.Node) -> tuple[tuple[Strategy, ...], bool]:
        """Return the strategies of a ``call_function`` node, including running whole on every rank; and
        whether any rule covers the operator."""
        key = _signature(node)
        if key not in self._known:
            self._known[key] = self._strategies(node)
        return self._known[key]

    def _strategies(self, node: fx.Node) -> tuple[tuple[Strategy, ...], bool]:
        inputs = [each.meta["val"] for each in tensors_of(node)]
        outputs = values_of(node)
        whole = OperatorRule(
            tuple(None if each is None else WHOLE for each in outputs), tuple(WHOLE for _ in inputs)
        )
        rules: dict[int, list[OperatorRule]] = {}
        is_known = True
        for size, mesh in self._meshes.items():
            found, is_known = _rules_of(node, mesh)
            fitting = {each for each in found if self._is_taken(each, outputs, inputs, size)}
            rules[size] = [whole, *sorted(fitting - {whole}, key=_order)]
        made: dict[Strategy, None] = {}
        for chosen in product(*(rules[size] for size in self.sizes)):
            strategy = _joined(chosen, outputs, inputs, self.sizes)
            if strategy is not None and (strategy in made or self._runs(node, strategy)):
                made[strategy] = None
        return tuple(made), is_known

    def _is_taken(
        self, rule: OperatorRule, outputs: Sequence[Any], inputs: Sequence[torch.Tensor], size: int
    ) -> bool:
        if len(rule.outputs) != len(outputs) or len(rule.inputs) != len(inputs):
            return False
        pairs = [*zip(rule.outputs, outputs, strict=True), *zip(rule.inputs, inputs, strict=True)]
        for placement, value in pairs:
            if (placement is None) != (value is None):
                return False
            if placement is None or placement < 0:
                # Partial sums are used for floating point only: a bool tensor has none.
                if placement in (SUM, MEAN) and not value.dtype.is_floating_point:
                    return False
            elif placement >= value.ndim or value.shape[placement] % size or not value.shape[placement]:
                return False
        return MEAN not in rule.inputs and _passes_sums(rule)

    def _runs(self, node: fx.Node, strategy: Strategy) -> bool:
        """Return whether the operator accepts the parts, and makes parts of the right shapes."""
        if not strategy.axes:
            return True
        whole = [each.meta["val"] for each in tensors_of(node)]
        parts = iter(
            torch.empty(layout.local_shape(value.shape, self.sizes), dtype=value.dtype, device="meta")
            for value, layout in zip(whole, strategy.inputs, strict=True)
        )
        args, kwargs = fx.map_arg((node.args, node.kwargs), lambda _: next(parts))
        kwargs = {name: "meta" if name == "device" else value for name, value in kwargs.items()}
        call = local_call(node, strategy.inputs, strategy.outputs, self.sizes, values_of(node))
        try:
            with torch.no_grad():
                out = call(_Nowhere(self.sizes), *args, **kwargs)
        except _REFUSALS:
            return False
        found = out if isinstance(out, (tuple, list)) else (out,)
        return all(
            layout is None
            or (
                isinstance(part, torch.Tensor)
                and tuple(part.shape) == layout.local_shape(value.shape, self.sizes)  # type: ignore[union-attr]
            )
            for part, layout, value in zip(found, strategy.outputs, values_of(node), strict=True)
        )


class _Nowhere:
    """A rank without peers, for a trial on ``meta``."""

    def __init__(self, sizes: Sequence[int]) -> None:
        self.place = tuple(0 for _ in sizes)

    def add_up(self, tensor: torch.Tensor, _axes: Sequence[int]) -> torch.Tensor:
        return tensor


def _passes_sums(rule: OperatorRule) -> bool:
    """Return whether an operator maps all-summand inputs to summands, or adds summand inputs (a bias) to its
    own partial sum.

    Other rules with summands, such as summands times a whole matrix, are correct but save no work. Programs
    without them are solved several times faster.
    """
    if SUM not in rule.inputs:
        return True
    others = {each for each in rule.inputs if each != SUM}
    return not others or any(each >= 0 for each in others)


def _order(rule: OperatorRule) -> tuple[Any, ...]:
    return tuple(-9 if each is None else each for each in rule.outputs), rule.inputs


def _joined(
    chosen: Sequence[OperatorRule],
    outputs: Sequence[Any],
    inputs: Sequence[torch.Tensor],
    sizes: Sequence[int],
) -> Strategy | None:
    """Return the strategy in which each axis follows its rule; None if parts would be unequal."""
    scale = math.prod(1 / size for rule, size in zip(chosen, sizes, strict=True) if MEAN in rule.outputs)
    made = []
    for value, placements in zip(
        (*outputs, *inputs),
        (
            *zip(*(rule.outputs for rule in chosen), strict=True),
            *zip(*(r.inputs for r in chosen), strict=True),
        ),
        strict=True,
    ):
        layout = None if value is None else _layout(placements, value.ndim)
        if layout is not None and not layout.fits(value.shape, sizes):
            return None
        made.append(layout)
    of_inputs = [each for each in made[len(outputs) :] if each is not None]
    return Strategy(tuple(made[: len(outputs)]), tuple(of_inputs), scale)


def _layout(placements: Sequence[int | None], ndim: int) -> OperatorLayout:
    dims: list[tuple[int, ...]] = [()] * ndim
    partial = []
    for axis, placement in enumerate(placements):
        if placement in (SUM, MEAN):
            partial.append(axis)
        elif placement is not None and placement >= 0:
            dims[placement] = (*dims[placement], axis)
    return OperatorLayout(tuple(dims), tuple(partial))


def _signature(node: fx.Node) -> Any:
    """Return a cache key for a node: nodes with equal keys have the same strategies."""

    def plain(value: Any) -> Any:
        if isinstance(value, fx.Node):
            known = value.meta.get("val")
            if isinstance(known, torch.Tensor):
                return tuple(known.shape), known.dtype
            return tuple((tuple(each.shape), each.dtype) for each in values_of(value) if each is not None)
        if isinstance(value, (tuple, list)):
            return tuple(plain(each) for each in value)
        if isinstance(value, dict):
            return tuple((key, plain(each)) for key, each in sorted(value.items()))
        return value if isinstance(value, (int, float, str, bool, type(None))) else repr(value)

    return node.target, plain(node.args), plain(dict(node.kwargs))


# -- DTensor's rules -------------------------------------------------------------------------------


def _mesh(size: int) -> DeviceMesh:
    """Return a mesh of one axis without processes."""
    return DeviceMesh("cpu", torch.arange(size, device="cpu"), _init_backend=False, _rank=0)


def _rules_of(node: fx.Node, mesh: DeviceMesh) -> tuple[set[OperatorRule], bool]:
    """Return the rules of a node along an axis, and whether any exist for its operator."""
    target = node.target
    if target is operator.getitem:
        raise AssertionError("what getitem takes is decided by the node that makes it")
    own = _OWN.get(target)
    if own is not None:
        return set(own(node)), True
    if not isinstance(target, torch._ops.OpOverload):
        return set(), False
    if not tensors_of(node):
        return set(), True  # a factory: every rank makes the same
    if target in _NEVER_CUT:
        return set(), False
    named = {argument.name for argument in target._schema.arguments}
    if named & _SIZE_NAMES and target not in SIZE_ARGUMENTS:
        return set(), False
    propagator = DTensor._op_dispatcher.sharding_propagator
    if target in propagator.op_single_dim_strategy_funcs:
        return set(_of_single_axis(node, propagator.op_single_dim_strategy_funcs[target])), True
    if target in propagator.op_strategy_funcs:
        return set(_of_strategies(node, mesh, propagator)), True
    return set(), False


def _meta(node: fx.Node) -> TensorMeta:
    value = node.meta["val"]
    return TensorMeta(value.shape, value.stride(), value.dtype)


def _of_single_axis(node: fx.Node, info: Any) -> Iterator[OperatorRule]:
    """Yield the rules of operators with single-axis strategies, which need only shapes."""
    args, kwargs = _mapped(node.args, _meta), _mapped(dict(node.kwargs), _meta)
    try:
        found = getattr(info, "func", info)(node.target, args, kwargs)
    except _REFUSALS:
        return
    count = len(values_of(node))
    for each in found:
        placements = [_placement(placement) for placement in each]
        if "?" not in placements:
            yield OperatorRule(tuple(placements[:count]), tuple(placements[count:]))


def _of_strategies(node: fx.Node, mesh: DeviceMesh, propagator: Any) -> Iterator[OperatorRule]:
    """Yield the rules of operators with older strategy functions.

    These map input placements to output placements, so all input placements are passed. If that raises, the
    first input's placements are passed one at a time.
    """
    inputs = tensors_of(node)
    function, info = (
        propagator.op_strategy_funcs[node.target],
        propagator.op_to_schema_info.get(node.target),
    )

    def strategy(each: fx.Node, only: Any = None) -> OpStrategy:
        every = [Replicate(), Partial(), *(Shard(dim) for dim in range(each.meta["val"].ndim))]
        chosen = every if only is None else [only]
        return OpStrategy(
            [OpSpec(DTensorSpec(mesh, (placement,), tensor_meta=_meta(each))) for placement in chosen]
        )

    def ask(make: Callable[[fx.Node], OpStrategy]) -> list[OperatorRule]:
        args = tuple(
            TupleStrategy(each) if isinstance(each, list) and isinstance(each[0], OpStrategy) else each
            for each in (_mapped(list(node.args), make))
        )
        target: Any = node.target
        schema = OpSchema(target, args, _mapped(dict(node.kwargs), make), schema_info=info)
        return list(_rules_in(function(schema), len(values_of(node)), len(inputs)))

    try:
        yield from ask(strategy)
        return
    except _REFUSALS:
        pass
    first = inputs[0]
    for placement in [Replicate(), Partial(), *(Shard(dim) for dim in range(first.meta["val"].ndim))]:
        try:
            yield from ask(lambda each, only=placement: strategy(each, only if each is first else None))  # type: ignore[misc]
        except _REFUSALS:
            continue


def _rules_in(found: Any, num_outputs: int, num_inputs: int) -> Iterator[OperatorRule]:
    for spec in getattr(found, "strategies", ()):
        outputs = spec.output_specs
        outputs = list(outputs) if isinstance(outputs, (tuple, list)) else [outputs] * num_outputs
        inputs = [outputs[0]] * num_inputs if spec.input_specs is None else list(spec.input_specs)
        placements = [None if each is None else _placement(each.placements[0]) for each in outputs + inputs]
        if "?" not in placements and None not in placements[len(outputs) :]:
            into: list[Any] = placements[len(outputs) :]
            yield OperatorRule(tuple(placements[: len(outputs)]), tuple(into))


def _placement(placement: Any) -> Any:
    """Convert a DTensor placement to a placement of this file; "?" if it has no equivalent."""
    if placement is None:
        return None
    if isinstance(placement, _ShardingPlaceholder) or type(placement) is Shard:
        return placement.dim
    if isinstance(placement, Replicate):
        return WHOLE
    if type(placement) is Partial and placement.reduce_op in ("sum", "avg"):
        return SUM if placement.reduce_op == "sum" else MEAN
    return "?"


def _mapped(value: Any, make: Callable[[fx.Node], Any]) -> Any:
    """Return arguments (nested lists, tuples and dicts) with ``make`` applied to each node."""
    if isinstance(value, fx.Node):
        return make(value)
    if isinstance(value, tuple):
        return tuple(_mapped(each, make) for each in value)
    if isinstance(value, list):
        return [_mapped(each, make) for each in value]
    if isinstance(value, dict):
        return {name: _mapped(each, make) for name, each in value.items()}
    return value


# -- own rules -------------------------------------------------------------------------------------


def _mask_placements(node: fx.Node, batch: int, heads: int) -> tuple[list[int], list[int]]:
    """Return the placements of the attention mask, if there is one, for a cut batch and for cut heads."""
    mask = node.kwargs.get("attn_mask")
    if not isinstance(mask, fx.Node):
        return [], []
    shape = mask.meta["val"].shape
    of_batch = 0 if len(shape) == 4 and shape[0] == batch and batch > 1 else WHOLE
    of_heads = len(shape) - 3 if len(shape) >= 3 and shape[-3] == heads and heads > 1 else WHOLE
    return [of_batch], [of_heads]


def _attention(node: fx.Node) -> list[OperatorRule]:
    batch, heads = tensors_of(node)[0].meta["val"].shape[:2]
    of_batch, of_heads = _mask_placements(node, batch, heads)
    return [OperatorRule((0, 0), (0, 0, 0, *of_batch)), OperatorRule((1, 1), (1, 1, 1, *of_heads))]


def _attention_backward(node: fx.Node) -> list[OperatorRule]:
    batch, heads = tensors_of(node)[0].meta["val"].shape[:2]
    of_batch, of_heads = _mask_placements(node, batch, heads)
    return [
        OperatorRule((0,) * 3, (0,) * 6 + tuple(of_batch)),
        OperatorRule((1,) * 3, (1,) * 6 + tuple(of_heads)),
    ]


def _nll_loss(node: fx.Node) -> list[OperatorRule]:
    """Each rank counts its own samples; the operator then adds up the sums and weights of all ranks."""
    weighted = [WHOLE] * (len(tensors_of(node)) - 2)
    return [OperatorRule((WHOLE, WHOLE), (0, 0, *weighted))] if node.args[3] in (1, 2) else []


def _nll_loss_backward(node: fx.Node) -> list[OperatorRule]:
    weighted = [WHOLE] * (len(tensors_of(node)) - 4)
    return [OperatorRule((0,), (WHOLE, 0, 0, *weighted, WHOLE))] if node.args[4] in (1, 2) else []


def _embedding(node: fx.Node) -> list[OperatorRule]:
    """Cut the ids, the columns of the table, or its rows. With cut rows, ids of other ranks' rows give
    zeros."""
    ids = tensors_of(node)[1].meta["val"].ndim
    return [
        *(OperatorRule((dim,), (WHOLE, dim)) for dim in range(ids)),
        OperatorRule((ids,), (1, WHOLE)),
        OperatorRule((SUM,), (0, WHOLE)),
    ]


def _embedding_backward(node: fx.Node) -> list[OperatorRule]:
    if node.args[4]:  # by frequency: ranks would have to count together
        return []
    grad = tensors_of(node)[0].meta["val"].ndim
    return [
        *(OperatorRule((SUM,), (dim, dim)) for dim in range(grad - 1)),
        OperatorRule((1,), (grad - 1, WHOLE)),
        OperatorRule((0,), (WHOLE, WHOLE)),
        OperatorRule((SUM,), (SUM, WHOLE)),
    ]


def _mean_squares(node: fx.Node) -> list[OperatorRule]:
    inputs = [each.meta["val"] for each in tensors_of(node)]
    if inputs[0].shape != inputs[1].shape:
        return []
    result = {0: None, 1: MEAN, 2: SUM}[node.args[2] if len(node.args) > 2 else 1]  # type: ignore[index]
    return [OperatorRule((dim if result is None else result,), (dim, dim)) for dim in range(inputs[0].ndim)]


def _mean_squares_backward(node: fx.Node) -> list[OperatorRule]:
    _, scores, targets = (each.meta["val"] for each in tensors_of(node))
    if scores.shape != targets.shape or node.args[3] not in (1, 2):
        return []
    return [OperatorRule((dim,), (WHOLE, dim, dim)) for dim in range(scores.ndim)]


def _convolution(node: fx.Node) -> list[OperatorRule]:
    bias = len(tensors_of(node)) - 2
    found = [OperatorRule((0,), (0, WHOLE, *[WHOLE] * bias))]
    if node.args[8] == 1 and not node.args[6]:
        found.append(OperatorRule((1,), (WHOLE, 0, *[0] * bias)))
        found.append(OperatorRule((SUM,), (1, 1, *[SUM] * bias)))
    return found


def _convolution_backward(node: fx.Node) -> list[OperatorRule]:
    wanted = node.args[10]
    every = [((0, SUM, SUM), (0, 0, WHOLE))]
    if node.args[9] == 1 and not node.args[7]:
        every += [((SUM, 0, 0), (1, WHOLE, 0)), ((1, 1, WHOLE), (WHOLE, 1, 1))]
    return [
        OperatorRule(tuple(p if is_wanted else None for p, is_wanted in zip(out, wanted, strict=True)), into)  # type: ignore[arg-type]
        for out, into in every
    ]


def _random(node: fx.Node) -> list[OperatorRule]:
    """Each rank draws the numbers for the whole tensor and keeps its own part."""
    inputs, outputs = tensors_of(node), values_of(node)
    return [
        OperatorRule((dim,) * len(outputs), (dim,) * len(inputs)) for dim in range(inputs[0].meta["val"].ndim)
    ]


def _like_input(node: fx.Node) -> list[OperatorRule]:
    """An element-wise operator on tensors of one shape."""
    inputs = [each.meta["val"] for each in tensors_of(node)]
    if any(each.shape != inputs[0].shape for each in inputs):
        return []
    return [OperatorRule((dim,), (dim,) * len(inputs)) for dim in range(inputs[0].ndim)]


def _floor_divide(node: fx.Node) -> list[OperatorRule]:
    return _like_input(node) if len(tensors_of(node)) == 1 else []


_OWN: dict[Any, Callable[[fx.Node], list[OperatorRule]]] = {
    _aten._scaled_dot_product_flash_attention_for_cpu.default: _attention,
    _aten._scaled_dot_product_flash_attention_for_cpu_backward.default: _attention_backward,
    _aten.nll_loss_forward.default: _nll_loss,
    _aten.nll_loss2d_forward.default: _nll_loss,
    _aten.nll_loss_backward.default: _nll_loss_backward,
    _aten.nll_loss2d_backward.default: _nll_loss_backward,
    _aten.embedding.default: _embedding,
    _aten.embedding_dense_backward.default: _embedding_backward,
    _aten.convolution.default: _convolution,
    _aten.convolution_backward.default: _convolution_backward,
    _aten.mse_loss.default: _mean_squares,
    _aten.mse_loss_backward.default: _mean_squares_backward,
    _aten.floor_divide.default: _floor_divide,
    _aten.softplus_backward.default: _like_input,
    _aten.copy.default: _like_input,
    _aten.fill.Scalar: _like_input,
    **dict.fromkeys(RANDOM, _random),
}
