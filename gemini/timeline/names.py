"""What tensors, chunks and operators are called on a timeline."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from gemini.chunk import ChunkKind
from gemini.runtime import ChunkGroup
from gemini.runtime.storage.model_storage import ModelStorage


@dataclass
class Names:
    """Labels of one model, looked up by the ids of its tensors and chunks; holds none of its memory."""

    chunks: tuple[str, ...] = ()
    chunk_of: dict[int, int] = field(default_factory=dict)
    params: dict[int, str] = field(default_factory=dict)
    grads: dict[int, str] = field(default_factory=dict)
    _operators: dict[tuple[int, ...], str] = field(default_factory=dict)

    def operator(self, tensors: Sequence[int]) -> str:
        """Return what an operator on ``tensors`` is called: after the module that they have in common."""
        key = tuple(tensors)
        label = self._operators.get(key)
        if label is None:
            label = self._operators[key] = self._label(key)
        return label

    def chunk_ids(self, tensors: Sequence[int]) -> frozenset[int]:
        """Return the chunks of ``tensors``."""
        return frozenset(self.chunk_of[tensor] for tensor in tensors if tensor in self.chunk_of)

    def _label(self, tensors: tuple[int, ...]) -> str:
        params = [self.params[tensor] for tensor in tensors if tensor in self.params]
        grads = [self.grads[tensor] for tensor in tensors if tensor in self.grads]
        states = len(params) + len(grads) < len(tensors)
        if states:
            return f"update of {_several(params)}" if params else "optimizer states"
        if params:
            return common_module(params)
        return f"gradient of {_several(grads)}"


def name_model(storage: ModelStorage) -> Names:
    """Return the labels of a managed model."""
    chunks = storage.chunks.chunks
    labels = [""] * len(chunks)
    names = Names()
    for name, slot in storage.slots.items():
        names.params[slot.param_ref.tensors[0]] = name
        if slot.grad is not None:
            names.grads[slot.grad.ref.tensors[0]] = name
    for group in storage.groups:
        for chunk, kind, held in _contents(group):
            labels[chunk] = f"{kind} of {_several(held)}"
    table = storage.chunks.table
    names.chunk_of = {tensor: table.chunk_of(tensor) for tensor in range(table.num_tensors())}
    names.chunks = tuple(labels)
    return names


def common_module(params: Sequence[str]) -> str:
    """Return the one parameter, or the innermost module of them all; otherwise how many there are.

    >>> common_module(["blocks.0.mlp.up.weight", "blocks.0.mlp.up.bias"])
    'blocks.0.mlp.up'
    """
    if len(set(params)) == 1:
        return params[0]
    owners = {name.rpartition(".")[0] for name in params}
    return owners.pop() or _several(params) if len(owners) == 1 else _several(params)


def _contents(group: ChunkGroup) -> list[tuple[int, str, list[str]]]:
    """Return each chunk of a group, what kind it is, and the parameters that have a part of it."""
    everything = [slot.name for slot in group.slots]
    contents = [(group.param.id, ChunkKind.PARAM.value, everything)]
    if group.grad is not None:
        contents.append((group.grad.id, ChunkKind.GRAD.value, everything))
    for piece in group.pieces:
        inside = [slot.name for slot in group.slots if slot.start < piece.stop and piece.start < slot.stop]
        contents += [(chunk.id, kind, inside) for kind, chunk in piece.chunks.items()]
    return contents


def _several(names: Sequence[str]) -> str:
    each = list(dict.fromkeys(names))
    if len(each) < 2:
        return "".join(each)
    return f"{each[0]} and {len(each) - 1} more"
