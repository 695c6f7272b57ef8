"""What torch promises of an optimizer, kept by those that drive another one."""

from __future__ import annotations

import copy
import gc
import io
import operator
import pickle
import warnings
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from gemini import ConfigError, CPUAdam, GeminiDDP, GeminiOptimizer, StateError
from gemini.parallel import LowLevelZeroOptimizer
from gemini.parallel.booster.optimizer import BoostedOptimizer
from gemini.parallel.zero import LowLevelZeroModel


def net() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(4, 6), nn.Sequential(nn.BatchNorm1d(6), nn.Linear(6, 2)))


def gemini(module: nn.Module, adam: CPUAdam) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = GeminiDDP(module)
    return model, GeminiOptimizer(adam, model)


def low_level(module: nn.Module, adam: CPUAdam) -> tuple[nn.Module, torch.optim.Optimizer]:
    optimizer = LowLevelZeroOptimizer(adam)
    return LowLevelZeroModel(module), optimizer


def boosted(module: nn.Module, adam: CPUAdam) -> tuple[nn.Module, torch.optim.Optimizer]:
    return module, BoostedOptimizer(adam)


def made(wrap: Callable[..., Any]) -> tuple[nn.Module, Any, CPUAdam]:
    module = net()
    adam = CPUAdam(module.parameters(), lr=0.01)
    return *wrap(module, adam), adam


def one_step(model: nn.Module, optimizer: Any, seed: int = 0) -> None:
    torch.manual_seed(seed)
    optimizer.backward(model(torch.randn(3, 4)).square().sum())
    optimizer.step()
    optimizer.zero_grad()


EVERY = pytest.mark.parametrize("wrap", [gemini, low_level, boosted])
BOTH = pytest.mark.parametrize("wrap", [gemini, low_level])


@pytest.fixture
def global_hooks() -> Iterator[list[tuple[str, Any]]]:
    seen: list[tuple[str, Any]] = []
    handles = [
        register_optimizer_step_pre_hook(lambda optim, *_: seen.append(("pre", optim))),
        register_optimizer_step_post_hook(lambda optim, *_: seen.append(("post", optim))),
    ]
    yield seen
    for handle in handles:
        handle.remove()


# -- hooks ---------------------------------------------------------------------------------------


@EVERY
def test_step_hooks_run_once_in_a_step(wrap: Callable[..., Any], global_hooks: list[Any]) -> None:
    model, optimizer, adam = made(wrap)
    own: list[str] = []
    adam.register_step_pre_hook(lambda *_: own.append("pre"))
    optimizer.register_step_post_hook(lambda *_: own.append("post"))
    for step in range(3):
        one_step(model, optimizer, step)
    assert [when for when, _ in global_hooks] == ["pre", "post"] * 3
    assert own == ["pre", "post"] * 3


@BOTH
def test_step_hooks_are_given_the_wrapper_and_see_the_whole_update(
    wrap: Callable[..., Any], global_hooks: list[Any]
) -> None:
    model, optimizer, adam = made(wrap)
    seen: list[dict[str, torch.Tensor]] = []
    adam.register_step_post_hook(lambda *_: seen.append(copy.deepcopy(dict(model.state_dict()))))
    one_step(model, optimizer)
    assert {id(optim) for _, optim in global_hooks} == {id(optimizer)}
    assert all(torch.equal(value, seen[0][name]) for name, value in model.state_dict().items())


@EVERY
@pytest.mark.parametrize("of_wrapper", [True, False])
def test_state_dict_hooks_run_once_and_what_they_return_counts(
    wrap: Callable[..., Any], of_wrapper: bool
) -> None:
    model, optimizer, adam = made(wrap)
    one_step(model, optimizer)
    holder = optimizer if of_wrapper else adam
    ran: list[str] = []
    holder.register_state_dict_pre_hook(lambda _: ran.append("before saving"))
    holder.register_state_dict_post_hook(lambda _, state: {**state, "mine": 1})
    holder.register_load_state_dict_post_hook(lambda _: ran.append("after loading"))

    def other_lr(_optim: Any, state: dict[str, Any]) -> dict[str, Any]:
        return {**state, "param_groups": [{**group, "lr": 0.5} for group in state["param_groups"]]}

    holder.register_load_state_dict_pre_hook(other_lr)
    saved = optimizer.state_dict()
    assert saved["mine"] == 1
    optimizer.load_state_dict(saved)
    assert ran == ["before saving", "after loading"]
    assert optimizer.param_groups[0]["lr"] == adam.param_groups[0]["lr"] == 0.5
    assert saved["param_groups"][0]["lr"] == 0.01


@BOTH
@pytest.mark.parametrize("wrapped_first", [True, False])
def test_a_scheduler_of_either_optimizer_sees_the_steps(
    wrap: Callable[..., Any], wrapped_first: bool
) -> None:
    module = net()
    adam = CPUAdam(module.parameters(), lr=0.01)
    schedulers = [] if wrapped_first else [torch.optim.lr_scheduler.StepLR(adam, 1)]
    model, optimizer = wrap(module, adam)
    schedulers += [torch.optim.lr_scheduler.StepLR(each, 1) for each in (adam, optimizer)]
    one_step(model, optimizer)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for scheduler in schedulers:
            scheduler.step()


# -- copies and lives ----------------------------------------------------------------------------


@BOTH
@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, pickle.dumps])
def test_a_wrapper_of_one_models_parameters_is_no_copy(
    wrap: Callable[..., Any], copied: Callable[[Any], Any], global_hooks: list[Any]
) -> None:
    model, optimizer, _ = made(wrap)
    with pytest.raises(ConfigError, match="state_dict"):
        copied(optimizer)
    if wrap is gemini:
        with pytest.raises(ConfigError, match=r"model\.module"):
            copied(model)
    one_step(model, optimizer)
    assert len(global_hooks) == 2


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda both: pickle.loads(pickle.dumps(both))])
def test_a_copy_of_a_boosted_optimizer_goes_on_as_the_original(
    copied: Callable[[Any], Any], global_hooks: list[Any]
) -> None:
    model, optimizer, _ = made(boosted)
    one_step(model, optimizer)
    twins = copied((model, optimizer))
    one_step(model, optimizer, 1)
    one_step(*twins, 1)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), twins[0].parameters(), strict=True))
    assert len(global_hooks) == 2 * 3


@BOTH
def test_an_optimizer_and_its_parameters_go_without_the_garbage_collector(wrap: Callable[..., Any]) -> None:
    model, optimizer, adam = made(wrap)
    one_step(model, optimizer)
    gone = [weakref.ref(each) for each in (optimizer, next(model.parameters()))]
    gc.disable()
    try:
        del optimizer
        assert gone[0]() is None
        del model, adam
        assert wrap is gemini or gone[1]() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("wrap_at", [1, 3])
@BOTH
def test_wrapping_goes_on_from_the_steps_that_were_made(wrap: Callable[..., Any], wrap_at: int) -> None:
    model, optimizer, adam = made(boosted)
    expected, plain, _ = made(boosted)
    for step in range(5):
        if step == wrap_at:
            model, optimizer = wrap(model, adam)
        one_step(model, optimizer, step)
        one_step(expected, plain, step)
    want = expected.state_dict()
    assert all(torch.equal(value, want[name]) for name, value in model.state_dict().items())


# -- states --------------------------------------------------------------------------------------


@EVERY
def test_the_state_of_a_parameter_is_what_state_dict_has(wrap: Callable[..., Any]) -> None:
    model, optimizer, _ = made(wrap)
    params = list(model.parameters())
    assert not any(param in optimizer.state or optimizer.state.get(param) for param in params)
    one_step(model, optimizer)
    saved = optimizer.state_dict()["state"]
    assert len(optimizer.state) == len(params) == len(saved)
    for number, param in enumerate(params):
        assert param in optimizer.state
        state = dict(optimizer.state[param])
        assert state.keys() == saved[number].keys()
        assert all(torch.equal(value, saved[number][name]) for name, value in state.items())
    for group in optimizer.param_groups:
        assert all("exp_avg" in optimizer.state[param] for param in group["params"])


def test_states_in_chunks_are_not_written_through_the_mapping() -> None:
    model, optimizer, _ = made(gemini)
    param = next(model.parameters())
    assert optimizer.state[param] == {}
    with pytest.raises(KeyError):
        optimizer.state[nn.Parameter(torch.ones(2))]
    one_step(model, optimizer)
    before = copy.deepcopy(optimizer.state_dict()["state"])
    refused: list[Callable[[], object]] = [
        lambda: setattr(optimizer, "state", {param: {}}),
        lambda: setattr(optimizer, "state", defaultdict(dict)),
        lambda: optimizer.state.clear(),
        lambda: optimizer.state.pop(param),
        lambda: optimizer.state.__setitem__(param, {}),
        lambda: optimizer.state[param].__setitem__("exp_avg", torch.zeros(())),
        lambda: optimizer.state[param].update(exp_avg=torch.zeros(())),
    ]
    for write in refused:
        with pytest.raises(StateError, match="load_state_dict"):
            write()
    writes: list[Callable[[Tensor], object]] = [
        lambda t: t.zero_(),
        lambda t: t.mul_(0.1),
        lambda t: operator.imul(t, 0.1),
        lambda t: operator.setitem(t, ..., 0),
        lambda t: setattr(t, "data", torch.zeros(())),
        lambda t: t.data.zero_(),
        lambda t: t.detach().view(-1)[:1].fill_(1),
        lambda t: t.reshape(-1).chunk(1)[0].neg_(),
        lambda t: torch.add(torch.zeros(()), 1, out=t),
        lambda t: torch._foreach_zero_([t]),
        lambda t: nn.init.ones_(t),
    ]
    for write_into in writes:
        for name in ("exp_avg", "step"):
            for mode in (torch.no_grad(), torch.inference_mode()):
                with mode, pytest.raises(StateError, match="load_state_dict"):
                    write_into(optimizer.state[param][name])
    after = optimizer.state_dict()["state"]
    assert all(torch.equal(after[n][k], v) for n, state in before.items() for k, v in state.items())


def test_what_is_read_of_states_in_chunks_makes_ordinary_tensors() -> None:
    model, optimizer, _ = made(gemini)
    one_step(model, optimizer)
    param = next(model.parameters())
    want = optimizer.state_dict()["state"][0]["exp_avg"]
    read = optimizer.state[param]["exp_avg"]
    file = io.BytesIO()
    torch.save(read, file)
    file.seek(0)
    for twin in (
        copy.deepcopy(read),
        pickle.loads(pickle.dumps(read)),
        torch.load(file),
        read.clone(),
        read + 0,
    ):
        assert type(twin) is torch.Tensor
        assert torch.equal(twin, want)
        assert torch.equal(twin.zero_(), torch.zeros_like(want))
    other = torch.zeros_like(want)
    assert torch.equal(other.copy_(read), want)
    assert torch.equal(torch.mul(read, 2, out=other), want * 2)
    assert torch.equal(read, want)
    assert torch.from_numpy(read.numpy()).equal(want)
    assert read.norm().item() == want.norm().item()


def test_states_begin_anew_as_the_refusal_says() -> None:
    model, optimizer, _ = made(gemini)
    one_step(model, optimizer)
    optimizer.load_state_dict({**optimizer.state_dict(), "state": {}})
    assert len(optimizer.state) == 0
    one_step(model, optimizer, 1)
    plain = net()
    for step in range(2):  # each with an Adam that has made no step
        one_step(plain, BoostedOptimizer(CPUAdam(plain.parameters(), lr=0.01)), step)
    want = plain.state_dict()
    assert all(torch.equal(value, want[name]) for name, value in model.state_dict().items())


@BOTH
def test_the_wrapped_optimizer_is_not_asked_for_states_that_it_has_not(wrap: Callable[..., Any]) -> None:
    model, optimizer, adam = made(wrap)
    one_step(model, optimizer)
    saved = optimizer.state_dict()
    own = type(optimizer).__name__
    with pytest.raises(StateError, match=rf"call state_dict\(\) of the {own}"):
        adam.state_dict()
    with pytest.raises(StateError, match=rf"call load_state_dict\(\) of the {own}"):
        adam.load_state_dict(saved)
    assert saved["state"].keys() == optimizer.state_dict()["state"].keys()
    optimizer.load_state_dict(saved)
    one_step(model, optimizer, 1)
    (model if wrap is gemini else optimizer).close()
    adam.state_dict()


def test_low_level_zero_refuses_parameters_that_came_after_wrapping() -> None:
    model, optimizer, adam = made(low_level)
    adam.add_param_group({"params": [nn.Parameter(torch.ones(2))]})
    with pytest.raises(ConfigError, match=r"group 1 has a parameter of shape \(2,\) that was added after"):
        one_step(model, optimizer)


@pytest.mark.parametrize("change", ["add", "pop", "replace"])
def test_groups_that_only_the_wrapped_optimizer_has_are_refused(change: str) -> None:
    module = net()
    adam = CPUAdam(module[0].parameters(), lr=0.01)
    model, optimizer = gemini(module, adam)
    one_step(model, optimizer)
    if change == "add":
        adam.add_param_group({"params": list(module[1].parameters())})
    elif change == "pop":
        adam.param_groups.pop()
    else:
        adam.param_groups = [dict(group) for group in adam.param_groups]
    before = {name: value.clone() for name, value in model.named_parameters()}
    with pytest.raises(ConfigError, match="param_groups of the wrapped CPUAdam"):
        one_step(model, optimizer, 1)
    assert all(torch.equal(value, before[name]) for name, value in model.named_parameters())


def test_what_a_user_keeps_beside_the_states_passes_through_low_level_zero() -> None:
    model, optimizer, _ = made(low_level)
    one_step(model, optimizer)
    optimizer.state["mine"] = value = torch.ones(3)
    saved = optimizer.state_dict()
    assert saved["state"]["mine"] is value
    _, successor, adam = made(low_level)
    successor.load_state_dict(saved)
    assert adam.state["mine"] is successor.state["mine"] is value


# -- gradients and names -------------------------------------------------------------------------


def test_a_gradient_that_low_level_zero_has_is_not_taken_for_missing() -> None:
    module = net()
    optimizer = LowLevelZeroOptimizer(CPUAdam(module.parameters()))
    assert nn.utils.clip_grad_norm_(module.parameters(), 0.1) == 0  # there is none yet
    module(torch.randn(3, 4)).sum().backward()
    for read in (
        lambda: nn.utils.clip_grad_norm_(module.parameters(), 0.1),
        lambda: nn.utils.clip_grad_value_(module.parameters(), 0.1),
        lambda: module.zero_grad(),
    ):
        with pytest.raises(StateError, match=r"clip_grad_by_norm.*zero_grad"):
            read()
    optimizer.step()
    module.zero_grad()
    assert all(param.grad is None for param in module.parameters())


def test_a_cut_parameter_is_copied_pickled_and_freed_as_an_ordinary_one() -> None:
    module = net()
    optimizer = LowLevelZeroOptimizer(CPUAdam(module.parameters()))
    module[0].weight.mine = 1
    module(torch.randn(3, 4)).sum().backward()
    for twin in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert {type(param) for param in twin.parameters()} == {nn.Parameter}
        assert all(torch.equal(a, b) for a, b in zip(twin.parameters(), module.parameters(), strict=True))
        twin(torch.randn(3, 4)).sum().backward()
        nn.utils.clip_grad_norm_(twin.parameters(), 0.1)
    assert pickle.loads(pickle.dumps(module))[0].weight.mine == 1
    with pytest.raises(StateError):
        module.zero_grad()
    del optimizer
    assert {type(param) for param in module.parameters()} == {nn.Parameter}


@BOTH
def test_torchs_checkpoints_have_the_names_of_the_wrapped_model(wrap: Callable[..., Any]) -> None:
    model, _, _ = made(wrap)
    outer = nn.Sequential(nn.Linear(4, 4), model)
    for each in (model, outer) if wrap is gemini else (model,):
        state = get_model_state_dict(each)
        want = {name: value.detach() + 1 for name, value in each.state_dict().items()}
        assert state.keys() == want.keys()
        assert set_model_state_dict(each, dict(want)) == ([], [])
        assert all(torch.equal(value, want[name]) for name, value in each.state_dict().items())
