"""Partition: for each parameter of a cut model its whole shape and the part that this rank has."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn

from gemini.comm.peers import ModelRanks
from gemini.errors import ConfigError
from gemini.parallel.mesh import Axis
from gemini.runtime.intercept.precision import is_quantized


def refuse_quantized(model: nn.Module) -> None:
    """Raise ConfigError for a model with 4-bit or 8-bit weights: only data parallelism supports them."""
    for name, param in model.named_parameters():
        if is_quantized(param):
            raise ConfigError(
                f"parameter {name!r} is a quantized weight ({type(param).__name__}), which tensor, pipeline "
                "and sequence parallelism cannot divide; share the batch among ranks instead (ZeRO), or use "
                "a base model with floating-point weights"
            )


@dataclass(frozen=True)
class Cut:
    """A tensor of ``shape`` cut along ``dim`` into ``count`` equal parts.

    The dimension consists of ``sections`` equal stretches (query, key and value of one weight). Each section
    is cut, and a part has one piece of each. A section that ``count`` does not divide is padded with zeros,
    which is possible with one section only; the padding is in no state dict. ``copies`` neighbouring ranks
    have the same part.
    """

    shape: tuple[int, ...]
    dim: int
    count: int
    sections: int = 1
    copies: int = 1

    @property
    def section_numel(self) -> int:
        """The length of a section along ``dim``."""
        return self.shape[self.dim] // self.sections

    @property
    def piece_numel(self) -> int:
        """The length of a part's piece of a section along ``dim``."""
        return -(-self.section_numel // self.count)

    def part(self, whole: torch.Tensor, rank: int) -> torch.Tensor:
        """Return a copy of the part of ``whole`` that ``rank`` has."""
        index = rank // self.copies
        if tuple(whole.shape) != self.shape:
            raise ConfigError(
                f"this partition cuts a tensor of {self.shape}, but got one of {tuple(whole.shape)}"
            )
        pieces = []
        for section in whole.split(self.section_numel, self.dim):
            start = min(index * self.piece_numel, self.section_numel)
            stop = min(start + self.piece_numel, self.section_numel)
            pieces.append(section.narrow(self.dim, start, stop - start))
            missing = self.piece_numel - (stop - start)
            if missing:
                size = [*self.shape[: self.dim], missing, *self.shape[self.dim + 1 :]]
                pieces.append(whole.new_zeros(size))
        return torch.cat(pieces, self.dim)

    def whole(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return the whole tensor from the ``parts`` of all ranks, in rank order."""
        pieces = [part.split(self.piece_numel, self.dim) for part in parts[:: self.copies]]
        sections = [torch.cat(each, self.dim) for each in zip(*pieces, strict=True)]
        return torch.cat([section.narrow(self.dim, 0, self.section_numel) for section in sections], self.dim)

    def counts_on(self, rank: int) -> bool:
        """Return whether ``rank`` is the first of the ranks with the same part."""
        return rank % self.copies == 0

    def filling_on(self, rank: int) -> int:
        """Return the number of padding zeros in the part of ``rank``."""
        before = rank // self.copies * self.piece_numel
        there = min(max(self.section_numel - before, 0), self.piece_numel)
        return (self.piece_numel - there) * math.prod(self.shape) // self.section_numel


class PartOfTensor(Protocol):
    """The interface of a parameter's cut: a :class:`Cut`, or a tile of a grid of ranks."""

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the whole tensor."""
        ...

    def part(self, whole: torch.Tensor, rank: int) -> torch.Tensor:
        """Return the part of a tensor that ``rank`` has. Raises ConfigError for another shape."""
        ...

    def whole(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return the whole tensor from the ``parts`` of all ranks, in rank order."""
        ...

    def counts_on(self, rank: int) -> bool:
        """Return whether ``rank`` is the first of the ranks with the same part."""
        ...


class Partition:
    """How :func:`gemini.parallel.tensor.parallelize` cut the parameters of a model, on this rank.

    A parameter that was not cut is whole and equal on all ranks of the axis. Expert parameters may be cut
    over ranks of data parallelism instead.
    """

    def __init__(self, axis: Axis | None, names: Mapping[str, nn.Parameter]) -> None:
        """``axis``: the ranks with the other parts, None for one rank; ``names``: all names of parameters."""
        self.axis = axis
        self._names = dict(names)
        self._cuts: dict[int, PartOfTensor] = {}
        self._axes: dict[int, Axis] = {}  # the other axes over which some parameters are cut

    def note(self, param: nn.Parameter, cut: PartOfTensor, *, over: Axis | None = None) -> None:
        """Record that ``param`` is this rank's part of a tensor that is cut over the axis, or over ``over``.
        Raises ConfigError if it was cut before.
        """
        if over is not None and id(param) in self._cuts:
            raise ConfigError(
                f"experts of shape {tuple(param.shape)} are already cut over ranks; leave them out of "
                "tp_plan, or leave out ep_size"
            )
        self._cuts[id(param)] = cut
        if over is not None:
            self._axes[id(param)] = over

    def keep_only(self, names: Collection[str]) -> None:
        """Forget the parameters with other names: another pipeline stage has them."""
        self._names = {name: param for name, param in self._names.items() if name in names}

    def cut_of(self, param: torch.Tensor) -> PartOfTensor | None:
        """Return how a parameter of this model was cut; None if it is whole."""
        return self._cuts.get(id(param))

    @property
    def cuts(self) -> dict[str, PartOfTensor]:
        """The cuts of the parameters that were cut, by all their names."""
        return {name: self._cuts[id(p)] for name, p in self._names.items() if id(p) in self._cuts}

    @property
    def model_ranks(self) -> ModelRanks | None:
        """The value for ``model_ranks=`` of GeminiDDP."""
        return None if self.axis is None else ModelRanks(self.axis, self.counts, filling=self.filling)

    def counts(self, param: torch.Tensor) -> bool:
        """Return whether a norm counts the gradient of ``param`` here: no other rank counts the same one."""
        if self.axis is None:
            return True
        cut = None if id(param) in self._axes else self._cuts.get(id(param))
        return self.axis.rank == 0 if cut is None else cut.counts_on(self.axis.rank)

    def filling(self, param: torch.Tensor) -> int:
        """Return the number of padding elements in this rank's part of ``param``."""
        cut = None if id(param) in self._axes else self._cuts.get(id(param))
        return cut.filling_on(self.axis.rank) if isinstance(cut, Cut) and self.axis is not None else 0

    @torch.no_grad()
    def gather_state(self, state: Mapping[str, Any], *, everywhere: bool = True) -> dict[str, Any]:
        """Return the state dict of the whole model from that of the cut one, on the CPU. Collective. Without
        ``everywhere`` only the first rank of the axis gets it, and the others get an empty dict.
        """
        keeps = self.axis is None or everywhere or self.axis.rank == 0
        cuts, axes, found = self.cuts, self._axes_by_name, {}
        for name, value in state.items():
            whole = value
            if (axis := axes.get(name)) is not None:
                whole = cuts[name].whole(axis.all_gather(value.detach().cpu()))
            if keeps:
                found[name] = whole
        return found

    @property
    def _axes_by_name(self) -> dict[str, Axis]:
        """The axis over which each cut parameter is cut, by all its names."""
        axes = {key: self._axes.get(key, self.axis) for key in self._cuts}
        named = ((name, axes.get(id(param))) for name, param in self._names.items())
        return {name: axis for name, axis in named if axis is not None}

    @torch.no_grad()
    def cut_state(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """Return this rank's state dict of the cut model from that of the whole one, ready to load.

        Raises:
            ConfigError: a tensor's shape differs from that of the parameter before the cut.
        """
        cuts, axes = self.cuts, self._axes_by_name
        return {
            name: cuts[name].part(value, axes[name].rank) if name in axes else value
            for name, value in state.items()
        }

    @torch.no_grad()
    def cut_states(self, optimizer: torch.optim.Optimizer) -> None:
        """Cut optimizer states that still have the shapes of whole tensors. Torch's Adagrad creates its
        states in its constructor, before the model is cut, and other optimizers may have taken a step before.
        """
        for param, states in optimizer.state.items():
            cut, axis = self._cuts.get(id(param)), self._axes.get(id(param), self.axis)
            if cut is not None and axis is not None:
                for name, value in states.items():
                    if isinstance(value, torch.Tensor) and value.shape == cut.shape:
                        states[name] = cut.part(value, axis.rank)
