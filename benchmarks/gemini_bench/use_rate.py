"""The reference of the rule that ranks experts by expected next use: integers, number for number the table's.

A *choice* is the set of experts of one layer. Each pass of the model uses some of them (``note``). The rate
of an expert is the share of passes that use it, decayed with three half-lives. Two estimates weigh the rates.
The estimate that lately ranked used experts above unused ones more often is in force for all choices of the
table. All state follows from the accesses alone: runs with the same accesses choose the same victims.
"""

from __future__ import annotations

from collections.abc import Collection

HALF_LIVES = (1, 8, 128)  # in passes of the choice
ESTIMATES = ((8, 6, 2), (0, 0, 16))  # recent, lasting: weights of the three rates
ONE = 1 << 16  # a rate of 1
CERTAIN = ONE * 16  # an estimate of 1: the weights sum to 16
MEMORY = 8  # counts lose 1/2**MEMORY with every note
POINT = 1 << MEMORY  # one comparison won, so that counts still decay when they are small

_DECAY = tuple(tuple(round(ONE * 2 ** (-i / h)) for i in range(h)) for h in HALF_LIVES)
_GAIN = tuple(ONE - round(ONE * 2 ** (-1 / h)) for h in HALF_LIVES)
_MAX_SHIFT = 31


def decay_tables() -> tuple[tuple[int, ...], ...]:
    """Return, per half-life, the factors of 0 to half-life - 1 passes, in units of 1 / ONE."""
    return _DECAY


def gains() -> tuple[int, ...]:
    """Return, per half-life, the amount that a use adds to a rate."""
    return _GAIN


class UseRate:
    """Rates of the experts of all choices of a table. ``sizes[c]`` experts belong to choice ``c``."""

    def __init__(self, sizes: Collection[int]) -> None:
        self.counts = [0] * len(ESTIMATES)  # comparisons won less lost, of each estimate
        self._passes = [0] * len(sizes)
        self._cursor = [0] * len(sizes)
        self._values = [[(0,) * len(HALF_LIVES)] * size for size in sizes]
        self._last = [[0] * size for size in sizes]

    @property
    def in_force(self) -> int:
        """The estimate that ranks: 0 is recent, which wins ties, 1 is lasting."""
        return max(range(len(ESTIMATES)), key=lambda j: (self.counts[j], -j))

    def rates(self, choice: int, expert: int) -> list[int]:
        """Return the decayed rates, one per half-life, each below ONE."""
        age = self._passes[choice] - self._last[choice][expert]
        return [
            ((value * _DECAY[i][age % half_life]) >> 16) >> min(age // half_life, _MAX_SHIFT)
            for i, (value, half_life) in enumerate(zip(self._values[choice][expert], HALF_LIVES, strict=True))
        ]

    def estimate(self, choice: int, expert: int, estimate: int | None = None) -> int:
        """Return the chance that a pass uses the expert, below CERTAIN; by the estimate in force."""
        weights = ESTIMATES[self.in_force if estimate is None else estimate]
        return sum(w * r for w, r in zip(weights, self.rates(choice, expert), strict=True))

    def score(self, choice: int, expert: int, distance: int, moments: int) -> int:
        """Return the moments until the expected next use.

        ``distance``: moments until the next one of the choice. ``moments``: how many a pass has. The highest
        score is evicted. An expert of every pass scores nearly ``distance``, as a chunk outside of choices.
        """
        return moments * CERTAIN // max(self.estimate(choice, expert), 1) - moments + distance

    def note(self, choice: int, used: Collection[int]) -> None:
        """Count a pass of a choice, which used these experts. Judges the estimates first, then learns."""
        size = len(self._last[choice])
        for expert in sorted(used):
            rival = self._cursor[choice]
            self._cursor[choice] = (rival + 1) % size
            if rival in used:
                continue
            for j in range(len(ESTIMATES)):
                mine, other = self.estimate(choice, expert, j), self.estimate(choice, rival, j)
                self.counts[j] += POINT * ((mine > other) - (mine < other))
        self.counts = [count - (count >> MEMORY) for count in self.counts]
        self._passes[choice] += 1
        for expert in used:
            grown = zip(self.rates(choice, expert), _GAIN, strict=True)
            self._values[choice][expert] = tuple(min(ONE - 1, rate + gain) for rate, gain in grown)
            self._last[choice][expert] = self._passes[choice]
