"""LowLevelZeroPlugin and the wrappers by stage: a model and an optimizer made ready in one call."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from processes import own_part, run_on_ranks
from torch import Tensor, nn
from torch import distributed as dist
from zero_models import adamw, assert_same, loss_of, odd_net, tokens_of, train, train_plain, weights

from gemini import ConfigError, GeminiDDP, GeminiOptimizer, HybridAdam, zero_model_wrapper, zero_optim_wrapper
from gemini.parallel import LowLevelZeroPlugin
from gemini.parallel.zero import LowLevelZeroModel, LowLevelZeroOptimizer


class Normed(nn.Module):
    """A model with buffers, which takes and gives floating-point numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 4)
        self.norm = nn.BatchNorm1d(4)
        self.fixed = nn.Linear(4, 2)
        self.fixed.requires_grad_(False)

    def forward(self, x: Tensor, *, scale: dict[str, Tensor]) -> Tensor:
        return self.fixed(self.norm(self.layer(x))) * scale["by"]


def _configured(precision: str, stage: int) -> dict[str, Any]:
    torch.manual_seed(dist.get_rank())
    module = Normed()
    module.norm.running_mean += dist.get_rank() + 1
    start = copy.deepcopy(module.state_dict())
    params = [param for param in module.parameters() if param.requires_grad]
    plugin = LowLevelZeroPlugin(stage=stage, precision=precision, initial_scale=4.0, max_norm=1.0)
    model, optimizer, _ = plugin.configure(module, torch.optim.SGD(params, lr=0.1), None, None)
    assert isinstance(optimizer, LowLevelZeroOptimizer)
    batch = torch.randn(4, 6), torch.tensor([2.0, 3.0])
    with plugin.no_sync(model, optimizer):
        optimizer.backward(model(batch[0], scale={"by": batch[1]}).float().square().mean())
    optimizer.backward(model(batch[0], scale={"by": batch[1]}).float().square().mean())
    optimizer.step()
    return {"start": start, "end": copy.deepcopy(model.state_dict()), "stage": optimizer.stage}


@pytest.mark.parametrize(
    ("precision", "dtype"), [("fp32", torch.float32), ("bf16", torch.bfloat16), ("fp16", torch.float16)]
)
def test_plugin_makes_ranks_equal_casts_the_model_and_trains_it(precision: str, dtype: torch.dtype) -> None:
    first, second = run_on_ranks(_configured, 2, precision, 2)
    assert first["stage"] == 2
    for name, value in first["end"].items():
        if value.is_floating_point():
            assert value.dtype == (torch.float32 if name.startswith("norm") else dtype), name
    for name, value in first["end"].items():
        same_on_ranks = torch.equal(value, second["end"][name])
        assert same_on_ranks or name in {"norm.running_mean", "norm.running_var"}, name
        if name.startswith("fixed"):
            assert torch.equal(value, first["start"][name].to(dtype)), name
    assert not torch.equal(first["end"]["layer.weight"].float(), first["start"]["layer.weight"])


def test_plugin_without_an_optimizer_casts_the_model() -> None:
    model, optimizer, _ = LowLevelZeroPlugin(precision="bf16").configure(Normed(), None, None, None)
    assert optimizer is None
    assert model(torch.randn(3, 6), scale={"by": torch.ones(2)}).dtype == torch.bfloat16


def test_plugin_that_does_not_cast_inputs_leaves_them() -> None:
    seen: list[torch.dtype] = []
    plugin = LowLevelZeroPlugin(precision="bf16", cast_inputs=False)
    model = plugin.configure(Normed(), None, None, None).model
    assert isinstance(model, LowLevelZeroModel)
    model.module.register_forward_pre_hook(lambda module, args: seen.append(args[0].dtype))
    model(torch.randn(3, 6), scale={"by": torch.ones(2)})  # where they meet weights they get their type
    assert seen == [torch.float32]


def test_plugin_refuses_what_it_does_not_know() -> None:
    with pytest.raises(TypeError, match="max_normm"):
        LowLevelZeroPlugin(max_normm=1.0)
    with pytest.raises(TypeError, match="reduce_bucket_size'"):
        LowLevelZeroPlugin(reduce_bucket_size=50)
    with pytest.raises(ConfigError, match="choose from"):
        LowLevelZeroPlugin(precision="int8")
    with pytest.raises(ConfigError, match="stage 1 or 2"):
        LowLevelZeroPlugin(stage=3)
    with pytest.raises(ConfigError, match="no_sync"):
        LowLevelZeroPlugin().no_sync(odd_net(), None)


def test_model_state_is_the_modules_and_loads_in_place() -> None:
    module = odd_net()
    model = LowLevelZeroModel(module)
    assert model.state_dict().keys() == module.state_dict().keys()
    other = {name: value + 1 for name, value in module.state_dict().items()}
    model.load_state_dict(other)
    assert_same(weights(module), other)
    with pytest.raises(ConfigError, match="assign"):
        model.load_state_dict(other, assign=True)


# -- by stage ------------------------------------------------------------------------------------


@pytest.mark.parametrize("stage", [1, 2])
def test_wrappers_by_stage_train_and_clip_as_the_optimizer_does(stage: int) -> None:
    module = odd_net()
    model = zero_model_wrapper(module, zero_stage=stage)
    optimizer = zero_optim_wrapper(model, adamw(module.parameters()), max_norm=0.05, reduce_bucket_size=50)
    assert isinstance(optimizer, LowLevelZeroOptimizer)
    assert optimizer.stage == stage
    for step in range(4):
        optimizer.backward(loss_of(model, own_part(tokens_of(step))))
        optimizer.step()
    assert_same(weights(module), weights(train(clip_grad_norm=0.05)[0]))
    assert not torch.equal(module.bias, train_plain()[0].bias)


def test_wrappers_of_stage_3_are_gemini_and_clip_too() -> None:
    with zero_model_wrapper(odd_net(), 3, {"device_bytes": "64MiB"}) as model:
        assert isinstance(model, GeminiDDP)
        optimizer = zero_optim_wrapper(model, HybridAdam(model.parameters(), lr=1e-2), max_norm=0.05)
        assert isinstance(optimizer, GeminiOptimizer)
        assert optimizer.max_norm == 0.05


def test_wrappers_refuse_what_does_not_belong_together() -> None:
    with pytest.raises(ConfigError, match="there are 1, 2 and 3"):
        zero_model_wrapper(odd_net(), zero_stage=4)
    with pytest.raises(ConfigError, match="gemini_config"):
        zero_model_wrapper(odd_net(), zero_stage=2, gemini_config={"device_bytes": 1})
    with pytest.raises(ConfigError, match="zero_model_wrapper"):
        zero_optim_wrapper(odd_net(), adamw(odd_net().parameters()))
    model = zero_model_wrapper(odd_net(), zero_stage=1)
    with pytest.raises(TypeError, match="clipping_norm"):
        zero_optim_wrapper(model, adamw(model.parameters()), clipping_norm=1.0)
