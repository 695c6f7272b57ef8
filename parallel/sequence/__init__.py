"""Sequence parallelism: each rank has a part of every sequence, and attention works across the parts."""

from gemini.parallel.sequence.batch import cut_batch
from gemini.parallel.sequence.parallelize import parallelize_sequence

__all__ = [
    "cut_batch",
    "parallelize_sequence",
]
