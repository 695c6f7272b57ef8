"""Tensor parallelism: cut the layers of an unmodified model over ranks by a plan, or build a model of layers
for a grid of ranks (``nn``).
"""

from gemini.parallel.tensor import nn
from gemini.parallel.tensor.loss import vocabulary_cross_entropy
from gemini.parallel.tensor.parallelize import parallelize
from gemini.parallel.tensor.styles import (
    Column,
    EmbeddingColumns,
    Head,
    PartialGradient,
    Row,
    TorchAttention,
    Vocabulary,
)

__all__ = [
    "Column",
    "EmbeddingColumns",
    "Head",
    "PartialGradient",
    "Row",
    "TorchAttention",
    "Vocabulary",
    "nn",
    "parallelize",
    "vocabulary_cross_entropy",
]
