"""The memory order of dense tensors."""

from __future__ import annotations

import torch

from gemini.errors import ConfigError


def is_dense(tensor: torch.Tensor) -> bool:
    """Say whether the elements fill one stretch of memory without gaps or overlaps, in any order."""
    if tensor.is_contiguous():
        return True
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size == 1:
            continue
        if stride != expected:
            return False
        expected *= size
    return True


def same_order(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Say whether two dense tensors of equal shape keep their elements in the same order."""
    if one.is_contiguous() and other.is_contiguous():
        return True
    pairs = zip(one.shape, one.stride(), other.stride(), strict=True)
    return all(size == 1 or left == right for size, left, right in pairs)


def ordered_like(value: torch.Tensor, like: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return ``value`` in the memory order and on the device of ``like``, as ``dtype``.

    A copy only if needed.

    Raises:
        ConfigError: the shapes differ.
    """
    if value.shape != like.shape:
        raise ConfigError(f"a tensor of shape {tuple(value.shape)} belongs to one of {tuple(like.shape)}")
    plain = value.dtype == dtype and value.device == like.device and not value.is_neg()
    plain = plain and (value.data_ptr() != 0 or value.numel() == 0)  # torch's zero tensors have no memory
    if plain and is_dense(value) and same_order(value, like):
        return value
    copy = torch.empty_strided(like.size(), like.stride(), dtype=dtype, device=like.device)
    return copy.copy_(value.detach())


def flat(tensor: torch.Tensor) -> torch.Tensor:
    """View a dense tensor's elements in memory order."""
    return tensor.detach().as_strided((tensor.numel(),), (1,), tensor.storage_offset())
