"""Adam with states in a file whose reads and writes fail; test_adam_faults.py runs this with fault_shim.c."""

from __future__ import annotations

import copy
import errno
import functools
import itertools
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from injected_faults import END_OF_FILE, SHORT, Faults, assert_says_where, attempt, open_files

from gemini.errors import IoError, StateError
from gemini.optim import CPUAdam
from gemini.optim import disk_states as disk_states_module
from gemini.optim.disk_states import lay_out

SIZES = [(3000,), (70, 130), (5,), (4000,)]
CASES = [
    ("read", errno.EIO, errno.EIO),
    ("write", errno.EIO, errno.EIO),
    ("write", errno.ENOSPC, errno.ENOSPC),
    ("read", END_OF_FILE, errno.EIO),
]


@pytest.fixture
def faults() -> Iterator[Faults]:
    shim = Faults()
    yield shim
    shim.disarm()


@pytest.fixture(autouse=True)
def small_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk_states_module, "lay_out", functools.partial(lay_out, batch_bytes=4096))


def test_the_threads_do_the_transfers() -> None:
    """The shim sees system calls, not what a ring in the kernel does."""
    assert os.environ["GEMINI_IO_BACKEND"] == "threads"


def make(directory: Path, fraction: float = 1.0) -> tuple[list[torch.Tensor], CPUAdam]:
    source = torch.Generator().manual_seed(0)
    params = [torch.randn(size, generator=source).requires_grad_() for size in SIZES]
    return params, CPUAdam(params, lr=0.01, nvme_offload_fraction=fraction, nvme_offload_dir=directory)


def steps(params: list[torch.Tensor], optimizer: CPUAdam, start: int, stop: int) -> None:
    for step in range(start, stop):
        source = torch.Generator().manual_seed(100 + step)
        for param in params:
            param.grad = torch.randn(param.shape, generator=source)
        optimizer.step()


def undisturbed(directory: Path, count: int) -> list[torch.Tensor]:
    params, optimizer = make(directory, 0.0)
    steps(params, optimizer, 0, count)
    return params


def assert_equal(got: list[torch.Tensor], want: list[torch.Tensor]) -> None:
    assert all(itertools.starmap(torch.equal, zip(got, want, strict=True)))


def restore(params: list[torch.Tensor], optimizer: CPUAdam, saved: tuple[list[torch.Tensor], dict]) -> None:
    with torch.no_grad():
        for param, value in zip(params, saved[0], strict=True):
            param.copy_(value)
    optimizer.load_state_dict(saved[1])


@pytest.mark.parametrize("fraction", [0.6, 1.0])
@pytest.mark.parametrize(("operation", "what", "code"), CASES)
def test_any_failed_transfer_is_typed_and_the_last_checkpoint_continues_exactly(
    tmp_path: Path, faults: Faults, fraction: float, operation: str, what: int, code: int
) -> None:
    want = undisturbed(tmp_path, 5)
    params, optimizer = make(tmp_path, fraction)
    steps(params, optimizer, 0, 2)
    saved = copy.deepcopy((params, optimizer.state_dict()))

    trained: list[int] = []

    def go_on() -> None:
        steps(params, optimizer, 2, 5)
        trained.append(5)
        optimizer.state_dict()

    for before in itertools.count():
        trained.clear()
        optimizer.state_dict()  # ends what is under way
        error = attempt(faults, go_on, operation, what, before)
        if error is None:
            break
        assert_says_where(error, tmp_path, code)
        if trained and operation == "read":
            optimizer.state_dict()  # only this had failed: it can be repeated
        else:
            with pytest.raises(StateError, match="load a checkpoint"):
                optimizer.step()
        restore(params, optimizer, saved)
    assert_equal(params, want)
    assert before > 3 * 15
    assert len([link for link in open_files() if link.startswith(str(tmp_path))]) == 1


@pytest.mark.parametrize("operation", ["read", "write"])
@pytest.mark.parametrize("what", [SHORT, errno.EINTR, errno.EAGAIN])
def test_what_can_be_repeated_is_not_an_error(
    tmp_path: Path, faults: Faults, operation: str, what: int
) -> None:
    params, optimizer = make(tmp_path)
    steps(params, optimizer, 0, 1)
    faults.arm(operation, what, before=2, times=40)
    steps(params, optimizer, 1, 5)
    assert faults.disarm() == 40
    assert_equal(params, undisturbed(tmp_path, 5))


def test_failed_first_step_can_start_anew(tmp_path: Path, faults: Faults) -> None:
    params, optimizer = make(tmp_path)
    saved = copy.deepcopy((params, optimizer.state_dict()))
    faults.arm("write", errno.ENOSPC, before=5)
    with pytest.raises(IoError):
        steps(params, optimizer, 0, 2)
    faults.disarm()
    restore(params, optimizer, saved)
    steps(params, optimizer, 0, 3)
    assert_equal(params, undisturbed(tmp_path, 3))
