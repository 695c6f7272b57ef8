"""Cut the sequence inside a model: before its first block, and gather it behind its last."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn

from gemini.errors import ConfigError
from gemini.parallel.sequence.attention import SequenceAttention

_Call = tuple[tuple[Any, ...], dict[str, Any]]


def find_blocks(model: nn.Module) -> list[nn.Module]:
    """Return the blocks of ``model``, its only list of modules of one class.

    Raises:
        ConfigError: there is none, or more than one.
    """
    lists = [
        list(module)
        for module in model.modules()
        if isinstance(module, nn.ModuleList)
        and len({type(block) for block in module}) == 1
        and next(module[0].children(), None) is not None
    ]
    if len(lists) != 1:
        raise ConfigError(
            f"cut='blocks' needs a model with one list of blocks, but {type(model).__name__} has {len(lists)}"
        )
    return lists[0]


def cut_at_blocks(blocks: list[nn.Module], attention: SequenceAttention) -> None:
    """Make ``blocks`` compute with parts of their input sequences (batch, length, features)."""
    if attention.axis is None:
        return
    blocks[0].register_forward_pre_hook(partial(_begin, attention), with_kwargs=True)
    for block in blocks[1:]:
        block.register_forward_pre_hook(partial(_go_on, attention), with_kwargs=True)
    blocks[-1].register_forward_hook(partial(_end, attention))


def _begin(
    attention: SequenceAttention, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> _Call:
    hidden = args[0] if args else kwargs["hidden_states"]
    part = attention.begin(hidden)
    if args:
        args = (part, *args[1:])
    else:
        kwargs = {**kwargs, "hidden_states": part}
    return args, _cut_positions(attention, kwargs, hidden.size(1))


def _go_on(
    attention: SequenceAttention, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> _Call:
    hidden = args[0] if args else kwargs["hidden_states"]
    return args, _cut_positions(attention, kwargs, attention.length_of(hidden.size(1)))


def _cut_positions(attention: SequenceAttention, kwargs: dict[str, Any], length: int) -> dict[str, Any]:
    """Cut position keywords of a block's call: tensors (batch or 1, length, ...), or tuples of them."""

    def cut(value: Any) -> Any:
        if isinstance(value, tuple):
            return tuple(cut(each) for each in value)
        if isinstance(value, torch.Tensor) and value.dim() > 1 and value.size(1) == length:
            return attention.part_of(value)
        return value

    return {name: cut(value) if name.startswith("position_") else value for name, value in kwargs.items()}


def _end(attention: SequenceAttention, _block: nn.Module, _args: object, output: Any) -> Any:
    if isinstance(output, tuple):
        return (attention.end(output[0]), *output[1:])
    return attention.end(output)
