"""A captured step computes what the model computes, with every value made once and no memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from operator_models import (
    Language,
    Masked,
    Pictures,
    language_batch,
    language_loss,
    picture_batch,
    picture_loss,
)
from torch import nn

from gemini.errors import ConfigError
from gemini.planner.operators.capture import (
    EXPORT,
    MAKE_FX,
    BatchForm,
    CaptureError,
    _captured,
    capture,
    is_view,
)

CASES = [(Language, language_batch, language_loss), (Pictures, picture_batch, picture_loss)]


def results(model: nn.Module, batch: Any, captured: Any) -> tuple[torch.Tensor, dict[str, torch.Tensor], Any]:
    values = [*(p.detach() for p in model.parameters()), *model.buffers()]
    loss, *rest = captured.module(*values, *captured.form.tensors(batch))
    rest = rest[: len(rest) - len(captured.truth_values)]
    grads = dict(zip(captured.gradients, rest, strict=False))
    return loss, grads, dict(zip(captured.changed, rest[len(grads) :], strict=True))


@pytest.mark.parametrize(("make", "batch_of", "loss_of"), CASES)
@pytest.mark.parametrize("way", [MAKE_FX, EXPORT])
def test_the_graph_has_the_loss_gradients_and_buffers_of_the_model(
    make: Any, batch_of: Any, loss_of: Any, way: str
) -> None:
    torch.manual_seed(0)
    model, batch = make(), batch_of()
    form, tensors = BatchForm.of(batch)
    captured = _captured(model, form, tensors, loss_of, way)
    loss, grads, buffers = results(model, batch, captured)
    want = loss_of(model(batch[0]), batch)
    want.backward()
    assert captured.way == way
    assert torch.equal(loss, want)
    for name, param in model.named_parameters():
        torch.testing.assert_close(grads[name], param.grad, rtol=1e-6, atol=1e-7)
    assert set(buffers) == set(dict(model.named_buffers()))
    for name, value in model.named_buffers():
        assert torch.equal(buffers[name], value)


def test_capture_needs_no_values_and_changes_none() -> None:
    with torch.device("meta"):
        model = Language(width=4096, vocab=10**6)
    state = torch.get_rng_state()
    captured = capture(model, language_batch(), language_loss)
    assert torch.equal(torch.get_rng_state(), state)
    assert captured.way == MAKE_FX
    assert all(param.is_meta and param.grad is None for param in model.parameters())


def test_backward_shares_no_view_with_forward() -> None:
    captured = capture(Language(), language_batch(), language_loss)
    nodes = captured.nodes
    behind = set(nodes[captured.backward_begins :])
    views = [node for node in nodes[: captured.backward_begins] if is_view(node)]
    assert views
    assert not [node for node in views if set(node.users) & behind]


def test_no_operator_writes_into_a_value() -> None:
    captured = capture(Pictures(), picture_batch(), picture_loss)
    for node in captured.nodes:
        if isinstance(node.target, torch._ops.OpOverload):
            assert not node.target._schema.is_mutable


class _Products(nn.Module):
    """Groups of rows with a matrix each, in fp32."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.Parameter(torch.randn(2, 8, 8) / 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        ends = torch.tensor([3, 8], dtype=torch.int32)
        return torch._grouped_mm(x, self.experts, offs=ends)


def test_experts_are_captured_in_the_dtypes_of_the_cpu() -> None:
    captured = capture(_Products(), torch.randn(8, 8))
    assert any("_grouped_mm" in str(node.target) for node in captured.nodes)


class _Undecided(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x[: int(x.sum().item()) % 3 + 1])


def test_what_depends_on_values_is_refused_with_the_reason_of_each_way() -> None:
    with pytest.raises(CaptureError, match="plan it by blocks") as refused:
        capture(_Undecided(4, 4), torch.ones(4, 4))
    assert MAKE_FX in str(refused.value)
    assert EXPORT in str(refused.value)


def _masked_batch(*, is_full: bool) -> dict[str, torch.Tensor]:
    return {"x": torch.ones(4, 4), "mask": torch.ones(4, 4) if is_full else torch.eye(4)}


@pytest.mark.parametrize("is_full", [True, False])
def test_a_step_takes_the_path_of_its_samples(is_full: bool) -> None:
    model, batch = Masked(4, 4), _masked_batch(is_full=is_full)
    captured = capture(model, batch, lambda out, _: out.sum())
    loss, grads, _ = results(model, batch, captured)
    want = model(**batch).sum()
    want.backward()
    assert [each.value for each in captured.truth_values] == [is_full]
    assert torch.equal(loss, want)
    assert torch.equal(grads["weight"], model.weight.grad)


def test_without_values_all_of_a_mask_is_taken_to_be_set() -> None:
    meta = {name: each.to("meta") for name, each in _masked_batch(is_full=False).items()}
    captured = capture(Masked(4, 4), meta, lambda out, _: out.sum())
    assert [each.value for each in captured.truth_values] == [True]


def test_another_form_of_batch_is_refused() -> None:
    captured = capture(Language(), language_batch(), language_loss)
    ids, targets = language_batch()
    with pytest.raises(ConfigError, match=r"\(2, 8\)"):
        captured.form.tensors((ids[:2], targets[:2]))
