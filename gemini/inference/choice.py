"""Chooser: samples the next token of a sequence."""

from __future__ import annotations

import secrets
from typing import Any

import torch

from gemini.errors import GeminiError
from gemini.inference.request import Request


class Chooser:
    """Samples the tokens of one request with its own random generator, so other requests in a pass do not
    change the result.

    Temperature, top-k and top-p work as in transformers.
    """

    def __init__(self, request: Request) -> None:
        self._warpers = _warpers(request)
        self._generator = torch.Generator()
        self._generator.manual_seed(secrets.randbits(62) if request.seed is None else request.seed)
        self._draws = request.temperature > 0

    def choose(self, logits: torch.Tensor) -> int:
        """Return the token for ``logits``, [vocabulary].

        Raises:
            GeminiError: the logits are not finite.
        """
        best, token = logits.max(dim=-1)
        if not best.isfinite():  # the maximum is NaN if any logit is
            raise GeminiError(
                f"the model's most likely token has the score {float(best)}, which is not a number: "
                "its weights are damaged, or the range of its dtype is too small for this prompt"
            )
        if not self._draws:
            return int(token)
        # With the maximum at 0, in double: dividing by a tiny temperature gives at worst -inf, never NaN.
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
