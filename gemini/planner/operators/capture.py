"""Forward, loss and backward of a model as one graph of operators, taken without memory.

``make_fx`` runs the step on FakeTensors and records it. Where it fails, ``torch.export`` reads the model's
Python first (dynamo), and ``make_fx`` differentiates what it found. In-place operators become others
(functionalization), so every node is a value, and changed buffers are outputs.
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
from gemini.runtime.intercept.of_cpu import GROUPED_MM, grouped_mm

_aten = torch.ops.aten
MAKE_FX, EXPORT = "make_fx", "torch.export"

# The loss of outputs and a batch.
LossOf = Callable[[Any, Any], torch.Tensor]
_TENSOR = object()
_MOST_CAPTURES = 16  # with one more answer of the samples each
# A path for a mask that is set in part takes a mask that is set everywhere, or nowhere, too.
_HOLDS_FOR_ALL: dict[Any, bool] = {_aten.all.default: False, _aten.any.default: True}


class CaptureError(ConfigError):
    """A step cannot be had as one graph."""


@dataclass(frozen=True)
class BatchForm:
    """How a batch is put together: the graph takes its tensors, everything else is as it was."""

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
        """Return the tensors of a batch like this. Raises ConfigError for another one."""
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
        """Return a batch of these tensors."""
        waiting = iter(tensors)
        leaves = [next(waiting) if each is _TENSOR else each for each in self.others]
        return tree_unflatten(leaves, self.spec)


@dataclass(frozen=True)
class Answer:
    """A truth value that the model asked for, mostly: is all of this mask set. The graph is for batches that
    give the same one."""

    node: fx.Node
    value: bool

    def check(self, found: torch.Tensor) -> None:
        """Raise ConfigError where a batch gives another answer, and the graph is not for that."""
        if bool(found) != self.value and _HOLDS_FOR_ALL.get(self.node.target) != self.value:
            raise ConfigError(
                f"this batch takes another path through the model than the captured one: {self.node.name} is "
                f"{bool(found)} and was {self.value} (mostly this says whether all of a mask is set); call "
                "autoshard with a batch like this one, such as one with padding"
            )


@dataclass(frozen=True)
class Captured:
    """A step as a graph. Its placeholders are ``parameters``, ``buffers`` and the tensors of a batch of
    ``form``, in this order; ``loss``, ``gradients`` and ``changed`` (buffers) are nodes. Nodes in front of
    ``backward_begins`` are those of forward.

    ``answers``: truth values that the model asked for. ``way``: how the step was captured.
    """

    module: fx.GraphModule
    parameters: tuple[str, ...]
    buffers: tuple[str, ...]
    form: BatchForm
    loss: fx.Node
    gradients: dict[str, fx.Node]
    changed: dict[str, fx.Node]
    answers: tuple[Answer, ...]
    way: str

    @property
    def nodes(self) -> list[fx.Node]:
        """All nodes but the output, in the order in which they run."""
        return [node for node in self.module.graph.nodes if node.op != "output"]

    @property
    def backward_begins(self) -> int:
        """The first node of backward, as an index into ``nodes``."""
        return self.nodes.index(self.loss) + 1

    def placeholders(self) -> tuple[dict[str, fx.Node], dict[str, fx.Node], list[fx.Node]]:
        """Return the nodes of parameters, buffers, and the tensors of a batch."""
        found = [node for node in self.module.graph.nodes if node.op == "placeholder"]
        first, second = len(self.parameters), len(self.parameters) + len(self.buffers)
        return (
            dict(zip(self.parameters, found[:first], strict=True)),
            dict(zip(self.buffers, found[first:second], strict=True)),
            found[second:],
        )


def capture(model: nn.Module, samples: Any, loss: LossOf = mean_of_outputs) -> Captured:
    """Return a step of ``model``, on any device, with a batch like ``samples``: shapes and types of tensors
    matter, and the truth values that the model asks for. Where ``samples`` have no values, or an answer
    depends on parameters, it is taken to be true.

    Raises:
        CaptureError: it cannot be captured, with the reason of each way.
    """
    form, tensors = BatchForm.of(samples)
    reasons = []
    for way in (MAKE_FX, EXPORT):
        try:
            return _as_answered(model, form, tensors, loss, way)
        except CaptureError:
            raise
        except Exception as error:  # of as many classes as there are models
            reasons.append(f"{way}: {in_words(error)}")
    raise CaptureError(
        f"a step of {type(model).__name__} cannot be captured as one graph ({'; '.join(reasons)}): plan "
        "it by blocks, or leave out what depends on the values of tensors"
    )


def _as_answered(
    model: nn.Module, form: BatchForm, tensors: list[torch.Tensor], loss: LossOf, way: str
) -> Captured:
    """Return the step on the path that the samples take."""
    answers: list[bool] = []
    for _ in range(_MOST_CAPTURES):
        captured = _captured(model, form, tensors, loss, way, answers)
        other = _first_other(captured, dict(model.named_buffers()), tensors)
        if other is None:
            return captured
        answers = [each.value for each in captured.answers[:other]]
        answers.append(not captured.answers[other].value)
    raise CaptureError(f"the path through the model depends on more than {_MOST_CAPTURES} values of tensors")


def _first_other(
    captured: Captured, buffers: Mapping[str, torch.Tensor], tensors: Sequence[torch.Tensor]
) -> int | None:
    """Return the first answer that is another one for the samples; None where none is known to be."""
    _, places, batch = captured.placeholders()
    values = {
        **{places[name]: value for name, value in buffers.items()},
        **dict(zip(batch, tensors, strict=True)),
    }
    env: dict[fx.Node, Any] = {node: value for node, value in values.items() if not value.is_meta}
    needed = _ancestors(each.node for each in captured.answers)
    with _quiet(), torch.no_grad():
        for node in captured.nodes:
            if node.op == "get_attr":
                env[node] = getattr(captured.module, str(node.target))
            elif node.op == "call_function" and node in needed and env.keys() >= set(node.all_input_nodes):
                args, kwargs = fx.map_arg((node.args, dict(node.kwargs)), env.__getitem__)
                function: Any = node.target
                env[node] = function(*args, **kwargs)
    for number, each in enumerate(captured.answers):
        if each.node in env and bool(env[each.node]) != each.value:
            return number
    return None


def _ancestors(nodes: Iterable[fx.Node]) -> set[fx.Node]:
    """Return these nodes and all that they are made of."""
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
    answers: Sequence[bool] = (),
) -> Captured:
    parameters, buffers = dict(model.named_parameters()), dict(model.named_buffers())
    trained = [name for name, param in parameters.items() if param.requires_grad]
    if not trained:
        raise CaptureError("the model has no parameter that requires a gradient: there is nothing to train")
    mode, truths = _FakeMode(allow_non_fake_inputs=True), _TruthValues(answers)
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
    """A model and its loss as a module that takes the tensors of a batch."""

    def __init__(self, model: nn.Module, form: BatchForm, loss: LossOf) -> None:
        super().__init__()
        self.model, self.form, self.loss = model, form, loss

    def forward(self, *tensors: torch.Tensor) -> torch.Tensor:
        """Return the loss."""
        batch = self.form.batch(tensors)
        args, kwargs = call_arguments(batch)
        loss = self.loss(self.model(*args, **kwargs), batch)
        if loss.ndim:
            raise CaptureError(f"the loss has the shape {tuple(loss.shape)}: return one number")
        return loss


def _exported(step: nn.Module, mode: FakeTensorMode, tensors: Sequence[torch.Tensor]) -> nn.Module:
    """Return the step as dynamo reads it."""
    real = [torch.zeros(each.shape, dtype=each.dtype, device=each.device) for each in tensors]
    del mode, tensors  # export makes FakeTensors of its own
    return torch.export.export(step, tuple(real), strict=False).module()


class _FakeMode(FakeTensorMode):
    """FakeTensors that take products of groups in every dtype, as the CPU does."""

    def dispatch(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is GROUPED_MM:
            with self:
                return grouped_mm(*args, **(kwargs or {}))
        return super().dispatch(func, types, args, kwargs or {})


class _TruthValues(TorchDispatchMode):
    """Answers where a model asks for a truth value, with true after the given answers."""

    def __init__(self, answers: Sequence[bool]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._answers = answers
        self.asked: list[torch.Tensor] = []
        self.given: list[bool] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is _aten._local_scalar_dense.default and args[0].dtype == torch.bool:
            number = len(self.given)
            self.asked.append(args[0])
            self.given.append(self._answers[number] if number < len(self._answers) else True)
            return self.given[number]
        return func(*args, **(kwargs or {}))


def _fakes(mode: FakeTensorMode, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return tensors without memory; what is on ``meta`` is taken to be on the CPU."""
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
    """Leave the random numbers of the process as they are."""
    with torch.random.fork_rng(devices=[]):
        yield


# -- making the graph smaller ----------------------------------------------------------------------

_SAME = (_aten.detach.default, _aten.alias.default, _aten.lift_fresh_copy.default, _aten.lift_fresh.default)


def is_view(node: fx.Node) -> bool:
    """Say whether a node has no memory of its own: its value lies in that of its first argument."""
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
    answers = tuple(Answer(node, value) for node, value in zip(asked, given, strict=True))
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
    graph.set_codegen(fx.graph.CodeGen())  # of tensors, not of the lists that were passed
    graph.lint()
    made.recompile()
    return Captured(made, parameters, buffers, form, loss, gradients, changed, answers, way)


def _views_again(graph: fx.Graph, loss: fx.Node) -> None:
    """Have backward make the views again that it shares with forward: what is kept in between is then always
    memory that some operator or parameter has, and a conversion of a view ends with forward."""
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
