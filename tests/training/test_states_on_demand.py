"""States and the room for an update come with the optimizer, not with wrapping."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from gemini import CPUAdam, GeminiAdamOptimizer, GeminiDDP, GeminiOptimizer, OutOfBudgetError

WIDTH = 160


def layers(*, frozen: bool = False) -> nn.Sequential:
    torch.manual_seed(3)
    net = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(6)))
    return net.requires_grad_(not frozen)


def tight(directory: Path, **options: Any) -> dict[str, Any]:
    """Budgets in which six layers are evaluated, and no update fits."""
    return {
        "placement_policy": "const",
        "device_bytes": 2**18,
        "non_model_bytes": 0,
        "disk_dir": str(directory),
        **options,
    }


def kinds(model: GeminiDDP) -> set[str]:
    return {chunk.spec.label for chunk in model.manager.chunks.chunks}


def test_what_is_evaluated_needs_what_the_frozen_model_needs(tmp_path: Path) -> None:
    inputs = torch.randn(4, WIDTH)
    with torch.no_grad():
        want = layers()(inputs)
        for frozen in (True, False):
            with GeminiDDP(layers(frozen=frozen), **tight(tmp_path)) as model:
                got = [model(inputs) for _ in range(4)]
                device = model.stats()["device"]
            assert all(torch.equal(each, want) for each in got)
            assert device["peak_bytes"] <= 2**18


@pytest.mark.parametrize("tiers", [{"device_bytes": 700_000, "disk_dir": None}, {"disk_bytes": 2**20}])
def test_what_the_tiers_do_not_hold_is_refused_with_the_optimizer(
    tiers: dict[str, Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    options = tight(tmp_path, **tiers)
    with pytest.raises(OutOfBudgetError) as announced:
        GeminiDDP(layers(), optimizer_rule="adam", **options)
    with caplog.at_level(logging.WARNING), GeminiDDP(layers(), **options) as model:
        assert str(announced.value) in caplog.text  # told at once
        before = (len(model.manager.chunks.chunks), model.stats())
        with pytest.raises(OutOfBudgetError) as refused:
            GeminiAdamOptimizer(model)
        assert str(refused.value) == str(announced.value)
        assert (len(model.manager.chunks.chunks), model.stats()) == before
        with torch.no_grad():
            assert torch.equal(model(torch.ones(2, WIDTH)), layers()(torch.ones(2, WIDTH)))


def test_nobody_is_warned_who_says_that_nothing_trains(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        GeminiDDP(layers(), optimizer_rule="none", **tight(tmp_path)).close()
        GeminiDDP(layers(frozen=True), **tight(tmp_path)).close()
    assert not caplog.records


def test_states_are_those_of_what_an_optimizer_has(tmp_path: Path) -> None:
    net = layers()
    with GeminiDDP(
        net, **tight(tmp_path, device_bytes=2**22, min_chunk_size_mb=0.05, search_range_mb=0.1)
    ) as m:
        assert kinds(m) == {"param", "grad"}
        first = GeminiOptimizer(CPUAdam(net[:2].parameters()), m)
        some = m.stats()["model_data_bytes"]
        assert kinds(m) == {"param", "grad", "exp_avg", "exp_avg_sq"}
        second = GeminiOptimizer(CPUAdam(net[2:4].parameters()), m)
        more = m.stats()["model_data_bytes"]
        first.add_param_group({"params": list(net[4:].parameters())})
        assert some < more < m.stats()["model_data_bytes"]
        count = len(m.manager.chunks.chunks)
        third = GeminiOptimizer(CPUAdam(net.parameters()), m)
        assert len(m.manager.chunks.chunks) == count
        del second, third


@pytest.mark.parametrize("when", ["before", "evaluated", "backward"])
def test_it_does_not_matter_when_the_optimizer_is_made(when: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    batches = torch.randn(5, 4, WIDTH)
    want = layers()
    plain = CPUAdam(want.parameters(), lr=1e-2)
    for batch in batches:
        want(batch).square().mean().backward()
        plain.step()
        plain.zero_grad()
    net = layers()
    with GeminiDDP(net, **tight(tmp_path, device_bytes=2**20 + 2**19)) as model:
        optimizer = GeminiAdamOptimizer(model, lr=1e-2) if when == "before" else None
        if when == "evaluated":
            with torch.no_grad():
                for _ in range(3):
                    model(batches[0])
        for batch in batches:
            model.backward(model(batch).square().mean())
            optimizer = optimizer or GeminiAdamOptimizer(model, lr=1e-2)
            optimizer.step()
        assert not model.stats()["warmup"]
        got = model.state_dict()
    assert all(torch.equal(got[name], value) for name, value in want.state_dict().items())


def test_a_trace_of_steps_waits_for_the_optimizer_one_of_evaluations_does_not(tmp_path: Path) -> None:
    options = tight(tmp_path, device_bytes=2**20 + 2**19)

    def run(memstats: Any = None) -> GeminiDDP:
        return GeminiDDP(layers(), memstats=memstats, **options)

    with run() as model:
        optimizer = GeminiAdamOptimizer(model)
        for _ in range(5):
            optimizer.backward(model(torch.ones(2, WIDTH)).sum())
            optimizer.step()
            with torch.no_grad():
                model(torch.ones(2, WIDTH))
        steps, passes = model.memstats(), model.memstats("eval")
    with run(steps) as model:
        assert not model.stats()["warmup"]
        assert model.memstats() is None
        GeminiAdamOptimizer(model)
        assert not model.stats()["warmup"]
        assert model.memstats() is not None
    with run(passes) as model:
        assert model.memstats("eval") is not None
