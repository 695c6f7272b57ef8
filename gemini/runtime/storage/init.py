"""Building a model without ever holding it whole."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def init_on(device: str | torch.device = "meta", dtype: torch.dtype | None = None) -> Iterator[None]:
    """Create parameters on ``device`` with ``dtype`` (None: torch's default) inside the block.

    On ``"meta"`` a model costs no memory; wrapping it in ``GeminiDDP`` then initializes it submodule by
    submodule, straight into chunks, through each submodule's ``reset_parameters()`` and, for models of
    transformers, their ``_init_weights()``. Weights that these leave out have to be loaded, or written to,
    before the model can be used.
    """
    before = torch.get_default_dtype()
    if dtype is not None:
        torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            yield
    finally:
        torch.set_default_dtype(before)
