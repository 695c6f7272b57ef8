"""Weights on their way from files into chunks: read once, written once, one while the other is under way."""

from __future__ import annotations

import errno
import threading
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from late_engine import LateEngine, LateResult
from safetensors.torch import save_file
from torch import nn

import gemini
from gemini import _C
from gemini.chunk.cpu_memory import CpuMemory
from gemini.errors import CheckpointError, IoError
from gemini.integrations.safetensors_files import StoredTensor, TensorReads
from gemini.integrations.stored_weights import StoredWeights

KIB = 2**10


@pytest.fixture(autouse=True)
def copied(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have weights copied that could stay in their files, as on a GPU, over ranks, or with masters."""
    monkeypatch.setattr(StoredWeights, "of", lambda *_: None)


class Scaled(nn.Module):
    """Has a buffer that no file holds, which ``reset_parameters`` computes, and one that files hold."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(48, 48))
        self.register_buffer("angles", torch.empty(48), persistent=False)
        self.register_buffer("seen", torch.empty(5))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialize as constructors do."""
        nn.init.normal_(self.weight)
        with torch.no_grad():
            self.angles.copy_(torch.arange(48.0))
            self.seen.zero_()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return ``x`` turned."""
        return x @ self.weight + self.angles


def stack() -> nn.Module:
    return nn.Sequential(*(nn.Linear(48, 48) for _ in range(11)), Scaled(), nn.BatchNorm1d(48))


def saved(directory: Path) -> dict[str, torch.Tensor]:
    torch.manual_seed(3)
    state = {
        name: torch.rand_like(value.float()).to(value.dtype) for name, value in stack().state_dict().items()
    }
    save_file(state, directory / "model.safetensors")
    return state


def load(directory: Path, device_kib: int = 40, **options: Any) -> nn.Module:
    options = {"non_model_bytes": 0, "disk_dir": str(directory), **options}
    module: nn.Module = gemini.from_pretrained(directory, stack, device_bytes=device_kib * KIB, **options)
    return module


@pytest.mark.parametrize("late", [None, 1])
@pytest.mark.parametrize(
    ("device_kib", "host_kib", "precision"), [(40, 0, None), (64, 32, None), (40, 0, "bf16"), (900, 0, None)]
)
def test_budgets_and_late_transfers_never_change_what_was_loaded(
    device_kib: int,
    host_kib: int,
    precision: str | None,
    late: int | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    want = saved(tmp_path)
    if late is not None:
        monkeypatch.setattr(_C, "TransferEngine", partial(LateEngine, seed=late))
    model = load(tmp_path, device_kib, host_bytes=host_kib * KIB, mixed_precision=precision)
    handle = gemini.handle_of(model)
    stats = handle.stats()
    got = handle.state_dict()
    handle.manager.chunks.table.check_invariants()
    assert all(torch.equal(got[name], value) for name, value in want.items())
    assert torch.equal(model[11].angles, torch.arange(48.0))
    assert stats["device"]["peak_bytes"] <= device_kib * KIB
    assert stats["host"]["peak_bytes"] <= host_kib * KIB


def test_each_value_is_read_once_and_leaves_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    want = saved(tmp_path)
    read, names = StoredTensor.read, []

    def noted(tensor: StoredTensor, memory: torch.UntypedStorage | None = None) -> torch.Tensor:
        names.append(tensor.name)
        return read(tensor, memory)

    monkeypatch.setattr(StoredTensor, "read", noted)
    stats = gemini.handle_of(load(tmp_path)).stats()
    linear = [name for name in want if not name.startswith("12.")]  # BatchNorm looks at its values first
    assert sorted(name for name in names if name in linear) == sorted(linear)
    assert stats["disk_read"]["bytes"] == 0
    assert 0 < stats["disk_write"]["bytes"] <= stats["model_data_bytes"]


def test_a_model_that_fits_leaves_nothing(tmp_path: Path) -> None:
    saved(tmp_path)
    stats = gemini.handle_of(load(tmp_path, 900)).stats()
    assert stats["disk_write"]["bytes"] == 0


def test_a_write_returns_while_chunks_are_leaving(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved(tmp_path)
    seen: list[int] = []
    take = TensorReads.take

    def watched(reads: TensorReads, tensor: StoredTensor) -> torch.Tensor:
        seen.append(len(manager[0].chunks._in_flight) if manager else 0)
        return take(reads, tensor)

    manager: list[Any] = []
    begin = gemini.runtime.growth.Filling.__init__
    monkeypatch.setattr(TensorReads, "take", watched)
    monkeypatch.setattr(
        gemini.runtime.growth.Filling,
        "__init__",
        lambda self, storage, held: (manager.append(held), begin(self, storage, held))[1],
    )
    load(tmp_path, 80)
    assert max(seen) > 0


@pytest.mark.parametrize("fails_at", [1, 2, 5])
def test_a_disk_that_fills_up_ends_the_load_and_leaves_nothing_behind(
    fails_at: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved(tmp_path)
    before, threads = set(tmp_path.iterdir()), threading.active_count()
    poll, seen = CpuMemory.poll, [0]

    def failing(memory: CpuMemory) -> list[Any]:
        results: list[Any] = poll(memory)
        for place, result in enumerate(results):
            seen[0] += 1
            if seen[0] == fails_at:
                message = "no space left on the disk"
                results[place] = LateResult(result.ticket, False, errno.ENOSPC, "disk", 0, message, 0.0, 0.0)
        return results

    monkeypatch.setattr(CpuMemory, "poll", failing)
    with pytest.raises(IoError, match="no space left") as caught:
        load(tmp_path)
    assert caught.value.errno == errno.ENOSPC
    assert set(tmp_path.iterdir()) == before
    assert threading.active_count() == threads
    monkeypatch.undo()
    assert load(tmp_path)


def test_a_file_that_shrinks_while_it_is_read_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved(tmp_path)
    file, read, threads = tmp_path / "model.safetensors", StoredTensor.read, threading.active_count()

    def cutting(tensor: StoredTensor, memory: torch.UntypedStorage | None = None) -> torch.Tensor:
        if tensor.name == "4.weight":
            file.write_bytes(file.read_bytes()[:1000])
        return read(tensor, memory)

    monkeypatch.setattr(StoredTensor, "read", cutting)
    with pytest.raises(CheckpointError, match="ends within"):
        load(tmp_path)
    assert threading.active_count() == threads


# -- reading ahead -----------------------------------------------------------------------------------


@dataclass
class Stored:
    """A tensor of bytes that says who read it."""

    name: str
    nbytes: int
    error: Exception | None = None
    threads: list[int] = field(default_factory=list)

    def read(self, memory: torch.UntypedStorage | None = None) -> torch.Tensor:
        """Return as many bytes, in ``memory`` if there is some."""
        self.threads.append(threading.get_ident())
        if self.error is not None:
            raise self.error
        if memory is None:
            memory = torch.UntypedStorage(self.nbytes)
        assert memory.nbytes() == self.nbytes
        return torch.empty(0, dtype=torch.uint8).set_(memory).fill_(int(self.name))


def waiting_bytes(reads: TensorReads) -> int:
    return sum(read.nbytes for read in reads._ahead.values())


@pytest.mark.parametrize("sizes", [(9, 2, 3, 4, 1, 9, 2), (5, 5, 5), (1, 1, 20, 1, 1), (0, 4, 0), ()])
def test_what_is_read_ahead_takes_no_more_than_the_largest(sizes: tuple[int, ...]) -> None:
    order = [Stored(str(place), nbytes) for place, nbytes in enumerate(sizes)]
    reads = TensorReads()
    reads.expect(order)
    for tensor in order:
        assert reads.take(tensor).tolist() == [int(tensor.name)] * tensor.nbytes
        assert waiting_bytes(reads) + tensor.nbytes <= max(sizes)
    reads.close()
    assert all(len(tensor.threads) == 1 for tensor in order)


def test_small_tensors_behind_a_large_one_are_read_on_another_thread() -> None:
    order = [Stored(str(place), nbytes) for place, nbytes in enumerate((8, 1, 1, 1))]
    reads = TensorReads()
    reads.expect(order)
    for tensor in order:
        reads.take(tensor)
    reads.close()
    assert order[3].threads != [threading.get_ident()]


def test_the_system_is_given_back_what_was_freed(monkeypatch: pytest.MonkeyPatch) -> None:
    trims: list[int] = []
    monkeypatch.setattr(_C, "malloc_trim", lambda: trims.append(threading.get_ident()))
    monkeypatch.setattr("gemini.integrations.safetensors_files._MOST_FREED_BYTES", 10)
    order = [Stored(str(place), 10 - place % 2) for place in range(6)]  # beside one is no room for another
    reads = TensorReads()
    reads.expect(order)
    for tensor in order:
        reads.reusable.append(reads.take(tensor))
    reads.close()
    assert len(trims) == 3 + 1  # of 10 bytes, twice of 9 and 10, and at the end
    assert threading.get_ident() not in trims[:3]  # beside the copies into chunks


def test_memory_of_what_is_spent_is_used_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gemini.integrations.safetensors_files._MOST_AHEAD_BYTES", 3)
    sizes = [9, *([2, 3, 1] * 5)]
    order = [Stored(str(place), nbytes) for place, nbytes in enumerate(sizes)]
    reads = TensorReads()
    reads.expect(order)
    seen: set[int] = set()
    for place, tensor in enumerate(order):
        values = reads.take(tensor)
        assert values.tolist() == [place] * tensor.nbytes
        seen.add(values.data_ptr())
        reads.reusable.append(values)
    reads.close()
    assert len(seen) < len(order) / 2


@given(
    sizes=st.lists(st.integers(0, 9), max_size=40),
    keeps=st.lists(st.booleans(), min_size=40, max_size=40),
)
def test_what_a_caller_keeps_is_never_written_to(sizes: list[int], keeps: list[bool]) -> None:
    order = [Stored(str(place), nbytes) for place, nbytes in enumerate(sizes)]
    reads = TensorReads()
    reads.expect(order)
    kept: list[torch.Tensor] = []
    for tensor, keeps_it in zip(order, keeps, strict=False):
        values = reads.take(tensor)
        assert waiting_bytes(reads) + tensor.nbytes + reads._spare._nbytes <= max(sizes)
        assert values.tolist() == [int(tensor.name)] * tensor.nbytes
        if keeps_it:
            kept.append(values)
        else:
            reads.reusable.append(values)
    reads.close()
    names = [int(tensor.name) for tensor, keeps_it in zip(order, keeps, strict=False) if keeps_it]
    for name, values in zip(names, kept, strict=True):
        assert set(values.tolist()) <= {name}


def test_another_order_than_expected_gives_the_same_values() -> None:
    order = [Stored(str(place), 1 + place % 3) for place in range(12)]
    reads = TensorReads()
    reads.expect(order)
    asked = [*order[::-2], *order[0::3], *order, Stored("77", 2)]
    assert [reads.take(tensor)[0].item() for tensor in asked] == [int(tensor.name) for tensor in asked]
    reads.close()


def test_an_error_of_reading_is_raised_where_the_tensor_is_asked_for() -> None:
    order = [Stored("0", 9), Stored("1", 1), Stored("2", 1, CheckpointError("damaged")), Stored("3", 1)]
    reads = TensorReads()
    reads.expect(order)
    for tensor in (*order[:2], order[3]):
        reads.take(tensor)
    with pytest.raises(CheckpointError, match="damaged"):
        reads.take(order[2])
    reads.close()
    reads.close()
