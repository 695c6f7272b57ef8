"""Sequence parallelism: each rank has a part of every sequence, and attention works across the parts."""

from gemini.parallel.sequence.batch import Batch, cut_batch
from gemini.parallel.sequence.parallelize import parallelize_sequence

__all__ = [
    "Batch",
    "cut_batch",
    "parallelize_sequence",
]
