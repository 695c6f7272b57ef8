"""Adam with states in a file: no share of them on disk, and no failure, may change a number silently."""

from __future__ import annotations

import copy
import errno
import functools
import os
import pickle
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from gemini.errors import ConfigError, IoError, StateError
from gemini.optim import disk_states as disk_states_module
from gemini.optim.disk_states import lay_out
from gemini.optim.kernel_adam import CPUAdam, HybridAdam
from gemini.optim.kernels import STATE_DTYPES, StateFormat

FRACTIONS = [0.0, 0.1, 0.5, 1.0]


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(autouse=True)
def small_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make a small model fill more batches than there are buffers: parameters span them and share them."""
    small = functools.partial(lay_out, batch_bytes=4096)
    monkeypatch.setattr(disk_states_module, "lay_out", small)


def small_model() -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(13, 167), nn.Tanh(), nn.Linear(167, 61), nn.Linear(61, 5))
    model[2].weight = nn.Parameter(model[2].weight.detach().t().contiguous().t())
    return model


def train(model: nn.Module, optimizer: torch.optim.Optimizer, start: int = 0, stop: int = 5) -> None:
    for step in range(start, stop):
        torch.manual_seed(100 + step)
        optimizer.zero_grad()
        model(torch.randn(7, 13)).square().mean().backward()
        optimizer.step()


def adam(model: nn.Module, fraction: float, **options: Any) -> CPUAdam:
    settings: dict[str, Any] = {"lr": 0.01, "weight_decay": 0.1, **options}
    return HybridAdam(model.parameters(), nvme_offload_fraction=fraction, **settings)


def trained(fraction: float, **options: Any) -> tuple[nn.Module, CPUAdam]:
    model = small_model()
    optimizer = adam(model, fraction, **options)
    train(model, optimizer)
    return model, optimizer


def assert_same_parameters(got: nn.Module, want: nn.Module) -> None:
    for (name, one), other in zip(got.named_parameters(), want.parameters(), strict=True):
        assert torch.equal(one, other), name


def assert_same_states(got: dict[str, Any], want: dict[str, Any]) -> None:
    assert got["state"].keys() == want["state"].keys()
    for key, state in want["state"].items():
        assert list(got["state"][key]) == ["step", "exp_avg", "exp_avg_sq"]
        for name, value in state.items():
            assert torch.equal(got["state"][key][name], value), (key, name)


@pytest.mark.parametrize("fraction", FRACTIONS)
def test_no_fraction_changes_parameters_or_states(fraction: float, tmp_path: Path) -> None:
    want, reference = trained(0.0)
    got, optimizer = trained(fraction, nvme_offload_dir=tmp_path)
    assert_same_parameters(got, want)
    assert_same_states(optimizer.state_dict(), reference.state_dict())
    train(want, reference, 5, 8)
    train(got, optimizer, 5, 8)  # reading the states out has not disturbed them
    assert_same_parameters(got, want)


@pytest.mark.parametrize("fraction", FRACTIONS)
def test_share_of_state_bytes_in_memory_is_as_asked(fraction: float) -> None:
    model, optimizer = trained(fraction)
    optimizer.state_dict()  # has copied the states out, not brought them back
    total = sum(param.numel() for param in model.parameters())
    largest = max(param.numel() for param in model.parameters())
    in_memory = sum(p.numel() for p, state in optimizer.state.items() if "exp_avg" in state)
    assert (1 - fraction) * total - largest < in_memory <= (1 - fraction) * total


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bit_parameters_are_the_same_from_disk(dtype: torch.dtype) -> None:
    results = []
    for fraction in (0.0, 1.0):
        torch.manual_seed(0)
        param = torch.randn(3001).to(dtype).requires_grad_()
        optimizer = CPUAdam([param], lr=0.1, nvme_offload_fraction=fraction)
        for _ in range(4):
            param.grad = torch.randn(3001).to(dtype)
            optimizer.step()
        results.append(param.detach())
    assert torch.equal(*results)


def test_parameters_without_gradient_keep_their_states_on_disk() -> None:
    results = []
    for fraction in (0.0, 1.0):
        model = small_model()
        optimizer = adam(model, fraction)
        for step in range(6):
            model[2].bias.requires_grad_(step not in (0, 3))
            train(model, optimizer, step, step + 1)
        results.append(model)
    assert_same_parameters(*results)


def test_added_group_joins_the_file() -> None:
    results = []
    for fraction in (0.0, 1.0):
        model = small_model()
        optimizer = CPUAdam(model[0].parameters(), nvme_offload_fraction=fraction)
        train(model, optimizer, 0, 2)
        optimizer.add_param_group({"params": list(model[2].parameters()), "lr": 0.1})
        train(model, optimizer, 2, 4)
        assert fraction == 0.0 or all("exp_avg" not in state for state in optimizer.state.values())
        results.append(model)
    assert_same_parameters(*results)


@pytest.mark.parametrize("before", FRACTIONS)
@pytest.mark.parametrize("after", [0.0, 0.5, 1.0])
def test_state_dict_moves_between_fractions(before: float, after: float) -> None:
    want, reference = trained(0.0)
    train(want, reference, 5, 8)
    model, optimizer = trained(before)
    successor = adam(model, after)
    successor.load_state_dict(optimizer.state_dict())
    assert_same_states(successor.state_dict(), optimizer.state_dict())
    train(model, successor, 5, 8)
    assert_same_parameters(model, want)


def test_loading_replaces_what_is_in_the_file() -> None:
    model, optimizer = trained(1.0)
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    train(model, optimizer, 5, 8)
    want = [param.clone() for param in model.parameters()]
    model.load_state_dict(saved[0])
    optimizer.load_state_dict(saved[1])
    train(model, optimizer, 5, 8)
    assert all(torch.equal(*pair) for pair in zip(model.parameters(), want, strict=True))


def test_cleared_state_starts_from_zero() -> None:
    results = []
    for fraction in (0.0, 1.0):
        model, optimizer = trained(fraction)
        optimizer.state.clear()
        train(model, optimizer, 5, 7)
        results.append(model)
    assert_same_parameters(*results)


@pytest.mark.parametrize("how", ["pickle", "deepcopy"])
def test_copies_take_the_states_with_them(how: str) -> None:
    both = trained(0.5)
    model, optimizer = pickle.loads(pickle.dumps(both)) if how == "pickle" else copy.deepcopy(both)
    train(*both, 5, 8)
    train(model, optimizer, 5, 8)
    assert_same_parameters(model, both[0])
    assert any("exp_avg" not in state for state in optimizer.state.values())


def test_users_state_dict_hook_sees_complete_states() -> None:
    _, optimizer = trained(1.0)
    seen: list[bool] = []
    optimizer.register_state_dict_post_hook(
        lambda _, saved: seen.extend("exp_avg" in state for state in saved["state"].values())
    )
    optimizer.state_dict()
    assert seen == [True] * 6


def test_nothing_is_left_in_either_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    open_before = len(list(Path("/proc/self/fd").iterdir()))
    for directory in (None, tmp_path):
        _, optimizer = trained(1.0, nvme_offload_dir=directory)
        assert list(tmp_path.iterdir()) == []  # not even while it is in use: a kill leaves nothing
        optimizer.close()
        optimizer.close()
    assert len(list(Path("/proc/self/fd").iterdir())) == open_before


def test_closed_optimizer_says_so() -> None:
    model, optimizer = trained(1.0)
    optimizer.close()
    for use in (optimizer.step, optimizer.state_dict, lambda: pickle.dumps(optimizer)):
        with pytest.raises(StateError, match="closed"):
            use()
    assert_same_parameters(model, trained(0.0)[0])


def test_unusable_directory_is_refused_before_training(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for directory in (tmp_path / "missing", tmp_path / "file"):
        with pytest.raises(ConfigError, match=directory.name):
            adam(small_model(), 1.0, nvme_offload_dir=directory)


def test_full_disk_is_an_io_error_and_nothing_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_space(*_arguments: Any) -> None:
        raise IoError(errno.ENOSPC, "no space")

    model, want = small_model(), small_model()
    optimizer = adam(model, 1.0)
    with monkeypatch.context() as patch:
        patch.setattr(disk_states_module, "_open", no_space)
        with pytest.raises(IoError):
            train(model, optimizer)
    assert_same_parameters(model, want)
    train(model, optimizer)  # space was made: it works
    assert_same_parameters(model, trained(0.0)[0])


class FailingFile:
    """A file whose ``fail_at``-th request from now on fails when it is waited for."""

    def __init__(self, file: Any) -> None:
        self.file = file
        self.fail_at = 0
        self.bad: set[int] = set()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.file, name)

    def read(self, *request: int) -> int:
        return self._start(self.file.read(*request))

    def write(self, *request: int) -> int:
        return self._start(self.file.write(*request))

    def _start(self, ticket: int) -> int:
        self.fail_at -= 1
        if self.fail_at == 0:
            self.bad.add(ticket)
        return ticket

    def wait(self, ticket: int) -> None:
        self.file.wait(ticket)
        if ticket in self.bad:
            raise IoError(errno.EIO, "broken", "the disk", 4096)


@pytest.fixture
def files(monkeypatch: pytest.MonkeyPatch) -> list[FailingFile]:
    """Return the files, that can be made to fail, of the optimizers of a test."""
    made: list[FailingFile] = []
    real = disk_states_module._open

    def opened(*arguments: Any) -> FailingFile:
        made.append(FailingFile(real(*arguments)))
        return made[-1]

    monkeypatch.setattr(disk_states_module, "_open", opened)
    return made


@pytest.mark.parametrize("fail_at", range(1, 57))
def test_failed_step_is_reported_and_blocks_until_a_checkpoint_is_loaded(
    fail_at: int, files: list[FailingFile]
) -> None:
    """Also requests that end between steps; every one of a step is among these."""
    want, reference = trained(0.0)
    model, optimizer = trained(1.0)
    assert len(optimizer._disk._files[0].batches) < 28
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    files[0].fail_at = fail_at
    with pytest.raises(IoError, match="broken"):
        train(model, optimizer, 5, 7)
    for use in (optimizer.step, optimizer.state_dict):
        with pytest.raises(StateError, match=r"(half-way|not be written).*broken.*load a checkpoint"):
            use()
    model.load_state_dict(saved[0])
    optimizer.load_state_dict(saved[1])
    train(want, reference, 5, 8)
    train(model, optimizer, 5, 8)
    assert_same_parameters(model, want)


def test_late_write_that_failed_is_reported_by_state_dict_and_stays_an_error(
    files: list[FailingFile],
) -> None:
    model, optimizer = trained(1.0)
    files[0].bad.add(optimizer._disk.ring._behind[-1].ticket)
    with pytest.raises(IoError, match="broken"):
        optimizer.state_dict()
    for use in (optimizer.step, optimizer.state_dict):
        with pytest.raises(StateError, match=r"written.*broken"):
            use()
    assert_same_parameters(model, trained(0.0)[0])


def test_late_write_that_failed_does_not_matter_to_who_loads_a_checkpoint(
    files: list[FailingFile],
) -> None:
    model, optimizer = trained(1.0)
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    train(model, optimizer, 5, 6)
    files[0].bad.add(optimizer._disk.ring._behind[-1].ticket)
    model.load_state_dict(saved[0])
    optimizer.load_state_dict(saved[1])
    train(model, optimizer, 5, 7)
    want, reference = trained(0.0)
    train(want, reference, 5, 7)
    assert_same_parameters(model, want)


def test_read_that_failed_in_state_dict_can_be_repeated(files: list[FailingFile]) -> None:
    model, optimizer = trained(1.0)
    want = optimizer.state_dict()
    files[0].fail_at = 5
    with pytest.raises(IoError, match="broken"):
        optimizer.state_dict()
    assert_same_states(optimizer.state_dict(), want)
    reference_model, reference = trained(0.0)
    train(reference_model, reference, 5, 7)
    train(model, optimizer, 5, 7)
    assert_same_parameters(model, reference_model)


def test_forked_child_gets_an_error_and_the_parent_goes_on() -> None:
    model, optimizer = trained(1.0)
    child = os.fork()
    if child == 0:
        try:
            optimizer.state_dict()
        except StateError:
            os._exit(7)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    want, reference = trained(0.0)
    train(want, reference, 5, 6)
    train(model, optimizer, 5, 6)
    assert_same_parameters(model, want)


@pytest.mark.parametrize("state_dtype", STATE_DTYPES)
def test_layout_covers_every_element_once_in_aligned_disjoint_places(state_dtype: str) -> None:
    state_format = StateFormat(state_dtype, remainders=True)
    params = [torch.zeros(n, dtype=torch.bfloat16) for n in (1, 5000, 16, 17, 1, 3000, 1)]
    covered = {id(param): 0 for param in params}
    end = 0
    for batch in lay_out(params, state_format, batch_bytes=8192):
        assert (batch.offset, batch.nbytes % 4096) == (end, 0)
        assert 0 < batch.nbytes <= 8192
        end += batch.nbytes
        used = 0
        for segment in batch.segments:
            assert segment.start == covered[id(segment.param)]
            assert segment.start % 256 == 0
            covered[id(segment.param)] += segment.numel
            for part in state_format.parts(segment.param):
                offset = segment.offsets[part.name]
                assert offset >= used
                assert offset % 64 == 0
                used = offset + part.nbytes(segment.numel)
        assert used <= batch.nbytes
    assert list(covered.values()) == [param.numel() for param in params]
