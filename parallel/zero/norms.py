"""The norm of gradients that lie in parts on several ranks."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from .bucket import Bucket
from .collectives import Collectives


def total_norm(
    parts: Sequence[torch.Tensor | None], norm_type: float, collectives: Collectives, device: torch.device
) -> torch.Tensor:
    """Return the norm over all ranks' parts, the same on every rank; on ``device``.

    ``parts`` has this rank's part of every gradient, None where it has none. With one rank it is
    ``torch.nn.utils.get_total_norm``, bit for bit.
    """
    if not parts:
        return torch.zeros((), dtype=torch.float32, device=device)
    nothing = torch.zeros((), dtype=torch.float32, device=device)
    own = torch.stack(
        [nothing if p is None else torch.linalg.vector_norm(p, norm_type).to(device) for p in parts]
    )
    if collectives.size > 1:
        own = _over_ranks(own, norm_type, collectives)
    norm: torch.Tensor = torch.linalg.vector_norm(own, norm_type)
    return norm


def _over_ranks(own: torch.Tensor, norm_type: float, collectives: Collectives) -> torch.Tensor:
    """Combine the norms of the parts of each gradient, summed in the order of the ranks."""
    every = collectives.gather_anywhere(own.double())
    if math.isinf(norm_type):
        return every.amax(0).to(own.dtype)
    total: torch.Tensor = every[0].pow(norm_type)
    for row in every[1:]:
        total.add_(row.pow(norm_type))
    norm: torch.Tensor = total.pow(1.0 / norm_type)
    return norm.to(own.dtype)


def any_overflow(buckets: Sequence[Bucket], collectives: Collectives) -> bool:
    """Say whether any rank has an infinity or a NaN in its part of the mean gradients."""
    largest = [
        torch.linalg.vector_norm(bucket.mean, math.inf) for bucket in buckets if bucket.mean is not None
    ]
    finite = not largest or bool(
        torch.stack([value.to(largest[0].device) for value in largest]).isfinite().all()
    )
    return collectives.maximum([int(not finite)], "looks for overflow (step)") == [1]
