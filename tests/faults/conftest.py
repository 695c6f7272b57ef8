"""Shared by the fault tests: one thread, and where to look for what a process leaves behind."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Keep tiny operators from being spread over threads: on a busy machine that costs seconds."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
