"""Engine: the loop of plain torch, with the features of a configuration."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from gemini import ConfigError, HybridAdam
from gemini.parallel import Booster, GeminiPlugin, LowLevelZeroOptimizer, LowLevelZeroPlugin, TorchDDPPlugin
from gemini.parallel.booster.mixed_precision import (
    FP16ApexMixedPrecision,
    FP16NaiveMixedPrecision,
    FP16TorchMixedPrecision,
)
from gemini.parallel.engine import (
    AMP_TYPE,
    BaseGradientHandler,
    BaseSchedule,
    Engine,
    get_dataloader,
    initialize,
)
from gemini.parallel.engine.amp import read_amp
from gemini.parallel.engine.schedule import call_criterion, call_model, num_samples, split_batch
from gemini.parallel.launch import GRADIENT_HANDLER, global_context, launch, shutdown


def model_of(seed: int = 3) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3))


def batches(count: int = 8) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [
        (torch.randn(4, 6, generator=generator), torch.randint(3, (4,), generator=generator))
        for _ in range(count)
    ]


def engine_of(config: dict[str, Any] | None = None, **options: Any) -> Engine:
    model = model_of()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return initialize(model, optimizer, nn.CrossEntropyLoss(), config=config or {}, **options)[0]


def engine_of_launch() -> Engine:
    model = model_of()
    return initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), nn.CrossEntropyLoss())[0]


def train(engine: Engine, count: int = 8) -> list[float]:
    losses = []
    for data, label in batches(count):
        engine.zero_grad()
        loss = engine.criterion(engine(data), label)
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def train_plain(accumulation: int = 1, max_norm: float = 0.0) -> tuple[list[float], nn.Module]:
    """Train as a program of plain torch does."""
    model, criterion, losses = model_of(), nn.CrossEntropyLoss(), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for number, (data, label) in enumerate(batches()):
        if number % accumulation == 0:
            optimizer.zero_grad()
        loss = criterion(model(data), label)
        (loss / accumulation).backward()
        losses.append(loss.item())
        if (number + 1) % accumulation == 0:
            if max_norm:
                nn.utils.clip_grad_norm_(model.parameters(), max_norm)
            optimizer.step()
    return losses, model


# -- one loop for all features ---------------------------------------------------------------------


@pytest.mark.parametrize("accumulation", [1, 4])
@pytest.mark.parametrize("max_norm", [0.0, 0.1])
def test_a_loop_has_the_numbers_of_plain_torch(accumulation: int, max_norm: float) -> None:
    want, plain = train_plain(accumulation, max_norm)
    engine = engine_of({"gradient_accumulation": accumulation, "clip_grad_norm": max_norm})
    assert train(engine) == want
    for param, other in zip(engine.model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(param, other)


def test_parameters_change_with_the_last_iteration_of_an_update() -> None:
    engine, seen = engine_of({"gradient_accumulation": 4}), []
    param = next(iter(engine.model.parameters()))
    for data, label in batches():
        before = param.detach().clone()
        engine.zero_grad()
        engine.backward(engine.criterion(engine(data), label))
        assert engine.step() is not torch.equal(param, before)
        seen.append(not torch.equal(param, before))
    assert seen == [False, False, False, True] * 2
    assert engine.num_updates == 2


def test_a_schedule_does_what_the_loop_does() -> None:
    want = train(engine_of({"gradient_accumulation": 2}))
    engine, losses = engine_of({"gradient_accumulation": 2}), []
    source = iter(batches())
    for _ in range(8):
        engine.zero_grad()
        output, label, loss = engine.execute_schedule(source)
        engine.step()
        assert (output.shape, label.shape, loss.requires_grad) == ((4, 3), (4,), False)
        losses.append(loss.item())
    assert losses == want
    with pytest.raises(StopIteration):
        engine.execute_schedule(source)


def test_a_schedule_gives_what_is_asked_for() -> None:
    engine = engine_of().eval()
    assert not engine.training
    assert engine.execute_schedule(iter(batches()), return_output_label=False)[:2] == (None, None)
    engine.zero_grad()
    output, _, loss = engine.execute_schedule(iter(batches()), forward_only=True, return_loss=False)
    assert (loss, output.requires_grad) == (None, False)
    assert all(param.grad is None for param in engine.model.parameters())
    assert engine.train().training


@pytest.mark.parametrize("forward_only", [True, False])
def test_a_loss_without_a_criterion_is_refused(forward_only: bool) -> None:
    model = model_of()
    engine, *_ = initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), config={})
    with pytest.raises(ConfigError, match="criterion"):
        engine.execute_schedule(iter(batches()), forward_only)


class Halving(BaseSchedule):
    def forward_backward_step(self, engine: Engine, data_iter: Iterator[Any], *_: Any) -> Any:
        data, label = self.load_batch(data_iter)
        loss = engine.criterion(engine(data), label) / 2
        engine.backward(loss)
        return None, None, loss.detach()


def test_an_engine_without_an_optimizer_evaluates_and_does_not_train() -> None:
    engine = initialize(model_of(), None, nn.CrossEntropyLoss(), config={})[0]
    engine.eval()
    _, _, loss = engine.execute_schedule(iter(batches(1)), forward_only=True)
    data, label = batches(1)[0]
    assert loss is not None
    assert torch.equal(loss, nn.functional.cross_entropy(model_of()(data), label))
    with pytest.raises(ConfigError, match="can only evaluate"):
        engine.zero_grad()


def test_a_schedule_of_the_programs_own_is_run() -> None:
    plain, halved = engine_of(), engine_of(schedule=Halving())
    first, second = (engine.execute_schedule(iter(batches()))[2] for engine in (plain, halved))
    assert second == first / 2
    assert halved.schedule.batch_size == 4


# -- features --------------------------------------------------------------------------------------


def test_a_scheduler_steps_with_the_updates_by_iteration_or_by_epoch() -> None:
    model = model_of()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    engine, _, _, scheduler = initialize(
        model, optimizer, nn.CrossEntropyLoss(), lr_scheduler=scheduler, config={"gradient_accumulation": 4}
    )
    rates = []
    for data, label in batches():
        engine.backward(engine.criterion(engine(data), label))
        engine.step()
        scheduler.step()
        rates.append(scheduler.get_last_lr()[0])
    assert rates == [1.0, 1.0, 1.0, 0.5, 0.5, 0.5, 0.5, 0.25]
    train(engine)
    scheduler.step()  # after an epoch of several updates
    assert scheduler.get_last_lr() == [0.125]


@GRADIENT_HANDLER.register_module
class Doubling(BaseGradientHandler):
    calls = 0

    def handle_gradient(self) -> None:
        Doubling.calls += 1
        for param in self._model.parameters():
            param.grad *= 2


@pytest.mark.parametrize("key", ["gradient_handler", "gradient_handlers"])
def test_handlers_see_the_gradients_of_an_update_before_they_are_clipped(key: str) -> None:
    Doubling.calls = 0
    engine = engine_of({key: [{"type": "Doubling"}], "gradient_accumulation": 2, "clip_grad_norm": 1e-3})
    train(engine)
    assert Doubling.calls == 4
    norm = nn.utils.get_total_norm([param.grad for param in engine.model.parameters()])
    torch.testing.assert_close(norm, torch.tensor(1e-3), rtol=1e-3, atol=0)


@pytest.mark.parametrize(
    ("fp16", "precision", "plugin"),
    [
        ({"mode": AMP_TYPE.TORCH, "init_scale": 2.0**4}, FP16TorchMixedPrecision(2.0**4), TorchDDPPlugin()),
        ({"mode": AMP_TYPE.APEX}, FP16TorchMixedPrecision(), TorchDDPPlugin()),
        ({"mode": AMP_TYPE.APEX, "opt_level": "O0"}, None, TorchDDPPlugin()),
    ],
)
def test_mixed_precision_of_a_configuration_is_that_of_a_booster(
    fp16: dict[str, Any], precision: Any, plugin: Any
) -> None:
    model = model_of()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    booster = Booster(precision, plugin)
    model, optimizer, criterion, _, _ = booster.boost(model, optimizer, nn.CrossEntropyLoss())
    want = train(Engine(booster, model, optimizer, criterion))
    assert train(engine_of({"fp16": fp16})) == want


# As the documents print them.
PRINTED = {
    AMP_TYPE.TORCH: {
        **{"init_scale": 2.0**16, "growth_factor": 2.0, "backoff_factor": 0.5},
        **{"growth_interval": 2000, "enabled": True},
    },
    AMP_TYPE.APEX: {
        **{"enabled": True, "opt_level": "O1", "cast_model_type": None, "patch_torch_functions": None},
        **{"keep_batchnorm_fp32": None, "master_weights": None, "loss_scale": None},
        **{"cast_model_outputs": None, "num_losses": 1, "verbosity": 1, "min_loss_scale": None},
        "max_loss_scale": 16777216.0,
    },
    AMP_TYPE.NAIVE: {
        **{"log_num_zeros_in_grad": False, "initial_scale": 2**32, "min_scale": 1, "growth_factor": 2},
        **{"backoff_factor": 0.5, "growth_interval": 1000, "hysteresis": 2},
    },
}


@pytest.mark.parametrize("mode", AMP_TYPE)
def test_the_defaults_of_mixed_precision_are_the_printed_ones(mode: AMP_TYPE) -> None:
    assert read_amp(mode, PRINTED[mode]) == read_amp(mode)
    kind = {
        AMP_TYPE.TORCH: FP16TorchMixedPrecision,
        AMP_TYPE.APEX: FP16ApexMixedPrecision,
        AMP_TYPE.NAIVE: FP16NaiveMixedPrecision,
    }
    assert isinstance(read_amp(mode).precision, kind[mode])
    engine = engine_of({"fp16": {"mode": mode, **PRINTED[mode]}, "clip_grad_norm": 1.0})
    train(engine, 2)
    is_half = next(engine.model.parameters()).dtype == torch.float16
    assert is_half is (mode is AMP_TYPE.NAIVE)


@pytest.mark.parametrize(
    "option",
    [
        *({"opt_level": "O2"}, {"opt_level": "O3"}, {"cast_model_type": torch.half}, {"num_losses": 2}),
        *({"keep_batchnorm_fp32": True}, {"master_weights": True}, {"loss_scale": 128.0}),
        *({"patch_torch_functions": False}, {"min_loss_scale": 1.0}, {"max_loss_scale": 2.0**10}),
    ],
)
def test_what_torch_does_otherwise_than_apex_is_refused_by_name(option: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(option))):
        engine_of({"fp16": {"mode": AMP_TYPE.APEX, **option}})
    with pytest.raises(ConfigError, match=next(iter(option))):
        FP16ApexMixedPrecision(**option)


def test_the_scale_of_mixed_precision_may_be_left_out() -> None:
    engine = engine_of({"fp16": {"mode": AMP_TYPE.TORCH, "enabled": False}})
    seen: list[torch.dtype] = []
    engine.model.module[2].register_forward_hook(lambda module, given, made: seen.append(made.dtype))
    train(engine)
    assert set(seen) == {torch.float16}
    assert "loss_scale" not in engine.optimizer.state_dict()


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_zero_of_a_configuration_computes_in_fp16_unless_told_otherwise(stage: int) -> None:
    half = engine_of({"zero": {"stage": stage}})
    assert {param.dtype for param in half.model.parameters()} == {torch.float16}
    assert isinstance(half.optimizer, LowLevelZeroOptimizer) is (stage < 3)
    key = "mixed_precision" if stage == 3 else "precision"
    full = engine_of({"zero": {"stage": stage, key: None if stage == 3 else "fp32"}, "clip_grad_norm": 0.1})
    want, _ = train_plain(max_norm=0.1)
    assert train(full) == pytest.approx(want, rel=1e-4)


def test_a_plugin_may_be_given() -> None:
    want, _ = train_plain()
    engine = engine_of(plugin=GeminiPlugin())
    assert train(engine) == want


@pytest.mark.parametrize(
    ("config", "text"),
    [
        ({"fp16": {}}, "AMP_TYPE.TORCH"),
        ({"fp16": {"mode": "torch"}}, "AMP_TYPE.NAIVE"),
        ({"fp16": {"mode": AMP_TYPE.TORCH}, "zero": {}}, "exclude"),
        ({"gradient_handler": [{"type": "Nobody"}]}, "Doubling"),
        ({"gradient_handler": [{"type": "Doubling"}], "zero": {}}, "zero"),
        ({"gradient_handler": {"type": "Doubling"}, "fp16": {"mode": AMP_TYPE.NAIVE}}, "NAIVE"),
        ({"gradient_accumulation": 0}, "gradient_accumulation"),
        ({"zero": {"stage": 4}}, "stage"),
    ],
)
def test_what_cannot_be_is_refused(config: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        engine_of(config)


def test_what_a_program_sets_of_the_configuration_counts() -> None:
    launch({"gradient_accumulation": 2})
    try:
        global_context.config.gradient_accumulation = 4
        assert engine_of_launch().accumulation == 4
        global_context.config.gradient_accumulation = 0
        with pytest.raises(ConfigError, match="gradient_accumulation is 0"):
            engine_of_launch()
    finally:
        shutdown()


def test_a_plugin_and_zero_are_not_both_given() -> None:
    with pytest.raises(ConfigError, match="plugin="):
        engine_of({"zero": {}}, plugin=TorchDDPPlugin())


# -- batches ---------------------------------------------------------------------------------------


def test_batches_are_read_as_the_documents_have_them() -> None:
    one, two, three = torch.ones(2), torch.zeros(2), torch.full((2,), 3.0)
    assert split_batch((one, two)) == (one, two)
    assert split_batch([one, two, three]) == (one, (two, three))
    assert split_batch({"x": one}) == ({"x": one}, None)
    assert split_batch(one) == (one, None)
    assert split_batch((one,)) == (one, None)
    with pytest.raises(ConfigError, match="empty"):
        split_batch(())

    def told(*args: Any, **kwargs: Any) -> Any:
        return args, kwargs

    assert call_model(told, {"x": 1}) == ((), {"x": 1})
    assert call_model(told, (1, 2)) == ((1, 2), {})
    assert call_model(told, 1) == ((1,), {})
    assert call_criterion(told, 1, None) == ((1,), {})
    assert call_criterion(told, (1, 2), 3) == ((1, 2, 3), {})
    assert call_criterion(told, 1, (2, 3)) == ((1, 2, 3), {})
    assert call_criterion(told, 1, {"y": 2}) == ((1,), {"y": 2})
    assert call_criterion(told, {"x": 1}, {"y": 2}) == ((), {"x": 1, "y": 2})
    assert num_samples({"a": 1, "b": torch.ones(5, 2)}) == 5
    assert num_samples(None, (torch.tensor(1.0), [torch.ones(3)])) == 3
    assert num_samples("text") == 0


def test_a_loader_shuffles_by_its_seed_anew_in_every_pass() -> None:
    data = TensorDataset(torch.arange(32))

    def passes(seed: int) -> list[list[int]]:
        loader = get_dataloader(data, shuffle=True, batch_size=8, seed=seed, drop_last=True)
        assert isinstance(loader, DataLoader)
        return [torch.cat([batch for (batch,) in loader]).tolist() for _ in range(2)]

    first, second = passes(5)
    assert first != second
    assert sorted(first) == sorted(second) == list(range(32))
    assert passes(5) == [first, second]
    assert passes(6) != [first, second]
    plain = get_dataloader(data, add_sampler=False, batch_size=32)
    assert next(iter(plain))[0].tolist() == list(range(32))


@pytest.mark.parametrize("plugin", [GeminiPlugin, LowLevelZeroPlugin])
def test_naive_precision_counts_zeros_of_gradients_and_none_of_a_skipped_step(plugin: Any) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    with torch.no_grad():
        model[0].bias[:3] = -100.0  # three units are off
    batch = torch.rand(4, 4) + 1
    model(batch).square().mean().backward()
    zeros = sum(int((param.grad == 0).sum()) for param in model.parameters())
    model.zero_grad()
    precision = FP16NaiveMixedPrecision(initial_scale=2.0**6, log_num_zeros_in_grad=True)
    booster = Booster(precision, plugin())
    model, optimizer, *_ = booster.boost(model, HybridAdam(model.parameters(), lr=0.0))
    found = []
    for factor in (1.0, 1e9):
        loss = model(batch).float().square().mean() * factor
        booster.backward(loss, optimizer)
        optimizer.step()
        optimizer.zero_grad()
        found.append(optimizer.get_num_zeros_in_grad())
    assert zeros >= 3 * (4 + 1 + 2)
    assert found == [zeros, None]
