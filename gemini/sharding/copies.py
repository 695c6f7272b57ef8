"""The mean of gradients over copies of the model, among the ranks that have the same part of each."""

from __future__ import annotations

import torch

from gemini.comm.peers import Peers


def take_mean_of_copies(
    peers: Peers, values: torch.Tensor, room: torch.Tensor, dtype: torch.dtype | None
) -> None:
    """Replace fp32 ``values`` by their mean over the copies, the same on all of them, added in their order.

    Values travel in ``dtype``, None: fp32. In 16 bits they are divided by the number of copies before they
    are rounded, and added in fp32; their mean travels back in 16 bits too, and every rank has it rounded.

    Args:
        values: without a ``dtype`` any number of them, else an even one.
        room: fp32, one element more per copy than ``values``; is overwritten.
    """
    copies = peers.share.replicas
    if dtype is None:
        _sum(peers, values, room, None)
        values.mul_(1.0 / copies)
        return
    half = values.numel() // 2
    narrow = room[:half].view(dtype).copy_(values.mul_(1.0 / copies))
    _sum(peers, narrow, room[half:].view(dtype), values)
    values.copy_(narrow)


def _sum(peers: Peers, values: torch.Tensor, room: torch.Tensor, scratch: torch.Tensor | None) -> None:
    """Replace ``values`` by their sum, added in ``scratch``, None: in their own type.

    Each rank adds one part of the values for all copies and sends the others the sum: less than twice the
    bytes of the values, for any number of copies.
    """
    own, copies = peers.share.replica, peers.share.replicas
    parts = values.tensor_split(copies)
    mine, size = parts[own], parts[own].numel()
    others = [copy for copy in range(copies) if copy != own]
    terms = [room[copy * size : (copy + 1) * size] for copy in range(copies)]
    peers.swap_copies([(copy, parts[copy], terms[copy]) for copy in others])
    total, terms[own] = terms[own] if scratch is None else scratch[:size], mine
    total.copy_(terms[0])
    for term in terms[1:]:
        total.add_(term)  # in the type of the total
    mine.copy_(total)
    peers.swap_copies([(copy, mine, parts[copy]) for copy in others])
