"""What computes in 16 bits in a cut model, and what keeps its type: as in a managed one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from processes import run_on_ranks
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from gemini import ConfigError
from gemini.parallel import Booster, LowLevelZeroPlugin
from gemini.parallel.zero import LowLevelZeroModel, LowLevelZeroOptimizer

HALVES = pytest.mark.parametrize("precision", ["bf16", "fp16"])


class Net(nn.Module):
    """Adds positions in fp32 to activations, counts its calls, and has batch norm."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8)
        self.norm = nn.BatchNorm1d(8)
        self.router = nn.Linear(8, 8)
        self.register_buffer("positions", torch.linspace(0, 1, 8) / 3)
        self.register_buffer("calls", torch.tensor(256.0))
        self.calls: Tensor
        self.positions: Tensor

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        x = self.norm(torch.tanh(self.first(x)) + self.positions)
        out: Tensor = checkpoint(self._end, x, use_reentrant=False)
        return out

    def _end(self, x: Tensor) -> Tensor:
        return self.last(x + self.positions) + self.router(x)


def train(precision: str, keep_fp32: tuple[str, ...] = ()) -> tuple[nn.Module, Any]:
    module = Net()
    plugin = LowLevelZeroPlugin(stage=2, precision=precision, initial_scale=2.0**10, keep_fp32=keep_fp32)
    adam = torch.optim.AdamW(module.parameters(), lr=1e-2)
    model, optimizer, *_ = Booster(plugin=plugin).boost(module, adam)
    for step in range(3):
        x = torch.randn(6, 8, generator=torch.Generator().manual_seed(step))
        optimizer.backward(model(x).float().square().mean())
        optimizer.step()
    return module, optimizer


def _types(precision: str) -> None:
    module, _ = train(precision, ("router",))
    half = {"bf16": torch.bfloat16, "fp16": torch.float16}[precision]
    types = {name: tensor.dtype for name, tensor in module.state_dict().items()}
    for name, dtype in types.items():
        kept = name.startswith(("norm", "router", "positions", "calls"))
        want = torch.int64 if "num_batches" in name else torch.float32 if kept else half
        assert dtype == want, name
    assert module.get_buffer("calls") == 259.0
    assert torch.equal(module.get_buffer("positions"), Net().get_buffer("positions"))


@HALVES
def test_buffers_batch_norm_and_what_is_named_stay_in_fp32(precision: str) -> None:
    _types(precision)
    run_on_ranks(_types, 2, precision)


@HALVES
def test_weights_are_those_of_fp32_up_to_rounding(precision: str) -> None:
    want = {name: value.float() for name, value in train("fp32")[0].state_dict().items()}
    for name, value in train(precision)[0].state_dict().items():
        torch.testing.assert_close(value.float(), want[name], atol=4e-2, rtol=0)


@HALVES
def test_statistics_go_with_batch_norm_that_the_optimizer_has_cast(precision: str) -> None:
    module = Net()
    optimizer = LowLevelZeroOptimizer(torch.optim.AdamW(module.parameters()), precision=precision)
    model = LowLevelZeroModel(module, module.first.weight.dtype)
    optimizer.backward(model(torch.ones(6, 8)).float().square().mean())
    assert module.norm.running_mean is not None
    assert module.norm.running_mean.dtype == module.norm.weight.dtype == module.first.weight.dtype
    assert module.positions.dtype == torch.float32


def test_names_that_fit_nothing_or_have_no_effect_are_refused() -> None:
    for precision, names in (("bf16", ("nothing",)), ("fp32", ("router",))):
        with pytest.raises(ConfigError, match="keep_fp32"):
            train(precision, names)


def test_other_refusals_are_torchs_own() -> None:
    module = Net()
    model = LowLevelZeroModel(module, torch.bfloat16)
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        model(torch.ones(6, 9))


@HALVES
def test_compiled_modules_run(precision: str) -> None:
    module = Net()
    half = {"bf16": torch.bfloat16, "fp16": torch.float16}[precision]
    want = LowLevelZeroModel(Net(), half)(torch.ones(6, 8))
    got = LowLevelZeroModel(torch.compile(module, backend="eager"), half)(torch.ones(6, 8))
    torch.testing.assert_close(got, want)
