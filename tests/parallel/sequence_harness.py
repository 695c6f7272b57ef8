"""What the tests of sequence parallelism share: attention of parts beside that of the whole."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from tensor_harness import make_mesh, relative
from torch import Tensor
from torch import distributed as dist
from torch.nn import functional

from gemini.parallel.sequence.parallelize import SequenceParallel

BATCH, WIDTH = 2, 8


@dataclass(frozen=True)
class Case:
    """Attention over a whole sequence. ``mask``: what of it is said, and of how many queries and keys."""

    heads: int = 4
    key_heads: int | None = None
    length: int = 12
    key_length: int | None = None
    causal: bool = False
    mask: str | None = None

    def __str__(self) -> str:
        said = [f"{name}={value}" for name, value in vars(self).items() if value != getattr(Case, name)]
        return ", ".join(said) or "plain"


def make_mask(case: Case) -> Tensor | None:
    """Return the mask of the whole sequence, all of whose queries see something."""
    generator = torch.Generator().manual_seed(5)
    keys = case.key_length or case.length
    if case.mask in ("padding", "own padding"):
        seen = torch.ones(BATCH, 1, 1, keys, dtype=torch.bool)
        seen[1, ..., keys // 3 :] = False
        return seen
    if case.mask == "added":
        return torch.randn(case.length, keys, generator=generator)
    if case.mask == "heads":
        return torch.randn(BATCH, case.heads, case.length, keys, generator=generator)
    if case.mask is not None:
        seen = torch.rand(BATCH, 1, case.length, keys, generator=generator) < 0.5
        seen[..., 0] = True
        if case.mask == "nothing":  # is seen by some queries
            seen[:, :, 3:5] = False
        return seen
    return None


def own_mask(sequence: SequenceParallel, case: Case, mask: Tensor | None) -> Tensor | None:
    """Return what a rank is given of a mask."""
    if mask is None or case.mask in ("padding", "whole", "heads", "nothing"):
        return mask
    if case.mask == "own padding":
        return sequence.order.part(mask, sequence.rank, 3)
    return sequence.order.part(mask, sequence.rank, mask.dim() - 2)


def make_inputs(case: Case) -> tuple[list[Tensor], Tensor]:
    """Return query, key and value, and the gradient of the output."""
    generator = torch.Generator().manual_seed(3)
    keys, key_heads = case.key_length or case.length, case.key_heads or case.heads
    shapes = [(case.heads, case.length), (key_heads, keys), (key_heads, keys)]
    inputs = [torch.randn(BATCH, *shape, WIDTH, generator=generator) for shape in shapes]
    return inputs, torch.randn(BATCH, case.heads, case.length, WIDTH, generator=generator)


def attend(method: str, case: Case, zigzag: bool | None = None) -> dict[str, float]:
    """Return the relative errors of a rank's output and gradients."""
    sequence = SequenceParallel(make_mesh(sp=dist.get_world_size()), method, zigzag=zigzag)
    inputs, grad = make_inputs(case)
    mask = make_mask(case)
    whole = [x.clone().requires_grad_() for x in inputs]
    grouped = case.key_heads is not None
    matching = whole
    if grouped and mask is not None:  # as transformers does: torch's fast kernel takes equal heads
        matching = [whole[0], *(x.repeat_interleave(case.heads // whole[1].size(1), 1) for x in whole[1:])]
    wanted = functional.scaled_dot_product_attention(
        *matching, mask, is_causal=case.causal, enable_gqa=grouped and mask is None
    )
    wanted.backward(grad)

    def own(x: Tensor) -> Tensor:
        return sequence.order.part(x, sequence.rank, 2)

    parts = [own(x).clone().requires_grad_() for x in inputs]
    with sequence.attending():
        got = functional.scaled_dot_product_attention(
            *parts, own_mask(sequence, case, mask), is_causal=case.causal, enable_gqa=grouped
        )
    got.backward(own(grad))
    errors = {"output": relative(got.detach(), own(wanted.detach()))}
    for name, part, x in zip(("query", "key", "value"), parts, whole, strict=True):
        assert part.grad is not None
        assert x.grad is not None
        errors[name] = relative(part.grad, own(x.grad))
    return errors
