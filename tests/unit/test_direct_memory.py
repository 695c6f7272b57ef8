"""Memory for O_DIRECT: where it lies, and what a fork leaves of it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from gemini.offload import async_file as async_file_module
from gemini.offload.async_file import HUGE_PAGE_BYTES, direct_memory

MIB = 2**20


@pytest.mark.parametrize("nbytes", [1, 4096, 2 * MIB, 3 * MIB + 4096])
def test_memory_is_zero_and_begins_with_a_huge_page(nbytes: int) -> None:
    memory = direct_memory(nbytes)
    assert memory.data_ptr() % HUGE_PAGE_BYTES == 0
    assert torch.equal(memory, torch.zeros(nbytes, dtype=torch.uint8))


def test_system_is_asked_for_huge_pages() -> None:
    memory = direct_memory(4 * MIB)
    flags: list[str] = []
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first, _, last = line.split(" ", 1)[0].partition("-")
        if last:
            inside = int(first, 16) <= memory.data_ptr() < int(last, 16)
        elif inside and line.startswith("VmFlags:"):
            flags = line.split()[1:]
    assert {"hg", "wf"} <= set(flags)  # huge pages; wiped in a forked child


def seen_by_child(memory: torch.Tensor, then: int) -> int:
    """Return the largest byte that a forked child has in ``memory``, which it then fills with ``then``."""
    child = os.fork()
    if child == 0:
        seen = int(memory.max())
        memory.fill_(then)
        del memory
        os._exit(seen)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def test_forked_child_has_pages_of_its_own_from_the_start() -> None:
    memory = direct_memory(4096).fill_(1)
    assert seen_by_child(memory, then=3) == 0
    assert torch.equal(memory, torch.ones_like(memory))


def test_older_kernel_shares_the_pages_instead_of_copying_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(async_file_module, "_MADV_WIPEONFORK", -1)  # not known there
    memory = direct_memory(4096).fill_(1)
    assert seen_by_child(memory, then=3) == 1
    assert torch.equal(memory, torch.full_like(memory, 3))
