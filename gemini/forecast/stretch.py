"""A step of more tokens than are worth rehearsing: models that run token by token, from three shorter steps.

Times follow a parabola: the gradient of a token's part of a tensor is made of the whole tensor's size. Memory
follows a line; what keeps all products of queries and keys beside the loop comes out too low.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from gemini.forecast.meter import Period
from gemini.forecast.rehearsal import Rehearsal
from gemini.memstats import Trace
from gemini.memstats.trace import OPTIMIZER

Spans = tuple[int, int, int]


@dataclass(frozen=True)
class Stretch:
    """Rehearsals of ``spans`` tokens, each of twice as many as the one before, and the number wanted."""

    rehearsals: tuple[Rehearsal, ...]
    spans: Spans
    wanted: int

    @property
    def longest(self) -> Rehearsal:
        """The last rehearsal, whose moments stand for those of the wanted step."""
        return self.rehearsals[-1]

    def rehearsal(self) -> Rehearsal:
        """Return the longest rehearsal with the non-model data of the wanted step."""
        trace: Trace = self.longest.trace
        values = [list(map(float, each.trace.non_model_bytes)) for each in self.rehearsals]
        reserves = tuple(map(math.ceil, self._values(values, max, self._line)))
        return replace(self.longest, trace=replace(trace, non_model_bytes=reserves))

    def growth(self, seconds: Callable[[Period], float]) -> tuple[float, ...]:
        """Return how many times as long each moment takes in the wanted step as in the longest rehearsal.

        ``seconds`` must say the same for equal work: measured times differ by more than some tokens add.
        """
        values = [[seconds(period) for period in each.periods] for each in self.rehearsals]
        stretched = self._values(values, sum, self._parabola)
        return tuple(new / old if old > 0 else 1.0 for new, old in zip(stretched, values[-1], strict=True))

    def _values(
        self,
        values: list[list[float]],
        total: Callable[[Sequence[float]], float],
        curve: Callable[[Sequence[float]], float],
    ) -> list[float]:
        """Extrapolate moment by moment; where their number grows, too, all evenly, by their total."""
        phases = [each.trace.phases for each in self.rehearsals]
        if phases[0] == phases[1] == phases[2]:
            return [curve(each) for each in zip(*values, strict=True)]
        totals = [
            total([value for value, phase in zip(each, names, strict=True) if phase != OPTIMIZER])
            for each, names in zip(values, phases, strict=True)
        ]
        ratio = curve(totals) / totals[-1] if totals[-1] > 0 else 1.0
        return [
            value if phase == OPTIMIZER else value * ratio
            for value, phase in zip(values[-1], phases[-1], strict=True)
        ]

    def _line(self, values: Sequence[float]) -> float:
        _, more, most = self.spans
        slope = max(values[2] - values[1], 0) / (most - more)
        return values[2] + slope * (self.wanted - most)

    def _parabola(self, values: Sequence[float]) -> float:
        few, more, most = self.spans
        slopes = (values[1] - values[0]) / (more - few), (values[2] - values[1]) / (most - more)
        bend = max(slopes[1] - slopes[0], 0) / (most - few)
        return self._line(values) + bend * (self.wanted - most) * (self.wanted - more)


def spans(few: int, few_calls: int, more_calls: int, most_calls: int) -> Spans | None:
    """Return the numbers of tokens to rehearse instead of all.

    A step of ``few`` tokens made ``few_calls`` operator calls, one of twice as many ``more_calls``; the three
    together should make no more than ``most_calls``, if that is enough for ``few`` and its half. None: the
    calls are not those of a loop over tokens.
    """
    if more_calls < 1.25 * few_calls:
        return None
    per_token = (more_calls - few_calls) / few
    room = most_calls - 3 * (few_calls - per_token * few)
    first = max(few // 2, 1)
    while 2 * 7 * first * per_token <= room:
        first *= 2
    return first, 2 * first, 4 * first
