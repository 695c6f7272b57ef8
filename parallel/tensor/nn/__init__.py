"""Layers over the ranks of tensor parallelism, in the mode of a mesh: 1d, 2d, 2.5d or 3d.

``with over(mesh) as grid: model = Model()`` builds them; in one process they are whole. A model of these
layers is written once: in every mode its tensors have the names and the initial bits that they have in one
process.
"""

from __future__ import annotations

from gemini.parallel.tensor.nn.embedding import Embedding, PatchEmbedding
from gemini.parallel.tensor.nn.grid_layer import over, partition_of
from gemini.parallel.tensor.nn.grid_loss import CrossEntropyLoss
from gemini.parallel.tensor.nn.linear import Classifier, Linear
from gemini.parallel.tensor.nn.modes import Linear1D_Col, Linear1D_Row, Linear2D, Linear2p5D, Linear3D
from gemini.parallel.tensor.nn.norm import Dropout, LayerNorm

__all__ = [
    "Classifier",
    "CrossEntropyLoss",
    "Dropout",
    "Embedding",
    "LayerNorm",
    "Linear",
    "Linear1D_Col",
    "Linear1D_Row",
    "Linear2D",
    "Linear2p5D",
    "Linear3D",
    "PatchEmbedding",
    "over",
    "partition_of",
]
