"""Captures forward, loss and backward of a model as one graph of operators, without memory.

``make_fx`` runs the step on FakeTensors and records it. If that fails, ``torch.export`` first reads the
model's Python (dynamo), and ``make_fx`` differentiates its graph. Functionalization replaces in-place
operators, so every node is a value, and changed buffers are outputs.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch._subclasses.functional_tensor import FunctionalTensor, FunctionalTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import TreeSpec, tree_flatten, tree_map_only, tree_unflatten

from gemini.errors import ConfigError, in_words
from gemini.forecast.rehearsal import mean_of_outputs
from gemini.parallel.pipeline.batches import call_arguments
from gemini.runtime.intercept.cpu_operators import GROUPED_MM, grouped_mm

_aten = torch.ops.aten
MAKE_FX, EXPORT = "make_fx", "torch.export"

LossOf = Callable[[Any, Any], torch.Tensor]  # (outputs, batch) -> loss
_TENSOR = object()
_MOST_CAPTURES = 16  # each capture fixes one more answer
# The path for a partly set mask is also correct for a mask that is set everywhere or nowhere.
_HOLDS_FOR_ALL: dict[Any, bool] = {_aten.all.default: False, _aten.any.default: True}


class CaptureError(ConfigError):
    """The step cannot be captured as one graph."""


@dataclass(frozen=True)
class BatchForm:
    """The structure of a batch. The graph takes its tensors; all other leaves are constants."""

    spec: TreeSpec
    others: tuple[Any, ...]  # _TENSOR stands for a tensor
    shapes: tuple[tuple[torch.Size, torch.dtype], ...]

    @classmethod
    def of(cls, batch: Any) -> tuple[BatchForm, list[torch.Tensor]]:
        """Return the form of a batch, and its tensors."""
        leaves, spec = tree_flatten(dict(batch) if isinstance(batch, Mapping) else batch)
        tensors = [each for each in leaves if isinstance(each, torch.Tensor)]
        others = tuple(_TENSOR if isinstance(each, torch.Tensor) else each for each in leaves)
        return cls(spec, others, tuple((each.shape, each.dtype) for each in tensors)), tensors

    def tensors(self, batch: Any) -> list[torch.Tensor]:
        """Return the tensors of a batch. Raises ConfigError if the batch has another form."""
        form, tensors = BatchForm.of(batch)
        if form != self:
            found = [f"{tuple(shape)} {dtype}" for shape, dtype in form.shapes]
            wanted = [f"{tuple(shape)} {dtype}" for shape, dtype in self.shapes]
            raise ConfigError(
                f"the batch has tensors {', '.join(found)}; the step was captured with {', '.join(wanted)}: "
                "give batches of one form, or capture again"
            )
        return tensors

    def batch(self, tensors: Sequence[Any]) -> Any:
        """Return a batch that contains these tensors."""
        waiting = iter(tensors)
        leaves = [next(waiting) if each is _TENSOR else each for each in self.others]
        return tree_unflatten(leaves, self.spec)


@dataclass(frozen=True)
class TruthValue:
    """A truth value of a tensor on which the model branched, usually whether all of a mask is set. The graph
    is valid only for batches with the same value."""

    node: fx.Node
    value: bool

    def check(self, found: torch.Tensor) -> None:
        """Raise ConfigError if a batch gives another answer for which the graph is not valid."""
        if bool(found) != self.value and _HOLDS_FOR_ALL.get(self.node.target) != self.value:
            raise ConfigError(
                f"this batch takes another path through the model than the captured one: {self.node.name} is "
                f"{bool(found)} and was {self.value} (mostly this says whether all of a mask is set); call "
                "autoshard with a batch like this one, such as one with padding"
            )


@dataclass(frozen=True)
class Captured:
    """A step as a graph.

    Its placeholders are ``parameters``, ``buffers`` and the tensors of a batch of ``form``, in this order.
    ``loss``, ``gradients`` and ``changed`` (buffers) are nodes.

    Attributes:
        truth_values: truth values on which the model branched.
        way: how the step was captured, ``MAKE_FX`` or ``EXPORT``.
    """

    module: fx.GraphModule
    parameters: tuple[str, ...]
    buffers: tuple[str, ...]
    form: BatchForm
    loss: fx.Node
    gradients: dict[str, fx.Node]
    changed: dict[str, fx.Node]
    truth_values: tuple[TruthValue, ...]
    way: str

    @property
    def nodes(self) -> list[fx.Node]:
        """All nodes except the output, in execution order."""
        return [node for node in self.module.graph.nodes if node.op != "output"]

    @property
    def backward_begins(self) -> int:
        """Index into ``nodes`` of the first backward node."""
        return self.nodes.index(self.loss) + 1

    def placeholders(self) -> tuple[dict[str, fx.Node], dict[str, fx.Node], list[fx.Node]]:
        """Return the nodes of parameters, of buffers, and of the batch's tensors."""
        found = [node for node in self.module.graph.nodes if node.op == "placeholder"]
        first, second = len(self.parameters), len(self.parameters) + len(self.buffers)
        return (
            dict(zip(self.parameters, found[:first], strict=True)),
            dict(zip(self.buffers, found[first:second], strict=True)),
            found[second:],
        )


def capture(model: nn.Module, samples: Any, loss: LossOf = mean_of_outputs) -> Captured:
    """Capture a step of ``model``, on any device, for batches like ``samples``.

    The shapes and types of its tensors matter, and the truth values on which the model branches. A truth
    value is assumed to be true if ``samples`` have no values or it depends on parameters.

    Raises:
        CaptureError: the step cannot be captured; the message has the reason of each way.
    """
    form, tensors = BatchForm.of(samples)
    reasons = []
    for way in (MAKE_FX, EXPORT):
        try:
            return _with_truth_values(model, form, tensors, loss, way)
        except CaptureError:
            raise
        except Exception as error:  # model code may raise anything
            reasons.append(f"{way}: {in_words(error)}")
    raise CaptureError(
        f"a step of {type(model).__name__} cannot be captured as one graph ({'; '.join(reasons)}): plan "
        "it by blocks, or leave out what depends on the values of tensors"
    )


def _with_truth_values(
    model: nn.Module, form: BatchForm, tensors: list[torch.Tensor], loss: LossOf, way: str
) -> Captured:
    """Capture the step on the path that the samples take. Each capture assumes truth values; the first wrong
    one is corrected and the step is captured again."""
    truth_values: list[bool] = []
    for _ in range(_MOST_CAPTURES):
        captured = _captured(model, form, tensors, loss, way, truth_values)
        other = _first_other(captured, dict(model.named_buffers()), tensors)
        if other is None:
            return captured
        truth_values = [each.value for each in captured.truth_values[:other]]
        truth_values.append(not captured.truth_values[other].value)
    raise CaptureError(f"the path through the model depends on more than {_MOST_CAPTURES} values of tensors")


def _first_other(
    captured: Captured, buffers: Mapping[str, torch.Tensor], tensors: Sequence[torch.Tensor]
) -> int | None:
    """Return the index of the first answer that is wrong for the samples; None if none is known to be
    wrong."""
    _, places, batch = captured.placeholders()
    values = {
        **{places[name]: value for name, value in buffers.items()},
        **dict(zip(batch, tensors, strict=True)),
    }
    env: dict[fx.Node, Any] = {node: value for node, value in values.items() if not value.is_meta}
    needed = _ancestors(each.node for each in captured.truth_values)
    with _quiet(), torch.no_grad():
        for node in captured.nodes:
            if node.op == "get_attr":
                env[node] = getattr(captured.module, str(node.target))
            elif node.op == "call_function" and node in needed and env.keys() >= set(node.all_input_nodes):
                args, kwargs = fx.map_arg((node.args, dict(node.kwargs)), env.__getitem__)
                function: Any = node.target
                env[node] = function(*args, **kwargs)
    for number, each in enumerate(captured.truth_values):
        if each.node in env and bool(env[each.node]) != each.value:
            return number
    return None


def _ancestors(nodes: Iterable[fx.Node]) -> set[fx.Node]:
    """Return these nodes and all nodes on which they depend."""
    found, waiting = set[fx.Node](), list(nodes)
    while waiting:
        node = waiting.pop()
        if node not in found:
            found.add(node)
            waiting += node.all_input_nodes
    return found


def _captured(
    model: nn.Module,
    form: BatchForm,
    tensors: list[torch.Tensor],
    loss: LossOf,
    way: str,
    truth_values: Sequence[bool] = (),
) -> Captured:
    parameters, buffers = dict(model.named_parameters()), dict(model.named_buffers())
    trained = [name for name, param in parameters.items() if param.requires_grad]
    if not trained:
        raise CaptureError("the model has no parameter that requires a gradient: there is nothing to train")
    mode, truths = _FakeMode(allow_non_fake_inputs=True), _TruthValues(truth_values)
    called: nn.Module = _LossModule(model, form, loss)

    def step(params: list[Any], buffs: list[Any], batch: list[Any]) -> Any:
        with FunctionalTensorMode(), truths:
            params, buffs, batch = tree_map_only(torch.Tensor, _functional, (params, buffs, batch))
            named = {**dict(zip(parameters, params, strict=True)), **dict(zip(buffers, buffs, strict=True))}
            values = {f"model.{name}": value for name, value in named.items()}
            out = torch.func.functional_call(called, values, tuple(batch))
            wanted = [param for param in params if param.requires_grad]
            grads = torch.autograd.grad(out, wanted, allow_unused=True)
            return tree_map_only(
                FunctionalTensor, _plain, (out.detach(), list(grads), list(buffs), truths.asked)
            )

    with _quiet():
        fakes = [_fakes(mode, each) for each in (list(parameters.values()), list(buffers.values()), tensors)]
        if way == EXPORT:
            called = _exported(called, mode, fakes[2])
        with mode:
            made = make_fx(step, tracing_mode="real")(*fakes)
    return _tidied(made, tuple(parameters), tuple(buffers), trained, form, way, truths.given)


class _LossModule(nn.Module):
    """A module that takes the tensors of a batch and returns the model's loss."""

    def __init__(self, model: nn.Module, form: BatchForm, loss: LossOf) -> None:
        super().__init__()
        self.model, self.form, self.loss = model, form, loss

    def forward(self, *tensors: torch.Tensor) -> torch.Tensor:
        """Return the loss, a scalar."""
        batch = self.form.batch(tensors)
        args, kwargs = call_arguments(batch)
        loss = self.loss(self.model(*args, **kwargs), batch)
        if loss.ndim:
            raise CaptureError(f"the loss has the shape {tuple(loss.shape)}: return one number")
        return loss


def _exported(step: nn.Module, mode: FakeTensorMode, tensors: Sequence[torch.Tensor]) -> nn.Module:
    """Return the step as ``torch.export`` reads it."""
    real = [torch.zeros(each.shape, dtype=each.dtype, device=each.device) for each in tensors]
    del mode, tensors  # export makes its own FakeTensors
    return torch.export.export(step, tuple(real), strict=False).module()


class _FakeMode(FakeTensorMode):
    """FakeTensor mode that supports grouped matrix products in every dtype, as the CPU does."""

    def dispatch(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is GROUPED_MM:
            with self:
                return grouped_mm(*args, **(kwargs or {}))
        return super().dispatch(func, types, args, kwargs or {})


class _TruthValues(TorchDispatchMode):
    """Answers the model's queries for truth values of tensors: first with the given ones, then with true.
    Records both."""

    def __init__(self, truth_values: Sequence[bool]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._given_values = truth_values
        self.asked: list[torch.Tensor] = []
        self.given: list[bool] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is _aten._local_scalar_dense.default and args[0].dtype == torch.bool:
            number = len(self.given)
            self.asked.append(args[0])
            self.given.append(self._given_values[number] if number < len(self._given_values) else True)
            return self.given[number]
        return func(*args, **(kwargs or {}))


def _fakes(mode: FakeTensorMode, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return FakeTensors for ``tensors``; meta tensors are treated as CPU tensors."""
    found = []
    with mode:
        for each in tensors:
            device = "cpu" if each.is_meta else each.device
            fake = torch.empty_strided(each.shape, each.stride(), dtype=each.dtype, device=device)
            found.append(fake.requires_grad_(each.requires_grad and each.is_leaf))
    return found


def _functional(tensor: torch.Tensor) -> Any:
    made: Any = FunctionalTensor.to_functional(tensor.detach())
    return made.requires_grad_(tensor.requires_grad)


def _plain(tensor: Any) -> torch.Tensor:
    torch._sync(tensor)  # type: ignore[attr-defined, no-untyped-call]
    found: torch.Tensor = torch._from_functional_tensor(tensor.elem)
    return found


@contextmanager
def _quiet() -> Iterator[None]:
    """Restore the CPU random state of the process afterwards."""
    with torch.random.fork_rng(devices=[]):
        yield


# -- making the graph smaller ----------------------------------------------------------------------

_SAME = (_aten.detach.default, _aten.alias.default, _aten.lift_fresh_copy.default, _aten.lift_fresh.default)


def is_view(node: fx.Node) -> bool:
    """Return whether a node has no memory of its own: its value lies in the memory of its first argument."""
    if node.op != "call_function":
        return False
    if node.target is operator.getitem:
        return isinstance(node.args[0], fx.Node) and is_view(node.args[0])
    return isinstance(node.target, torch._ops.OpOverload) and (
        node.target.is_view or node.target is _aten._unsafe_view.default
    )


def _tidied(
    made: fx.GraphModule,
    parameters: tuple[str, ...],
    buffers: tuple[str, ...],
    trained: list[str],
    form: BatchForm,
    way: str,
    given: Sequence[bool],
) -> Captured:
    graph = made.graph
    for node in list(graph.nodes):
        if node.op == "call_function" and node.target in _SAME:
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)
    output = next(node for node in reversed(graph.nodes) if node.op == "output")
    loss, *others = output.args[0]
    until = len(trained) + len(buffers)
    grads, buffs, asked = others[: len(trained)], others[len(trained) : until], others[until:]
    truth_values = tuple(TruthValue(node, value) for node, value in zip(asked, given, strict=True))
    places = [node for node in graph.nodes if node.op == "placeholder"]
    before = places[len(parameters) : len(parameters) + len(buffers)]
    changed = {name: new for name, new, old in zip(buffers, buffs, before, strict=True) if new is not old}
    gradients = {name: node for name, node in zip(trained, grads, strict=True) if isinstance(node, fx.Node)}
    if not gradients or not isinstance(loss, fx.Node) or loss.op != "call_function":
        raise CaptureError("the loss does not depend on any parameter: there is nothing to train")
    graph.erase_node(output)
    graph.output((loss, *gradients.values(), *changed.values(), *asked))
    graph.eliminate_dead_code()
    _views_again(graph, loss)
    graph.eliminate_dead_code()
    graph.set_codegen(fx.graph.CodeGen())  # the inputs become flat tensors instead of three lists
    graph.lint()
    made.recompile()
    return Captured(made, parameters, buffers, form, loss, gradients, changed, truth_values, way)


def _views_again(graph: fx.Graph, loss: fx.Node) -> None:
    """Recompute in backward the views that it shares with forward.

    Then only memory of operators and parameters is kept from forward to backward, and a conversion of a view
    ends with forward.
    """
    order = {node: at for at, node in enumerate(graph.nodes)}
    boundary, copies = order[loss], dict[fx.Node, fx.Node]()

    def again(node: fx.Node) -> fx.Node:
        if order.get(node, boundary + 1) > boundary or not is_view(node):
            return node
        if node not in copies:
            copies[node] = graph.node_copy(node, again)
        return copies[node]

    for node in list(graph.nodes):
        if node.op == "call_function" and order[node] > boundary:
            with graph.inserting_before(node):
                for at, argument in enumerate(node.args):
                    node.update_arg(at, fx.map_arg(argument, again))
                for name, argument in node.kwargs.items():
                    node.update_kwarg(name, fx.map_arg(argument, again))
