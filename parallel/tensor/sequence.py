"""Sequence-parallel norms: between two sublayers each rank has its part of the sequence."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn

from gemini.errors import ConfigError
from gemini.parallel.families import SUBLAYERS
from gemini.parallel.tensor.layers import RowLayer
from gemini.parallel.tensor.region import Region
from gemini.parallel.tensor.styles import PartialGradient, sum_gradient


def find_blocks(model: nn.Module) -> list[nn.Module]:
    """Return the blocks with norms that can be cut, in order; they must form one list of the model.

    Raises:
        ConfigError: there is no such list, or more than one.
    """
    lists = [
        list(module)
        for module in model.modules()
        if isinstance(module, nn.ModuleList)
        and len(module)
        and all(type(block).__name__ in SUBLAYERS for block in module)
    ]
    if len(lists) != 1:
        raise ConfigError(
            f"sequence_norms=True needs a model with one list of blocks of {', '.join(SUBLAYERS)}, but "
            f"{type(model).__name__} has {len(lists)}"
        )
    for block in lists[0]:
        if getattr(block, "crossattention", None) is not None:
            raise ConfigError(
                "sequence_norms=True: blocks that attend to another sequence cannot be cut; leave "
                "sequence_norms out"
            )
    return lists[0]


def cut_sequence(blocks: list[nn.Module], region: Region) -> None:
    """Cut the sequence between the sublayers of ``blocks``, which have their row layers already."""
    region.cover_norms()
    dim = 1 if _is_batch_first(blocks[0]) else 0
    for block in blocks:
        parts = SUBLAYERS[type(block).__name__]
        for name in parts.entries:
            entry = block.get_submodule(name)
            entry.register_forward_pre_hook(partial(_enter, region, dim), with_kwargs=True)
        for name in parts.norms:
            PartialGradient().apply(block.get_submodule(name), region, {})
        for module in block.modules():
            if isinstance(module, RowLayer) and isinstance(module.bias, nn.Parameter):
                sum_gradient(module.bias, region.axis)
    blocks[0].register_forward_pre_hook(partial(_begin, region, dim), with_kwargs=True)
    blocks[-1].register_forward_hook(partial(_end, region, dim))


def _is_batch_first(block: nn.Module) -> bool:
    attention = getattr(block, "self_attn", None)
    return not isinstance(attention, nn.MultiheadAttention) or attention.batch_first


_Call = tuple[tuple[Any, ...], dict[str, Any]]


def _begin(
    region: Region, dim: int, block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> _Call:
    def own_part(x: torch.Tensor) -> torch.Tensor:
        if x.size(dim) % region.axis.size:
            raise ConfigError(
                f"a sequence of {x.size(dim)} tokens is not divisible by {region.axis.size} ranks; pad it to "
                "a multiple, or leave sequence_norms out"
            )
        return region.own_part(x, dim)

    if block.training:
        region.begin_masks(_first(args, kwargs).device)
    return _replaced(args, kwargs, own_part(_first(args, kwargs)))


def _enter(region: Region, dim: int, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Call:
    return _replaced(args, kwargs, region.enter_sequence(_first(args, kwargs), dim))


def _end(region: Region, dim: int, _block: nn.Module, _args: object, output: Any) -> Any:
    region.end_masks()
    if isinstance(output, tuple):
        return (region.gathered(output[0], dim), *output[1:])
    return region.gathered(output, dim)


def _first(args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
    """Return the hidden states among a layer's arguments."""
    found: torch.Tensor = args[0] if args else kwargs["hidden_states"]
    return found


def _replaced(args: tuple[Any, ...], kwargs: dict[str, Any], by: torch.Tensor) -> _Call:
    """Replace the hidden states by another tensor in all arguments (query, key, value)."""
    old = _first(args, kwargs)
    return (
        tuple(by if value is old else value for value in args),
        {key: by if value is old else value for key, value in kwargs.items()},
    )
