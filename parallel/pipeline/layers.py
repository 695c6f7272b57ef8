"""PipelinableContext: record a model as a sequence of layers, and give each rank of a pipeline a range of
them, with equal numbers of layers or with the largest cost as small as possible.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_module_registration_hook

from gemini.errors import ConfigError


def partition_uniform(
    num_items: int, pipeline_parallel_size: int, num_chunks: int = 1
) -> list[list[tuple[int, int]]]:
    """Divide items evenly, and return for each rank the ranges ``(start, end)`` of its chunks. The items are
    cut into ``num_chunks`` stretches, each over all ranks; longer ranges come last.

    Raises:
        ConfigError: a range would be empty.
    """
    ranks, parts = pipeline_parallel_size, pipeline_parallel_size * num_chunks
    if min(ranks, num_chunks) < 1 or num_items < parts:
        raise ConfigError(
            f"{num_items} layers cannot be divided over {ranks} ranks with {num_chunks} chunks each; use "
            f"{parts} or more layers, fewer ranks or fewer chunks"
        )
    if num_items % num_chunks:
        ends = list(accumulate(_sizes(num_items, parts)))
    else:
        ends = list(accumulate(_sizes(num_items // num_chunks, ranks) * num_chunks))
    ranges = list(zip([0, *ends], ends, strict=False))
    return [ranges[rank::ranks] for rank in range(ranks)]


def _sizes(count: int, parts: int) -> list[int]:
    short = parts - count % parts
    return [count // parts + (index >= short) for index in range(parts)]


def partition_balanced(costs: Sequence[float], parts: int) -> list[tuple[int, int]]:
    """Cut ``costs`` into contiguous, non-empty ranges with the smallest possible largest cost. Among those,
    choose the ranges with the least sum of squares. Exact.

    Raises:
        ConfigError: there are fewer items than parts.
    """
    count = len(costs)
    if parts < 1 or count < parts:
        raise ConfigError(f"{count} layers cannot be cut into {parts} stages; give {count} stages or fewer")
    sums = [0.0, *accumulate(costs)]
    costliest = _best_cuts(sums, parts, lambda so_far, cost: max(so_far, cost))[0]
    # Sums of floats differ in the last digit depending on where they begin.
    limit = costliest * (1 + 1e-9)

    def squares(so_far: float, cost: float) -> float:
        return so_far + cost * cost if cost <= limit else float("inf")

    ends = _best_cuts(sums, parts, squares)[1]
    return list(zip([0, *ends], ends, strict=False))


def _best_cuts(
    sums: Sequence[float], parts: int, add: Callable[[float, float], float]
) -> tuple[float, list[int]]:
    """Return the least total of ``parts`` ranges, and their ends; ``add(total, cost)`` adds a range."""
    count = len(sums) - 1
    best: list[tuple[float, list[int]]] = [(float("inf"), [])] * (count + 1)
    best[0] = (0.0, [])
    for part in range(1, parts + 1):
        row: list[tuple[float, list[int]]] = [(float("inf"), [])] * (count + 1)
        for end in range(part, count - (parts - part) + 1):
            totals = [(add(best[start][0], sums[end] - sums[start]), start) for start in range(part - 1, end)]
            total, start = min(totals)
            row[end] = (total, [*best[start][1], end])
        best = row
    return best[count]


Step = str | tuple[Callable[..., Any], str]


class PipelinableContext:
    """Records the model that is built inside it, for :meth:`partition` to cut::

        pipelinable = PipelinableContext()
        with pipelinable:
            model = resnet50()
        pipelinable.to_layer_list(["conv1", ..., "avgpool", (lambda x: torch.flatten(x, 1), "behind"), "fc"])
        stage = pipelinable.partition(num_chunks, pipeline_size, rank)

    ``BuiltStages(stage)`` trains it. HybridParallelPlugin does not need this if the whole model is available:
    it cuts the model by ``blocks=``.

    Args:
        policy: ``"uniform"`` numbers of layers, or ``"balanced"`` numbers of parameters.
    """

    def __init__(self, policy: str = "balanced") -> None:
        if policy not in ("uniform", "balanced"):
            raise ConfigError(f"policy is {policy!r}; give 'uniform' or 'balanced'")
        self.policy = policy
        self.model: nn.Module | None = None
        self._made: list[nn.Module] = []
        self._layers: list[nn.Module] = []

    def __enter__(self) -> PipelinableContext:
        self._made = []
        self._noting = register_module_module_registration_hook(self._note)
        return self

    def _note(self, parent: nn.Module, _name: str, _child: nn.Module | None) -> None:
        self._made.append(parent)

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._noting.remove()
        made, self._made = self._made, []
        if kind is None and made:
            self.model = max(made, key=lambda module: sum(1 for _ in module.modules()))

    def to_layer_list(self, exec_seq: Sequence[Step] | None = None) -> None:
        """Set the order in which the model computes: names of its modules, and functions of one argument as
        ``(function, "behind")``. None: its children, in the order of registration.

        Raises:
            ConfigError: there is no model, or no module with a name.
        """
        if self.model is None:
            raise ConfigError(
                "no model was built within the context; write with pipelinable: model = build()"
            )
        steps = [name for name, _ in self.model.named_children()] if exec_seq is None else exec_seq
        self._layers = [self._layer(step) for step in steps]

    def _layer(self, step: Step) -> nn.Module:
        assert self.model is not None
        if isinstance(step, str):
            try:
                return self.model.get_submodule(step)
            except AttributeError:
                raise ConfigError(
                    f"{type(self.model).__name__} has no module {step!r}; name modules as "
                    "model.named_modules() does"
                ) from None
        function, place = step if isinstance(step, tuple) and len(step) == 2 else (None, None)
        if not callable(function) or place not in ("front", "behind"):
            raise ConfigError(
                f"{step!r} is neither the name of a module nor a pair (function, 'front' or 'behind')"
            )
        return _Function(function)

    def partition(self, num_chunks: int, pipeline_size: int, rank: int) -> nn.Module:
        """Return the layers of a ``rank``: a module from the output of the previous rank to the input of the
        next; with several chunks a ModuleList of such modules.

        Raises:
            ConfigError: there are fewer layers than chunks, or no such rank.
        """
        if not self._layers:
            self.to_layer_list()
        return stretch_of(self._layers, num_chunks, pipeline_size, rank, self.policy)


def stretch_of(
    layers: Sequence[nn.Module], num_chunks: int, pipeline_size: int, rank: int, policy: str
) -> nn.Module:
    """Return the layers of a ``rank`` from a sequence of layers: a Sequential, or with several chunks a
    ModuleList of Sequentials. Raises ConfigError as :meth:`PipelinableContext.partition`.
    """
    if not 0 <= rank < pipeline_size:
        raise ConfigError(f"rank is {rank}; a pipeline of {pipeline_size} has ranks 0 to {pipeline_size - 1}")
    if policy == "uniform":
        own = partition_uniform(len(layers), pipeline_size, num_chunks)[rank]
    else:
        sizes = [float(sum(p.numel() for p in layer.parameters())) for layer in layers]
        own = partition_balanced(sizes, pipeline_size * num_chunks)[rank::pipeline_size]
    chunks = [nn.Sequential(*layers[start:stop]) for start, stop in own]
    return chunks[0] if num_chunks == 1 else nn.ModuleList(chunks)


class _Function(nn.Module):
    """A function as a layer."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self._function = function

    def forward(self, x: torch.Tensor) -> Any:
        """Call the function."""
        return self._function(x)
