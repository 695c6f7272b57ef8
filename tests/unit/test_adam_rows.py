"""Steps that repeat the last one's table: whatever is replaced between them, the numbers are torch's."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch

from gemini.errors import ConfigError, GeminiError
from gemini.optim import step_rows
from gemini.optim.kernel_adam import CPUAdam

DTYPES = (torch.float32, torch.bfloat16, torch.float16)

Optimizer = torch.optim.Optimizer
Disturbance = Callable[[Optimizer, list[torch.Tensor]], None]


def make_params() -> list[torch.Tensor]:
    source = torch.Generator().manual_seed(0)
    shapes = [(5,), (6, 6), (256,), (4, 67), (1, 3)]
    return [torch.randn(shape, generator=source).requires_grad_() for shape in shapes]


def groups_of(params: list[torch.Tensor]) -> list[dict[str, Any]]:
    return [{"params": params[:2], "lr": 0.1}, {"params": params[2:], "lr": 0.01, "weight_decay": 0.3}]


def set_gradients(params: list[torch.Tensor], step: int) -> None:
    """Give every parameter a new gradient, in memory of its own."""
    source = torch.Generator().manual_seed(100 + step)
    for param in params:
        param.grad = torch.randn(param.shape, generator=source)


def steps(optimizer: Optimizer, params: list[torch.Tensor], start: int, stop: int) -> None:
    for step in range(start, stop):
        set_gradients(params, step)
        optimizer.step()


def torchs(groups: Any) -> torch.optim.AdamW:
    return torch.optim.AdamW(groups, weight_decay=0.0, foreach=False)


def assert_as_torch(run: Callable[[Optimizer, list[torch.Tensor]], None]) -> None:
    """Run with ours and with torch's optimizer; a stale row would be off by far more than rounding."""
    results = []
    for make in (CPUAdam, torchs):
        params = make_params()
        optimizer = make(groups_of(params))
        run(optimizer, params)
        results.append((params, [optimizer.state.get(param, {}) for param in params]))
    (got, got_states), (want, want_states) = results
    for one, other, state, expected in zip(got, want, got_states, want_states, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)
        assert state.keys() == expected.keys()
        for name, value in expected.items():
            torch.testing.assert_close(state[name], value, rtol=1e-5, atol=1e-6)


def replace_data(_optimizer: Optimizer, params: list[torch.Tensor]) -> None:
    params[1].data = params[1].data.clone() + 1.0


def change_memory_order(_optimizer: Optimizer, params: list[torch.Tensor]) -> None:
    params[1].data = params[1].data.t().contiguous().t()  # what Module.to(memory_format=...) does


def transpose_in_place(_optimizer: Optimizer, params: list[torch.Tensor]) -> None:
    params[1].data = params[1].data.t()  # at the same address


def replace_moment(optimizer: Optimizer, params: list[torch.Tensor]) -> None:
    state = optimizer.state[params[0]]
    state["exp_avg"] = state["exp_avg"].clone() * 3.0


def replace_moment_with_gaps(optimizer: Optimizer, params: list[torch.Tensor]) -> None:
    state = optimizer.state[params[1]]
    state["exp_avg"] = torch.stack([state["exp_avg"] * 3.0, torch.ones(6, 6)], -1)[..., 0]


def replace_moments_data(optimizer: Optimizer, params: list[torch.Tensor]) -> None:
    moment = optimizer.state[params[2]]["exp_avg_sq"]
    moment.data = moment.data.clone() * 5.0


def write_moment(optimizer: Optimizer, params: list[torch.Tensor]) -> None:
    optimizer.state[params[3]]["exp_avg"].zero_()


def replace_step(optimizer: Optimizer, params: list[torch.Tensor]) -> None:
    optimizer.state[params[1]]["step"] = torch.tensor(40.0)


def delete_and_set_step(optimizer: Optimizer, params: list[torch.Tensor]) -> None:
    del optimizer.state[params[1]]["step"]  # the new tensor may get the old one's identity
    optimizer.state[params[1]]["step"] = torch.tensor(40.0)


def fill_step(optimizer: Optimizer, params: list[torch.Tensor]) -> None:
    optimizer.state[params[4]]["step"].fill_(40.0)


def replace_steps_data(optimizer: Optimizer, params: list[torch.Tensor]) -> None:
    optimizer.state[params[4]]["step"].data = torch.tensor(40.0)


def replace_state(optimizer: Optimizer, params: list[torch.Tensor]) -> None:
    state = optimizer.state[params[0]]
    optimizer.state[params[0]] = {**state, "exp_avg": state["exp_avg"] * 2.0}


def clear_one_state(optimizer: Optimizer, params: list[torch.Tensor]) -> None:
    del optimizer.state[params[3]]


def clear_states(optimizer: Optimizer, _params: list[torch.Tensor]) -> None:
    optimizer.state.clear()


def change_settings(optimizer: Optimizer, _params: list[torch.Tensor]) -> None:
    optimizer.param_groups[0]["lr"] = 0.5
    optimizer.param_groups[1].update(betas=(0.5, 0.6), eps=1e-3, weight_decay=0.0)


def move_between_groups(optimizer: Optimizer, _params: list[torch.Tensor]) -> None:
    moved = optimizer.param_groups[0]["params"].pop()
    optimizer.param_groups[1]["params"].insert(0, moved)  # the order of all parameters stays


def insert_empty_group(optimizer: Optimizer, _params: list[torch.Tensor]) -> None:
    optimizer.param_groups.insert(0, {**optimizer.param_groups[1], "params": [], "lr": 5.0})


def reverse_groups(optimizer: Optimizer, _params: list[torch.Tensor]) -> None:
    optimizer.param_groups.reverse()


def remove_from_group(optimizer: Optimizer, _params: list[torch.Tensor]) -> None:
    optimizer.param_groups[1]["params"].pop(0)


def swap_in_group(optimizer: Optimizer, _params: list[torch.Tensor]) -> None:
    params = optimizer.param_groups[1]["params"]
    params[0], params[1] = params[1], params[0]


def load_older_state(optimizer: Optimizer, params: list[torch.Tensor]) -> None:
    saved = copy.deepcopy(optimizer.state_dict())
    steps(optimizer, params, 50, 52)
    optimizer.load_state_dict(saved)


DISTURBANCES = [
    replace_data,
    change_memory_order,
    transpose_in_place,
    replace_moment,
    replace_moment_with_gaps,
    replace_moments_data,
    write_moment,
    replace_step,
    delete_and_set_step,
    fill_step,
    replace_steps_data,
    replace_state,
    clear_one_state,
    clear_states,
    change_settings,
    move_between_groups,
    insert_empty_group,
    reverse_groups,
    remove_from_group,
    swap_in_group,
    load_older_state,
]


@pytest.mark.parametrize("disturb", DISTURBANCES, ids=lambda function: function.__name__)
def test_what_is_replaced_between_steps_is_seen(disturb: Disturbance) -> None:
    def run(optimizer: Optimizer, params: list[torch.Tensor]) -> None:
        steps(optimizer, params, 0, 3)
        disturb(optimizer, params)
        steps(optimizer, params, 3, 6)

    assert_as_torch(run)


@pytest.mark.parametrize("disturb", DISTURBANCES, ids=lambda function: function.__name__)
def test_what_is_replaced_is_seen_without_torchs_exchange_api(
    disturb: Disturbance, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(step_rows, "TENSOR_EXCHANGE", None)  # torch before 2.10
    test_what_is_replaced_between_steps_is_seen(disturb)


@pytest.mark.parametrize("exchange", [step_rows.TENSOR_EXCHANGE, None], ids=["exchange", "attributes"])
def test_undisturbed_steps_keep_their_rows(exchange: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_rows, "TENSOR_EXCHANGE", exchange)
    params = make_params()
    optimizer = CPUAdam(groups_of(params))
    steps(optimizer, params, 0, 1)
    rows = optimizer._rows
    steps(optimizer, params, 1, 3)
    assert optimizer._rows is rows


def test_gradients_come_and_go() -> None:
    def run(optimizer: Optimizer, params: list[torch.Tensor]) -> None:
        for step in range(8):
            set_gradients(params, step)
            for index, param in enumerate(params):
                if (step >> index % 3) & 1:
                    param.grad = None
            optimizer.step()

    assert_as_torch(run)


def test_added_group_is_updated_with_its_settings() -> None:
    def run(optimizer: Optimizer, params: list[torch.Tensor]) -> None:
        late = optimizer.param_groups[1]["params"].pop()
        steps(optimizer, params, 0, 2)
        optimizer.add_param_group({"params": [late], "lr": 0.3})
        steps(optimizer, params, 2, 4)

    assert_as_torch(run)


@pytest.mark.parametrize("set_to_none", [True, False])
def test_zero_grad_either_way_keeps_the_numbers(set_to_none: bool) -> None:
    def run(optimizer: Optimizer, params: list[torch.Tensor]) -> None:
        for step in range(5):
            optimizer.zero_grad(set_to_none=set_to_none)
            torch.manual_seed(step)
            torch.stack([(param * torch.randn(param.shape)).sum() for param in params]).sum().backward()
            optimizer.step()

    assert_as_torch(run)


def transposed(grad: torch.Tensor) -> torch.Tensor:
    return grad.t().contiguous().t()


def negative_view(grad: torch.Tensor) -> torch.Tensor:
    view = torch.complex(torch.zeros_like(grad), -grad).conj().imag
    assert view.is_neg()
    return view


def slice_of_larger(grad: torch.Tensor) -> torch.Tensor:
    return torch.stack([grad, grad * 9.0], -1)[..., 0]


def expanded(grad: torch.Tensor) -> torch.Tensor:
    return grad[0, 0].expand(grad.shape)


@pytest.mark.parametrize("form", [transposed, negative_view, slice_of_larger, expanded])
@pytest.mark.parametrize("odd_steps", [{0, 1, 2, 3}, {2}, {1, 3}])
def test_gradient_of_any_form_is_read_and_its_copy_not_after_the_step(
    form: Callable[[torch.Tensor], torch.Tensor], odd_steps: set[int]
) -> None:
    def run(optimizer: Optimizer, params: list[torch.Tensor]) -> None:
        for step in range(4):
            set_gradients(params, step)
            if step in odd_steps:
                params[1].grad = form(params[1].grad)  # type: ignore[arg-type]
            optimizer.step()
            for param in params:
                param.grad = None  # the memory is free, and written to before the next step
            [torch.full_like(param, 1e9) for param in params * 3]

    assert_as_torch(run)


@pytest.mark.skipif(not hasattr(torch.Tensor, "grad_dtype"), reason="this torch ties it to the parameter's")
@pytest.mark.parametrize("dtypes", list(itertools.permutations(DTYPES)))
def test_gradient_type_may_change_from_step_to_step(dtypes: tuple[torch.dtype, ...]) -> None:
    param, same = (torch.ones(300).requires_grad_() for _ in range(2))
    param.grad_dtype = None  # any
    optimizer, reference = CPUAdam([param]), CPUAdam([same])
    for dtype in dtypes * 2:
        grad = torch.randn(300).to(dtype)
        param.grad, same.grad = grad, grad.float()
        optimizer.step()
        reference.step()
    assert torch.equal(param, same)


def test_sparse_gradient_is_refused_later_too_and_nothing_changes() -> None:
    params = make_params()
    optimizer = CPUAdam(groups_of(params))
    steps(optimizer, params, 0, 2)
    before = copy.deepcopy([params, optimizer.state_dict()["state"]])
    set_gradients(params, 2)
    params[1].grad = params[1].grad.to_sparse()  # type: ignore[union-attr]
    with pytest.raises(ConfigError, match="gradient of parameter 1 of group 0"):
        optimizer.step()
    assert all(torch.equal(*pair) for pair in zip(params, before[0], strict=True))
    for key, state in optimizer.state_dict()["state"].items():
        assert all(torch.equal(state[name], value) for name, value in before[1][key].items())
    want = copy.deepcopy((params, optimizer))
    steps(optimizer, params, 2, 4)
    steps(want[1], want[0], 2, 4)
    assert all(torch.equal(*pair) for pair in zip(params, want[0], strict=True))


# Each is inside a larger buffer: reading or writing it as if it fitted would be seen, not crash.
MISFITS = {
    "short": lambda: torch.zeros(64)[:8],
    "another type": lambda: torch.zeros(64).view(torch.bfloat16)[:36].view(6, 6),
}


@pytest.mark.parametrize("misfit", MISFITS)
@pytest.mark.parametrize("name", ["exp_avg", "exp_avg_sq"])
def test_moment_that_does_not_fit_is_refused_and_nothing_changes(name: str, misfit: str) -> None:
    params = make_params()
    optimizer = CPUAdam(groups_of(params))
    steps(optimizer, params, 0, 2)
    optimizer.state[params[1]][name] = MISFITS[misfit]()
    before = copy.deepcopy(params)
    with pytest.raises(GeminiError, match=r"parameter 1 of group 0"):
        steps(optimizer, params, 2, 3)
    assert all(torch.equal(*pair) for pair in zip(params, before, strict=True))
    assert not optimizer.state[params[1]][name].any()


def test_parameter_that_shrank_in_place_is_refused_and_its_old_memory_left_alone() -> None:
    memory, grads = torch.ones(64), torch.ones(64)
    param = memory[:32].requires_grad_()
    optimizer = CPUAdam([param])
    param.grad = grads[:32]
    optimizer.step()
    before = memory.detach().clone()
    param.grad = None
    param.data = param.data[:8]
    param.grad = grads[:8]
    with pytest.raises(GeminiError, match="parameter 0 of group 0"):
        optimizer.step()
    assert torch.equal(memory, before)


def test_ten_thousand_small_tensors_get_what_one_large_one_gets() -> None:
    sizes = [1 + index % 37 for index in range(10_000)]
    torch.manual_seed(0)
    whole = torch.randn(sum(sizes)).requires_grad_()
    pieces = [piece.clone().requires_grad_() for piece in whole.detach().split(sizes)]
    many, one = CPUAdam(pieces, weight_decay=0.1), CPUAdam([whole], weight_decay=0.1)
    for _ in range(3):
        whole.grad = torch.randn(sum(sizes))
        for piece, grad in zip(pieces, whole.grad.split(sizes), strict=True):
            piece.grad = grad.clone()
        many.step()
        one.step()
    assert torch.equal(torch.cat([piece.detach() for piece in pieces]), whole)
    assert {int(state["step"]) for state in many.state.values()} == {3}
