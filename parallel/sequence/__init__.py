"""Sequence parallelism: each rank has a part of every sequence, and attention works across the parts."""

from gemini.parallel.sequence.batch import Batch, SequenceCut, cut_batch
from gemini.parallel.sequence.mean_loss import mean_of
from gemini.parallel.sequence.parallelize import SequenceParallel, parallelize_sequence

__all__ = ["Batch", "SequenceCut", "SequenceParallel", "cut_batch", "mean_of", "parallelize_sequence"]
