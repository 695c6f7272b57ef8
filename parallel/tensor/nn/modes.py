"""Layers for one mode only: they raise if the mesh has another mode."""

from __future__ import annotations

from gemini.parallel.tensor.nn.embedding import Embedding, PatchEmbedding
from gemini.parallel.tensor.nn.grid_loss import CrossEntropyLoss
from gemini.parallel.tensor.nn.linear import Classifier, Linear
from gemini.parallel.tensor.nn.norm import Dropout, LayerNorm


class Linear1D_Col(Linear):
    """Linear for mode 1d only, the first of a pair."""

    mode = "1d"
    side = False


class Linear1D_Row(Linear):
    """Linear for mode 1d only, the second of a pair."""

    mode = "1d"
    side = True


class Linear2D(Linear):
    """Linear for mode 2d only."""

    mode = "2d"


class Linear2p5D(Linear):
    """Linear for mode 2.5d only."""

    mode = "2.5d"


class Linear3D(Linear):
    """Linear for mode 3d only."""

    mode = "3d"


class LayerNorm1D(LayerNorm):
    """LayerNorm for mode 1d only."""

    mode = "1d"


class LayerNorm2D(LayerNorm):
    """LayerNorm for mode 2d only."""

    mode = "2d"


class LayerNorm2p5D(LayerNorm):
    """LayerNorm for mode 2.5d only."""

    mode = "2.5d"


class LayerNorm3D(LayerNorm):
    """LayerNorm for mode 3d only."""

    mode = "3d"


class Embedding1D(Embedding):
    """Embedding for mode 1d only."""

    mode = "1d"


class Embedding2D(Embedding):
    """Embedding for mode 2d only."""

    mode = "2d"


class Embedding2p5D(Embedding):
    """Embedding for mode 2.5d only."""

    mode = "2.5d"


class Embedding3D(Embedding):
    """Embedding for mode 3d only."""

    mode = "3d"


class PatchEmbedding1D(PatchEmbedding):
    """PatchEmbedding for mode 1d only."""

    mode = "1d"


class PatchEmbedding2D(PatchEmbedding):
    """PatchEmbedding for mode 2d only."""

    mode = "2d"


class PatchEmbedding2p5D(PatchEmbedding):
    """PatchEmbedding for mode 2.5d only."""

    mode = "2.5d"


class PatchEmbedding3D(PatchEmbedding):
    """PatchEmbedding for mode 3d only."""

    mode = "3d"


class Classifier1D(Classifier):
    """Classifier for mode 1d only."""

    mode = "1d"


class Classifier2D(Classifier):
    """Classifier for mode 2d only."""

    mode = "2d"


class Classifier2p5D(Classifier):
    """Classifier for mode 2.5d only."""

    mode = "2.5d"


class Classifier3D(Classifier):
    """Classifier for mode 3d only."""

    mode = "3d"


class Dropout1D(Dropout):
    """Dropout for mode 1d only."""

    mode = "1d"


class Dropout2D(Dropout):
    """Dropout for mode 2d only."""

    mode = "2d"


class Dropout2p5D(Dropout):
    """Dropout for mode 2.5d only."""

    mode = "2.5d"


class Dropout3D(Dropout):
    """Dropout for mode 3d only."""

    mode = "3d"


class CrossEntropyLoss1D(CrossEntropyLoss):
    """CrossEntropyLoss for mode 1d only."""

    mode = "1d"


class CrossEntropyLoss2D(CrossEntropyLoss):
    """CrossEntropyLoss for mode 2d only."""

    mode = "2d"


class CrossEntropyLoss2p5D(CrossEntropyLoss):
    """CrossEntropyLoss for mode 2.5d only."""

    mode = "2.5d"


class CrossEntropyLoss3D(CrossEntropyLoss):
    """CrossEntropyLoss for mode 3d only."""

    mode = "3d"
