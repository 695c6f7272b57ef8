"""When the training thread was computing: from each PreOp's end to the next PreOp."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from gemini.memstats.trace import FORWARD
from gemini.timeline.events import Operator, Phase, StepSpan


def computing(operators: Sequence[Operator], step: StepSpan) -> Iterator[Phase]:
    """Yield the spans of ``step`` that its ``operators`` leave, each in the phase of the one before.

    They are disjoint and in order. What comes before the first operator is forward.
    """
    phase, since = FORWARD, step.begin_s
    for operator in operators:
        if operator.asked_s > since:
            yield Phase(phase, since, operator.asked_s)
        phase, since = operator.phase, operator.begin_s
    if step.end_s > since:
        yield Phase(phase, since, step.end_s)
