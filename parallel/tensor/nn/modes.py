"""Layers that are for one mode alone: built over a mesh of another one they are refused."""

from __future__ import annotations

from gemini.parallel.tensor.nn.embedding import Embedding, PatchEmbedding
from gemini.parallel.tensor.nn.grid_loss import CrossEntropyLoss
from gemini.parallel.tensor.nn.linear import Classifier, Linear
from gemini.parallel.tensor.nn.norm import Dropout, LayerNorm


class Linear1D_Col(Linear):
    """Linear, in mode 1d alone, the first of a pair."""

    mode = "1d"
    side = False


class Linear1D_Row(Linear):
    """Linear, in mode 1d alone, the second of a pair."""

    mode = "1d"
    side = True


class Linear2D(Linear):
    """Linear, in mode 2d alone."""

    mode = "2d"


class Linear2p5D(Linear):
    """Linear, in mode 2.5d alone."""

    mode = "2.5d"


class Linear3D(Linear):
    """Linear, in mode 3d alone."""

    mode = "3d"


class LayerNorm1D(LayerNorm):
    """LayerNorm, in mode 1d alone."""

    mode = "1d"


class LayerNorm2D(LayerNorm):
    """LayerNorm, in mode 2d alone."""

    mode = "2d"


class LayerNorm2p5D(LayerNorm):
    """LayerNorm, in mode 2.5d alone."""

    mode = "2.5d"


class LayerNorm3D(LayerNorm):
    """LayerNorm, in mode 3d alone."""

    mode = "3d"


class Embedding1D(Embedding):
    """Embedding, in mode 1d alone."""

    mode = "1d"


class Embedding2D(Embedding):
    """Embedding, in mode 2d alone."""

    mode = "2d"


class Embedding2p5D(Embedding):
    """Embedding, in mode 2.5d alone."""

    mode = "2.5d"


class Embedding3D(Embedding):
    """Embedding, in mode 3d alone."""

    mode = "3d"


class PatchEmbedding1D(PatchEmbedding):
    """PatchEmbedding, in mode 1d alone."""

    mode = "1d"


class PatchEmbedding2D(PatchEmbedding):
    """PatchEmbedding, in mode 2d alone."""

    mode = "2d"


class PatchEmbedding2p5D(PatchEmbedding):
    """PatchEmbedding, in mode 2.5d alone."""

    mode = "2.5d"


class PatchEmbedding3D(PatchEmbedding):
    """PatchEmbedding, in mode 3d alone."""

    mode = "3d"


class Classifier1D(Classifier):
    """Classifier, in mode 1d alone."""

    mode = "1d"


class Classifier2D(Classifier):
    """Classifier, in mode 2d alone."""

    mode = "2d"


class Classifier2p5D(Classifier):
    """Classifier, in mode 2.5d alone."""

    mode = "2.5d"


class Classifier3D(Classifier):
    """Classifier, in mode 3d alone."""

    mode = "3d"


class Dropout1D(Dropout):
    """Dropout, in mode 1d alone."""

    mode = "1d"


class Dropout2D(Dropout):
    """Dropout, in mode 2d alone."""

    mode = "2d"


class Dropout2p5D(Dropout):
    """Dropout, in mode 2.5d alone."""

    mode = "2.5d"


class Dropout3D(Dropout):
    """Dropout, in mode 3d alone."""

    mode = "3d"


class CrossEntropyLoss1D(CrossEntropyLoss):
    """CrossEntropyLoss, in mode 1d alone."""

    mode = "1d"


class CrossEntropyLoss2D(CrossEntropyLoss):
    """CrossEntropyLoss, in mode 2d alone."""

    mode = "2d"


class CrossEntropyLoss2p5D(CrossEntropyLoss):
    """CrossEntropyLoss, in mode 2.5d alone."""

    mode = "2.5d"


class CrossEntropyLoss3D(CrossEntropyLoss):
    """CrossEntropyLoss, in mode 3d alone."""

    mode = "3d"
