"""The share of the states that is in files: exact, whatever is added or replaced, and cheap to keep up."""

from __future__ import annotations

import copy
import functools
import gc
import itertools
import os
import resource
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from pairs import pairs

from gemini.errors import ChecksumError, ConfigError, IoError, StateError
from gemini.optim import disk_states
from gemini.optim import disk_states as disk_states_module
from gemini.optim.disk_states import lay_out
from gemini.optim.kernel_adam import CPUAdam
from gemini.optim.kernels import STATE_DTYPES, StateFormat

BATCH_BYTES = 4096
SIZES = [(300,), (70, 130), (1,), (31, 257), (2048,)]


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(autouse=True)
def small_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make a few thousand elements fill many batches: more than there are buffers."""
    monkeypatch.setattr(disk_states_module, "lay_out", functools.partial(lay_out, batch_bytes=BATCH_BYTES))


def make_params(dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    source = torch.Generator().manual_seed(0)
    return [torch.randn(size, generator=source).to(dtype).requires_grad_() for size in SIZES]


def set_gradients(params: list[torch.Tensor], step: int) -> None:
    source = torch.Generator().manual_seed(100 + step)
    for param in params:
        param.grad = torch.randn(param.shape, generator=source).to(param.dtype)


def steps(optimizer: torch.optim.Optimizer, params: list[torch.Tensor], start: int, stop: int) -> None:
    for step in range(start, stop):
        set_gradients(params, step)
        optimizer.step()


def trained(fraction: float, params: list[torch.Tensor] | None = None, **options: Any) -> Any:
    params = make_params() if params is None else params
    optimizer = CPUAdam(params, lr=0.01, weight_decay=0.1, nvme_offload_fraction=fraction, **options)
    steps(optimizer, params, 0, 3)
    return params, optimizer


def assert_equal(got: list[torch.Tensor], want: list[torch.Tensor]) -> None:
    for index, (one, other) in enumerate(zip(got, want, strict=True)):
        assert torch.equal(one, other), index


def state_bytes(params: list[torch.Tensor], optimizer: CPUAdam) -> int:
    return sum(map(optimizer.state_format.nbytes, params))


def bytes_in_files(optimizer: CPUAdam) -> int:
    """Return the bytes of states in the batches of files; what surrounds them is not counted."""
    files = optimizer._disk._files
    segments = [segment for file in files for batch in file.batches for segment in batch.segments]
    return sum(
        part.nbytes(segment.numel)
        for segment in segments
        for part in optimizer.state_format.parts(segment.param)
    )


@pairs(fraction=[0.001, 0.1, 0.37, 0.5, 0.9, 0.999, 1.0], state_dtype=STATE_DTYPES, remainders=[False, True])
def test_share_in_files_is_exact_to_a_batch_and_changes_no_bit(
    fraction: float, state_dtype: str, remainders: bool
) -> None:
    options = {"state_dtype": state_dtype, "master_remainders": remainders}
    want, reference = trained(0.0, make_params(torch.bfloat16), **options)
    got, optimizer = trained(fraction, make_params(torch.bfloat16), **options)
    assert_equal(got, want)
    wanted = fraction * state_bytes(got, optimizer)
    assert wanted <= bytes_in_files(optimizer) < wanted + BATCH_BYTES
    in_memory = sum(v.nbytes for s in optimizer.state.values() for k, v in s.items() if k != "step")
    rests = sum(memory.nbytes for file in optimizer._disk._files for _, memory in file.rests)
    assert in_memory + rests < state_bytes(got, optimizer) - wanted + BATCH_BYTES
    for key, state in reference.state_dict()["state"].items():
        for name, value in state.items():
            assert torch.equal(optimizer.state_dict()["state"][key][name], value), (key, name)


@pytest.mark.parametrize("state_dtype", STATE_DTYPES)
def test_cut_parameter_goes_through_state_dicts_and_orders(state_dtype: str) -> None:
    def run(fraction: float) -> tuple[list[torch.Tensor], CPUAdam]:
        params, optimizer = trained(fraction, state_dtype=state_dtype)
        params[1].data = params[1].data.t().contiguous().t()
        steps(optimizer, params, 3, 5)
        saved = copy.deepcopy(optimizer.state_dict())
        steps(optimizer, params, 5, 6)
        optimizer.load_state_dict(saved)
        steps(optimizer, params, 6, 8)
        del optimizer.state[params[1]]
        steps(optimizer, params, 8, 10)
        return params, optimizer

    want, _ = run(0.0)
    got, optimizer = run(0.3)
    assert [batch.segments[0].param is got[1] for batch, _ in optimizer._disk._files[0].rests] == [True]
    assert_equal(got, want)


def test_share_stays_exact_when_groups_are_added_and_parameters_thaw() -> None:
    results = []
    for fraction in (0.0, 0.3, 0.6, 1.0):
        params = make_params()
        params[1].requires_grad_(False)
        optimizer = CPUAdam(params[:3], lr=0.1, nvme_offload_fraction=fraction)
        steps(optimizer, [params[0], params[2]], 0, 2)
        params[1].requires_grad_()
        steps(optimizer, params[:3], 2, 4)
        optimizer.add_param_group({"params": params[3:], "lr": 0.01, "betas": (0.5, 0.9), "eps": 1e-3})
        steps(optimizer, params, 4, 7)
        wanted = fraction * state_bytes(params, optimizer)
        assert wanted <= bytes_in_files(optimizer) < wanted + BATCH_BYTES
        results.append(params)
    for got in results[1:]:
        assert_equal(got, results[0])


def test_choice_covers_the_bytes_by_blocks() -> None:
    params = [torch.zeros(1000), torch.zeros(0), torch.zeros(513), torch.zeros(1)]
    state_format = StateFormat("fp32")
    total = sum(map(state_format.nbytes, params))
    for nbytes in range(0, total + 1, 8):
        numels = disk_states.choose_for_disk(params, nbytes, state_format)
        chosen = 8 * sum(numels.values())
        assert nbytes <= chosen < nbytes + 2048
        assert all(n == p.numel() or n % 256 == 0 for p, n in numels.items())


def test_many_groups_with_their_own_settings_and_counts() -> None:
    results = []
    for fraction in (0.0, 0.5, 1.0):
        params = make_params()
        groups = [{"params": [param], "lr": 0.1 / (at + 1)} for at, param in enumerate(params)]
        optimizer = CPUAdam(groups, weight_decay=0.2, nvme_offload_fraction=fraction)
        for step in range(8):
            set_gradients(params, step)
            for index, param in enumerate(params):
                if (step >> index % 3) & 1:
                    param.grad = None
            optimizer.param_groups[2]["lr"] *= 0.9
            optimizer.step()
        results.append(params)
    assert_equal(results[1], results[0])
    assert_equal(results[2], results[0])


def new_memory(params: list[torch.Tensor], _optimizer: CPUAdam) -> None:
    params[1].data = params[1].data.clone() + 1.0


def gradient_of_other_order(params: list[torch.Tensor], _optimizer: CPUAdam) -> None:
    params[1].grad = params[1].grad.t().contiguous().t()  # type: ignore[union-attr]


def moved_between_groups(params: list[torch.Tensor], optimizer: CPUAdam) -> None:
    optimizer.param_groups[0]["params"].remove(params[0])
    optimizer.add_param_group({"params": [params[0]], "lr": 0.5})


def filled_step(params: list[torch.Tensor], optimizer: CPUAdam) -> None:
    optimizer.state[params[1]]["step"].fill_(40.0)


def replaced_step(params: list[torch.Tensor], optimizer: CPUAdam) -> None:
    optimizer.state[params[1]]["step"] = torch.tensor(40.0)


def cleared(_params: list[torch.Tensor], optimizer: CPUAdam) -> None:
    optimizer.state.clear()


def given_moments(params: list[torch.Tensor], optimizer: CPUAdam) -> None:
    ones = {name: torch.ones_like(params[1]) for name in ("exp_avg", "exp_avg_sq")}
    optimizer.state[params[1]].update(ones)


def with_extra(params: list[torch.Tensor], optimizer: CPUAdam) -> None:
    optimizer.state[params[0]]["note"] = "mine"


DISTURBANCES = [
    new_memory,
    gradient_of_other_order,
    moved_between_groups,
    filled_step,
    replaced_step,
    cleared,
    given_moments,
    with_extra,
]


@pytest.mark.parametrize("disturb", DISTURBANCES, ids=lambda function: function.__name__)
@pytest.mark.parametrize("fraction", [0.5, 1.0])
def test_what_is_replaced_between_steps_is_seen(disturb: Any, fraction: float) -> None:
    results = []
    for share in (0.0, fraction):
        params, optimizer = trained(share)
        set_gradients(params, 3)
        disturb(params, optimizer)
        optimizer.step()
        steps(optimizer, params, 4, 7)
        results.append((params, optimizer))
    assert_equal(results[1][0], results[0][0])
    note = results[1][1].state[results[1][0][0]].get("note")
    assert note == ("mine" if disturb is with_extra else None)


def test_tables_are_built_once_for_the_same_parameters(monkeypatch: pytest.MonkeyPatch) -> None:
    params, optimizer = trained(0.7)
    monkeypatch.setattr(optimizer, "_collect", None)
    steps(optimizer, params, 3, 6)
    assert_equal(params, trained_for(6))


def trained_for(count: int) -> list[torch.Tensor]:
    params, optimizer = trained(0.0)
    steps(optimizer, params, 3, count)
    return params


def test_saved_state_shows_one_moment() -> None:
    """Moments from files are copies, so the step beside them must not go on."""
    params, optimizer = trained(1.0)
    saved = optimizer.state_dict()
    steps(optimizer, params, 3, 5)
    assert {float(state["step"]) for state in saved["state"].values()} == {3.0}


def test_memory_of_buffers_does_not_grow_with_the_model() -> None:
    sizes = []
    for numel in (100_000, 400_000):
        param = torch.zeros(numel).requires_grad_()
        _, optimizer = trained(1.0, [param])
        sizes.append(optimizer._disk.ring.nbytes)
    assert sizes == [8 * BATCH_BYTES] * 2


@pytest.mark.parametrize("numel", [1, 10**6, 124 * 10**6, 10**9, 7 * 10**10])
def test_batches_make_a_ring_of_a_fortieth_or_32_mib_at_most(numel: int) -> None:
    nbytes = disk_states_module._batch_bytes(8 * numel)
    assert nbytes % 4096 == 0
    assert 8 * nbytes <= min(32 * 2**20, max(8 * numel // 40 + 8 * 4096, 2**19))


def test_several_directories_share_the_states(tmp_path: Path) -> None:
    directories = [tmp_path / "one", tmp_path / "two"]
    for directory in directories:
        directory.mkdir()
    params, optimizer = trained(1.0, nvme_offload_dir=directories)
    assert_equal(params, trained_for(3))
    used = {link for link in descriptors() if link.startswith(str(tmp_path))}
    assert {Path(link).parent for link in used} == set(directories)
    copied, successor = copy.deepcopy((params, optimizer))
    steps(successor, copied, 3, 5)
    assert_equal(copied, trained_for(5))


def descriptors() -> list[str]:
    links = Path("/proc/self/fd").iterdir()
    return [str(link.readlink()) for link in links if os.path.lexists(link)]


@pytest.mark.parametrize("directories", [[], ["/", "/missing-directory"]])
def test_directories_that_cannot_be_used_are_refused(directories: list[str]) -> None:
    with pytest.raises(ConfigError, match=r"no directory|missing-directory"):
        CPUAdam(make_params(), nvme_offload_fraction=0.5, nvme_offload_dir=directories)


def flip_bits(directory: Path) -> None:
    """Flip a bit in every block of the unlinked file."""
    (number,) = [
        link.name
        for link in Path("/proc/self/fd").iterdir()
        if os.path.lexists(link) and str(link.readlink()).startswith(str(directory))
    ]
    with Path(f"/proc/self/fd/{number}").open("r+b", buffering=0) as file:
        size = os.fstat(file.fileno()).st_size
        for offset in range(0, size, 4096):
            byte = os.pread(file.fileno(), 1, offset)
            os.pwrite(file.fileno(), bytes([byte[0] ^ 4]), offset)


def test_flipped_bit_on_disk_is_found_with_checksums_and_stops_training(tmp_path: Path) -> None:
    params, optimizer = trained(1.0, nvme_offload_dir=tmp_path, nvme_offload_checksums=True)
    saved = copy.deepcopy(optimizer.state_dict())
    weights = copy.deepcopy(params)
    flip_bits(tmp_path)
    with pytest.raises(ChecksumError):
        optimizer.state_dict()
    with pytest.raises(ChecksumError):
        steps(optimizer, params, 3, 4)
    with pytest.raises(StateError, match="half-way"):
        optimizer.step()
    for param, weight in zip(params, weights, strict=True):
        param.data.copy_(weight)
    optimizer.load_state_dict(saved)
    steps(optimizer, params, 3, 5)
    assert_equal(params, trained_for(5))


def test_copies_keep_their_checksums() -> None:
    _, optimizer = trained(1.0, nvme_offload_checksums=True)
    assert copy.deepcopy(optimizer)._disk_checksums


def test_setting_of_checksums_is_the_optimizers() -> None:
    with pytest.raises(ConfigError, match="nvme_offload_checksums"):
        CPUAdam([{"params": [torch.zeros(2)], "nvme_offload_checksums": True}])


def test_too_large_a_file_is_an_error_nothing_has_changed_and_training_can_go_on(tmp_path: Path) -> None:
    params = make_params()
    optimizer = CPUAdam(
        params, lr=0.01, weight_decay=0.1, nvme_offload_fraction=1.0, nvme_offload_dir=tmp_path
    )
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (8192, hard))
    try:
        with pytest.raises(IoError, match=str(tmp_path)):
            steps(optimizer, params, 0, 1)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert_equal(params, make_params())
    gc.collect()
    assert not [link for link in descriptors() if link.startswith(str(tmp_path))]
    steps(optimizer, params, 0, 3)
    assert_equal(params, trained_for(3))


def test_child_that_was_forked_between_steps_disturbs_nothing() -> None:
    params, optimizer = trained(1.0)
    for step in range(3, 6):
        child = os.fork()  # reads are under way here
        if child == 0:
            for param in params:
                param.grad = torch.ones_like(param)
            before = [param.detach().clone() for param in params]
            try:
                optimizer.step()
            except StateError as error:
                same = all(itertools.starmap(torch.equal, zip(params, before, strict=True)))
                optimizer.close()
                os._exit(7 if same and "forked child" in str(error) else 1)
            os._exit(2)
        steps(optimizer, params, step, step + 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    assert_equal(params, trained_for(6))


def test_optimizer_that_is_dropped_gives_everything_back(tmp_path: Path) -> None:
    params, optimizer = trained(1.0, nvme_offload_dir=tmp_path)
    params[0].owner = optimizer  # type: ignore[attr-defined]
    gone = weakref.ref(optimizer)
    del params, optimizer
    gc.collect()
    assert gone() is None
    assert not [link for link in descriptors() if link.startswith(str(tmp_path))]
