"""What is asked of each model of the zoo: to train, evaluate, generate and resume as without a budget."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from builders import arguments, built, called, loss_of, recomputes, tensors_in
from catalogue import Row
from torch import Tensor, nn

import gemini
from gemini import checkpoint

STEPS = 3
ADAM = {"lr": 1e-3, "weight_decay": 0.01}
STATE_BYTES = 16  # of a parameter that trains: value, gradient, two moments
LINKS = ("h2d", "d2h", "disk_read", "disk_write")


@dataclass(frozen=True)
class Seen:
    """What one step showed: its loss, what an evaluation after it gave, and what was generated then."""

    loss: Tensor
    outputs: list[Tensor]
    generated: list[Tensor]


@dataclass(frozen=True)
class Facts:
    """What a run found out about a model, as the page shows it. ``data_bytes``: what training it keeps, of
    which DEVICE gets ``device_bytes``."""

    parameters: int
    data_bytes: int
    device_bytes: int
    recomputes: bool


def conform(row: Row, directory: Path) -> Facts:
    """Assert all that the zoo asks of the model of ``row``; ``directory`` is for its files."""
    plain = built(row)
    facts = facts_of(row, plain)
    optimizer = gemini.HybridAdam([p for p in plain.parameters() if p.requires_grad], **ADAM)
    want = [step(row, plain, optimizer, index) for index in range(STEPS)]
    assert all(seen.loss.isfinite() for seen in want)
    assert_trains_alike(row, directory, facts.device_bytes, want, plain.state_dict())
    assert_trains_alike_resident(row, directory, want, plain.state_dict())
    assert_resumes(row, directory, 2 * facts.device_bytes, want[-1], plain.state_dict())
    if row.bf16:
        assert_bf16_is_the_same_within_a_budget(row, directory, facts.device_bytes)
    else:
        assert_has_no_bf16(row, plain)
    return facts


def assert_trains_alike(
    row: Row, directory: Path, device_bytes: int, want: list[Seen], weights: dict[str, Tensor]
) -> None:
    """Train within a budget, as ``want`` and to ``weights``; save before the last step."""
    with managed(row, directory, device_bytes=device_bytes) as (model, handle, adam):
        for index in range(STEPS):
            if index == STEPS - 1:
                checkpoint.save(directory / "saved", handle, adam)
            assert_same_step(step(row, model, adam, index), want[index], f"step {index}")
        assert_same_tensors(handle.state_dict(), weights, "weights")
        assert_within_budget(handle.stats())


def assert_trains_alike_resident(
    row: Row, directory: Path, want: list[Seen], weights: dict[str, Tensor]
) -> None:
    """Train where all data stays on DEVICE, which takes gradients as autograd made them."""
    with managed(row, directory) as (model, handle, adam):
        for index in range(STEPS):
            # With the evaluations: models that mask at random go on with the numbers that those leave.
            assert_same_step(step(row, model, adam, index), want[index], f"resident step {index}")
        assert handle.manager.resident
        assert_same_tensors(handle.state_dict(), weights, "weights of a resident model")


def assert_resumes(
    row: Row, directory: Path, device_bytes: int, want: Seen, weights: dict[str, Tensor]
) -> None:
    """Load what was saved into a model with other values, which then takes the last step."""
    with managed(row, directory, seed=1, device_bytes=device_bytes) as (model, handle, adam):
        checkpoint.load(directory / "saved", handle, adam)
        assert_same_step(step(row, model, adam, STEPS - 1), want, "the step after loading")
        assert_same_tensors(handle.state_dict(), weights, "weights after loading")


def assert_bf16_is_the_same_within_a_budget(row: Row, directory: Path, device_bytes: int) -> None:
    """Take one step in mixed precision within a budget, and one without."""
    found = []
    for most in (device_bytes, None):
        options = {"mixed_precision": "bf16", "device_bytes": most}
        with managed(row, directory, **options) as (model, handle, adam):
            seen = step(row, model, adam, 0)
            found.append((seen, {name: value.clone() for name, value in handle.state_dict().items()}))
    (seen, weights), (want, want_weights) = found
    assert seen.loss.isfinite()
    assert_same_step(seen, want, "bf16")
    assert_same_tensors(weights, want_weights, "weights in bf16")


def assert_has_no_bf16(row: Row, plain: nn.Module) -> None:
    """Have the model itself refuse bf16, with nobody managing it."""
    plain.bfloat16()
    with pytest.raises(RuntimeError, match=r"(?i)bfloat16"):
        step(row, plain, torch.optim.SGD(plain.parameters()), 0)


def step(row: Row, model: nn.Module, optimizer: torch.optim.Optimizer, index: int) -> Seen:
    """Train once, then evaluate and generate."""
    model.train()
    loss = loss_of(called(row, model, arguments(row, index)))
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    model.eval()
    given = arguments(row, STEPS + index)
    with torch.no_grad():
        outputs = tensors_in(called(row, model, given))
        generated = []
        if row.prompt:
            prompt = {name: given[name] for name in row.prompt}
            generated = [model.generate(**prompt, max_new_tokens=3, do_sample=False)]
    return Seen(loss.detach(), [out.clone() for out in outputs], generated)


@contextmanager
def managed(row: Row, directory: Path, seed: int = 0, **options: Any) -> Iterator[tuple[Any, Any, Any]]:
    """Build a model and manage it in place over a DISK; yield it, its handle and an optimizer."""
    model = built(row, seed)
    handle = gemini.manage(
        model, disk_dir=str(directory), non_model_bytes=0, min_chunk_size_mb=4096 / 2**20, **options
    )
    with closing(handle):
        yield model, handle, gemini.GeminiAdamOptimizer(model, **ADAM)


def facts_of(row: Row, model: nn.Module) -> Facts:
    """Return the size of a model, and the budget that it is given: its share of what training keeps."""
    params = list(model.parameters())
    data = sum(p.numel() * (STATE_BYTES if p.requires_grad else 4) for p in params)
    budget = int(data * row.budget)
    return Facts(sum(p.numel() for p in params), data, budget, recomputes(model))


def assert_within_budget(stats: dict[str, Any]) -> None:
    """DEVICE held no more than it may, and so chunks went to and fro."""
    assert stats["device"]["peak_bytes"] <= stats["device"]["budget_bytes"] < stats["model_data_bytes"]
    assert sum(stats[link]["bytes"] for link in LINKS) > 0


def assert_same_step(got: Seen, want: Seen, what: str) -> None:
    """Compare two steps bit for bit."""
    assert same(got.loss, want.loss), f"{what}: loss {got.loss}, not {want.loss}"
    for name, ours, theirs in (
        ("evaluation", got.outputs, want.outputs),
        ("generate", got.generated, want.generated),
    ):
        pairs = zip(ours, theirs, strict=True)
        unlike = [place for place, (one, two) in enumerate(pairs) if not same(one, two)]
        assert not unlike, f"{what}: {name} gives another output {unlike}"


def assert_same_tensors(got: dict[str, Tensor], want: dict[str, Tensor], what: str) -> None:
    """Compare two state dicts bit for bit."""
    assert list(got) == list(want)
    unlike = [name for name, value in want.items() if not same(got[name], value)]
    assert not unlike, f"{what}: {unlike}"


def same(one: Tensor, two: Tensor) -> bool:
    """Compare bit for bit."""
    return one.dtype == two.dtype and torch.equal(one, two)
