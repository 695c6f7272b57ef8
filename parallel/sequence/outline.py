"""A model on ``meta`` that attends as one of several ranks, without the other ranks and without values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import nn

from gemini.parallel.mesh import Arrival, Axis
from gemini.parallel.sequence.parallelize import parallelize_sequence
from gemini.parallel.tensor.cut_outline import OutlineAxis


class SequenceOutline:
    """``model``, on ``meta``, with the attention of the first of ``size`` ranks, which each have a part of
    every sequence. No rank has more heads than the first.

    ``fills_up``: whether a cut batch was padded, so that its masks hide something.

    Raises:
        ConfigError: the model cannot work on parts, see :func:`parallelize_sequence`.
    """

    def __init__(self, model: nn.Module, size: int, method: str) -> None:
        self._messages = _Messages(size)
        self._sequence = parallelize_sequence(model, self, method, takes_loss=False)
        self.fills_up = False

    def axis(self, *names: str) -> Axis | None:
        """Return the stand-in for the ranks along ``sp``, if ``names`` contain it; else None."""
        return self._messages if "sp" in names else None

    def cut(self, batch: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """See :meth:`SequenceParallel.cut`; tensors are on ``meta``."""
        own = self._sequence.cut(batch)
        tokens = "input_ids" if "input_ids" in batch else "inputs_embeds"
        self.fills_up |= own[tokens].size(1) * self._messages.size > batch[tokens].size(1)
        return own

    def take_message_bytes(self) -> int:
        """Return the largest number of message bytes that attention had in flight at once, sent and received,
        since the last call. Includes the messages of backward, which does not run.
        """
        most, self._messages.most_bytes = self._messages.most_bytes, 0
        return most


class _Messages(OutlineAxis):
    """Records the sizes of messages. In backward, gradients of forward's messages are sent back."""

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self.most_bytes = 0

    def all_to_all(
        self, parts: Sequence[torch.Tensor], shapes: Sequence[Sequence[int]]
    ) -> list[torch.Tensor]:
        got = super().all_to_all(parts, shapes)
        self._note(sum(each.nbytes for each in (*parts, *got)))
        return got

    def pass_on(self, tensor: torch.Tensor) -> Arrival:
        # In backward it goes round again, followed by its gradient in fp32 or wider.
        gradient_bytes = tensor.numel() * max(tensor.itemsize, 4)
        self._note(2 * (tensor.nbytes + gradient_bytes))
        return super().pass_on(tensor)

    def _note(self, nbytes: int) -> None:
        self.most_bytes = max(self.most_bytes, nbytes)
