"""LayerGraph: the layers of a model with the dimensions of their outputs, their seconds, and their inputs.

They are found by one forward pass on ``meta`` and its autograd graph. Seconds come from the project's
costs.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any

import torch
from torch import nn

from gemini.errors import ConfigError
from gemini.parallel.layout_plan import trainable_outline
from gemini.planner.records import Part
from gemini.planner.search import RunOf, Search
from gemini.planner.segment_costs import SegmentCosts, Speeds
from gemini.runtime.intercept.cpu_operators import CpuAttention

CONTRACTING = ("conv", "linear", "embedding")  # read all input channels for each output channel
_SPACE = {3: ("sample", "channel", "length"), 4: ("sample", "channel", "height", "width")}
_ROWS = {1: ("channel",), 2: ("sample", "channel"), 3: ("sample", "length", "channel")}
_SUMS = ("Add", "Sub", "Mul", "Div", "Cat", "Where", "Stack", "Rsub", "Maximum", "Minimum")
GRADIENT_BYTES = 4


@dataclass(frozen=True)
class Layer:
    """A module with its own parameters, or a place where tensors meet: ``sum``, or ``attention``, in which
    every token depends on all others.

    Attributes:
        inputs: indices of the layers that it reads.
        dims: dimensions of its output, by name.
        reduced: number of input channels that it sums over; 0: none.
        forward, backward: seconds of the whole batch on one rank.
        halo: input rows that neighbouring parts share, by dimension.
    """

    name: str
    kind: str
    inputs: tuple[int, ...]
    dims: Mapping[str, int]
    reduced: int = 0
    numel: int = 0
    itemsize: int = 4
    forward: float = 0.0
    backward: float = 0.0
    halo: Mapping[str, int] = field(default_factory=dict)

    @property
    def output_bytes(self) -> int:
        """Bytes of the whole output."""
        return prod(self.dims.values()) * self.itemsize

    @property
    def parameter_bytes(self) -> int:
        """Bytes of the whole parameters."""
        return self.numel * self.itemsize


LayerGraph = tuple[Layer, ...]  # every layer comes after its inputs


def share(layer: Layer, parts: Mapping[str, int], reduced: int = 1) -> float:
    """Return the share of a layer's work on the busiest rank if its dimensions are cut into ``parts``."""
    most = 1.0
    for name, count in parts.items():
        most *= -(-layer.dims[name] // count) / layer.dims[name]
    return most / reduced


def own_seconds(layer: Layer, parts: Mapping[str, int], speeds: Speeds, reduced: int = 1) -> float:
    """Return the seconds that a rank spends on a layer itself: computing, the gradient exchange among the
    ranks with the same parameters, and the update."""
    computing = (layer.forward + layer.backward) * share(layer, parts, reduced)
    if not layer.numel:
        return computing
    cut = parts.get("channel", 1) * reduced
    copies = prod(parts.values()) // parts.get("channel", 1)
    numel = -(-layer.numel // cut)
    update = numel * (24 + layer.itemsize) / speeds.machine.adam_bytes_per_second
    exchange = speeds.collective("all_reduce", copies, GRADIENT_BYTES * numel) if copies > 1 else 0.0
    return computing + exchange + update


def divisors(number: int) -> list[int]:
    """Return the divisors of a number, ascending."""
    return [each for each in range(1, number + 1) if number % each == 0]


def capture(searching: Search, model: nn.Module, run_of: RunOf, batch: int) -> LayerGraph:
    """Return the layers of a model for a batch of ``batch`` samples.

    Raises:
        ConfigError: the model has no layers with parameters, or cannot run without values.
    """
    outline = trainable_outline(model)
    watch = _CallWatch(outline)
    with torch.random.fork_rng(devices=[]), torch.device("meta"), CpuAttention():
        try:
            loss = run_of(batch)(outline, None)
        except (RuntimeError, ValueError) as error:
            said = str(error).partition("\n")[0]
            raise ConfigError(f"the model cannot be run without values: {said}") from error
        finally:
            watch.close()
        del loss
    if not watch.layers:
        raise ConfigError("the model has no layers with parameters, between which ranks could be shared out")
    return _timed(watch, searching.costs_of(Part(), batch))


class _CallWatch:
    """Records the calls of modules with parameters, and finds their inputs through the autograd graph."""

    def __init__(self, model: nn.Module) -> None:
        self.layers: list[Layer] = []
        self.keys: list[tuple[str, ...]] = []  # the parameters of each layer
        self._made: dict[Any, int] = {}  # autograd node of an output -> its layer
        self._sources: dict[Any, int | None] = {}
        names: dict[int, str] = {}
        for name, each in model.named_parameters(remove_duplicate=False):
            names.setdefault(id(each), name)
        self._hooks = []
        for path, module in model.named_modules():
            keys = tuple(names[id(each)] for each in module.parameters(recurse=False))
            if keys:
                hook = self._note(path, keys)
                self._hooks.append(module.register_forward_hook(hook, with_kwargs=True))

    def close(self) -> None:
        """Remove the hooks."""
        for hook in self._hooks:
            hook.remove()

    def _note(self, path: str, keys: tuple[str, ...]) -> Any:
        def hook(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            tensors = [each for each in (*args, *kwargs.values()) if isinstance(each, torch.Tensor)]
            out = output[0] if isinstance(output, tuple) else output
            if not isinstance(out, torch.Tensor) or not out.ndim:
                return
            found = [self._source(each.grad_fn, tensors[0]) for each in tensors if each.grad_fn is not None]
            inputs = tuple(dict.fromkeys(each for each in found if each is not None))
            layer = replace(_described(module, path, tensors[0] if tensors else out, out), inputs=inputs)
            if out.grad_fn is not None:
                self._made[out.grad_fn] = len(self.layers)
            self.layers.append(layer)
            self.keys.append(keys)

        return hook

    def _source(self, node: Any, like: torch.Tensor) -> int | None:
        """Return the layer that produces a value; if several values meet, a new layer for the meeting.
        Iterative, because autograd graphs are deeper than the recursion limit."""
        pending = [node]
        while pending:
            each = pending[-1]
            if each in self._made or each in self._sources:
                pending.pop()
                continue
            behind = [fn for fn, _ in each.next_functions if fn is not None]
            unknown = [fn for fn in behind if fn not in self._made and fn not in self._sources]
            if unknown:
                pending += unknown
                continue
            pending.pop()
            self._sources[each] = self._meeting(each, behind, like)
        return self._made.get(node, self._sources.get(node))

    def _meeting(self, node: Any, behind: Sequence[Any], like: torch.Tensor) -> int | None:
        """Return the layer that produces a node's value. A new layer is made if several values meet. A
        product also makes one if both factors come from the same layer, as in attention."""
        found = [at for fn in behind if (at := self._made.get(fn, self._sources.get(fn))) is not None]
        inputs = tuple(dict.fromkeys(found))
        kind = "sum" if type(node).__name__.startswith(_SUMS) else "attention"
        if len(inputs if kind == "sum" else found) < 2:
            return inputs[0] if inputs else None
        last = max(inputs)
        if kind == "attention" and self.layers[last].kind == "attention":  # scores x values: merge with q x k
            merged = dict.fromkeys((*self.layers[last].inputs, *inputs))
            others = tuple(at for at in merged if at != last)
            self.layers[last] = replace(self.layers[last], inputs=others)
            return last
        dims = _dims(like, _ROWS if like.ndim < 4 else _SPACE)
        name = f"{kind} {len(self.layers)}"
        self.layers.append(Layer(name, kind, inputs, dims, 0, 0, like.itemsize))
        self.keys.append(())
        return len(self.layers) - 1


def _described(module: nn.Module, path: str, given: torch.Tensor, out: torch.Tensor) -> Layer:
    """Return a layer without its inputs."""
    weight = getattr(module, "weight", None)
    numel = sum(each.numel() for each in module.parameters(recurse=False))
    if isinstance(module, (nn.Conv1d, nn.Conv2d)):
        names = _SPACE[out.ndim] if out.ndim in _SPACE else _ROWS[2]
        reduced = module.in_channels // module.groups if module.groups == 1 else 0
        steps = zip(names[2:], module.kernel_size, module.stride, strict=False)
        halo = {name: int(kernel) - int(stride) for name, kernel, stride in steps if kernel > stride}
        return Layer(path, "conv", (), _dims(out, _SPACE), reduced, numel, out.itemsize, halo=halo)
    if isinstance(module, nn.Embedding):
        return Layer(path, "embedding", (), _dims(out, _ROWS), module.num_embeddings, numel, out.itemsize)
    sizes = {given.shape[-1], out.shape[-1]} if given.ndim else set()
    if isinstance(weight, torch.Tensor) and weight.ndim == 2 and sizes == set(weight.shape):
        return Layer(path, "linear", (), _dims(out, _ROWS), given.shape[-1], numel, out.itemsize)
    spatial = out.ndim == 4 or isinstance(module, nn.modules.batchnorm._BatchNorm)
    return Layer(
        path,
        "norm",
        (),
        _dims(out, _SPACE if spatial and out.ndim in _SPACE else _ROWS),
        0,
        numel,
        out.itemsize,
    )


def _dims(tensor: torch.Tensor, names: Mapping[int, Sequence[str]]) -> dict[str, int]:
    """Return the dimensions by name. Leading dimensions without a name are multiplied into ``sample``."""
    if tensor.ndim in names:
        return {name: int(size) for name, size in zip(names[tensor.ndim], tensor.shape, strict=True)}
    *more, length, channel = tensor.shape
    return {"sample": prod(more), "length": int(length), "channel": int(channel)}


def _timed(watch: _CallWatch, costs: Sequence[SegmentCosts]) -> LayerGraph:
    """Return the layers with the seconds of the costs: those of the operators from one use of parameters to
    the next. Forward and backward are scaled so that time outside all uses is distributed over the layers."""
    uses: defaultdict[tuple[str, ...], float] = defaultdict(float)
    gradients: defaultdict[str, float] = defaultdict(float)
    for segment in costs:
        for each in segment.uses:
            uses[each.keys] += each.seconds
        for each in segment.gradients:
            for key in each.keys:
                gradients[key] += each.seconds
    calls = Counter(watch.keys)
    forward = [uses[keys] / calls[keys] if keys else 0.0 for keys in watch.keys]
    backward = [sum(gradients[key] for key in keys) / calls[keys] for keys in watch.keys]
    scales = (
        sum(each.forward for each in costs) / max(sum(forward), 1e-30),
        sum(each.backward for each in costs) / max(sum(backward), 1e-30),
    )
    return tuple(
        replace(layer, forward=one * scales[0], backward=other * scales[1])
        for layer, one, other in zip(watch.layers, forward, backward, strict=True)
    )
