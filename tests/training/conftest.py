"""Settings of the training tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def _quick(one_thread: None, short_searches: None) -> None:
    """Every test here."""


@pytest.fixture
def fresh_compiler() -> Iterator[None]:
    """Have torch.compile know nothing of other tests."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()
