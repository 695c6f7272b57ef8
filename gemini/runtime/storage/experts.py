"""Finds the experts of a model and lays out each expert in chunks of its own: a pass uses only some experts.

It finds modules that state their number of experts and hold them in parameters with a leading dimension of
that size, as in transformers; and lists of modules named experts. The chunk table registers the experts of a
module as a choice.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import nn

from gemini.chunk.chunk import Chunk, CutChunk
from gemini.chunk.layout import Apart
from gemini.runtime.storage.model_storage import ChunkGroup, ManagedSlot, gradient_chunks, master_chunks

_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts", "n_experts")
_LISTS = ("experts", "local_experts", "routed_experts")


@dataclass(frozen=True)
class ExpertSet:
    """The experts of one module, by parameter names. ``arrays``: parameters with a row for each of ``count``
    experts. ``others``: groups of parameters that are laid out together: parameters of no single expert, or
    those of each expert in a list."""

    name: str
    count: int
    arrays: tuple[str, ...]
    others: tuple[tuple[str, ...], ...]

    @property
    def params(self) -> Iterator[str]:
        """The names of all parameters."""
        yield from self.arrays
        for names in self.others:
            yield from names


def expert_sets(module: nn.Module) -> list[ExpertSet]:
    """Return the expert sets in ``module`` and its submodules. If sets share a parameter (tied or nested),
    only the first is returned."""
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
    """Return the layout constraints that keep experts apart, for sets with parameters that are all ``frozen``
    or all not. ``params``: shapes by name. A part of an array is a multiple of ``page_numel`` elements."""
    still = set(frozen)
    found: dict[str, Apart] = {}
    for each in sets:
        if len({name in still for name in each.params}) > 1:
            continue
        parts = _parts(each.count, [prod(params[name].shape[1:]) for name in each.arrays], page_numel)
        if each.arrays and parts < 2:
            continue
        found |= {name: Apart((each.name, name), parts) for name in each.arrays}
        for index, names in enumerate(each.others):
            found |= {name: Apart((each.name, index)) for name in names}
    return found


def _parts(count: int, row_numels: Sequence[int], page_numel: int) -> int:
    """Return the largest number of parts into which arrays of ``count`` rows can be cut so that each part is
    whole pages."""

    def fits(rows: int) -> bool:
        return count % rows == 0 and all(rows * numel % page_numel == 0 for numel in row_numels)

    return next((count // rows for rows in range(1, count + 1) if fits(rows)), 1)


def choices(
    sets: Iterable[ExpertSet], slots: Mapping[str, ManagedSlot]
) -> Iterator[tuple[list[ChunkGroup], list[list[int]]]]:
    """Yield the choices for the chunk table: for each set its chunk groups, and the members. A member has the
    chunks that are used together: the parameters of one expert, or of several that share a chunk; their
    gradients; or a piece of masters."""
    for each in sets:
        if not all(name in slots for name in each.params):
            continue
        arrays = [slots[name].group for name in each.arrays]
        others = [_groups(slots, names) for names in each.others]
        if not all(isinstance(group.param, CutChunk) for group in arrays):
            continue
        members = _members([group.param for group in arrays])
        members += [[group.param.id for group in together] for together in others]
        if len(members) < 2 or not _are_apart(each, members, slots):
            continue
        members += _members([group.grad for group in arrays])
        members += [[c for group in together for c in gradient_chunks(group)] for together in others]
        groups = _groups(slots, each.params)
        masters = [chunks for group in groups for chunks in master_chunks(group)]
        yield groups, [chunks for chunks in (*members, *masters) if chunks]


def _groups(slots: Mapping[str, ManagedSlot], names: Iterable[str]) -> list[ChunkGroup]:
    return list({id(slots[name].group): slots[name].group for name in names}.values())


def _members(cut: Sequence[Chunk | CutChunk | None]) -> list[list[int]]:
    """Return the chunks of each row of arrays that are cut alike; if an array is not cut, one list for all
    rows."""
    if not all(isinstance(chunk, CutChunk) for chunk in cut):
        return [[chunk.id for chunk in cut if chunk is not None]]
    parts = [chunk.parts for chunk in cut if isinstance(chunk, CutChunk)]
    return [[part.id for part in each] for each in zip(*parts, strict=True)]


def _are_apart(each: ExpertSet, members: list[list[int]], slots: Mapping[str, ManagedSlot]) -> bool:
    """Say whether the member chunks hold only parameters of this set, and no chunk is in two members."""
    ids = [chunk for member in members for chunk in member]
    own = set(each.params)
    held = {slot.name for name in own for slot in slots[name].group.members}
    return len(ids) == len(set(ids)) and held <= own
