"""autoparallelize(): one plan on all ranks, and training that gives the numbers of one process."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "parallel"))

from planner_models import Net, machine
from processes import close_workers, run_on_ranks
from torch import nn

import gemini
from gemini import CPUAdam
from gemini.forecast.machine import MachineSpeeds
from gemini.memstats.collectives import CollectiveSpeeds
from gemini.parallel.booster.ranks import Ranks


@pytest.fixture(autouse=True, scope="module")
def _workers_end() -> Iterator[None]:
    yield
    close_workers()


BATCH = 8
STEPS = 4  # the third loss is the first that gradients of an earlier step would change


def net() -> Net:
    torch.manual_seed(0)
    return Net((32, 32, 32, 32)).train()


def batch_of(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(step)
    return tuple(torch.randint(0, 32, (BATCH, 8), generator=draw) for _ in range(2))  # type: ignore[return-value]


def part_of(step: int, ranks: Ranks) -> tuple[torch.Tensor, ...]:
    return tuple(each.chunk(ranks.size)[ranks.number] for each in batch_of(step))


def alone() -> MachineSpeeds:
    """Return a machine with one process."""
    return dataclasses.replace(machine(3), collectives=CollectiveSpeeds())


def loss_of(outputs: torch.Tensor, batch: Any) -> torch.Tensor:
    return nn.functional.cross_entropy(outputs.flatten(0, 1), batch[1].flatten())


def trained_alone(steps: int) -> list[float]:
    model = net()
    optimizer = torch.optim.Adam(model.parameters())
    losses = []
    for step in range(steps):
        batch = batch_of(step)
        loss = loss_of(model(batch[0]), batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def train(pins: tuple[str, ...], steps: int, **options: Any) -> tuple[dict[str, Any], list[float]]:
    model = net()
    options = {"machine": machine(3), "device_bytes": "1GiB", **options}
    found = gemini.autoparallelize(
        model, batch_of(0), CPUAdam(model.parameters()), loss=loss_of, pins=pins, **options
    )
    losses = []
    for step in range(steps):
        part = part_of(step, found.data_ranks)
        assert len(part[0]) == found.num_samples
        losses.append(float(found.step(part)))
    return found.plan.to_json(), losses


@pytest.mark.parametrize("pins", [(), ("zero=3",)])
def test_one_process_is_a_rank_too(pins: tuple[str, ...]) -> None:
    plan, losses = train(pins, STEPS)
    assert plan["layout"] == {"dp": 1, "pp": 1, "sp": 1, "tp": 1}
    assert losses == pytest.approx(trained_alone(STEPS), rel=1e-5)


def test_what_does_not_fit_on_device_is_trained_from_disk(tmp_path: Path) -> None:
    plan, losses = train((), STEPS, device_bytes="48KiB", disk_dir=str(tmp_path))
    assert plan["zero_stage"] == 3
    assert plan["predicted"]["ranks"][0]["disk_bytes"] > 0
    assert losses == pytest.approx(trained_alone(STEPS), rel=1e-5)


def test_activations_that_do_not_fit_on_device_go_to_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.modules[__name__], "BATCH", 512)
    pins = ("zero=3", "recompute=none", "microbatches=1")
    plan, losses = train(pins, STEPS, device_bytes="3MiB", disk_dir=str(tmp_path))
    assert plan["activation_offload"] == "auto"
    assert plan["predicted"]["ranks"][0]["activation_bytes"] > 2**22
    assert losses == trained_alone(STEPS)


@pytest.mark.parametrize("pins", [(), ("pp=2",)])
def test_ranks_train_by_one_plan_as_one_process(pins: tuple[str, ...]) -> None:
    (plan, losses), (other, others) = run_on_ranks(train, 2, pins, STEPS)
    assert plan == other
    assert all(plan["layout"][name] == int(size) for name, _, size in (pin.partition("=") for pin in pins))
    assert losses == pytest.approx(trained_alone(STEPS), rel=1e-5)
    assert others == losses


def _refused(own: dict[str, Any], first: dict[str, Any]) -> tuple[str, str]:
    """Return what each rank is told; the first one asks for something else as well."""
    is_first = torch.distributed.get_rank() == 0
    options = {
        "machine": machine(3),
        "device_bytes": "1GiB",
        "loss": loss_of,
        **own,
        **(first if is_first else {}),
    }
    try:
        gemini.autoparallelize(net(), options.pop("samples", batch_of(0)), **options)
    except (gemini.GeminiError, KeyboardInterrupt) as error:
        return type(error).__name__, str(error)
    return "", ""


def _interrupted(_outputs: Any, _batch: Any) -> torch.Tensor:
    raise KeyboardInterrupt


@pytest.mark.parametrize(
    ("own", "first", "kind", "words"),
    [
        ({"device_bytes": "8KiB"}, {}, "OutOfBudgetError", "For each rank device_bytes "),
        ({}, {"dtype": "fp8"}, "ConfigError", "fp8"),
        ({}, {"batch": 0}, "ConfigError", "batch is 0"),
        ({}, {"samples": ()}, "ConfigError", "no tensor"),
        ({}, {"pins": ["tp=3"]}, "ConfigError", "no layout of 2 ranks"),
        ({}, {"machine": "/nowhere.json"}, "ConfigError", "/nowhere.json"),
        ({"machine": alone()}, {}, "ConfigError", "no speeds between ranks"),
        ({}, {"loss": _interrupted}, "KeyboardInterrupt", ""),
    ],
    ids=["budget", "dtype", "batch", "samples", "pins", "machine", "speeds", "Ctrl-C"],
)
def test_what_the_first_rank_is_refused_all_are(
    own: dict[str, Any], first: dict[str, Any], kind: str, words: str
) -> None:
    (raised, why), (other, told) = run_on_ranks(_refused, 2, own, first)
    assert (raised, other) == (kind, "ConfigError")
    assert words in why
    assert why in told
    assert kind in told


def _measured() -> tuple[dict[str, Any], int, float]:
    """Train by what is measured now; the ranks have made as many groups as each other."""
    model = net()
    found = gemini.autoparallelize(
        model, batch_of(0), CPUAdam(model.parameters()), loss=loss_of, device_bytes="1GiB", pins=["dp=2"]
    )
    return found.plan.to_json(), found.num_samples, float(found.step(part_of(0, found.data_ranks)))


@pytest.mark.dear("ranks measure the machine")
def test_a_machine_that_nobody_describes_is_measured_by_one_rank_and_its_links_by_all() -> None:
    (plan, samples, loss), other = run_on_ranks(_measured, 2)
    assert (plan, samples, loss) == other
    assert samples == BATCH // 2
    assert plan["layout"]["dp"] == 2
    assert loss == pytest.approx(trained_alone(1)[0], rel=1e-5)


def _documented(*, plainly: bool) -> list[float]:
    from gemini.compat.adapters.models import autoparallelize

    meta_input_samples = (torch.empty(BATCH, 8, dtype=torch.int64, device="meta"),)
    model = autoparallelize(net(), meta_input_samples, machine=machine(3), device_bytes="1GiB")
    ranks = Ranks()
    optimizer = CPUAdam(model.parameters()) if plainly else gemini.GeminiAdamOptimizer(model, lr=1e-3)
    losses = []
    for step in range(STEPS):
        batch = part_of(step, ranks)
        optimizer.zero_grad()
        loss = loss_of(model(batch[0]), batch)
        if plainly:
            loss.backward()
        else:
            optimizer.backward(loss)
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("plainly", [True, False])
def test_the_line_of_the_documents_gives_a_model_for_a_loop_as_it_is_written(plainly: bool) -> None:
    losses = run_on_ranks(partial(_documented, plainly=plainly), 2)
    means = [sum(each) / 2 for each in zip(*losses, strict=True)]
    assert means == pytest.approx(trained_alone(STEPS), rel=1e-5)
