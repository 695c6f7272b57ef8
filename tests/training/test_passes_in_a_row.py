"""Passes in a row, with gradients used behind the last: autograd adds them up, with the bits of before."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from gemini import CPUAdam, GeminiDDP, GeminiOptimizer, handle_of
from gemini.runtime.intercept.tensors import ManagedParameter, ResidentParameter

pytestmark = pytest.mark.usefixtures("one_thread")


def build() -> tuple[GeminiDDP, GeminiOptimizer]:
    """A model of which two steps have been made: it stays on DEVICE."""
    torch.manual_seed(5)
    model = GeminiDDP(nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 3)), optimizer_rule="adam")
    optimizer = GeminiOptimizer(CPUAdam(model.parameters(), lr=1e-2), model)
    for step in range(2):
        run(model, step)
        optimizer.step()
    assert handle_of(model).manager.resident
    return model, optimizer


def run(model: GeminiDDP, number: int) -> None:
    inputs = torch.randn(4, 6, generator=torch.Generator().manual_seed(number))
    model.backward(model(inputs).pow(3).sum())


def gradients(model: GeminiDDP) -> list[torch.Tensor]:
    return [param.grad.clone() for param in model.parameters()]


def kinds(model: GeminiDDP) -> set[type]:
    return set(map(type, model.parameters()))


@pytest.mark.parametrize("there_before", [0, 2])
def test_gradients_of_several_passes_have_the_bits_of_single_ones(there_before: int) -> None:
    single, _ = build()
    for number in range(there_before + 4):
        run(single, number)
    model, optimizer = build()
    for number in range(there_before):
        run(model, number)
    arrived = handle_of(model).gradient_state()
    with handle_of(model).passes_in_a_row():
        assert kinds(model) == {ManagedParameter if there_before else ResidentParameter}
        for number in range(there_before, there_before + 4):
            run(model, number)
    assert kinds(model) == {ManagedParameter}
    assert handle_of(model).gradient_state() != arrived
    assert all(map(torch.equal, gradients(model), gradients(single)))
    optimizer.step()
    assert not any(param.grad is not None for param in model.parameters())
    run(model, 9)  # collected as before
    assert all(slot.has_grad for slot in handle_of(model).storage.slots.values())


def test_what_is_written_meanwhile_is_noted_and_stays_in_its_chunk() -> None:
    model, _ = build()
    manager, weight = handle_of(model).manager, next(model.parameters())
    before, address = manager.written.times(), weight.data_ptr()
    with handle_of(model).passes_in_a_row(), torch.no_grad():
        weight.add_(1.0)
        weight.data = torch.full((8, 6), 2.0)
    assert manager.written.times() > before
    assert weight.data_ptr() == address
    assert torch.equal(weight.clone(), torch.full((8, 6), 2.0))


def test_operators_go_through_their_pre_op_as_soon_as_chunks_may_leave() -> None:
    single, _ = build()
    model, _ = build()
    with handle_of(model).passes_in_a_row():
        run(model, 0)
        handle_of(model).manager.end_residence()
        assert kinds(model) == {ManagedParameter}
        run(model, 1)
    for number in range(2):
        run(single, number)
    assert all(map(torch.equal, gradients(model), gradients(single)))


def test_hooks_of_the_user_see_every_gradient() -> None:
    model, _ = build()
    seen: list[torch.Tensor] = []
    weight = next(model.parameters())
    weight.register_post_accumulate_grad_hook(lambda param: seen.append(param.grad.clone()))
    with handle_of(model).passes_in_a_row():
        run(model, 0)
        run(model, 1)
    assert len(seen) == 2
    assert torch.equal(seen[1], weight.grad)
