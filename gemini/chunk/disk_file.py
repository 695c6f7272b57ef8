"""The file of the DISK tier."""

from __future__ import annotations

from gemini.chunk.budgets import TierBudgets
from gemini.offload.async_file import AsyncFile


def open_disk_file(budgets: TierBudgets, file_bytes: int) -> AsyncFile | None:
    """Make the file, of ``file_bytes``, in which every chunk has a place; None where there is no DISK tier.

    Raises:
        IoError: the directory is missing, read-only or too small.
    """
    if budgets.disk_dir is None or budgets.disk_bytes == 0:
        return None
    # With a smaller budget each chunk still has its place; only what the table admits takes disk space.
    reserve = not budgets.spare_disk_bytes and budgets.disk_bytes >= file_bytes
    return AsyncFile(budgets.disk_dir, file_bytes, reserve=reserve)
