"""State formats under management: the bits of the same optimizer over an unmanaged model, and the bytes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from training_harness import seeded

from gemini import CheckpointError, ConfigError, GeminiDDP, GeminiOptimizer, HybridAdam, checkpoint

WIDTH, STEPS = 72, 8
FORMATS = {
    "bf16": {"state_dtype": "bf16"},
    "int8": {"state_dtype": "int8"},
    "remainders": {"master_remainders": True},
    "bf16-remainders": {"state_dtype": "bf16", "master_remainders": True},
    "int8-remainders": {"state_dtype": "int8", "master_remainders": True},
}
BYTES = {"remainders": 14, "bf16-remainders": 10, "int8-remainders": 8}


def net() -> nn.Module:
    """Weights of many blocks, of less than one, transposed, and one that is larger than a chunk."""
    layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.Tanh()) for _ in range(4)]
    model = nn.Sequential(nn.Linear(WIDTH, 500), nn.Linear(500, WIDTH), *layers)
    model[0].weight.data = model[0].weight.data.t().contiguous().t()
    return model.bfloat16()


def loss_of(model: nn.Module, index: int) -> Tensor:
    inputs = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(index)).bfloat16()
    return model(inputs).float().square().mean()


def adam(params: Any, kind: str) -> HybridAdam:
    return HybridAdam(params, lr=1e-2, weight_decay=0.1, **FORMATS[kind])


def tight(directory: Path, **options: Any) -> dict[str, Any]:
    return {
        "device_bytes": 2**19,
        "non_model_bytes": 0,
        "min_chunk_size_mb": 2**-8,
        "search_range_mb": 2**-8,
        "disk_dir": str(directory),
        "host_bytes": 2**18,
        **options,
    }


def train_plain(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range = range(STEPS)) -> None:
    for step in steps:
        loss_of(model, step).backward()
        optimizer.step()
        optimizer.zero_grad()


def train(model: nn.Module, optimizer: GeminiOptimizer, steps: range = range(STEPS)) -> None:
    for step in steps:
        optimizer.backward(loss_of(model, step))
        optimizer.step()


def flat_values(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from flat_values(inner, f"{path}/{key}")
    else:
        yield path, value


def assert_same(got: Any, want: Any) -> None:
    found, wanted = dict(flat_values(got)), dict(flat_values(want))
    assert found.keys() == wanted.keys()
    for path, value in wanted.items():
        same = torch.equal(found[path], value) if isinstance(value, Tensor) else found[path] == value
        assert same, path


def bf16(state: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: value.bfloat16() for name, value in state.items()}


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize(
    "options",
    [{}, {"overlap": "backward"}, {"nvme": 0.5}],
    ids=["overlap", "backward", "stowed"],
)
def test_weights_and_states_are_those_of_the_unmanaged_model(
    kind: str, options: dict[str, Any], tmp_path: Path
) -> None:
    options = dict(options)
    stowed = options.pop("nvme", 0.0)
    plain = seeded(net)
    optimizer = adam(plain.parameters(), kind)
    train_plain(plain, optimizer)
    module = seeded(net)
    with GeminiDDP(module, **tight(tmp_path)) as model:
        own = HybridAdam(
            module.parameters(), lr=1e-2, weight_decay=0.1, nvme_offload_fraction=stowed, **FORMATS[kind]
        )
        managed = GeminiOptimizer(own, model, **options)
        train(model, managed)
        stats = model.stats()
        assert stats["device"]["peak_bytes"] <= 2**19
        assert stats["h2d"]["bytes"] + stats["disk_read"]["bytes"] > 0
        assert_same(bf16(model.state_dict()), dict(plain.state_dict()))
        assert_same(managed.state_dict()["state"], optimizer.state_dict()["state"])
        mine, theirs = module[2][0].weight, plain[2][0].weight
        assert_same(dict(managed.state[mine]), dict(optimizer.state[theirs]))


@pytest.mark.parametrize("kind", BYTES)
def test_a_bf16_parameter_trains_in_14_bytes_10_or_8(kind: str, tmp_path: Path) -> None:
    module = seeded(lambda: nn.Sequential(*(nn.Linear(512, 512, bias=False) for _ in range(4))).bfloat16())
    numel = sum(param.numel() for param in module.parameters())
    with GeminiDDP(module, device_bytes=2**26, non_model_bytes=0, min_chunk_size_mb=1) as model:
        optimizer = GeminiOptimizer(adam(module.parameters(), kind), model, overlap=False)
        full = 0
        for index in range(2):
            inputs = torch.randn(4, 512, generator=torch.Generator().manual_seed(index)).bfloat16()
            optimizer.backward(model(inputs).float().square().mean())
            full = model.stats()["device"]["bytes"] if index else 0  # gradients are still there
            optimizer.step()
        assert BYTES[kind] * numel <= full <= (BYTES[kind] + 0.07) * numel
        assert full == model.stats()["model_data_bytes"]


@pytest.mark.parametrize("kind", FORMATS)
def test_a_checkpoint_resumes_to_the_bit_at_another_budget(kind: str, tmp_path: Path) -> None:
    def wrap(**options: Any) -> tuple[GeminiDDP, GeminiOptimizer]:
        module = seeded(net)
        model = GeminiDDP(module, **tight(tmp_path, **options))
        return model, GeminiOptimizer(adam(module.parameters(), kind), model)

    model, optimizer = wrap()
    train(model, optimizer, range(4))
    checkpoint.save(tmp_path / "saved", model, optimizer)
    train(model, optimizer, range(4, STEPS))
    want = model.state_dict(), optimizer.state_dict()
    model.close()
    model, optimizer = wrap(device_bytes=2**24, min_chunk_size_mb=0.1)
    checkpoint.load(tmp_path / "saved", model, optimizer)
    train(model, optimizer, range(4, STEPS))
    assert_same(dict(model.state_dict()), dict(want[0]))
    assert_same(optimizer.state_dict()["state"], want[1]["state"])
    model.close()


@pytest.mark.parametrize("kind", FORMATS)
def test_state_dicts_go_both_ways(kind: str, tmp_path: Path) -> None:
    plain = seeded(net)
    optimizer = adam(plain.parameters(), kind)
    train_plain(plain, optimizer)
    module = seeded(net)
    first = adam(module.parameters(), kind)
    train_plain(module, first, range(3))
    with GeminiDDP(module, **tight(tmp_path)) as model:
        managed = GeminiOptimizer(first, model)  # goes on from its state
        train(model, managed, range(3, 5))
        weights, state = bf16(model.state_dict()), managed.state_dict()
    module = seeded(net)
    module.load_state_dict(weights)
    with GeminiDDP(module, **tight(tmp_path, device_bytes=2**24)) as model:
        managed = GeminiOptimizer(adam(module.parameters(), kind), model)
        managed.load_state_dict(state)
        train(model, managed, range(5, 7))
        weights, state = bf16(model.state_dict()), managed.state_dict()
    module = seeded(net)
    module.load_state_dict(weights)
    last = adam(module.parameters(), kind)
    last.load_state_dict(state)
    train_plain(module, last, range(7, STEPS))
    assert_same(dict(module.state_dict()), dict(plain.state_dict()))


def test_another_format_begins_anew_beside_what_was_there(tmp_path: Path) -> None:
    def second_of(module: nn.Module, run: Callable[[str], None]) -> dict[str, Tensor]:
        run("bf16")
        run("int8")
        return module.state_dict()

    plain = seeded(net)
    want = second_of(plain, lambda kind: train_plain(plain, adam(plain.parameters(), kind)))
    module = seeded(net)
    with GeminiDDP(module, **tight(tmp_path)) as model:
        second_of(module, lambda kind: train(model, GeminiOptimizer(adam(module.parameters(), kind), model)))
        assert_same(bf16(model.state_dict()), dict(want))


def test_masters_of_16_bit_parameters_go_with_compact_moments_and_not_with_remainders(tmp_path: Path) -> None:
    def weights(device_bytes: int) -> dict[str, Tensor]:
        module = seeded(net).float()
        options = tight(tmp_path, mixed_precision="bf16", device_bytes=device_bytes)
        with GeminiDDP(module, **options) as model:
            with pytest.raises(ConfigError, match="leave mixed_precision out"):
                GeminiOptimizer(adam(module.parameters(), "remainders"), model)
            train(model, GeminiOptimizer(adam(module.parameters(), "int8"), model))
            return model.state_dict()

    assert_same(dict(weights(2**20)), dict(weights(2**24)))


def test_a_checkpoint_of_another_format_is_refused_with_the_way_out(tmp_path: Path) -> None:
    for kind in ("int8", "bf16"):
        module = seeded(net)
        with GeminiDDP(module, **tight(tmp_path)) as model:
            optimizer = GeminiOptimizer(adam(module.parameters(), kind), model)
            if kind == "int8":
                train(model, optimizer, range(2))
                checkpoint.save(tmp_path / "saved", model, optimizer)
                continue
            before = dict(model.state_dict())
            with pytest.raises(CheckpointError, match="state_dict"):
                checkpoint.load(tmp_path / "saved", model, optimizer)
            assert_same(dict(model.state_dict()), before)
