"""Tests that need reads and writes to fail; test_injected_faults.py runs them with fault_shim.c loaded."""

from __future__ import annotations

import ctypes
import errno
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from fault_training import (
    KIB,
    adam,
    assert_sound,
    assert_weights,
    build,
    loss_of,
    managed,
    train_step,
    undisturbed,
    weights,
)
from torch import nn

import gemini
from gemini import checkpoint
from gemini.errors import IoError

SHORT, END_OF_FILE = -1, -2
FOREVER = 2**40


class Faults:
    """Orders faults from the shim."""

    def __init__(self) -> None:
        self._shim = ctypes.CDLL(os.environ["GEMINI_FAULT_SHIM"])
        self._shim.fault_arm.argtypes = [ctypes.c_int, ctypes.c_long, ctypes.c_long, ctypes.c_int]
        self._shim.fault_hits.restype = ctypes.c_long

    def arm(self, operation: str, what: int, *, before: int = 0, times: int = 1) -> None:
        """Let ``before`` reads or writes pass and ``times`` fail with errno ``what``."""
        self.disarm()
        self._shim.fault_arm(operation == "write", before, times, what)

    def disarm(self) -> int:
        """Stop; return how many faults there were since the last arming."""
        hits = int(self._shim.fault_hits())
        self._shim.fault_arm(0, 0, 0, 0)
        self._shim.fault_arm(1, 0, 0, 0)
        return hits


@pytest.fixture
def faults() -> Iterator[Faults]:
    shim = Faults()
    yield shim
    shim.disarm()


def attempt(
    faults: Faults, action: Callable[[], Any], operation: str, what: int, before: int
) -> IoError | None:
    """Run ``action`` with one fault; return its error, or None when the fault was never reached."""
    faults.arm(operation, what, before=before)
    try:
        action()
    except IoError as error:
        assert faults.disarm() == 1
        return error
    assert faults.disarm() == 0, "a fault was swallowed"
    return None


def settled(model: gemini.GeminiDDP, action: Callable[[], Any]) -> Callable[[], None]:
    """Return ``action`` followed by the end of what it started ahead: a prefetch that fails is raised
    then."""

    def run() -> None:
        action()
        model.manager.chunks.drain()

    return run


def open_files() -> list[str]:
    """Return what the descriptors of this process point to."""
    links = Path("/proc/self/fd").iterdir()
    return [str(link.readlink()) for link in links if os.path.lexists(link)]


def assert_says_where(error: IoError, directory: Path, code: int) -> None:
    assert error.errno == code
    assert str(error.filename).startswith(str(directory))
    assert error.offset % 4096 == 0
    assert os.strerror(code) in str(error)


CASES = [
    ("read", errno.EIO, errno.EIO),
    ("write", errno.EIO, errno.EIO),
    ("write", errno.ENOSPC, errno.ENOSPC),
    ("read", END_OF_FILE, errno.EIO),
]
PLACES: list[dict[str, Any]] = [
    {},
    {"host_bytes": 48 * KIB},
    {"mixed_precision": "bf16"},
]


@pytest.mark.parametrize("options", PLACES, ids=["disk", "host", "bf16"])
@pytest.mark.parametrize(("operation", "what", "code"), CASES)
def test_a_step_that_failed_before_its_update_can_be_repeated(
    tmp_path: Path, faults: Faults, options: dict[str, Any], operation: str, what: int, code: int
) -> None:
    """Forward and backward: any one failing transfer leaves everything as it was before the step."""
    want_losses, want = undisturbed(3, mixed_precision=options.get("mixed_precision"))
    model = managed(tmp_path, **options)
    optimizer = adam(model)
    losses = [train_step(model, optimizer, 0)]
    for before in range(1000):
        forward_and_backward = lambda: optimizer.backward(loss_of(model, 1))  # noqa: E731
        error = attempt(faults, settled(model, forward_and_backward), operation, what, before)
        assert_sound(model)
        optimizer.zero_grad()
        if error is None:
            break
        assert_says_where(error, tmp_path, code)
    assert before > (0 if options.get("mixed_precision") else 3)
    losses += [train_step(model, optimizer, step) for step in (1, 2)]
    assert losses == want_losses
    assert_weights(weights(model), want)


@pytest.mark.parametrize(("operation", "what", "code"), CASES[:2])
def test_after_a_failed_update_the_checkpoint_continues_exactly(
    tmp_path: Path, faults: Faults, operation: str, what: int, code: int
) -> None:
    """A parameter whose update was done stays updated; the last checkpoint makes it exact again."""
    want_losses, want = undisturbed(3)
    model = managed(tmp_path)
    optimizer = adam(model, overlap=False)
    train_step(model, optimizer, 0)
    checkpoint.save(tmp_path / "run", model, optimizer)
    for before in range(1000):
        optimizer.backward(loss_of(model, 1))
        error = attempt(faults, settled(model, optimizer.step), operation, what, before)
        assert_sound(model)
        checkpoint.load(tmp_path / "run", model, optimizer)
        if error is None:
            break
        assert_says_where(error, tmp_path, code)
    assert before > 3
    assert [train_step(model, optimizer, step) for step in (1, 2)] == want_losses[1:]
    assert_weights(weights(model), want)


@pytest.mark.parametrize("options", PLACES, ids=["disk", "host", "bf16"])
@pytest.mark.parametrize(("operation", "what", "code"), CASES[:3])
def test_a_pending_update_that_failed_is_done_later(
    tmp_path: Path, faults: Faults, options: dict[str, Any], operation: str, what: int, code: int
) -> None:
    """Any one failing transfer, of whatever the update was left to: what is left of it is done next time. In
    one run another transfer fails at each step, and each step begins with what the one before it left."""
    undisturbed = gemini.GeminiDDP(build(), mixed_precision=options.get("mixed_precision"))
    model = managed(tmp_path, **options)
    optimizers = adam(model), adam(undisturbed)

    def take(step: int) -> None:
        loss, want = (
            train_step(one, own, step) for one, own in zip((model, undisturbed), optimizers, strict=True)
        )
        assert loss == want, f"step {step}"

    take(0)
    take(1)
    for before in range(1000):
        assert model.stats()["pending_updates"] > 0
        error = attempt(faults, settled(model, lambda: loss_of(model, before + 2)), operation, what, before)  # noqa: B023
        assert_sound(model)
        optimizers[0].zero_grad()
        take(before + 2)
        if error is None:
            break
        assert_says_where(error, tmp_path, code)
    assert before > 3
    assert_weights(weights(model), weights(undisturbed))


@pytest.mark.parametrize("operation", ["read", "write"])
@pytest.mark.parametrize("what", [SHORT, errno.EINTR, errno.EAGAIN])
def test_what_can_be_repeated_is_not_an_error(
    tmp_path: Path, faults: Faults, operation: str, what: int
) -> None:
    want_losses, want = undisturbed(3)
    model = managed(tmp_path)
    optimizer = adam(model)
    faults.arm(operation, what, before=2, times=40)
    losses = [train_step(model, optimizer, step) for step in range(3)]
    assert faults.disarm() == 40
    assert losses == want_losses
    assert_weights(weights(model), want)


def test_a_disk_that_is_gone_for_a_while(tmp_path: Path, faults: Faults) -> None:
    want_losses, want = undisturbed(3)
    model = managed(tmp_path)
    optimizer = adam(model)
    losses = [train_step(model, optimizer, 0)]
    for operation in ("read", "write"):
        faults.arm(operation, errno.EIO, before=3, times=FOREVER)
        for _ in range(3):
            with pytest.raises(IoError):
                optimizer.backward(loss_of(model, 1))
            with pytest.raises(IoError):
                model.state_dict()
        faults.disarm()
        assert_sound(model)
        optimizer.zero_grad()
    losses += [train_step(model, optimizer, step) for step in (1, 2)]
    assert losses == want_losses
    assert_weights(weights(model), want)


@pytest.mark.parametrize("operation", ["read", "write"])
def test_a_chunk_that_cannot_be_saved_leaves_the_last_checkpoint(
    tmp_path: Path, faults: Faults, operation: str
) -> None:
    want_losses, want = undisturbed(4)
    model = managed(tmp_path)
    optimizer = adam(model)
    train_step(model, optimizer, 0)
    first = checkpoint.save(tmp_path / "run", model, optimizer)
    train_step(model, optimizer, 1)
    save = lambda: checkpoint.save(tmp_path / "run", model, optimizer)  # noqa: E731
    for before in range(1000):
        error = attempt(faults, save, operation, errno.EIO, before)
        assert_sound(model)
        if error is None:
            break
        assert_says_where(error, tmp_path, errno.EIO)
        assert "unlinked" in str(error.filename)  # the chunk's file, not the checkpoint's
        assert {file.name for file in (tmp_path / "run").iterdir()} == {first.name}
    assert before > (3 if operation == "read" else -1)
    model_2 = managed(tmp_path)
    optimizer_2 = adam(model_2)
    checkpoint.load(tmp_path / "run", model_2, optimizer_2)
    assert [train_step(model_2, optimizer_2, step) for step in (2, 3)] == want_losses[2:]
    assert_weights(weights(model_2), want)


@pytest.mark.parametrize("operation", ["read", "write"])
def test_a_load_that_failed_can_be_repeated(tmp_path: Path, faults: Faults, operation: str) -> None:
    want_losses, want = undisturbed(3)
    model = managed(tmp_path)
    optimizer = adam(model)
    train_step(model, optimizer, 0)
    checkpoint.save(tmp_path / "run", model, optimizer)
    train_step(model, optimizer, 5)
    load = lambda: checkpoint.load(tmp_path / "run", model, optimizer)  # noqa: E731
    for before in range(1000):
        error = attempt(faults, load, operation, errno.EIO, before)
        assert_sound(model)
        if error is None:
            break
        assert_says_where(error, tmp_path, errno.EIO)
    assert before > 3
    assert [train_step(model, optimizer, step) for step in (1, 2)] == want_losses[1:]
    assert_weights(weights(model), want)


@pytest.mark.parametrize("precision", [None, "bf16"])
def test_a_model_that_cannot_be_moved_into_chunks_is_untouched(
    tmp_path: Path, faults: Faults, precision: str | None
) -> None:
    for before in range(1, 1000):  # the first write asks whether the file system has O_DIRECT
        module, same = build(), build()
        wrap = lambda: gemini.GeminiDDP(  # noqa: E731
            module,  # noqa: B023 - called in the same round
            device_bytes=64 * KIB,
            disk_dir=str(tmp_path),
            non_model_bytes=0,
            min_chunk_size_mb=0.01,
            search_range_mb=0,
            mixed_precision=precision,
        )
        error = attempt(faults, wrap, "write", errno.EIO, before)
        if error is None:
            break
        assert_says_where(error, tmp_path, errno.EIO)
        assert all(type(param) is nn.Parameter for param in module.parameters())
        for param, untouched in zip(module.parameters(), same.parameters(), strict=True):
            assert torch.equal(param, untouched)
        loss_of(module, 0).backward()
        assert all(param.grad is not None for param in module.parameters())
        assert not [link for link in open_files() if link.startswith(str(tmp_path))]
    assert before > 2
