"""Laws of windows, arenas and the transfer engine, as Python and torch see them."""

from __future__ import annotations

import gc
import math
import os
import pickle
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from gemini import _C
from gemini.errors import OutOfBudgetError, StateError

MIB = 2**20


@dataclass(frozen=True)
class Memory:
    """A window space and an arena of the same size."""

    space: _C.WindowSpace
    arena: _C.Arena

    def tensor(self, window: _C.Window) -> torch.Tensor:
        """Return the window's bytes as float32."""
        return torch.frombuffer(window, dtype=torch.float32)


@pytest.fixture
def memory() -> Memory:
    _C.take_stray()
    return Memory(_C.WindowSpace(32 * MIB), _C.Arena(8 * MIB))


def test_tensor_of_a_window_is_writable_and_keeps_its_address(memory: Memory) -> None:
    window = memory.space.create(2 * MIB)
    tensor = memory.tensor(window)
    for park in (True, False):
        memory.arena.map(window, zero=True)
        assert tensor.data_ptr() == window.address
        assert tensor.nbytes == window.nbytes
        assert torch.equal(tensor, torch.zeros_like(tensor))
        tensor.fill_(3.0)
        assert tensor.sum().item() == 3.0 * tensor.numel()
        memory.arena.unmap(window, park=park)


def test_view_keeps_space_and_memory_alive() -> None:
    gc.collect()  # windows of earlier tests
    before = _C.arena_process_bytes()
    space, arena = _C.WindowSpace(MIB), _C.Arena(MIB)
    window = space.create(MIB)
    arena.map(window, zero=True)
    view = torch.frombuffer(window, dtype=torch.float32).view(512, -1).t()
    del space, arena, window
    gc.collect()
    view.fill_(1.0)
    assert view.sum().item() == view.numel()
    assert _C.arena_process_bytes() == before + MIB
    del view
    gc.collect()
    assert _C.arena_process_bytes() == before


def test_stray_read_is_nan_and_is_reported_once(memory: Memory) -> None:
    window = memory.space.create(MIB)
    tensor = memory.tensor(window)
    strays = _C.stray_count()
    assert math.isnan(tensor.sum().item())
    assert _C.stray_count() > strays
    address = _C.take_stray()
    assert address is not None
    assert memory.space.find(address) == 0
    assert _C.take_stray() is None


def test_mapping_and_healing_remove_poison(memory: Memory) -> None:
    window = memory.space.create(MIB)
    tensor = memory.tensor(window)
    tensor.add_(1.0)  # lost
    memory.arena.map(window, zero=True)
    assert not tensor.any()
    memory.arena.unmap(window, park=False)
    assert math.isnan(tensor[0].item())
    assert memory.space.heal() == 1
    assert memory.space.heal() == 0


def test_autograd_of_a_transposed_view_survives_an_eviction(memory: Memory) -> None:
    plain = torch.randn(64, 64)
    rows = torch.randn(8, 64)
    window = memory.space.create(plain.nbytes)
    other = memory.space.create(plain.nbytes)
    memory.arena.map(window)
    weight = memory.tensor(window).view(64, 64).requires_grad_()
    weight.detach().copy_(plain)
    source = rows.clone().requires_grad_()
    loss = torch.nn.functional.linear(source, weight).square().sum()
    saved = plain.clone()
    memory.arena.unmap(window)
    memory.arena.map(other)  # takes the block
    memory.tensor(other).fill_(9.0)
    memory.arena.unmap(other)
    memory.arena.map(window)
    _copy_raw(window, saved)
    loss.backward()
    reference = rows.clone().requires_grad_()
    expected = plain.clone().requires_grad_()
    torch.nn.functional.linear(reference, expected).square().sum().backward()
    assert torch.equal(source.grad, reference.grad)
    assert torch.equal(weight.grad, expected.grad)


def _copy_raw(window: _C.Window, data: torch.Tensor) -> None:
    """Copy without autograd noticing, as a fetch does."""
    engine = _C.TransferEngine()
    engine.copy(window.address, data.data_ptr(), data.nbytes, _C.Link.H2D)
    engine.drain()
    assert [done.ok for done in engine.poll()] == [True]


def test_arena_refuses_what_does_not_fit_and_changes_nothing(memory: Memory) -> None:
    held, refused = memory.space.create(6 * MIB), memory.space.create(4 * MIB)
    memory.arena.map(held)
    with pytest.raises(OutOfBudgetError, match=r"4\.0 MiB does not fit"):
        memory.arena.map(refused)
    with pytest.raises(StateError):
        memory.arena.map(held)
    with pytest.raises(StateError):
        memory.arena.unmap(refused)
    assert (memory.arena.mapped_bytes, memory.arena.parked_bytes) == (6 * MIB, 0)
    assert (held.mapped, refused.mapped) == (True, False)
    assert memory.arena.peak_bytes == 6 * MIB <= memory.arena.capacity


def test_trim_returns_parked_memory(memory: Memory) -> None:
    window = memory.space.create(4 * MIB)
    memory.arena.map(window)
    memory.arena.unmap(window)
    assert memory.arena.parked_bytes == 4 * MIB
    memory.arena.trim()
    assert memory.arena.parked_bytes == 0


def test_debug_level_3_poisons_what_is_parked() -> None:
    script = """
import torch
from gemini import _C
space, arena = _C.WindowSpace(2**20), _C.Arena(2**20)
first, second = space.create(2**18), space.create(2**18)
arena.map(first, zero=True)
arena.unmap(first)
arena.map(second)
tensor = torch.frombuffer(second, dtype=torch.float32)
assert tensor.isnan().all(), tensor
assert _C.stray_count() == 0
"""
    subprocess.run([sys.executable, "-c", script], check=True, env={**os.environ, "GEMINI_DEBUG": "3"})


def test_data_loader_worker_neither_crashes_nor_doubles_memory(memory: Memory) -> None:
    window = memory.space.create(MIB)
    memory.arena.map(window, zero=True)
    tensor = memory.tensor(window)
    engine = _C.TransferEngine()
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            value = tensor[0].item()
            refused = False
            try:
                engine.poll()
            except StateError:
                refused = True
            os.write(writer, pickle.dumps((math.isnan(value), window.mapped, refused)))
            code = 0
        finally:
            os._exit(code)
    assert os.waitpid(child, 0)[1] == 0
    assert pickle.loads(os.read(reader, 1000)) == (True, False, True)
    assert tensor[0].item() == 0.0
    os.close(reader)
    os.close(writer)


def test_bytes_survive_the_disk_while_windows_share_one_block(memory: Memory, tmp_path: Path) -> None:
    nbytes, count = 3 * MIB, 4
    space, arena = _C.WindowSpace(count * nbytes), _C.Arena(nbytes)
    engine = _C.TransferEngine(_C.AsyncFile([str(tmp_path)], count * nbytes))
    windows = [space.create(nbytes) for _ in range(count)]
    for index, window in enumerate(windows):
        arena.map(window)
        memory.tensor(window).copy_(torch.arange(nbytes // 4) * (index + 1))
        engine.write(window.address, nbytes, index * nbytes)
        engine.drain()
        arena.unmap(window)
    for index, window in reversed(list(enumerate(windows))):
        arena.map(window)
        engine.read(window.address, nbytes, index * nbytes)
        engine.drain()
        assert torch.equal(memory.tensor(window), (torch.arange(nbytes // 4) * (index + 1)).float())
        arena.unmap(window)
    assert all(done.ok for done in engine.poll())
    assert engine.stats()["disk_read"]["bytes"] == count * nbytes
    assert arena.peak_bytes == nbytes


def test_engine_reports_each_outcome_once_and_refuses_misuse() -> None:
    engine = _C.TransferEngine()
    source, target = torch.arange(1000.0), torch.zeros(1000)
    ticket = engine.copy(target.data_ptr(), source.data_ptr(), source.nbytes, _C.Link.D2H)
    assert engine.wait_any(60.0)
    assert [(done.ticket, done.ok, done.errno) for done in engine.poll()] == [(ticket, True, 0)]
    assert engine.poll() == []
    assert not engine.wait_any()
    assert torch.equal(source, target)
    with pytest.raises(StateError, match="DISK"):
        engine.read(target.data_ptr(), 4096, 0)
    engine.close()
    with pytest.raises(StateError, match="closed"):
        engine.copy(target.data_ptr(), source.data_ptr(), 4, _C.Link.D2H)
    assert set(engine.stats()) == {"h2d", "d2h", "disk_read", "disk_write"}
    assert engine.stats()["d2h"]["bytes"] == source.nbytes
