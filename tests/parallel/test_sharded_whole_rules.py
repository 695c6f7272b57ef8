"""Optimizers that need whole parameters, over ranks: parameters are put together for their updates."""

from __future__ import annotations

import re
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from processes import run_on_ranks
from same_bits import assert_same
from sharded_harness import WIDTH, batch, columns, mlp
from torch import Tensor, nn
from torch import distributed as dist
from torch import optim as torch_optim

from gemini import ConfigError, GeminiDDP, GeminiOptimizer, Lamb, Muon, OutOfBudgetError, checkpoint
from gemini.chunk.chunk import StateSpec
from gemini.chunk.layout import ChunkLayout
from gemini.comm.peers import ModelRanks, Share
from gemini.runtime.growth import with_gathered
from gemini.runtime.storage.data_sizes import GroupSpec, Kept, Needs, data_sizes, plan_groups
from gemini.system.config import parse_bytes

# As many threads as a rank has: a product, or a norm, over two has other bits.
pytestmark = pytest.mark.usefixtures("one_thread")

STEPS = 4
TIGHT = {"min_chunk_size_mb": 2**-6, "search_range_mb": 2**-6, "non_model_bytes": 0}


def _muon(params: Any) -> torch_optim.Optimizer:
    return torch_optim.Muon([p for p in params if p.dim() == 2], lr=0.02)


class Counted(torch_optim.Optimizer):
    """Of a class that nobody knows: counts in its group and in itself, scales by the norm of a parameter."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.05, "count": 0})
        self.total = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.total += 1
        for group in self.param_groups:
            group["count"] += 1
            for param in group["params"]:
                mean = self.state[param].setdefault("mean", torch.zeros_like(param)).lerp_(param.grad, 0.3)
                param.sub_(mean / (0.1 + mean.norm()), alpha=group["lr"] / group["count"])


MAKE: dict[str, Callable[[Any], torch_optim.Optimizer]] = {
    "unknown": Counted,
    "muon": _muon,
    "adafactor": lambda params: torch_optim.Adafactor(params, lr=0.05, weight_decay=0.1),
    "lamb": lambda params: Lamb(params, lr=0.05, weight_decay=0.1, bias_correction=True),
}


def _mixed(params: Any) -> torch_optim.Optimizer:
    return Muon([(str(number), param) for number, param in enumerate(params)], weight_decay=0.1)


def wide() -> nn.Module:
    """Matrices in chunks of their own, which both ranks have halves of; small parameters beside them."""
    torch.manual_seed(9)
    sizes = [WIDTH, 600] * 3
    return nn.Sequential(*(nn.Linear(*pair) for pair in pairwise(sizes)))


BUILD: dict[str, Callable[[], nn.Module]] = {"mlp": mlp, "columns": columns, "wide": wide}
Trained = tuple[dict[str, Tensor], dict[int, dict[str, Any]], dict[str, Any]]


def _plain(build: str, rule: str) -> tuple[dict[str, Tensor], dict[int, dict[str, Any]]]:
    model = BUILD[build]()
    optimizer = MAKE.get(rule, _mixed)(model.parameters())
    for step in range(STEPS):
        model(batch(step)).square().mean().backward()
        optimizer.step()
        model.zero_grad()
    return dict(model.state_dict()), optimizer.state_dict()["state"]


def _train(
    build: str, rule: str, options: dict[str, Any], steps: range = range(STEPS), saved: Path | None = None
) -> Trained:
    """Train with batches that all ranks have, whose mean gradient is each rank's to the bit; from a
    checkpoint, or up to one."""
    model = GeminiDDP(BUILD[build](), **{**TIGHT, **options})
    optimizer = GeminiOptimizer(MAKE.get(rule, _mixed)(model.parameters()), model)
    if saved is not None and steps.start:
        checkpoint.load(saved, model, optimizer)
    for step in steps:
        optimizer.backward(model(batch(step)).square().mean())
        optimizer.step()
        assert model.stats()["pending_updates"] == 0
    if saved is not None and not steps.start:
        checkpoint.save(saved, model, optimizer)
    stats = model.stats()
    weights, states = dict(model.state_dict()), optimizer.state_dict()["state"]
    model.manager.chunks.table.check_invariants()
    model.close()
    return weights, states, stats


@pytest.mark.parametrize("build", BUILD)
@pytest.mark.parametrize("rule", MAKE)
def test_ranks_make_the_steps_of_the_unmanaged_model(build: str, rule: str) -> None:
    want = _plain(build, rule)
    small = [value for entry in want[1].values() for value in entry.values() if rule == "adafactor"]
    for weights, states, stats in run_on_ranks(_train, 2, build, rule, {}):
        assert stats["small_state_bytes"] == sum(value.nbytes for value in small)
        assert_same(weights, want[0])
        assert_same(states, want[1])


def test_muon_with_adam_is_one_optimizer_over_ranks() -> None:
    want = _plain("mlp", "mixed")
    for weights, states, _ in run_on_ranks(_train, 2, "mlp", "mixed", {}):
        assert_same(weights, want[0])
        assert_same(states, want[1])


def _least(rule: str, directory: str) -> int:
    """Return the DEVICE that the optimizer is refused for less than."""
    with GeminiDDP(wide(), **TIGHT, device_bytes="640KiB", disk_dir=directory) as model:
        with pytest.raises(OutOfBudgetError) as refused:
            GeminiOptimizer(MAKE[rule](model.parameters()), model)
        found = re.search(r"raise device_bytes to at least ([\d.]+\wiB)", str(refused.value))
        assert found is not None
        return parse_bytes(found[1]) or 0


@pytest.mark.parametrize("rule", MAKE)
def test_the_least_budget_that_is_asked_for_holds_and_no_bit_changes(rule: str, tmp_path: Path) -> None:
    (least,) = set(run_on_ranks(_least, 2, rule, str(tmp_path)))
    want = _plain("wide", rule)
    for weights, states, stats in run_on_ranks(
        _train, 2, "wide", rule, {"device_bytes": least, "disk_dir": str(tmp_path)}
    ):
        assert stats["device"]["peak_bytes"] <= least < stats["model_data_bytes"]
        assert stats["disk_write"]["bytes"] > 0
        assert_same(weights, want[0])
        assert_same(states, want[1])


def test_a_room_that_is_larger_than_what_is_gathered_counts() -> None:
    layout = ChunkLayout.build([("weight", torch.empty(3000))], 4096, itemsize=4)
    (plan,) = plan_groups([GroupSpec(layout, torch.float32, True, False)], 4096, Share(0, 2))

    def size(kept: Kept) -> tuple[int, int]:
        found = with_gathered(data_sizes([(plan, Needs(False, True, kept))]), 0, 0, "")
        return found.total_bytes, found.working_set_bytes

    states = tuple(StateSpec(f"state_{index}") for index in range(6))
    pieces, whole = size(Kept(states)), size(Kept(states, True))
    more = 8 * 12288 - 3 * 4096 * 4  # gradient, values and states of 3000 elements, each in pages
    assert whole == (pieces[0] + more, pieces[1] + more)


@pytest.mark.parametrize("rule", MAKE)
def test_masters_are_put_together_too(rule: str) -> None:
    halves = {"mixed_precision": "bf16"}
    want = _train("wide", rule, halves)
    for weights, states, _ in run_on_ranks(_train, 2, "wide", rule, halves):
        assert_same(weights, want[0])
        assert_same(states, want[1])


@pytest.mark.parametrize("rule", [*MAKE, "mixed"])
def test_a_checkpoint_of_ranks_goes_on_over_ranks_and_in_one_process(rule: str, tmp_path: Path) -> None:
    saved = tmp_path / "saved"
    options = {"optimizer_rule": "muon"} if rule == "mixed" else {}  # one state of matrices, two of biases
    run_on_ranks(_train, 2, "mlp", rule, options, range(2), saved)
    rest = "mlp", rule, options, range(2, STEPS), saved
    want = _plain("mlp", rule)
    for weights, states, _ in [*run_on_ranks(_train, 2, *rest), _train(*rest)]:
        assert_same(weights, want[0])
        assert_same(states, want[1])


def _cut() -> str:
    peers = GeminiDDP(mlp(), **TIGHT)
    assert peers.manager.sharding is not None
    parts = ModelRanks(peers.manager.sharding.peers, lambda _param: True)
    alone = [dist.new_group([rank]) for rank in range(2)][dist.get_rank()]
    with peers, GeminiDDP(mlp(), process_group=alone, model_ranks=parts, **TIGHT) as model:
        with pytest.raises(ConfigError) as refused:
            GeminiOptimizer(MAKE["lamb"](model.parameters()), model)
        return str(refused.value)


def test_what_was_cut_before_is_refused() -> None:
    for message in run_on_ranks(_cut, 2):
        assert "Lamb needs whole parameters" in message
        assert "use only data parallelism" in message
