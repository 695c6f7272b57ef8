"""The norm of gradients that lie in parts on several ranks."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from gemini.comm.peers import ModelRanks, Topic
from gemini.optim.gradients import NormOverRanks, sum_over_ranks
from gemini.parallel.zero.bucket import Bucket
from gemini.parallel.zero.collectives import Collectives
from gemini.parallel.zero.shards import ParamShard

Gradients = Sequence[tuple[ParamShard, torch.Tensor | None]]


def total_norm(
    gradients: Gradients,
    norm_type: float,
    collectives: Collectives,
    model_ranks: ModelRanks | None,
    device: torch.device,
) -> torch.Tensor:
    """Return the norm over the parts of all ranks, ``model_ranks`` too; the same bits on every rank, whatever
    is cut; on ``device``.

    ``gradients`` has this rank's part of every gradient, None where it has none. With one rank it is
    ``torch.nn.utils.get_total_norm``, bit for bit.
    """
    if collectives.size > 1 or model_ranks is not None:
        norm = NormOverRanks(norm_type)
        for shard, part in gradients:
            if part is not None and (model_ranks is None or model_ranks.counts(shard.param)):
                norm.add(part.float())
        others = [] if model_ranks is None else [model_ranks.peers]
        return norm.over([collectives, *others]).to(device)
    norms = [torch.linalg.vector_norm(part, norm_type) for _, part in gradients if part is not None]
    if not norms:
        return torch.zeros((), dtype=torch.float32, device=device)
    total: torch.Tensor = torch.linalg.vector_norm(torch.stack([n.to(device) for n in norms]), norm_type)
    return total


def count_zeros(gradients: Gradients, collectives: Collectives, model_ranks: ModelRanks | None = None) -> int:
    """Return how many elements are 0 over the parts of all ranks, ``model_ranks`` too; ``gradients`` as for
    :func:`total_norm`."""
    found = 0
    for shard, part in gradients:
        if model_ranks is not None and not model_ranks.counts(shard.param):
            continue
        if part is not None:
            found += part.numel() - int(torch.count_nonzero(part))
        if model_ranks is not None and collectives.part == 0:
            found -= model_ranks.filling(shard.param)
    return sum_over_ranks(found, [collectives] if model_ranks is None else [collectives, model_ranks.peers])


def any_overflow(
    buckets: Sequence[Bucket], collectives: Collectives, model_ranks: ModelRanks | None = None
) -> bool:
    """Say whether any rank has an infinity or a NaN in its part of the mean gradients."""
    largest = [
        torch.linalg.vector_norm(bucket.mean, math.inf) for bucket in buckets if bucket.mean is not None
    ]
    finite = not largest or bool(
        torch.stack([value.to(largest[0].device) for value in largest]).isfinite().all()
    )
    overflowed = collectives.maximum([int(not finite)], "looks for overflow (step)")
    if model_ranks is None:
        return overflowed == [1]
    return any(said == [1] for said in model_ranks.peers.exchange(Topic.GRADIENTS, overflowed))
