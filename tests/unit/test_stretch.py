"""A step of a loop over tokens is forecast from shorter ones; what any CPU computes is rehearsed like it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from forecast_models import MIB, config, machine
from torch import Tensor, nn

from gemini.forecast import forecast
from gemini.forecast.forecast import Settings, forecast_batch, time_step
from gemini.forecast.rehearsal import Example, ModelSource, mean_of_outputs, spans

WIDTH = 32


class Steps(nn.Module):
    """A cell that is called once per token, or a loop beside whose body all parameters are used."""

    def __init__(self, cell: bool) -> None:
        super().__init__()
        self.embed = nn.Embedding(64, WIDTH)
        self.cell = nn.GRUCell(WIDTH, WIDTH) if cell else None
        self.out = nn.Linear(WIDTH, 64)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden, state, states = self.embed(tokens), None, []
        for index in range(tokens.shape[1]):
            token = hidden[:, index]
            if self.cell is not None:
                state = self.cell(token, state)
            else:
                state = token if state is None else torch.tanh(0.5 * state + token)
            states.append(state)
        return self.out(torch.stack(states, 1))


def steps(tokens: int, cell: bool) -> ModelSource:
    return ModelSource(
        "steps",
        lambda batch: Example(Steps(cell), (torch.zeros(batch, tokens, dtype=torch.int64),)),
        mean_of_outputs,
        tokens,
        "tokens",
        resized=lambda tokens: steps(tokens, cell),
    )


@pytest.mark.dear("a step of thousands of moments is measured")
@pytest.mark.parametrize("cell", [False, True])
def test_memory_and_time_of_a_token_loop_are_those_of_the_whole_step(
    cell: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = Settings(2, config(64 * MIB), machine())
    whole = forecast_batch(replace(steps(512, cell), resized=None), settings, 2)
    monkeypatch.setattr(forecast, "_MOST_CALLS", 6000)
    part = forecast_batch(steps(512, cell), settings, 2)
    assert part.source.spans is not None
    assert part.rehearsal.num_calls < 6000 < whole.rehearsal.num_calls
    assert part.non_model_bytes == pytest.approx(whole.non_model_bytes, rel=0.2)
    seconds = [time_step(found, settings).seconds for found in (part, whole)]
    assert seconds[0] == pytest.approx(seconds[1], rel=0.1)


def test_a_step_within_the_bound_is_rehearsed_whole() -> None:
    found = forecast_batch(steps(16, cell=True), Settings(2, config(64 * MIB), machine()), 2)
    assert found.source.spans is found.stretch is None


def test_many_layers_are_no_loop_over_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    def layers(tokens: int) -> ModelSource:
        return ModelSource(
            "layers",
            lambda batch: Example(
                nn.Sequential(*(nn.Linear(8, 8) for _ in range(20))), (torch.zeros(batch, tokens, 8),)
            ),
            mean_of_outputs,
            tokens,
            resized=layers,
        )

    settings = Settings(2, config(64 * MIB), machine())
    whole = forecast_batch(replace(layers(64), resized=None), settings, 2)
    monkeypatch.setattr(forecast, "_MOST_CALLS", 50)
    found = forecast_batch(layers(64), settings, 2)
    assert found.stretch is None
    assert found.rehearsal.periods == whole.rehearsal.periods


def test_spans_are_doubled_as_far_as_calls_are_allowed() -> None:
    assert spans(16, 100, 101, 10_000) is None
    found = spans(16, 1_600, 3_200, 30_000)
    assert found is not None
    assert 100 * sum(found) <= 30_000 < 200 * sum(found)
    assert spans(16, 10**6, 2 * 10**6, 30_000) == (8, 16, 32)


class BiasedAttention(nn.Module):
    """Attention with a bias that is trained, as Swin has it."""

    def __init__(self) -> None:
        super().__init__()
        self.project, self.bias = nn.Linear(8, 8), nn.Parameter(torch.zeros(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        heads = self.project(x).view(-1, 1, 4, 8)
        return nn.functional.scaled_dot_product_attention(heads, heads, heads, attn_mask=self.bias)


class Experts(nn.Module):
    """Rows in groups, a matrix for each."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.weight = nn.Linear(8, 8), nn.Parameter(torch.zeros(2, 8, 16))

    def forward(self, x: Tensor) -> Tensor:
        rows = self.first(x).flatten(0, 1)
        ends = torch.tensor([3, rows.shape[0]], dtype=torch.int32, device=x.device)
        return 1.0 * torch._grouped_mm(rows, self.weight, offs=ends)


class Masked(nn.Module):
    """Values put where a mask says, as SpecAugment does."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.fill = nn.Linear(8, 8), nn.Parameter(torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        hidden[torch.ones(x.shape[:-1], dtype=torch.bool, device=x.device)] = self.fill
        return hidden


@pytest.mark.parametrize("kind", [BiasedAttention, Experts, Masked])
def test_a_rehearsal_takes_what_a_cpu_does(kind: type[nn.Module]) -> None:
    source = ModelSource("layer", lambda batch: Example(kind(), (torch.zeros(batch, 4, 8),)), mean_of_outputs)
    settings = Settings(2, config(64 * MIB), machine())
    found: Any = forecast_batch(source, settings, 2).rehearsal
    assert found.num_guesses == (kind is Masked)
    assert time_step(forecast_batch(source, settings, 2), settings).seconds > 0
    outputs = kind()(torch.zeros(2, 4, 8))
    outputs.mean().backward()
