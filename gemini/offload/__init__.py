"""Files below memory: asynchronous reads and writes, and tensors offloaded to disk."""

from __future__ import annotations

from gemini.offload.async_file import AsyncFile
from gemini.offload.disk_offloader import DiskOffloader

__all__ = ["AsyncFile", "DiskOffloader"]
