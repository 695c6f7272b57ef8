"""Nested values, as optimizers keep them, compared bit for bit."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def assert_same(got: Any, want: Any, path: str = "") -> None:
    """Fail where ``got`` differs from ``want``, with the path of what does."""
    if isinstance(want, dict):
        assert got.keys() == want.keys(), path
        for key, value in want.items():
            assert_same(got[key], value, f"{path}/{key}")
    elif isinstance(want, (list, tuple)):
        assert len(got) == len(want), path
        for index, (one, other) in enumerate(zip(got, want, strict=True)):
            assert_same(one, other, f"{path}/{index}")
    elif isinstance(want, Tensor):
        assert torch.equal(got, want), path
    else:
        assert got == want, path
