"""Rounds: in which all ranks say what they need next, and do it together.

Ranks may run different operators. So no rank starts a collective because it needs one: it enters a round,
says which chunks it wants and which gradients it has complete, and every rank then carries out, in one order,
what all of them said. A rank that has nothing left to do enters rounds until all have.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gemini.errors import StateError

WANTS = 4  # chunks that a rank may ask for in a round

_BITS = 62  # of an integer, used for a set


@dataclass(frozen=True)
class Round:
    """What all ranks said: for each of them, in order, the chunks it wants; the gradients that all have."""

    wants: tuple[tuple[int, ...], ...]
    complete: tuple[int, ...]
    all_done: bool

    def gathers(self, members: Sequence[int]) -> list[tuple[int, list[int]]]:
        """Return the chunks that ranks among ``members`` want, each once, with the places among them of those
        ranks; the same list on every one of them."""
        askers: dict[int, list[int]] = {}
        for place in range(WANTS):
            wanted = sorted({self.wants[m][place] for m in members if place < len(self.wants[m])})
            for chunk in wanted:
                askers.setdefault(chunk, [i for i, m in enumerate(members) if chunk in self.wants[m]])
        return list(askers.items())


def encode(wants: Sequence[int], complete: Sequence[int], num_groups: int, *, done: bool) -> list[int]:
    """Return the message of a rank; equally long for all."""
    padded = [*wants, *([-1] * (WANTS - len(wants)))]
    return [int(done), *padded, *to_bits(complete, num_groups)]


def decode(messages: Sequence[Sequence[int]]) -> Round:
    """Return what the messages of all ranks say together."""
    complete = set.intersection(*(set(from_bits(message[1 + WANTS :])) for message in messages))
    return Round(
        wants=tuple(tuple(w for w in message[1 : 1 + WANTS] if w >= 0) for message in messages),
        complete=tuple(sorted(complete)),
        all_done=all(message[0] for message in messages),
    )


def refuse_difference(messages: Sequence[Sequence[int]]) -> None:
    """Raise StateError, on all ranks, unless they want and have the same."""
    different = [rank for rank, message in enumerate(messages) if message != messages[0]]
    if different:
        raise StateError(
            f"ranks {different} run other operators than rank 0, or in another order; leave strict_ddp_mode "
            "out where they may"
        )


def to_bits(members: Sequence[int], size: int) -> list[int]:
    """Return a set of numbers below ``size`` as integers."""
    words = [0] * -(-size // _BITS)
    for member in members:
        words[member // _BITS] |= 1 << member % _BITS
    return words


def from_bits(words: Sequence[int]) -> list[int]:
    """Return the numbers in a set made by :func:`to_bits`, ascending."""
    return [
        index * _BITS + bit for index, word in enumerate(words) for bit in range(_BITS) if word >> bit & 1
    ]
