"""What else the runtime does to a model it does to a cut one: no option changes the bits of its parts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from processes import run_on_ranks
from tensor_harness import HEADS, LANGUAGE_PLAN, WIDTH, Language, gathered, make_mesh
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from gemini import CPUAdam, GeminiDDP, GeminiOptimizer
from gemini.parallel import parallelize

CHUNKS = {"min_chunk_size_mb": 0.004, "search_range_mb": 0.004, "non_model_bytes": 0}
TIGHT = {"device_bytes": "150KiB", "host_bytes": "8MiB"}


class Attending(nn.Module):
    """Torch's encoder, its blocks computed again in backward."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 2 * WIDTH, dropout=0.1, batch_first=True)
        self.blocks = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False).layers

    def forward(self, ids: Tensor) -> Tensor:
        x = torch.nn.functional.one_hot(ids % WIDTH, WIDTH).float()
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return x


MODELS: dict[str, tuple[type[nn.Module], Any, dict[str, Any]]] = {
    "language": (Language, LANGUAGE_PLAN, {}),
    "attention, recomputed": (Attending, "auto", {}),
    "attention, norms on parts": (Attending, "auto", {"sequence_norms": True}),
}


def train(name: str, options: dict[str, Any] | None) -> tuple[list[float], dict[str, Tensor], int]:
    """Train some steps; without options, an unmanaged model."""
    mesh = make_mesh(tp=2)
    kind, plan, how = MODELS[name]
    torch.manual_seed(9)
    model: nn.Module = kind()
    partition = parallelize(model, mesh, plan, **how)
    optimizer: Any = CPUAdam(model.parameters(), lr=1e-2, eps=1e-6)
    if options is not None:
        model = GeminiDDP(
            model, process_group=mesh["dp"], model_ranks=partition.model_ranks, **{**CHUNKS, **options}
        )
        adam = CPUAdam(model.parameters(), lr=1e-2, eps=1e-6)
        optimizer = GeminiOptimizer(adam, model, initial_scale=16)
    losses = []
    for step in range(3):
        ids = torch.randint(37, (3, 6), generator=torch.Generator().manual_seed(step))
        loss = model(ids).float().square().mean()
        optimizer.backward(loss) if options is not None else loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    weights = gathered(model, partition)
    moved = 0
    if isinstance(model, GeminiDDP):
        moved = model.stats()["d2h"]["bytes"]
        model.close()
    return losses, weights, moved


def assert_same(got: Any, wanted: Any) -> None:
    assert got[0] == wanted[0]
    assert got[1].keys() == wanted[1].keys()
    for key, value in wanted[1].items():
        assert torch.equal(got[1][key], value), key


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("options", [TIGHT, {**TIGHT, "activation_offload": True}])
def test_managed_parts_have_the_bits_of_unmanaged_ones(name: str, options: dict[str, Any]) -> None:
    wanted = run_on_ranks(train, 2, name, None)
    for got, plain in zip(run_on_ranks(train, 2, name, options), wanted, strict=True):
        assert_same(got, plain)
        assert got[2] > 0


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_budgets_change_no_bit_of_parts_in_16_bits(precision: str) -> None:
    roomy = run_on_ranks(train, 2, "language", {"device_bytes": "64MiB", "mixed_precision": precision})
    tight = run_on_ranks(train, 2, "language", {**TIGHT, "mixed_precision": precision})
    full, _ = run_on_ranks(train, 2, "language", None)
    for got, wanted in zip(tight, roomy, strict=True):
        assert_same(got, wanted)
        assert wanted[0] == pytest.approx(full[0], rel=0.05)
