"""CPUAdam and HybridAdam as torch optimizers."""

from __future__ import annotations

import copy
import inspect
import math
import pickle
from typing import Any

import pytest
import torch
from torch import nn

from gemini.errors import ConfigError
from gemini.optim import FusedAdam, kernel_adam
from gemini.optim.kernel_adam import CPUAdam, HybridAdam, KernelAdam

EACH = pytest.mark.parametrize("kind", [CPUAdam, HybridAdam])


def small_model(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 16))


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 5, start: int = 0) -> None:
    for step in range(start, start + steps):
        torch.manual_seed(100 + step)
        optimizer.zero_grad()
        model(torch.randn(7, 16)).square().mean().backward()
        optimizer.step()


def assert_identical(got: nn.Module, want: nn.Module) -> None:
    for (name, one), other in zip(got.named_parameters(), want.parameters(), strict=True):
        assert torch.equal(one, other), name


def torch_adamw(params: Any, **options: Any) -> torch.optim.AdamW:
    """Return torch's optimizer with our defaults, of which the fused one has exactly our bits."""
    return torch.optim.AdamW(params, fused=True, **{"weight_decay": 0.0, **options})


@EACH
def test_training_is_that_of_torch_adamw(kind: type[CPUAdam]) -> None:
    got, want = small_model(), small_model()
    train(got, kind(got.parameters(), lr=0.01, weight_decay=0.1))
    train(want, torch_adamw(want.parameters(), lr=0.01, weight_decay=0.1))
    assert_identical(got, want)


def test_adam_mode_is_torch_adam() -> None:
    got, want = small_model(), small_model()
    train(got, CPUAdam(got.parameters(), weight_decay=0.1, adamw_mode=False))
    train(want, torch.optim.Adam(want.parameters(), weight_decay=0.1, fused=True))
    assert_identical(got, want)


def test_without_bias_correction_the_first_step_is_smaller() -> None:
    param = torch.zeros(4, requires_grad=True)
    param.grad = torch.ones(4)
    CPUAdam([param], lr=1.0, bias_correction=False).step()
    assert param.tolist() == pytest.approx([-0.1 / 0.001**0.5] * 4, rel=1e-5)


def test_groups_keep_their_own_settings_and_parameters_their_own_step() -> None:
    got, want = small_model(), small_model()
    models = ((got, CPUAdam), (want, torch_adamw))
    for model, make in models:
        groups = [
            {"params": [model[0].weight], "lr": 0.1, "betas": (0.5, 0.7)},
            {"params": [model[0].bias, model[2].weight], "weight_decay": 0.3, "eps": 1e-3},
        ]
        optimizer = make(groups, lr=0.02)
        model[2].weight.requires_grad_(False)  # joins after three steps
        train(model, optimizer, 3)
        model[2].weight.requires_grad_(True)
        optimizer.add_param_group({"params": [model[2].bias], "lr": 0.5})
        train(model, optimizer, 3, start=3)
    assert_identical(got, want)


def test_schedulers_drive_the_learning_rate() -> None:
    got, want = small_model(), small_model()
    for model, make in ((got, CPUAdam), (want, torch_adamw)):
        optimizer = make(model.parameters(), lr=0.05)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=6)
        for step in range(6):
            train(model, optimizer, 1, start=step)
            scheduler.step()
    assert_identical(got, want)


def test_tensor_learning_rate_is_its_number() -> None:
    got, want = small_model(), small_model()
    train(got, CPUAdam(got.parameters(), lr=torch.tensor(0.03125)))
    train(want, CPUAdam(want.parameters(), lr=0.03125))
    assert_identical(got, want)


def test_warm_up_from_a_learning_rate_of_zero_starts_with_no_change() -> None:
    got, want = small_model(), small_model()
    for model, make in ((got, CPUAdam), (want, torch_adamw)):
        optimizer = make(model.parameters(), lr=0.05, weight_decay=0.1)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, step / 3))
        train(model, optimizer, 1)
        assert_identical(model, small_model())
        for step in range(1, 6):
            scheduler.step()
            train(model, optimizer, 1, start=step)
    assert_identical(got, want)


FORMS = pytest.mark.parametrize(
    "form",
    [{}, {"nvme_offload_fraction": 1.0}, {"state_dtype": "bf16"}, {"state_dtype": "int8"}],
    ids=lambda form: "-".join(map(str, form.values())) or "plain",
)


@FORMS
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("scale", [2.0**10, 0.25])
def test_grad_scale_divides_the_gradients_first(
    dtype: torch.dtype, form: dict[str, Any], scale: float
) -> None:
    scaled, plain = (torch.ones(300, dtype=dtype).requires_grad_() for _ in range(2))
    ours, reference = CPUAdam([scaled], lr=0.01, **form), CPUAdam([plain], lr=0.01, **form)
    for step in range(3):
        grad = torch.randn(300, generator=torch.Generator().manual_seed(step))
        # Scaled, still normal numbers in fp16.
        plain.grad = (grad.sign() * grad.abs().clamp(0.01, 4.0)).to(dtype)
        scaled.grad = plain.grad * scale
        ours.step(grad_scale=scale)
        reference.step()
    assert torch.equal(scaled, plain)
    assert torch.equal(scaled.grad, plain.grad * scale)  # type: ignore[arg-type, operator]


@pytest.mark.parametrize("bad", [0.0, -2.0, math.nan, math.inf])  # the norm of gradients that overflowed
def test_grad_scale_that_is_not_a_positive_number_is_refused_and_nothing_changes(bad: float) -> None:
    model = small_model()
    optimizer = CPUAdam(model.parameters())
    model(torch.ones(2, 16)).sum().backward()
    with pytest.raises(ConfigError, match="grad_scale"):
        optimizer.step(grad_scale=bad)
    assert_identical(model, small_model())
    assert not optimizer.state


@FORMS
def test_torchs_grad_scaler_scales_back_and_skips_overflowed_steps(form: dict[str, Any]) -> None:
    got, want = small_model(), small_model()
    train(want, CPUAdam(want.parameters(), lr=0.01, **form), 3)
    optimizer = CPUAdam(got.parameters(), lr=0.01, **form)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for step, factor in enumerate((1.0, 1.0, math.inf, 1.0)):
        torch.manual_seed(100 + step - (step == 3))
        optimizer.zero_grad()
        scaler.scale(got(torch.randn(7, 16)).square().mean() * factor).backward()
        scaler.step(optimizer)
        scaler.update()
    assert scaler.get_scale() == 512.0
    assert_identical(got, want)


@FORMS
def test_closure_gives_every_form_its_gradients_and_loss(form: dict[str, Any]) -> None:
    param = torch.ones(300).requires_grad_()
    optimizer = CPUAdam([param], lr=0.25, **form)

    def closure() -> float:
        optimizer.zero_grad()
        loss = (3.0 * param).sum()
        loss.backward()
        return loss.item()

    assert [optimizer.step(closure), optimizer.step(closure)] == pytest.approx([900.0, 675.0], rel=1e-3)


def test_closure_is_run_with_gradients_and_its_loss_returned() -> None:
    model = small_model()
    optimizer = CPUAdam(model.parameters())
    before = model[0].weight.clone()

    def closure() -> float:
        optimizer.zero_grad()
        loss = model(torch.ones(2, 16)).sum()
        loss.backward()
        return loss.item()

    assert isinstance(optimizer.step(closure), float)
    assert not torch.equal(model[0].weight, before)


def test_hooks_of_torch_optimizers_run() -> None:
    model = small_model()
    optimizer = CPUAdam(model.parameters())
    calls: list[str] = []
    optimizer.register_step_pre_hook(lambda *_: calls.append("pre"))
    optimizer.register_step_post_hook(lambda *_: calls.append("post"))
    train(model, optimizer, 1)
    assert calls == ["pre", "post"]


def test_graph_that_saved_a_weight_notices_the_step() -> None:
    model = small_model()
    optimizer = CPUAdam(model.parameters())
    loss = model(torch.randn(2, 16, requires_grad=True)).sum()
    loss.backward(retain_graph=True)
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_permuted_parameter_and_other_gradient_order_match_torch() -> None:
    values, grad = torch.randn(8, 16), torch.randn(8, 16)
    got = values.t().contiguous().t().clone(memory_format=torch.preserve_format).requires_grad_()
    want = values.clone().requires_grad_()
    assert not got.is_contiguous()
    for param, make in ((got, CPUAdam), (want, torch_adamw)):
        param.grad = grad.clone()
        optimizer = make([param])
        optimizer.step()
        optimizer.step()
    assert torch.equal(got, want)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bit_parameters_have_fp32_moments(dtype: torch.dtype) -> None:
    param = torch.randn(100).to(dtype).requires_grad_()
    param.grad = torch.full((100,), 1e-3).to(dtype)
    optimizer = CPUAdam([param])
    optimizer.step()
    assert optimizer.state[param]["exp_avg_sq"].dtype == torch.float32
    assert (optimizer.state[param]["exp_avg_sq"] > 0).all()  # 1e-9: zero in fp16


@pytest.mark.parametrize("how", ["pickle", "deepcopy"])
def test_copies_go_on_as_the_original(how: str) -> None:
    model = small_model()
    optimizer = CPUAdam(model.parameters(), lr=0.01, weight_decay=0.1)
    train(model, optimizer)
    both = (model, optimizer)
    other, twin = pickle.loads(pickle.dumps(both)) if how == "pickle" else copy.deepcopy(both)
    train(model, optimizer, start=5)
    train(other, twin, start=5)
    assert_identical(other, model)


def refused(params: Any, match: str, kind: type[KernelAdam] = CPUAdam, **options: Any) -> None:
    with pytest.raises(ConfigError, match=match):
        kind(params, **options)


def test_parameters_that_cannot_be_updated_are_refused_by_name() -> None:
    refused([torch.zeros(3, dtype=torch.float64)], "parameter 0 of group 0.*float64")
    refused([torch.zeros(3), torch.zeros(4, 4)[:, :2]], "parameter 1 of group 0.*gaps")
    refused([torch.zeros(1).expand(5)], "gaps or overlaps")
    refused([("w.bias", torch.zeros(3, dtype=torch.int32))], "'w.bias'")
    refused([torch.zeros(3).to_sparse()], "sparse")
    refused([torch.zeros(2)], "nvme_offload_fraction", nvme_offload_fraction=1.5)
    refused([torch.zeros(2)], "betas", betas=(0.9, 1.0))
    refused([{"params": [torch.zeros(2)], "amsgrad": True}], "amsgrad")


class ElsewhereTensor(torch.Tensor):
    """A CPU tensor that says it is on a GPU: the check itself needs none."""

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return torch.device("cuda", 0)


def test_parameters_of_other_devices_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    param = torch.zeros(3).as_subclass(ElsewhereTensor)
    refused([param], "cuda:0; CPUAdam takes CPU tensors")
    refused([torch.zeros(3)], "cpu; FusedAdam takes CUDA tensors", FusedAdam)
    monkeypatch.setattr(kernel_adam, "has_cuda_kernel", lambda: False)
    refused([param], "cuda:0.*GEMINI_CUDA=ON", HybridAdam)


def test_refused_group_is_not_added() -> None:
    optimizer = CPUAdam([torch.zeros(3)])
    with pytest.raises(ConfigError):
        optimizer.add_param_group({"params": [torch.zeros(3, dtype=torch.float64)]})
    assert len(optimizer.param_groups) == 1


def test_unknown_keyword_is_a_type_error() -> None:
    with pytest.raises(TypeError):
        CPUAdam([torch.zeros(3)], weight_decy=0.1)


def test_flags_of_torch_are_taken_at_their_defaults_and_refused_by_name_otherwise() -> None:
    flags = {
        name: parameter.default
        for name, parameter in inspect.signature(torch.optim.AdamW).parameters.items()
        if name in ("amsgrad", "maximize", "foreach", "capturable", "differentiable", "fused")
    }
    assert len(flags) == 6
    CPUAdam([torch.zeros(3)], **flags)
    HybridAdam([torch.zeros(3)], **flags)
    for name in flags:
        with pytest.raises(ConfigError, match=f"HybridAdam.{name}=True"):
            HybridAdam([torch.zeros(3)], **{name: True})
        with pytest.raises(ConfigError, match=f"CPUAdam.{name}=True"):
            CPUAdam([{"params": [torch.zeros(3)], name: True}])


def test_groups_of_torchs_adam_keep_its_kind_of_decay() -> None:
    model, like = small_model(), small_model()
    theirs = torch.optim.Adam(like.parameters(), lr=0.01, weight_decay=0.5)
    ours = CPUAdam(torch.optim.Adam(model.parameters(), lr=0.01, weight_decay=0.5).param_groups)
    train(model, ours)
    train(like, theirs)
    assert all(
        torch.allclose(a, b, atol=1e-6) for a, b in zip(model.parameters(), like.parameters(), strict=True)
    )


def test_unusable_gradient_is_refused_and_nothing_changes() -> None:
    good, bad = (torch.ones(4, 2, requires_grad=True) for _ in range(2))
    good.grad = torch.ones(4, 2)
    bad.grad = torch.ones(4, 2).to_sparse()
    optimizer = CPUAdam([good, bad])
    with pytest.raises(ConfigError, match="gradient of parameter 1 of group 0"):
        optimizer.step()
    assert torch.equal(good, torch.ones(4, 2))
    assert not optimizer.state


def test_meta_parameter_may_be_held_but_not_stepped() -> None:
    param = torch.zeros(3, device="meta", requires_grad=True)
    optimizer = CPUAdam([param])
    param.grad = torch.zeros(3, device="meta")
    with pytest.raises(ConfigError, match="meta"):
        optimizer.step()
