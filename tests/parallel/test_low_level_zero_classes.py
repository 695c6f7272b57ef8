"""Optimizer classes that nobody knows step under ZeRO 0 to 2 as they do by themselves: over the same places,
attributes and, where nothing is cut, shapes; or they are refused.
"""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from processes import own_part, run_on_ranks
from torch import Tensor, nn
from zero_models import assert_same, loss_of, odd_net, row_major_net, tokens_of, train, train_plain, weights

from gemini import ConfigError, CPUAdam
from gemini.optim.lamb import Lamb
from gemini.parallel.zero import LowLevelZeroOptimizer
from gemini.parallel.zero.options import check_optimizer, whole_unless

# As in test_low_level_zero: ranks sum gradients of parts of the batch, one process those of all of it.
TOLERANCE = 2e-6


class OwnStep(torch.optim.Optimizer):
    """Of a class that is not known."""

    def __init__(self, params: Any, **options: Any) -> None:
        super().__init__(params, {"lr": 0.1, **options})

    def updated(self) -> Iterator[tuple[dict[str, Any], int, Tensor, Tensor]]:
        """Yield each parameter that has a gradient: its group, its place in it, and both."""
        for group in self.param_groups:
            for place, param in enumerate(group["params"]):
                if param.grad is not None:
                    yield group, place, param, param.grad


class ByPlace(OwnStep):
    """Has a rate for each place in a group, and counts parameters, those with gradients, and names."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for number, (group, place, param, grad) in enumerate(self.updated()):
            count = len(group["params"]) + len(group["param_names"][place])
            param.sub_(grad, alpha=group["lr"] * (1 + place) / (count + number))


class ByAttribute(OwnStep):
    """Reads a rate that is an attribute, and counts steps in another one."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group, _, param, grad in self.updated():
            param.steps = getattr(param, "steps", 0) + 1  # type: ignore[attr-defined]
            rate = getattr(param, "rate", 1.0) / param.steps  # type: ignore[attr-defined]
            param.sub_(grad, alpha=group["lr"] * rate)


class KeepsAnAttribute(OwnStep):
    """Keeps what other classes have in their states as an attribute of the parameter."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group, _, param, grad in self.updated():
            param.total = getattr(param, "total", torch.zeros_like(grad)) + grad  # type: ignore[attr-defined]
            param.sub_(param.total, alpha=group["lr"])  # type: ignore[attr-defined]


class ByRows(OwnStep):
    """Scales matrices by rows and by what columns have added up to, in a state of that shape."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group, _, param, grad in self.updated():
            if param.dim() < 2:
                param.sub_(grad, alpha=group["lr"] * 1e-3)
                continue
            state = self.state[param]
            state["columns"] = state.get("columns", grad.new_zeros(grad.shape[1])) + grad.square().sum(0)
            param.sub_(
                grad / (grad.norm(dim=1, keepdim=True) + state["columns"].sqrt() + 1), alpha=group["lr"]
            )


class ByIdentity(OwnStep):
    """Finds the rate of a parameter by its identity; of one that it does not find it is 0."""

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.rates = {id(param): 0.1 for group in self.param_groups for param in group["params"]}

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for _, _, param, grad in self.updated():
            param.sub_(grad, alpha=self.rates.get(id(param), 0.0))


class ByLoss(OwnStep):
    """Has the loss decide on the rate, where there is a closure."""

    def step(self, closure: Any = None) -> Any:
        with torch.enable_grad():
            loss = 1.0 if closure is None else closure()
        with torch.no_grad():
            for group, _, param, grad in self.updated():
                param.sub_(grad, alpha=group["lr"] * float(loss) * 1e-3)
        return loss


class NeedsTheLoss(ByLoss):
    """Makes no step without a closure."""

    def step(self, closure: Any) -> Any:  # type: ignore[override]
        return super().step(closure)


class Ascends(OwnStep):
    """Runs the closure at other weights than it found."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for _, _, param, grad in self.updated():
            param.add_(grad, alpha=0.05)
        if closure is not None:
            closure()


class NoneEmpty(OwnStep):
    """Fails over a parameter that has no elements."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group, _, param, grad in self.updated():
            param.sub_(grad, alpha=group["lr"] * param.numel() / param.numel())


def by_place(params: Any) -> ByPlace:
    named = [(f"{'p' * (2 + place % 5)}{place}", param) for place, param in enumerate(params)]
    return ByPlace([{"params": named[0::2]}, {"params": named[1::2], "lr": 0.05}])


def by_attribute(params: Any) -> ByAttribute:
    params = list(params)
    for place, param in enumerate(params):
        param.rate = 1 / (1 + place)
    return ByAttribute(params)


def adafactor(params: Any) -> torch.optim.Optimizer:
    return torch.optim.Adafactor(params, lr=1e-2)


def lamb(params: Any) -> torch.optim.Optimizer:
    return Lamb(params, lr=1e-2, weight_decay=0.1)


Make = Callable[[Any], torch.optim.Optimizer]


def _train(make: Make, options: dict[str, Any]) -> tuple[dict[str, Tensor], list[int], dict[str, Any]]:
    model, optimizer = train(make=make, **options)
    steps = [getattr(param, "steps", 0) for param in model.parameters()]
    return copy.deepcopy((weights(model), steps, optimizer.state_dict()))


@pytest.mark.parametrize("stage", [0, 1, 2])
@pytest.mark.parametrize("make", [by_place, by_attribute])
def test_places_names_and_attributes_are_those_of_the_parameters_on_every_rank(
    make: Make, stage: int
) -> None:
    plain, optimizer = train_plain(make=make)
    want = weights(plain)
    for got, steps, state in run_on_ranks(_train, 3, make, {"stage": stage}):
        for name, weight in want.items():
            torch.testing.assert_close(got[name], weight, rtol=0, atol=TOLERANCE, msg=name)
        assert steps == [getattr(param, "steps", 0) for param in plain.parameters()]
        assert state["param_groups"] == optimizer.state_dict()["param_groups"]


@pytest.mark.parametrize("make", [ByRows, adafactor, lamb])
def test_what_is_not_cut_has_its_shape(make: Make) -> None:
    plain, optimizer = train_plain(make=make)
    want, states = weights(plain), optimizer.state_dict()["state"]
    for got, _, state in run_on_ranks(_train, 2, make, {"stage": 0}):
        for name, weight in want.items():
            torch.testing.assert_close(got[name], weight, rtol=0, atol=TOLERANCE, msg=name)
        assert state["state"].keys() == states.keys()
        for number, entry in states.items():
            assert state["state"][number].keys() == entry.keys()
            for name, value in entry.items():
                torch.testing.assert_close(state["state"][number][name], value, rtol=1e-4, atol=TOLERANCE)


@pytest.mark.parametrize("options", [{}, {"precision": "bf16"}, {"cpu_offload": True}])
def test_a_master_of_what_is_not_cut_has_its_shape_too(options: dict[str, Any]) -> None:
    model, optimizer = train(make=ByRows, stage=0, **options)
    masters = [master for group in optimizer.param_groups for master in group["params"]]
    assert [master.shape for master in masters] == [param.shape for param in model.parameters()]
    for param, master in zip(model.parameters(), masters, strict=True):
        assert torch.equal(param, master.to(param.dtype))
        assert dict(optimizer.state[param]).keys() == dict(optimizer.state[master]).keys()


@pytest.mark.parametrize("precision", [None, "bf16"])
@pytest.mark.parametrize("make", [ByRows, adafactor])
def test_states_of_any_shape_are_saved_and_loaded_where_nothing_is_cut(
    make: Make, precision: str | None
) -> None:
    _, whole = train(make=make, stage=0, precision=precision, num_steps=2)
    saved = copy.deepcopy(whole.state_dict())
    loaded = LowLevelZeroOptimizer(make(odd_net().parameters()), stage=0, precision=precision)
    loaded.load_state_dict(saved)
    again = loaded.state_dict()
    for number, entry in saved["state"].items():
        assert_same(again["state"][number], entry)
    assert_same(again.get("masters", {}), saved.get("masters", {}))
    loaded.load_state_shards(list(whole.state_shards()), whole.exported_groups())
    for number, entry in saved["state"].items():
        assert_same(loaded.state_dict()["state"][number], entry)


@pytest.mark.parametrize("make", [by_place, CPUAdam, torch.optim.AdamW])
def test_an_empty_part_has_its_place_and_goes_on_from_loaded_states(make: Make) -> None:
    want = weights(train_plain(make=make, num_steps=4)[0])
    for got in run_on_ranks(_in_two_runs, 3, make):
        for name, weight in want.items():
            torch.testing.assert_close(got[name], weight, rtol=0, atol=TOLERANCE, msg=name)


def _in_two_runs(make: Make) -> dict[str, Tensor]:
    model, first = train(make=make, num_steps=2)
    masters = [master for group in first.param_groups for master in group["params"]]
    assert len(masters) == len(list(model.parameters()))
    assert any(master.numel() == 0 for master in masters) == (first.collectives.rank > 0)
    state, twin = copy.deepcopy(first.state_dict()), odd_net()
    first.close()
    twin.load_state_dict(model.state_dict())
    second = LowLevelZeroOptimizer(make(twin.parameters()))
    second.load_state_dict(state)
    for step in (2, 3):
        second.backward(loss_of(twin, own_part(tokens_of(step))))
        second.step()
    return weights(twin)


def test_attributes_are_one_thing_whenever_they_are_set() -> None:
    model = nn.Linear(4, 3)
    optimizer = LowLevelZeroOptimizer(ByAttribute(model.parameters()))
    model.weight.rate = 0.25  # type: ignore[assignment]
    (master, _) = optimizer.param_groups[0]["params"]
    assert master.rate == 0.25
    twin = pickle.loads(pickle.dumps(model))
    assert twin.weight.rate == 0.25
    model.weight.rate = 0.5  # type: ignore[assignment]
    assert (master.rate, twin.weight.rate) == (0.5, 0.25)
    del master.rate
    assert not hasattr(model.weight, "rate")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (KeepsAnAttribute, "something else of its attributes of a parameter.*Use stage=0"),
        (ByRows, "is to update parts of parameters.*Use stage=0"),
        (NoneEmpty, r"shapes \[\(0,\).*ZeroDivisionError"),
        (lamb, "Lamb does not update each element on its own.*Use stage=0"),
        (adafactor, "Adafactor does not update each element on its own.*Use stage=0"),
    ],
)
def test_what_would_train_otherwise_in_parts_is_refused(make: Make, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        LowLevelZeroOptimizer(make(odd_net().parameters()))
    with pytest.raises(
        ConfigError, match=message.replace("Use stage=0", "Other ranks have parts of the model")
    ):
        check_optimizer(make(odd_net().parameters()), whole_unless(cuts=False, parted=True))


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_a_class_that_finds_parameters_by_their_identity_is_refused(stage: int) -> None:
    message = r"'rates' keeps .*the id of one, and its step has other tensors.*DistributedDataParallel"
    with pytest.raises(ConfigError, match=message):
        LowLevelZeroOptimizer(ByIdentity(odd_net().parameters()), stage=stage)


def test_all_else_is_as_in_plain_training_where_nothing_is_cut() -> None:
    plain, _ = train_plain(make=KeepsAnAttribute, model=row_major_net())
    got, _ = train(make=KeepsAnAttribute, model=row_major_net(), stage=0)
    assert_same(weights(got), weights(plain))
    totals = [
        {name: p.total for name, p in net.named_parameters() if hasattr(p, "total")} for net in (got, plain)
    ]
    assert len(totals[1]) > 5
    assert_same(*totals)


# -- closures ------------------------------------------------------------------------------------


def _with_closures(model: nn.Module, optimizer: Any, part: Callable[[Tensor], Tensor]) -> list[float]:
    backward = getattr(optimizer, "backward", Tensor.backward)

    def closure(step: int) -> Tensor:
        optimizer.zero_grad()
        loss = loss_of(model, part(tokens_of(step)))
        backward(loss)
        return loss.detach()

    return [float(optimizer.step(partial(closure, step))) for step in range(3)]


def _close(make: Make, stage: int) -> tuple[dict[str, Tensor], list[float]]:
    model = odd_net()
    optimizer = LowLevelZeroOptimizer(make(model.parameters()), stage=stage)
    returned = _with_closures(model, optimizer, own_part)
    return weights(model), returned


@pytest.mark.parametrize(("make", "stage"), [(ByLoss, 0), (ByLoss, 1), (ByLoss, 2), (NeedsTheLoss, 0)])
def test_a_class_gets_the_loss_of_the_whole_batch_from_its_closure(make: Make, stage: int) -> None:
    plain = odd_net()
    losses = _with_closures(plain, make(plain.parameters()), lambda tokens: tokens)
    every = run_on_ranks(_close, 2, make, stage)
    for got, _ in every:
        for name, weight in weights(plain).items():
            torch.testing.assert_close(got[name], weight, rtol=0, atol=TOLERANCE, msg=name)
    for want, *own in zip(losses, *(returned for _, returned in every), strict=True):
        assert own[0] != own[1]
        assert sum(own) / 2 == pytest.approx(want, abs=TOLERANCE)


@pytest.mark.parametrize("stage", [0, 1])
def test_a_closure_that_is_to_run_at_other_weights_is_refused(stage: int) -> None:
    model, before = odd_net(), weights(odd_net())
    optimizer = LowLevelZeroOptimizer(Ascends(model.parameters()), stage=stage)
    with pytest.raises(ConfigError, match="runs the closure after it has changed parameters or gradients"):
        _with_closures(model, optimizer, lambda tokens: tokens)
    assert_same(weights(model), before)


def test_a_class_that_needs_a_closure_is_sent_to_stage_0() -> None:
    with pytest.raises(ConfigError, match=r"missing 1 required positional argument: 'closure'.*Use stage=0"):
        LowLevelZeroOptimizer(NeedsTheLoss(odd_net().parameters()))
