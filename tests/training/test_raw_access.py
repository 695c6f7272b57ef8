"""What reads or writes managed tensors past torch, by their addresses, finds and leaves the right values."""

from __future__ import annotations

import ctypes
import pickle
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from torch import Tensor, nn
from training_harness import KIB, assert_same_state, assert_within_budgets, moved_bytes, tight

from gemini import GeminiAdamOptimizer, GeminiDDP, HybridAdam

WIDTH = 32
LAYERS = 20


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))


@pytest.fixture
def model(tmp_path: Path) -> Iterator[GeminiDDP]:
    """Yield a network in a small part of its memory, some of it away."""
    with GeminiDDP(network(), **tight(tmp_path, 24 * KIB)) as model:
        model(torch.ones(2, WIDTH))
        yield model
        assert_within_budgets(model.stats())


@pytest.fixture(params=["disk", "host"])
def tiers(request: pytest.FixtureRequest, tmp_path: Path) -> dict[str, Any]:
    """Return options for the network of which DEVICE holds a small part."""
    options = tight(tmp_path, 24 * KIB)
    if request.param == "host":
        options.update(disk_dir=None, host_bytes=4096 * KIB)
    return options


def by_safetensors(state: dict[str, Tensor], path: Path) -> dict[str, Tensor]:
    safetensors.torch.save_file(state, path)
    return safetensors.torch.load_file(path)


def by_safetensors_in_memory(state: dict[str, Tensor], _path: Path) -> dict[str, Tensor]:
    return safetensors.torch.load(safetensors.torch.save(state))


def by_numpy(state: dict[str, Tensor], path: Path) -> dict[str, Tensor]:
    arrays = {key: value.detach().numpy() for key, value in state.items()}
    np.savez(path, **arrays)
    with np.load(path.with_suffix(".npz")) as found:
        return {key: torch.from_numpy(found[key]) for key in state}


def by_asarray(state: dict[str, Tensor], path: Path) -> dict[str, Tensor]:
    arrays = {key: np.asarray(value.detach()) for key, value in state.items()}
    return {key: torch.from_numpy(np.array(value)) for key, value in arrays.items()}


def by_dlpack(state: dict[str, Tensor], _path: Path) -> dict[str, Tensor]:
    memory = {key: np.from_dlpack(value.detach()) for key, value in state.items()}
    return {key: torch.from_numpy(value.copy()) for key, value in memory.items()}


def by_torch(state: dict[str, Tensor], path: Path) -> dict[str, Tensor]:
    torch.save(state, path)
    found: dict[str, Tensor] = torch.load(path, weights_only=True)
    return found


def by_pickle(state: dict[str, Tensor], _path: Path) -> dict[str, Tensor]:
    found: dict[str, Tensor] = pickle.loads(pickle.dumps(state))
    return found


def by_address(state: dict[str, Tensor], _path: Path) -> dict[str, Tensor]:
    addresses = {key: value.data_ptr() for key, value in state.items()}
    found = {key: torch.empty(value.shape) for key, value in state.items()}
    for key, value in found.items():
        ctypes.memmove(value.data_ptr(), addresses[key], value.nbytes)
    return found


WRITERS = [
    by_safetensors,
    by_safetensors_in_memory,
    by_numpy,
    by_asarray,
    by_dlpack,
    by_torch,
    by_pickle,
    by_address,
]


@pytest.mark.parametrize("writer", WRITERS)
@pytest.mark.parametrize("give", [lambda net: net.state_dict(), lambda net: dict(net.named_parameters())])
def test_every_writer_of_files_finds_all_weights(
    writer: Any, give: Callable[[nn.Module], dict[str, Tensor]], model: GeminiDDP, tmp_path: Path
) -> None:
    got = writer(give(model.module), tmp_path / "written")
    want = network().state_dict()
    assert got.keys() == want.keys()
    assert_same_state({key: got[key].detach() for key in want}, want)


def test_tied_weights_have_one_storage_and_others_their_own(model: GeminiDDP) -> None:
    model.module[3].weight = model.module[7].weight
    state = model.module.state_dict()
    of = {key: value.untyped_storage().data_ptr() for key, value in state.items()}
    assert of["3.weight"] == of["7.weight"]
    assert len(set(of.values())) == len(of) - 1
    assert state["0.bias"].untyped_storage().nbytes() == 4 * WIDTH


def mixed_network() -> nn.Sequential:
    """Return a network with tied and transposed weights and a buffer."""
    net = network()
    net[3].weight = net[7].weight
    for layer in list(net)[9:19]:
        layer.weight = nn.Parameter(layer.weight.detach().t())
    net.register_buffer("steps", torch.arange(3))
    return net


def test_safetensors_writes_and_reads_a_managed_module(tiers: dict[str, Any], tmp_path: Path) -> None:
    want, got = tmp_path / "want", tmp_path / "got"
    safetensors.torch.save_model(mixed_network(), str(want))
    with GeminiDDP(mixed_network(), **tiers) as model:
        model(torch.ones(2, WIDTH))
        for module in (model.module, model, model.module):
            safetensors.torch.save_model(module, str(got))
            assert got.read_bytes() == want.read_bytes()
        with torch.no_grad():
            for param in model.module.parameters():
                param.zero_()
        assert safetensors.torch.load_model(model.module, str(want)) == (set(), [])
        assert_same_state(model.state_dict(), mixed_network().state_dict())
        assert_within_budgets(model.stats())


def test_a_pickled_module_is_an_ordinary_one(tiers: dict[str, Any], tmp_path: Path) -> None:
    with GeminiDDP(mixed_network(), **tiers) as model:
        model(torch.ones(2, WIDTH))
        torch.save(model.module, tmp_path / "whole")
        found = torch.load(tmp_path / "whole", weights_only=False)
        for got in (found, pickle.loads(pickle.dumps(model.module))):
            assert all(type(param) is nn.Parameter for param in got.parameters())
            assert got[3].weight is got[7].weight
            assert_same_state(got.state_dict(), mixed_network().state_dict())


def test_parts_of_a_parameter_are_parts_of_what_is_at_its_address(tiers: dict[str, Any]) -> None:
    with GeminiDDP(mixed_network(), **tiers) as model:
        model(torch.ones(2, WIDTH))
        for layer in model.module:
            weight = layer.weight.detach()
            begin, last = weight.data_ptr(), weight[-1, -1].data_ptr()
            row = weight.narrow(0, 3, 1)
            assert last == begin + weight.nbytes - 4
            assert row.untyped_storage().data_ptr() == begin == weight.untyped_storage().data_ptr()
            at_address = ctypes.cast(row.data_ptr(), ctypes.POINTER(ctypes.c_float))[0]
            assert row.data_ptr() - begin == 4 * 3 * weight.stride(0)
            assert at_address == float(row[0, 0])


def halve_by_address(param: Tensor) -> None:
    """Write to a parameter as a kernel does that is given its address."""
    values = torch.frombuffer(
        (ctypes.c_char * param.nbytes).from_address(param.data_ptr()), dtype=param.dtype
    )
    values.mul_(0.5)


def train(model: nn.Module, optimizer: Any, change: Callable[[nn.Module], object]) -> list[float]:
    losses = []
    for step in range(6):
        x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(step))
        loss = model(x).float().square().mean()
        getattr(optimizer, "backward", Tensor.backward)(loss)
        optimizer.step()
        optimizer.zero_grad()
        change(model)
        losses.append(loss.item())
    return losses


def halve_all(model: nn.Module) -> None:
    for param in model.parameters():
        halve_by_address(param.detach())


def double_by_numpy(param: Tensor) -> None:
    param.numpy()[...] *= 2


def double_by_dlpack(param: Tensor) -> None:
    torch.from_dlpack(param).mul_(2)


@pytest.mark.parametrize("double", [double_by_numpy, double_by_dlpack])
def test_what_was_written_to_copies_is_there_for_the_next_operator(
    double: Callable[[Tensor], None], model: GeminiDDP
) -> None:
    for param in model.parameters():
        double(param.detach())
    for param, want in zip(model.parameters(), network().parameters(), strict=True):
        assert torch.equal(param.clone(), want * 2)


def add_to_all(net: nn.Module) -> None:
    for param in net.parameters():
        param.detach().numpy()[...] += 1e-3


def test_what_is_written_within_a_step_is_used_and_updated_by_it(model: GeminiDDP) -> None:
    plain = network()
    adams = HybridAdam(plain.parameters(), lr=1e-2), GeminiAdamOptimizer(model, lr=1e-2)
    for net, adam in zip((plain, model), adams, strict=True):
        for _ in range(3):
            loss = net(torch.ones(2, WIDTH)).square().mean()
            add_to_all(net)
            loss.backward()
            add_to_all(net)
            adam.step()
            adam.zero_grad()
    assert_same_state(model.state_dict(), plain.state_dict())


def test_a_view_is_formatted_as_the_number_that_it_holds(model: GeminiDDP) -> None:
    last = [*model.parameters()][-1]
    for weight, want in zip(last.detach(), [*network().parameters()][-1].detach(), strict=True):
        assert f"{weight:.3f} {weight}" == f"{want:.3f} {want}"


def test_what_is_written_by_address_is_trained_on(model: GeminiDDP) -> None:
    plain = network()
    want = train(plain, HybridAdam(plain.parameters(), lr=1e-2), halve_all)
    assert train(model, GeminiAdamOptimizer(model, lr=1e-2), halve_all) == want
    assert_same_state(model.state_dict(), plain.state_dict())
    assert moved_bytes(model.stats()) > 0


@pytest.mark.parametrize("device_kib", [48, 4096])
def test_reading_by_address_changes_no_bit_of_masters(device_kib: int, tmp_path: Path) -> None:
    outcomes = []
    for change in (lambda _model: None, lambda model: [param.data_ptr() for param in model.parameters()]):
        options = tight(tmp_path, device_kib * KIB, mixed_precision="bf16")
        with GeminiDDP(network(), **options) as model:
            losses = train(model, GeminiAdamOptimizer(model, lr=1e-2), change)
            outcomes.append((losses, {key: value.clone() for key, value in model.state_dict().items()}))
    assert outcomes[0][0] == outcomes[1][0]
    assert_same_state(outcomes[0][1], outcomes[1][1])


LAST = """
import sys, torch, gemini
net = torch.nn.Sequential(*(torch.nn.Linear(32, 32) for _ in range(20)))
handle = gemini.manage(net, device_bytes=24 * 1024, non_model_bytes=0, placement_policy="const",
    min_chunk_size_mb=0.002, search_range_mb=0.004, disk_dir=sys.argv[1])
net(torch.ones(2, 32))
values = torch.tensor(net[0].weight.detach())
"""


def test_what_nothing_follows_is_told_of_at_the_end_of_the_process(tmp_path: Path) -> None:
    ended = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", LAST, tmp_path], capture_output=True, text=True, check=True
    )
    assert "was read or written outside an operator" in ended.stderr


def test_an_operator_ends_what_an_address_held(model: GeminiDDP) -> None:
    for param in model.module.parameters():
        param.data_ptr()
    assert model.manager.raw.uses
    model(torch.ones(2, WIDTH))
    assert not model.manager.raw.uses
    table = model.manager.chunks.table
    assert not any(table.pins(chunk.id) for chunk in model.manager.chunks.chunks)
