"""Experts: each pass uses some of them and leaves the others.

Found are modules that say how many experts they have and hold them in parameters with a leading dimension of
that size, as those of transformers do; and lists of modules that are called experts. What does not train is
laid out by the expert: each has chunks of its own, and the chunk table is told which form a choice.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import nn

from gemini.chunk.chunk import CutChunk
from gemini.chunk.layout import Apart
from gemini.runtime.storage.model_storage import ManagedSlot

_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts", "n_experts")
_LISTS = ("experts", "local_experts", "routed_experts")


@dataclass(frozen=True)
class ExpertSet:
    """The experts of one module, by names of parameters. ``arrays``: parameters that have a row for each of
    ``count``. ``others``: what belongs to none alone, or is an expert of a list, those of each together."""

    name: str
    count: int
    arrays: tuple[str, ...]
    others: tuple[tuple[str, ...], ...]

    @property
    def params(self) -> Iterator[str]:
        """The names of all."""
        yield from self.arrays
        for names in self.others:
            yield from names


def expert_sets(module: nn.Module) -> list[ExpertSet]:
    """Return the experts in ``module`` and its parts. Of sets that share a parameter, as tied or nested ones
    do, the first."""
    found: list[ExpertSet] = []
    taken: set[str] = set()
    for each in _candidates(module):
        names = list(each.params)
        if len(set(names)) == len(names) and taken.isdisjoint(names):
            found.append(each)
            taken.update(names)
    return found


def _candidates(module: nn.Module) -> Iterator[ExpertSet]:
    names = {id(param): name for name, param in module.named_parameters()}
    for path, part in module.named_modules():
        if isinstance(part, nn.ModuleList) and path.rpartition(".")[2] in _LISTS:
            each = [tuple(names[id(p)] for p in expert.parameters() if id(p) in names) for expert in part]
            if len(each) > 1 and all(each) and len(set(map(type, part))) == 1:
                yield ExpertSet(path, len(each), (), tuple(each))
        elif not type(part).__module__.startswith("torch.nn."):
            yield from _of_arrays(path, part, names)


def _of_arrays(path: str, part: nn.Module, names: Mapping[int, str]) -> Iterator[ExpertSet]:
    counts = {value for name in _COUNTS if type(value := getattr(part, name, None)) is int and value > 1}
    own = [param for param in part.parameters(recurse=False) if id(param) in names]
    arrays = [param for param in own if param.dim() == 3 and len(param) in counts and param.is_contiguous()]
    if arrays and len({len(param) for param in arrays}) == 1:
        rest = tuple(names[id(param)] for param in own if not any(param is array for array in arrays))
        others = (rest,) if rest else ()
        yield ExpertSet(path, len(arrays[0]), tuple(names[id(param)] for param in arrays), others)


def apart(
    sets: Iterable[ExpertSet], params: Mapping[str, torch.Tensor], frozen: Sequence[str], page_numel: int
) -> dict[str, Apart]:
    """Return how a layout keeps experts apart, of sets with all parameters ``frozen``. ``params``: shapes, by
    name; a part of an array is a multiple of ``page_numel`` elements."""
    still = set(frozen)
    found: dict[str, Apart] = {}
    for each in sets:
        if not still.issuperset(each.params):
            continue
        parts = _parts(each.count, [prod(params[name].shape[1:]) for name in each.arrays], page_numel)
        if each.arrays and parts < 2:
            continue
        found |= {name: Apart((each.name, name), parts) for name in each.arrays}
        for index, names in enumerate(each.others):
            found |= {name: Apart((each.name, index)) for name in names}
    return found


def _parts(count: int, row_numels: Sequence[int], page_numel: int) -> int:
    """Return into how many parts arrays of ``count`` rows can be cut so that all are whole pages."""

    def fits(rows: int) -> bool:
        return count % rows == 0 and all(rows * numel % page_numel == 0 for numel in row_numels)

    return next((count // rows for rows in range(1, count + 1) if fits(rows)), 1)


def choices(sets: Iterable[ExpertSet], slots: Mapping[str, ManagedSlot]) -> Iterator[list[list[int]]]:
    """Yield the choices of the chunk table: of each set its members, each the chunks that one expert, or as
    many as share some, has."""
    for each in sets:
        if not all(name in slots for name in each.params):
            continue
        chunks = [slots[name].group.param for name in each.arrays]
        cut = [chunk for chunk in chunks if isinstance(chunk, CutChunk)]
        if each.arrays and len(cut) < len(chunks):
            continue
        members = [[part.id for part in parts] for parts in zip(*(chunk.parts for chunk in cut), strict=True)]
        for names in each.others:
            ids = dict.fromkeys(slots[name].group.param.id for name in names)
            members.append(list(ids))
        if len(members) > 1 and _are_apart(each, members, slots):
            yield members


def _are_apart(each: ExpertSet, members: list[list[int]], slots: Mapping[str, ManagedSlot]) -> bool:
    """Say whether no chunk of the members has a parameter of something else, or belongs to two."""
    ids = [chunk for member in members for chunk in member]
    own = set(each.params)
    held = {slot.name for name in own for slot in slots[name].group.members}
    trains = any(slots[name].group.grad is not None for name in own)
    return len(ids) == len(set(ids)) and held <= own and not trains
