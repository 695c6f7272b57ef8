"""A plan by operators, run over gloo ranks: the numbers of one process, within the allowed bytes."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "parallel"))

from operator_models import (
    Language,
    Masked,
    Pictures,
    language_batch,
    language_loss,
    machine,
    picture_batch,
    picture_loss,
)
from processes import close_workers, run_on_ranks
from torch import nn

from gemini.errors import ConfigError, StateError
from gemini.planner.operators.apply import OperatorParallel, _gathering
from gemini.planner.operators.autoshard import autoshard, make_problem
from gemini.planner.operators.capture import capture
from gemini.planner.operators.program import MisfitError, solve

STEPS = 3
MODELS = {
    "language": (lambda: Language(1, dropout=0.1), language_batch, language_loss),
    "short": (lambda: Language(1), language_batch, language_loss),
    "pictures": (Pictures, picture_batch, picture_loss),
}


@pytest.fixture(autouse=True, scope="module")
def _workers_end() -> Iterator[None]:
    yield
    close_workers()


def built(kind: str) -> nn.Module:
    torch.manual_seed(0)
    return MODELS[kind][0]()


def _whole_gradients(sharded: OperatorParallel) -> dict[str, torch.Tensor]:
    return {
        name: sharded.rank.convert(part.grad, _gathering(sharded._layouts[name]))
        for name, part in sharded._parts.items()
        if part.grad is not None
    }


def trained(kind: str, mesh: tuple[int, ...], budget: int | None) -> dict[str, Any]:
    """Train over ranks; return losses, whole weights, and what the plan is."""
    _, batch_of, loss_of = MODELS[kind]
    model = built(kind)
    sharded = autoshard(model, batch_of(), loss=loss_of, mesh=mesh, machine=machine(), device_bytes=budget)
    optimizer = torch.optim.SGD(sharded.parameters(), 0.1, momentum=0.9)
    torch.manual_seed(7)
    losses, gradients = [], {}
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = sharded(batch_of(step))
        loss.backward()
        gradients = gradients or _whole_gradients(sharded)
        optimizer.step()
        losses.append(loss.item())
    with torch.no_grad():
        losses.append(sharded(batch_of(STEPS)).item())
    return {
        "losses": losses,
        "gradients": gradients,
        "weights": dict(sharded.whole_parameters()),
        "buffers": dict(sharded.named_buffers()),
        "numel": sum(param.numel() for param in sharded.parameters()),
        "plan": sharded.plan.to_json(),
        "text": sharded.plan.explain(),
    }


def trained_alone(kind: str) -> dict[str, Any]:
    _, batch_of, loss_of = MODELS[kind]
    model = built(kind)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    torch.manual_seed(7)
    losses, gradients = [], {}
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = loss_of(model(batch_of(step)[0]), batch_of(step))
        loss.backward()
        gradients = gradients or {name: param.grad.clone() for name, param in model.named_parameters()}
        optimizer.step()
        losses.append(loss.item())
    with torch.no_grad():
        losses.append(loss_of(model(batch_of(STEPS)[0]), batch_of(STEPS)).item())
    return {
        "losses": losses,
        "gradients": gradients,
        "weights": dict(model.named_parameters()),
        "buffers": dict(model.named_buffers()),
    }


@pytest.mark.dear("ranks capture, plan and train a model")
@pytest.mark.parametrize(
    ("kind", "mesh"), [("language", (2,)), ("language", (2, 2)), ("pictures", (2,)), ("language", (1,))]
)
def test_ranks_train_as_one_process(kind: str, mesh: tuple[int, ...]) -> None:
    want = trained_alone(kind)
    every = run_on_ranks(trained, math.prod(mesh), kind, mesh, None)
    largest = max(float(each.abs().max()) for each in want["gradients"].values())
    for got in every:
        assert got["gradients"].keys() == want["gradients"].keys()
        for name, gradient in want["gradients"].items():
            assert float((got["gradients"][name] - gradient).abs().max()) < 1e-5 * largest, name
        assert got["losses"] == pytest.approx(want["losses"], rel=1e-5)
        assert got["plan"] == every[0]["plan"]
        for name, weight in want["weights"].items():
            torch.testing.assert_close(got["weights"][name], weight.detach(), rtol=1e-4, atol=1e-5)
        for name, value in want["buffers"].items():
            torch.testing.assert_close(got["buffers"][name], value, rtol=1e-4, atol=1e-5)
    if math.prod(mesh) > 1:
        assert every[0]["numel"] < sum(weight.numel() for weight in want["weights"].values())
        assert sum(every[0]["plan"]["messages"].values()) > 0


def test_a_budget_that_binds_is_run_within_it() -> None:
    captured = capture(Language(1), language_batch(), language_loss)
    program = make_problem(captured, (2,), machine()).program
    free = solve(program)
    budget = int(free.peak_bytes * 0.95)
    first, second = run_on_ranks(trained, 2, "short", (2,), budget)
    assert first["plan"]["peak_bytes"] <= budget
    assert first["plan"]["seconds"] >= free.seconds * (1 - 2e-3)
    assert first["losses"] == pytest.approx(trained_alone("short")["losses"], rel=1e-5)
    assert second["losses"] == first["losses"]


def test_a_budget_below_what_does_not_depend_on_layouts_is_refused() -> None:
    captured = capture(Language(1), language_batch(), language_loss)
    program = make_problem(captured, (1,), machine()).program
    with pytest.raises(MisfitError) as refused:
        solve(program, 100)
    assert solve(program, refused.value.least_bytes).peak_bytes <= refused.value.least_bytes


def test_faster_links_give_no_slower_plan() -> None:
    captured = capture(Language(1), language_batch(), language_loss)
    slow, fast = (
        solve(make_problem(captured, (2,), machine(rate=rate)).program).seconds for rate in (1e7, 1e9)
    )
    assert fast <= slow * (1 + 1e-3)


def test_an_explanation_names_layouts_messages_and_what_no_rule_covers() -> None:
    plan = trained("pictures", (1,), None)
    assert "no rule covers" in plan["text"]
    assert "batch_norm" in plan["text"]
    assert "first.weight" in plan["text"]
    assert "predicted step" in plan["text"]


def test_the_example_of_the_page_runs(capsys: pytest.CaptureFixture[str]) -> None:
    page = (Path(__file__).parents[2] / "docs" / "operators.md").read_text()
    example = page.partition("```python\n")[2].partition("```")[0]
    exec(compile(example, "docs/operators.md", "exec"), {})
    assert "rules cover every operator" in capsys.readouterr().out


def test_a_batch_on_another_path_is_refused_unless_the_captured_one_is_for_all_masks() -> None:
    model, values = Masked(4, 4), torch.randn(4, 4)
    full, partly = ({"x": values, "mask": mask} for mask in (torch.ones(4, 4), torch.eye(4)))

    def loss_of(outputs: torch.Tensor, _: Any) -> torch.Tensor:
        return outputs.square().sum()

    for_full, for_all = (autoshard(model, each, loss=loss_of, machine=machine()) for each in (full, partly))
    assert "1 truth value" in for_full.plan.explain()
    for batch in (full, partly):
        assert for_all(batch).item() == pytest.approx(loss_of(model(**batch), None).item())
    with pytest.raises(ConfigError, match="another path"):
        for_full(partly)
    with torch.no_grad(), pytest.raises(ConfigError, match="another path"):
        for_full(partly)


def test_backward_twice_is_refused() -> None:
    sharded = autoshard(built("language"), language_batch(), loss=language_loss, machine=machine())
    loss = sharded(language_batch())
    loss.backward(retain_graph=True)
    with pytest.raises(StateError, match="twice"):
        loss.backward()


def test_a_mesh_of_other_ranks_is_refused() -> None:
    with pytest.raises(ConfigError, match="2 x 2"):
        autoshard(built("language"), language_batch(), loss=language_loss, mesh=(2, 2), machine=machine())


def test_a_model_without_values_is_refused() -> None:
    with torch.device("meta"):
        model = Language()
    with pytest.raises(ConfigError, match="on meta"):
        autoshard(model, language_batch(), loss=language_loss, machine=machine())
