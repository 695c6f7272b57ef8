"""Layers over the ranks of tensor parallelism, in the mode of a mesh: 1d, 2d, 2.5d or 3d.

``with over(mesh) as grid: model = Model()`` builds them; in one process they are whole. A model of these
layers is written once: in every mode its tensors have the names and the initial bits that they have in one
process.
"""

from __future__ import annotations

from gemini.parallel.tensor.nn.embedding import Embedding, PatchEmbedding
from gemini.parallel.tensor.nn.grid_layer import GridLayer, over, partition_along, partition_of
from gemini.parallel.tensor.nn.grid_loss import CrossEntropyLoss
from gemini.parallel.tensor.nn.linear import Classifier, Linear
from gemini.parallel.tensor.nn.modes import (
    Classifier1D,
    Classifier2D,
    Classifier2p5D,
    Classifier3D,
    CrossEntropyLoss1D,
    CrossEntropyLoss2D,
    CrossEntropyLoss2p5D,
    CrossEntropyLoss3D,
    Dropout1D,
    Dropout2D,
    Dropout2p5D,
    Dropout3D,
    Embedding1D,
    Embedding2D,
    Embedding2p5D,
    Embedding3D,
    LayerNorm1D,
    LayerNorm2D,
    LayerNorm2p5D,
    LayerNorm3D,
    Linear1D_Col,
    Linear1D_Row,
    Linear2D,
    Linear2p5D,
    Linear3D,
    PatchEmbedding1D,
    PatchEmbedding2D,
    PatchEmbedding2p5D,
    PatchEmbedding3D,
)
from gemini.parallel.tensor.nn.norm import Dropout, LayerNorm

__all__ = [
    "Classifier",
    "Classifier1D",
    "Classifier2D",
    "Classifier2p5D",
    "Classifier3D",
    "CrossEntropyLoss",
    "CrossEntropyLoss1D",
    "CrossEntropyLoss2D",
    "CrossEntropyLoss2p5D",
    "CrossEntropyLoss3D",
    "Dropout",
    "Dropout1D",
    "Dropout2D",
    "Dropout2p5D",
    "Dropout3D",
    "Embedding",
    "Embedding1D",
    "Embedding2D",
    "Embedding2p5D",
    "Embedding3D",
    "GridLayer",
    "LayerNorm",
    "LayerNorm1D",
    "LayerNorm2D",
    "LayerNorm2p5D",
    "LayerNorm3D",
    "Linear",
    "Linear1D_Col",
    "Linear1D_Row",
    "Linear2D",
    "Linear2p5D",
    "Linear3D",
    "PatchEmbedding",
    "PatchEmbedding1D",
    "PatchEmbedding2D",
    "PatchEmbedding2p5D",
    "PatchEmbedding3D",
    "over",
    "partition_along",
    "partition_of",
]
