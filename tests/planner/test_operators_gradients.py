"""Every plan has the gradients of one process: those of no parameter are further from the truth, in fp64,
than one process is.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
import torch
from operator_models import (
    Language,
    Pictures,
    language_batch,
    language_loss,
    machine,
    picture_batch,
    picture_loss,
)
from pairs import pairs
from simulated_ranks import SimulatedRanks
from torch import nn
from torch.utils._pytree import tree_map_only
from transformers import BertConfig, BertForMaskedLM, ViTConfig, ViTForImageClassification

from gemini.forecast.rehearsal import mean_of_outputs
from gemini.planner.operators.autoshard import make_problem
from gemini.planner.operators.capture import capture
from gemini.planner.operators.integer_problem import StepProblem
from gemini.planner.operators.local import tensors_of
from gemini.planner.operators.plan import plan_of
from gemini.planner.operators.program import solve
from gemini.planner.operators.rules import values_of

_SMALL = {
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "intermediate_size": 32,
}


def _vit() -> nn.Module:
    return ViTForImageClassification(ViTConfig(**_SMALL, image_size=16, patch_size=8, num_labels=4))


def _vit_batch() -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(3)
    return {"pixel_values": torch.randn(4, 3, 16, 16, generator=draw), "labels": torch.arange(4)}


def _bert() -> nn.Module:
    return BertForMaskedLM(BertConfig(**_SMALL, vocab_size=32, max_position_embeddings=16))


def _bert_batch() -> dict[str, torch.Tensor]:
    """Return rows, one of which is filled up."""
    draw = torch.Generator().manual_seed(3)
    ids = torch.randint(0, 32, (4, 8), generator=draw)
    mask, labels = torch.ones_like(ids), ids.clone()
    mask[0, 5:], labels[0, 5:] = 0, -100
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Any], Any]] = {
    "vit": (_vit, _vit_batch, mean_of_outputs),
    "bert": (_bert, _bert_batch, mean_of_outputs),
    "language": (lambda: Language(1, dropout=0.25), language_batch, language_loss),
    "pictures": (Pictures, picture_batch, picture_loss),
}


@dataclass
class _Step:
    """A model with its batch in a dtype, and the gradients that one process finds."""

    model: nn.Module
    batch: Any
    loss_of: Any
    gradients: dict[str, torch.Tensor]


@cache
def step_of(kind: str, dtype: torch.dtype) -> _Step:
    make, batch_of, loss_of = MODELS[kind]
    torch.manual_seed(0)
    model = make().to(dtype)
    batch = tree_map_only(
        torch.Tensor, lambda each: each.to(dtype) if each.is_floating_point() else each, batch_of()
    )
    torch.manual_seed(7)
    outputs = model(**batch) if isinstance(batch, dict) else model(batch[0])
    loss = loss_of(outputs, batch)
    loss.backward()
    gradients = {name: param.grad for name, param in model.named_parameters() if param.grad is not None}
    return _Step(model, batch, loss_of, {"": loss.detach(), **gradients})


@cache
def problem_of(kind: str, dtype: torch.dtype, sizes: tuple[int, ...]) -> StepProblem:
    step = step_of(kind, dtype)
    return make_problem(capture(step.model, step.batch, step.loss_of), sizes, machine())


def by_chance(problem: StepProblem, seed: int) -> list[int]:
    """Return a plan in which every operator runs in any way that its inputs can be converted to."""
    draw, choices = random.Random(seed), []

    def reaches(value: torch.fx.Node, layout: Any) -> bool:
        source, out = problem.made(value)
        tensor = values_of(problem.nodes[source])[out]
        assert tensor is not None
        own = problem.choices[source][choices[source]].outputs[out]
        assert own is not None
        return problem.converter.path(own, layout, tensor.shape, tensor.element_size()) is not None

    for node, strategies in zip(problem.nodes, problem.choices, strict=True):
        values = tensors_of(node)
        choices.append(
            next(
                each
                for each in draw.sample(range(len(strategies)), len(strategies))
                if all(reaches(*pair) for pair in zip(values, strategies[each].inputs, strict=False))
            )
        )
    return choices


def farthest(found: list[dict[str, torch.Tensor]], want: dict[str, torch.Tensor]) -> dict[str, float]:
    """Return by parameter how far off the worst element of all ranks is, relative to the largest gradient of
    the model: a key's bias has none but rounding (softmax takes no notice of it), so nothing is relative to
    its own."""
    largest = max(float(each.abs().max()) for each in want.values())
    assert all(each.keys() == want.keys() for each in found)
    return {
        name: max(float((each[name].double() - value.double()).abs().max()) for each in found) / largest
        for name, value in want.items()
    }


@pairs(kind=list(MODELS), sizes=[(2,), (2, 2)], seed=[0, 1])
def test_plans_by_chance_have_the_gradients_of_one_process(
    kind: str, sizes: tuple[int, ...], seed: int
) -> None:
    step, problem = step_of(kind, torch.float64), problem_of(kind, torch.float64, sizes)
    ranks = SimulatedRanks(problem, by_chance(problem, seed))
    torch.manual_seed(7)
    off = farthest(ranks.gradients(step.model, step.batch), step.gradients)
    assert max(off.values()) < 1e-12


@pytest.mark.parametrize("kind", MODELS)
def test_a_plan_is_as_close_to_the_truth_as_one_process(kind: str) -> None:
    step, truth = step_of(kind, torch.float32), step_of(kind, torch.float64).gradients
    problem = problem_of(kind, torch.float32, (2,) if kind == "bert" else (2, 2))
    plan = plan_of(problem, solve(problem.program))
    assert sum(plan.messages.values()) > 0
    torch.manual_seed(7)
    found = SimulatedRanks(problem, plan.choices).gradients(step.model, step.batch)
    assert max(farthest(found, step.gradients).values()) < 1e-5
    alone = farthest([step.gradients], truth)
    for name, off in farthest(found, truth).items():
        assert off <= 2 * alone[name] + 1e-6, name
