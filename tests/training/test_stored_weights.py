"""``from_pretrained``: weights lie in the checkpoint until something writes to them, and it is only read."""

from __future__ import annotations

import ctypes
import json
import mmap
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import gemini
from gemini.errors import ConfigError, IoError

pytestmark = pytest.mark.usefixtures("one_thread")

WIDTH = 48  # 9 KiB a layer: tensors begin at odd bytes of their files, and share chunks


class Net(nn.Module):
    """Layers, and a head that is tied to the first one."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(10))
        self.head = nn.Linear(WIDTH, WIDTH, bias=False)
        self.head.weight = self.layers[0].weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Run all layers."""
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.head(x)  # type: ignore[no-any-return]


def net(dtype: torch.dtype = torch.float32) -> Net:
    torch.manual_seed(0)
    return Net().to(dtype)


def save(model: nn.Module, directory: Path, shards: int = 1) -> Path:
    """Write the state as ``save_pretrained`` does: a tied weight once, shards with an index."""
    state = {name: value for name, value in model.state_dict().items() if name != "head.weight"}
    directory.mkdir()
    where: dict[str, str] = {}
    for number in range(shards):
        part = dict(list(state.items())[number::shards])
        name = f"model-{number + 1:05}-of-{shards:05}.safetensors" if shards > 1 else "model.safetensors"
        save_file(part, directory / name)
        where |= dict.fromkeys(part, name)
    if shards > 1:
        (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    return directory


def answering(directory: Path, dtype: torch.dtype = torch.float32, **options: Any) -> nn.Module:
    chosen = {"device_bytes": "64KiB", "non_model_bytes": 0, "min_chunk_size_mb": 4096 / 2**20, **options}
    return gemini.from_pretrained(directory, lambda: Net().to(dtype), trains=False, **chosen)  # type: ignore[no-any-return]


def inputs(dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(1)).to(dtype)


@torch.no_grad()
def same_answers(model: nn.Module, plain: nn.Module, passes: int = 6) -> bool:
    dtype = next(plain.parameters()).dtype
    return all(torch.equal(model(inputs(dtype)), plain(inputs(dtype))) for _ in range(passes))


def cached_bytes(path: Path) -> int:
    """Return how much of a file is in the page cache."""
    libc = ctypes.CDLL(None, use_errno=True)
    nbytes = path.stat().st_size
    with path.open("r+b") as file, mmap.mmap(file.fileno(), nbytes) as mapped:
        pages = (ctypes.c_ubyte * -(-nbytes // mmap.PAGESIZE))()
        view = (ctypes.c_char * nbytes).from_buffer(mapped)
        assert libc.mincore(ctypes.c_void_p(ctypes.addressof(view)), ctypes.c_size_t(nbytes), pages) == 0
        del view
    return mmap.PAGESIZE * sum(page & 1 for page in pages)


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_answers_have_the_bits_and_no_byte_is_written(
    tmp_path: Path, dtype: torch.dtype, shards: int
) -> None:
    directory = save(net(dtype), tmp_path / "model", shards)
    before = {path.name: (path.stat().st_mtime_ns, path.read_bytes()) for path in directory.iterdir()}
    model = answering(directory, dtype, device_bytes="32KiB" if dtype.itemsize == 4 else "16KiB")
    handle = gemini.handle_of(model)
    assert handle.stats()["disk_read"]["bytes"] == 0  # before anybody uses a weight
    assert same_answers(model, net(dtype))
    stats = handle.stats()
    assert stats["disk_read"]["bytes"] > 0
    assert stats["disk_write"]["bytes"] == 0
    assert stats["device"]["peak_bytes"] <= stats["device"]["budget_bytes"]
    assert handle.memstats("eval") is not None
    assert not any(param.requires_grad for param in model.parameters())
    handle.close()
    after = {path.name: (path.stat().st_mtime_ns, path.read_bytes()) for path in directory.iterdir()}
    assert after == before


def test_the_first_pass_reads_each_byte_once_and_leaves_none_in_the_page_cache(tmp_path: Path) -> None:
    directory = save(net(), tmp_path / "model")
    file = directory / "model.safetensors"
    model = answering(directory, device_bytes="1MiB")
    handle = gemini.handle_of(model)
    descriptor = os.open(file, os.O_RDONLY)
    os.fsync(descriptor)
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(descriptor)
    assert same_answers(model, net())
    assert handle.stats()["disk_read"]["bytes"] <= file.stat().st_size
    if handle.manager.chunks.reads_directly:  # else the kernel only hears what is not needed
        assert cached_bytes(file) == 0
    handle.close()


def test_a_file_that_is_changed_is_refused_until_it_is_as_it_was(tmp_path: Path) -> None:
    directory = save(net(), tmp_path / "model")
    file = directory / "model.safetensors"
    model = answering(directory, device_bytes="32KiB")
    assert same_answers(model, net(), passes=2)
    at = file.stat().st_mtime_ns
    os.utime(file, ns=(at, at + 10**9))
    with pytest.raises(IoError, match="changed since the model was loaded") as caught, torch.no_grad():
        model(inputs())
    assert str(file) in str(caught.value)
    os.utime(file, ns=(at, at))
    assert same_answers(model, net())
    gemini.handle_of(model).close()


def test_a_file_that_is_cut_short_is_refused(tmp_path: Path) -> None:
    directory = save(net(), tmp_path / "model")
    model = answering(directory, device_bytes="32KiB")
    os.truncate(directory / "model.safetensors", 20_000)
    with pytest.raises(IoError, match=r"model\.safetensors"), torch.no_grad():
        model(inputs())
    gemini.handle_of(model).close()


def test_a_file_that_was_replaced_is_still_the_one_that_was_loaded(tmp_path: Path) -> None:
    directory = save(net(), tmp_path / "model")
    model = answering(directory, device_bytes="32KiB")
    other = save(Net(), tmp_path / "other")
    (other / "model.safetensors").replace(directory / "model.safetensors")
    assert same_answers(model, net())
    gemini.handle_of(model).close()


def write_to(model: nn.Module) -> None:
    with torch.no_grad():
        for layer in model.layers:  # type: ignore[union-attr]
            layer.weight.mul_(2)


def test_written_weights_go_to_the_disk_directory_and_never_to_the_files(tmp_path: Path) -> None:
    directory = save(net(), tmp_path / "model")
    before = (directory / "model.safetensors").read_bytes()
    plain, model = net(), answering(directory, device_bytes="32KiB", disk_dir=str(tmp_path))
    for module in (plain, model):
        write_to(module)
    assert same_answers(model, plain)
    gemini.handle_of(model).close()
    assert (directory / "model.safetensors").read_bytes() == before


def test_written_weights_without_a_disk_directory_are_an_error_with_the_way_out(tmp_path: Path) -> None:
    model = answering(save(net(), tmp_path / "model"), device_bytes="32KiB")
    with pytest.raises(IoError, match="give disk_dir"):
        write_to(model)
    gemini.handle_of(model).close()


def test_weights_of_another_type_are_converted_and_copied(tmp_path: Path) -> None:
    directory = save(net(), tmp_path / "model")
    model = answering(directory, device_bytes="32KiB", disk_dir=str(tmp_path), mixed_precision="bf16")
    with torch.no_grad():
        want = net().to(torch.bfloat16)(inputs(torch.bfloat16))
        assert torch.equal(model(inputs()), want)
    gemini.handle_of(model).close()


def test_adapters_train_so_they_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="adapters train"):
        gemini.from_pretrained(tmp_path, trains=False, adapter=str(tmp_path))


# -- a model that trains -----------------------------------------------------------------------------------


def training(directory: Path, build: Callable[[], nn.Module] = Net, **options: Any) -> nn.Module:
    chosen = {"device_bytes": "64KiB", "disk_dir": str(directory.parent), "non_model_bytes": 0, **options}
    return gemini.from_pretrained(directory, build, min_chunk_size_mb=4096 / 2**20, **chosen)  # type: ignore[no-any-return]


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 1) -> list[float]:
    losses = []
    for _ in range(steps):
        loss = model(inputs()).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


def test_a_model_that_trains_begins_with_the_files_and_writes_nothing_before_it_steps(tmp_path: Path) -> None:
    directory, plain = save(net(), tmp_path / "model"), net()
    before = (directory / "model.safetensors").read_bytes()
    model = training(directory)
    handle = gemini.handle_of(model)
    assert handle.stats()["disk_read"]["bytes"] == handle.stats()["disk_write"]["bytes"] == 0
    assert same_answers(model, plain, passes=2)
    assert handle.stats()["disk_write"]["bytes"] == 0
    optimizers = gemini.GeminiAdamOptimizer(model, lr=1e-2), gemini.CPUAdam(plain.parameters(), lr=1e-2)
    assert train(model, optimizers[0], 4) == train(plain, optimizers[1], 4)
    state = handle.state_dict()
    assert all(torch.equal(state[name], value) for name, value in plain.state_dict().items())
    handle.close()
    assert (directory / "model.safetensors").read_bytes() == before


def test_after_a_step_nothing_that_trains_needs_the_files(tmp_path: Path) -> None:
    directory, plain = save(net(), tmp_path / "model"), net()
    model = training(directory)
    optimizers = gemini.GeminiAdamOptimizer(model, lr=1e-2), gemini.CPUAdam(plain.parameters(), lr=1e-2)
    assert train(model, optimizers[0]) == train(plain, optimizers[1])
    os.truncate(directory / "model.safetensors", 100)
    assert train(model, optimizers[0], 3) == train(plain, optimizers[1], 3)
    gemini.handle_of(model).close()


def test_frozen_weights_beside_what_trains_stay_in_the_files(tmp_path: Path) -> None:
    def headed() -> Net:
        model = Net()
        for param in model.layers[1:].parameters():
            param.requires_grad_(False)
        return model

    directory = save(net(), tmp_path / "model")
    plain = headed()
    plain.load_state_dict(net().state_dict())
    model = training(directory, headed)
    trained = [param for param in plain.parameters() if param.requires_grad]
    optimizers = gemini.GeminiAdamOptimizer(model, lr=1e-2), gemini.CPUAdam(trained, lr=1e-2)
    assert train(model, optimizers[0], 4) == train(plain, optimizers[1], 4)
    file = directory / "model.safetensors"
    at = file.stat().st_mtime_ns
    os.utime(file, ns=(at, at + 10**9))
    with pytest.raises(IoError, match="changed since the model was loaded"):
        train(model, optimizers[0])
    gemini.handle_of(model).close()


@pytest.mark.parametrize(
    "options", [{"device_bytes": "1MiB"}, {"mixed_precision": "bf16"}, {"disk_bytes": "130KiB"}], ids=str
)
def test_weights_that_fit_or_have_masters_or_no_room_on_disk_are_copied(
    tmp_path: Path, options: dict[str, Any]
) -> None:
    directory = save(net(), tmp_path / "model")
    model = training(directory, optimizer_rule="none", **options)
    os.truncate(directory / "model.safetensors", 100)
    state, want = gemini.handle_of(model).state_dict(), net().state_dict()
    assert all(torch.equal(state[name], want[name]) for name in want)
    gemini.handle_of(model).close()
