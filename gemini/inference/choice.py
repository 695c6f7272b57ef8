"""The next token of a sequence."""

from __future__ import annotations

import secrets
from typing import Any

import torch

from gemini.errors import GeminiError
from gemini.inference.request import Request


class Chooser:
    """Chooses the tokens of one request, by a generator of its own: neighbours in a pass change no draw.

    Temperature, top-k and top-p are those of transformers.
    """

    def __init__(self, request: Request) -> None:
        self._warpers = _warpers(request)
        self._generator = torch.Generator()
        self._generator.manual_seed(secrets.randbits(62) if request.seed is None else request.seed)
        self._draws = request.temperature > 0

    def choose(self, logits: torch.Tensor) -> int:
        """Return the token for ``logits``, [vocabulary].

        Raises:
            GeminiError: they are no numbers.
        """
        best, token = logits.max(dim=-1)
        if not best.isfinite():  # NaN, if one of them is
            raise GeminiError(
                f"the model's likeliest token has the score {float(best)}, which is no number: its weights, "
                "or its type's range, do not give any answer to this prompt"
            )
        if not self._draws:
            return int(token)
        # The best one is 0, and numbers are wide: a tiny temperature makes no others of them than -inf.
        scores = (logits - best).double().cpu()[None]
        for warp in self._warpers:
            scores = warp(None, scores)
        drawn = torch.multinomial(torch.softmax(scores[0], dim=-1), 1, generator=self._generator)
        return int(drawn)


def _warpers(request: Request) -> list[Any]:
    from transformers.generation import logits_process

    found: list[Any] = []
    if request.temperature not in (0, 1):
        found.append(logits_process.TemperatureLogitsWarper(float(request.temperature)))
    if request.top_k:
        found.append(logits_process.TopKLogitsWarper(request.top_k))
    if request.top_p < 1:
        found.append(logits_process.TopPLogitsWarper(request.top_p))
    return found
