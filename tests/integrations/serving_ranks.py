"""What each rank does in tests of answers over ranks. It imports little, as every rank does it again."""

from __future__ import annotations

import errno
from typing import Any

from gemini.comm.ranks import Rank, make_peers
from gemini.errors import GeminiError, IoError, StateError
from gemini.inference import Engine, Request
from gemini.inference.ranks import follow
from gemini.inference.tensor_ranks import TensorRanks

PROMPTS = [tuple((5 * i + 3 * j) % 120 + 2 for j in range(length)) for i, length in enumerate((7, 1, 12, 3))]
MAX_TOKENS = 12
OPTIONS: dict[str, Any] = {"kv_bytes": 2**16, "max_batch": 3}
_LAYER = "model.layers.1.mlp"


class FailingRanks(TensorRanks):
    """Ranks of which one, ``who``, fails once, in the middle of its second pass; -1: none."""

    def __init__(self, who: int = -1) -> None:
        peers = make_peers(None)
        assert peers is not None
        super().__init__(Rank(peers.share.place, peers.share.world, peers.say, failure=StateError))
        self._fails = who == peers.share.place

    def load(self, *args: Any, **options: Any) -> Any:
        model = super().load(*args, **options)
        passes = 0

        def fail(*_: object) -> None:
            nonlocal passes
            passes += 1
            if passes == 2:
                raise IoError(errno.EIO, "the disk is gone")

        if self._fails:
            model.get_submodule(_LAYER).register_forward_pre_hook(fail)
        return model


def answers_of(directory: str, options: dict[str, Any]) -> Any:
    """On the first rank: return the answers to the prompts, and what the engine says of itself."""
    ranks = FailingRanks()
    if not ranks.is_lead:
        follow(ranks, directory, **options)
        return None
    with Engine.from_pretrained(directory, ranks=ranks, max_pass_tokens=5, **options) as engine:
        answers = [engine.submit(Request(prompt, max_tokens=MAX_TOKENS)) for prompt in PROMPTS]
        return [answer.result(120).tokens for answer in answers], engine.stats()


def answers_around_a_failure(directory: str, who: int) -> Any:
    """On the first rank: return what came of a request whose second pass fails, and of one after it."""
    ranks, options = FailingRanks(who), {**OPTIONS, "device_bytes": 2**20}
    if not ranks.is_lead:
        follow(ranks, directory, **options)
        return None
    with Engine.from_pretrained(directory, ranks=ranks, **options) as engine:
        request, failure = Request(PROMPTS[0], max_tokens=MAX_TOKENS), ("", "")
        try:
            engine.submit(request).result(120)
        except GeminiError as error:
            failure = type(error).__name__, str(error)
        return failure, engine.submit(request).result(120).tokens
