"""What a step is doing, as traces and timelines name it."""

from gemini.memstats.trace import PHASES

FORWARD, BACKWARD, OPTIMIZER = PHASES
