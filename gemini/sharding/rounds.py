"""Rounds: meetings in which all ranks state what they need next, and then act together.

Ranks may run different operators, so no rank starts a collective on its own. It enters a round and states
which chunks it wants and which of its gradients are complete. Then every rank performs the requests of all
ranks in the same order. A rank that has finished joins the rounds of the others until all have finished.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum

from gemini.comm.peers import Share
from gemini.errors import ConfigError, StateError

WANTS = 4  # chunks that a rank may request in a round

_BITS = 62  # bits of an integer that are used for a set
_HEAD = 4  # integers before the wants: ending, step, prediction, join()


class Ending(IntEnum):
    """Whether and why a rank has no further operators to run."""

    NONE = 0
    COMPLETE = 1  # its gradients will be used
    DISCARDED = 2  # its gradients will be discarded
    JOINED = 3  # it has no batches left and follows the other ranks


@dataclass(frozen=True)
class Round:
    """The combined statements of all ranks: the chunks that each rank wants, in rank order, and the gradient
    groups that are complete on all."""

    wants: tuple[tuple[int, ...], ...]
    complete: tuple[int, ...]
    all_done: bool
    same_predictions: bool  # all predict the same order
    joined: tuple[int, ...] = ()  # ranks without batches left
    discarded: bool = False  # a rank discards its gradients

    def gathers(
        self, members: Sequence[int], owners: Callable[[int], Sequence[int]] | None = None
    ) -> list[tuple[int, list[int]]]:
        """Return the distinct chunks that ranks among ``members`` want, each with the positions of these
        ranks among the chunk's owners; in the same order on all ranks. ``owners(chunk)``: the members with
        parts of a chunk; None: all members. Chunks that no owner wants are left out."""
        found: dict[int, list[int]] = {}
        for place in range(WANTS):
            wanted = sorted({self.wants[m][place] for m in members if place < len(self.wants[m])})
            for chunk in wanted:
                of = members if owners is None else owners(chunk)
                found.setdefault(chunk, [i for i, m in enumerate(of) if chunk in self.wants[m]])
        return [(chunk, askers) for chunk, askers in found.items() if askers]


def encode(
    wants: Sequence[int],
    complete: Sequence[int],
    num_groups: int,
    *,
    step: int = 0,
    prediction_digest: int = 0,
    ending: Ending = Ending.NONE,
    joining: int = 0,
) -> list[int]:
    """Return a rank's message, of equal length on all ranks. ``step``: steps that it has finished.
    ``joining``: the options of its ``join()``; 0: it is in none."""
    padded = [*wants, *([-1] * (WANTS - len(wants)))]
    return [ending, step, prediction_digest, joining, *padded, *to_bits(complete, num_groups)]


def decode(messages: Sequence[Sequence[int]]) -> Round:
    """Combine the messages of all ranks.

    Raises:
        StateError: on all ranks: they do not make the same calls.
    """
    endings = {ending: [r for r, m in enumerate(messages) if m[0] == ending] for ending in Ending}
    _refuse_apart(endings, [message[1] for message in messages])
    body = [message[_HEAD:] for message in messages]
    joined = tuple(endings[Ending.JOINED])
    if joined and len({message[3] for message in messages}) > 1:
        _refuse_unlike(joined, [rank for rank, message in enumerate(messages) if not message[3]])
    training = [words for rank, words in enumerate(body) if rank not in joined]
    complete = set.intersection(*(set(from_bits(words[WANTS:])) for words in training or body))
    return Round(
        wants=tuple(tuple(want for want in words[:WANTS] if want >= 0) for words in body),
        complete=tuple(sorted(complete)),
        all_done=not endings[Ending.NONE],
        same_predictions=all(message[2] == messages[0][2] for message in messages),
        joined=joined,
        discarded=bool(endings[Ending.DISCARDED]),
    )


def _refuse_unlike(joined: Sequence[int], outside: Sequence[int]) -> None:
    if outside:
        raise StateError(
            f"ranks {list(joined)} have come to the end of a `with model.join():` that ranks {list(outside)} "
            "are not in; have all ranks train within it"
        )
    raise StateError("ranks are in `with model.join():` with different options; give all of them the same")


def _refuse_apart(endings: Mapping[Ending, Sequence[int]], steps: Sequence[int]) -> None:
    together = "all ranks must call step(), zero_grad() and clipping as often and in the same order"
    if endings[Ending.COMPLETE] and endings[Ending.DISCARDED]:
        raise StateError(
            f"ranks {endings[Ending.DISCARDED]} give gradients up (zero_grad) that ranks "
            f"{endings[Ending.COMPLETE]} are about to use (step, clipping); {together}"
        )
    if len(set(steps)) > 1 and not endings[Ending.DISCARDED]:
        raise StateError(
            f"ranks are in different steps, {list(steps)} by rank; {together}. Load a checkpoint "
            "(gemini.checkpoint.load), or the states of model and optimizer (load_state_dict of both), on all"
        )


def refuse_difference(messages: Sequence[Sequence[int]]) -> None:
    """Raise StateError, on all ranks, unless their messages are equal. No check if a rank discards its
    gradients: its pass may have ended anywhere."""
    if any(message[0] == Ending.DISCARDED for message in messages):
        return
    training = [rank for rank, message in enumerate(messages) if message[0] != Ending.JOINED]
    different = [rank for rank in training if messages[rank] != messages[training[0]]]
    if different:
        raise StateError(
            f"ranks {different} run other operators than rank {training[0]}, or in another order; leave "
            "strict_ddp_mode out where they may"
        )


def to_bits(members: Sequence[int], size: int) -> list[int]:
    """Encode a set of numbers below ``size`` as integers."""
    words = [0] * -(-size // _BITS)
    for member in members:
        words[member // _BITS] |= 1 << member % _BITS
    return words


def from_bits(words: Sequence[int]) -> list[int]:
    """Return the numbers of a set from :func:`to_bits`, ascending."""
    return [
        index * _BITS + bit for index, word in enumerate(words) for bit in range(_BITS) if word >> bit & 1
    ]


Follow = Callable[[str], None]  # makes a call with gradients that other ranks have described


@dataclass(frozen=True)
class Joining:
    """Options of ``join()``. ``all_count``: gradients are divided by the number of all ranks, otherwise of
    those that still train. ``throws``: all ranks raise when the first has ended."""

    all_count: bool = True
    throws: bool = False

    @property
    def said(self) -> int:
        """The options as an integer for messages; never 0."""
        return 1 + self.all_count + 2 * self.throws

    def refuse(self, share: Share) -> None:
        """Raise ConfigError if these options cannot work over ``share``."""
        if not self.all_count and share.replicas > 1:
            raise ConfigError(
                "join(divide_by_initial_world_size=False) does not go with copies of the model (hybrid "
                "sharding), each of which has a mean of its own; leave it out"
            )


def count_present(joining: Joining | None, said: Round, share: Share) -> int:
    """Return the number of ranks by which gradients are divided from now on.

    Raises:
        StateError: on all ranks: a rank has ended, and ``joining.throws``.
    """
    if not said.joined or len(said.joined) == share.world:
        return share.size
    assert joining is not None, "ranks outside would have been refused"
    if joining.throws:
        raise StateError(
            f"ranks {list(said.joined)} have no batches left, and join(throw_on_early_termination=True) ends "
            "training with the first of them; leave that out to go on without them"
        )
    return share.size if joining.all_count else share.size - len(said.joined)
