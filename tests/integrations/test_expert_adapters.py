"""PEFT's adapters on arrays of experts: the numbers of plain torch, and no array of sums."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from test_expert_architectures import CONFIGS
from torch._C import DisableTorchFunctionSubclass

import gemini
from gemini.errors import StateError
from gemini.runtime.intercept.adapted_rows import AdaptedRows
from gemini.system.process import keep_few_kernels

peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")

_STEPS = 3


def _model(name: str, implementation: str, dtype: torch.dtype = torch.float32) -> Any:
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**CONFIGS[name])
    config._experts_implementation = implementation
    model = getattr(transformers, f"{name}ForCausalLM")(config).to(dtype)
    arrays = {name.rpartition(".")[2] for name, param in model.named_parameters() if param.dim() == 3}
    adapters = peft.LoraConfig(
        r=8,
        target_modules=["o_proj"],
        target_parameters=[f"experts.{array}" for array in sorted(arrays)],
        init_lora_weights=False,
    )
    return peft.get_peft_model(model, adapters).train()


def _train(model: Any, optimizer: Any, backward: Any) -> list[Any]:
    losses = []
    for step in range(_STEPS):
        tokens = torch.randint(96, (1, 6 + 20 * step), generator=torch.Generator().manual_seed(step))
        loss = model(input_ids=tokens, labels=tokens).loss
        backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def _trained(model: Any) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}


def _managed(model: Any, tmp_path: Path, share: float, **options: Any) -> Any:
    nbytes = int(share * sum(param.nbytes for param in model.parameters()))
    where = {"host_bytes": 0, "disk_dir": tmp_path, "non_model_bytes": 0}
    return gemini.manage(model, device_bytes=nbytes, **where, **options)


def _refuse_whole(_sum: AdaptedRows) -> torch.Tensor:
    raise AssertionError("the sum of a whole array was asked for")


@pytest.mark.parametrize("name", ["Mixtral", "GptOss", "Qwen3Moe"])
@pytest.mark.parametrize(
    ("implementation", "share", "options"),
    [
        ("grouped_mm", 0.4, {}),
        ("grouped_mm", 8.0, {}),
        ("eager", 0.4, {}),
        ("grouped_mm", 0.6, {"activation_offload": True}),
    ],
)
def test_adapters_on_experts_train_to_the_same_bits(
    name: str,
    implementation: str,
    share: float,
    options: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plain = _model(name, implementation, torch.bfloat16)
    optimizer: Any = gemini.HybridAdam([p for p in plain.parameters() if p.requires_grad], lr=1e-2)
    losses = _train(plain, optimizer, lambda loss: loss.backward())
    want = _trained(plain)
    monkeypatch.setattr(AdaptedRows, "whole", _refuse_whole)
    model = _model(name, implementation, torch.bfloat16)
    optimizer = gemini.GeminiAdamOptimizer(_managed(model, tmp_path, share, **options), lr=1e-2)
    assert _train(model, optimizer, optimizer.backward) == losses
    got = _trained(model)
    assert got.keys() == want.keys()
    assert [name for name in want if not torch.equal(got[name], want[name])] == []


def test_recomputed_blocks_have_the_same_bits(tmp_path: Path) -> None:
    trained = []
    for is_managed in (False, True):
        model = _model("Qwen3Moe", "grouped_mm", torch.bfloat16)
        model.gradient_checkpointing_enable({"use_reentrant": False})
        model.enable_input_require_grads()
        if is_managed:
            optimizer: Any = gemini.GeminiAdamOptimizer(_managed(model, tmp_path, 0.4), lr=1e-2)
            _train(model, optimizer, optimizer.backward)
        else:
            optimizer = gemini.HybridAdam([p for p in model.parameters() if p.requires_grad], lr=1e-2)
            _train(model, optimizer, lambda loss: loss.backward())
        trained.append(_trained(model))
    plain, managed = trained
    assert [name for name in plain if not torch.equal(managed[name], plain[name])] == []


@pytest.mark.parametrize("implementation", ["grouped_mm", "batched_mm"])
def test_other_uses_get_the_whole_sum(implementation: str, tmp_path: Path) -> None:
    """An index by a tensor of rows is one; and nothing is recorded without gradients."""
    model = _model("Qwen3Moe", implementation).eval()
    tokens = torch.arange(12)[None]
    with torch.no_grad():
        want = model(input_ids=tokens).logits
    _managed(model, tmp_path, 0.6, optimizer_rule="none")
    with torch.no_grad():
        assert torch.equal(model(input_ids=tokens).logits, want)


def _factors(kind: torch.dtype, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(rank)
    shapes = (8, 64, rank), (8, rank, 32)
    left, right = (torch.randn(shape, generator=generator).to(kind) for shape in shapes)
    return left.requires_grad_(), right.requires_grad_()


class _Experts(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.num_experts = 8
        generator = torch.Generator().manual_seed(1)
        self.weight = torch.nn.Parameter(torch.randn(8, 64, 32, generator=generator), requires_grad=False)

    def forward(self, tokens: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> list[torch.Tensor]:
        """Multiply with two experts; the sum of all is made without autocast, as PEFT makes it."""
        with torch.autocast("cpu", enabled=False):
            rows = torch.baddbmm(self.weight, left, right, alpha=2)
        return [torch.nn.functional.linear(tokens, rows[expert]) for expert in (1, 5)]


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("rank", [1, 2, 8])
def test_rows_have_the_bits_of_the_whole_sum(rank: int, autocast: bool, tmp_path: Path) -> None:
    found = []
    tokens = torch.randn(5, 32, generator=torch.Generator().manual_seed(2))
    for is_managed in (False, True):
        module = _Experts()
        if is_managed:
            _managed(module, tmp_path, 1.1 if rank == 1 else 0.7, optimizer_rule="none")
        left, right = _factors(torch.float32, rank)
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            products = module(tokens, left, right)
        torch.stack(products).float().square().sum().backward()
        found.append([*products, left.grad, right.grad])
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


def test_a_sum_made_without_gradients_has_none_and_one_that_was_changed_is_refused(tmp_path: Path) -> None:
    module = _Experts()
    _managed(module, tmp_path, 0.7, optimizer_rule="none")
    left, right = _factors(torch.float32, 8)
    with torch.no_grad():
        rows = torch.baddbmm(module.weight, left, right)
    assert type(rows) is AdaptedRows
    assert not torch.nn.functional.linear(torch.ones(1, 32), rows[1]).requires_grad
    assert rows.transpose(1, 2).stride() == torch.empty(8, 64, 32).transpose(1, 2).stride()
    with torch.no_grad():
        left.mul_(2)
    with pytest.raises(StateError, match="was changed in place between the sum of both and its use"):
        rows[1]


def test_what_reads_a_sum_below_autograd_does_not_take_its_gradient(tmp_path: Path) -> None:
    module = _Experts()
    _managed(module, tmp_path, 1.1, optimizer_rule="none")
    left, right = _factors(torch.float32, 8)
    rows = torch.baddbmm(module.weight, left, right)
    with torch.no_grad(), DisableTorchFunctionSubclass():
        torch.sum(rows)
    rows.square().sum().backward()
    assert left.grad is not None


def test_a_step_makes_no_array_of_sums(tmp_path: Path) -> None:
    """What a step keeps for backward has no share of the experts' bytes."""
    model = _model("Qwen3Moe", "grouped_mm")
    array = max(param.nbytes for param in model.parameters() if param.dim() == 3)
    optimizer: Any = gemini.GeminiAdamOptimizer(_managed(model, tmp_path, 0.4), lr=1e-2)
    largest = 0

    def note(tensor: torch.Tensor) -> torch.Tensor:
        nonlocal largest
        largest = max(largest, tensor.nbytes)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        loss = model(input_ids=torch.arange(4)[None], labels=torch.arange(4)[None]).loss
    optimizer.backward(loss)
    assert 0 < largest < array


def test_few_kernels_are_kept_unless_the_environment_says_how_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "environ", {"LRU_CACHE_CAPACITY": "7"})
    keep_few_kernels()
    assert os.environ == {"LRU_CACHE_CAPACITY": "7", "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "64"}
