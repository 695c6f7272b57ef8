"""``gemini finetune --objective dpo`` of all weights: the reference is computed once, by the first ones."""

from __future__ import annotations

import copy
import dataclasses
import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from finetune_runs import LLAMA, files_of, run, small_run
from torch.nn import functional

import gemini
from gemini.errors import ConfigError
from gemini.jobs.finetune import job
from gemini.jobs.finetune.config import FineTuneConfig
from gemini.jobs.finetune.engine import PretrainedEngine
from gemini.jobs.finetune.job import FineTuneResult
from gemini.jobs.finetune.references import REFERENCES
from gemini.jobs.finetune.samples import Batch
from gemini.jobs.finetune.task import FineTuneTask
from gemini.jobs.run.display import SilentDisplay

pytest.importorskip("transformers", reason="the extra 'hf' is not installed")

PAIRS = [
    {"prompt": "all work", "chosen": " and play"[: 4 + row % 5], "rejected": " and no play"[: 3 + row]}
    for row in range(9)
]


@pytest.fixture
def config(tmp_path: Path) -> FineTuneConfig:
    """Return a run of two pairs a step, over all weights, that holds one pair out."""
    config = small_run(tmp_path)
    Path(config.data).write_text("\n".join(map(json.dumps, PAIRS)))
    changes = {"schedule": "constant", "warmup": 0.0, "precision": "fp32", "steps": 3, "clip": 0.0}
    return dataclasses.replace(
        config, **changes, objective="dpo", dpo_beta=0.2, eval_share=0.1, lr=3e-3, resume="auto"
    )


class StoppedOnTheWay(SilentDisplay):
    """Is told to stop when so many pairs have their reference."""

    def __init__(self, pairs: int) -> None:
        self._pairs = pairs

    def progress(self, what: str, done: int, total: int) -> None:
        if done == self._pairs:
            os.kill(os.getpid(), signal.SIGUSR1)

    def stopping(self) -> None:
        """Say nothing."""


def stopped(config: FineTuneConfig, pairs: int) -> FineTuneResult:
    return job.run(config, show=lambda _: StoppedOnTheWay(pairs))


@pytest.fixture
def passes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return how many pairs each pass of the reference has had so far."""
    seen: list[int] = []
    refer = PretrainedEngine.reference

    def noted(engine: PretrainedEngine, batch: Batch) -> torch.Tensor:
        seen.append(batch.num_pairs)
        return refer(engine, batch)

    monkeypatch.setattr(PretrainedEngine, "reference", noted)
    return seen


def log_probs(model: Any, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
    """Return those of the chosen and of the rejected answers."""
    labels = batch.inputs["labels"][:, 1:]
    inputs = {name: value for name, value in batch.inputs.items() if name != "labels"}
    each = model(**inputs).logits[:, :-1].log_softmax(-1)
    picked = each.gather(-1, labels.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    chosen, rejected = (picked * (labels >= 0)).sum(-1).chunk(2)
    return chosen, rejected


def by_hand(config: FineTuneConfig) -> tuple[list[float], float, dict[str, torch.Tensor]]:
    """Return the losses of DPO with a frozen copy of the model, that on what is held out, and the weights."""
    task = FineTuneTask(config, Path("unused"), resume=False, scratch=None)
    model = LLAMA.from_pretrained(config.model)
    frozen = copy.deepcopy(model).requires_grad_(False)
    model.config.use_cache = False
    adam = gemini.HybridAdam(model.parameters(), lr=config.learning_rate, weight_decay=0.0)

    def loss_of(batch: Batch) -> torch.Tensor:
        chosen, rejected = log_probs(model, batch)
        of_chosen, of_rejected = log_probs(frozen, batch)
        return -functional.logsigmoid(
            config.dpo_beta * ((chosen - of_chosen) - (rejected - of_rejected))
        ).mean()

    losses = []
    for step in range(task.options.steps):
        adam.zero_grad()
        loss = loss_of(task._batch(step, 0))
        loss.backward()
        adam.step()
        losses.append(loss.item())
    (held_out,) = task._held_out.batches()
    return losses, loss_of(held_out()).item(), model.state_dict()


def test_losses_and_weights_are_those_of_a_frozen_copy(config: FineTuneConfig) -> None:
    result = run(config)
    losses, held_out, weights = by_hand(config)
    assert list(result.losses) == pytest.approx(losses, rel=1e-6)
    assert result.losses[0] == pytest.approx(0.693147, abs=1e-6)
    assert result.losses[-1] < 0.68
    assert result.summary.eval_loss == pytest.approx(held_out, rel=1e-6)
    trained = LLAMA.from_pretrained(result.summary.model).state_dict()
    for name, value in weights.items():
        torch.testing.assert_close(trained[name], value, rtol=1e-5, atol=1e-6)


@pytest.mark.dear("a whole run, one that is stopped twice, and one with more steps")
def test_the_reference_is_computed_once_however_often_a_run_is_stopped(
    config: FineTuneConfig, tmp_path: Path, passes: list[int]
) -> None:
    want = run(config)
    assert passes == [2, 2, 2, 1], "six pairs are learned from, and one is held out"
    passes.clear()
    config = dataclasses.replace(config, output=str(tmp_path / "again"))
    first = stopped(config, pairs=4)
    assert (first.exit_code, first.losses, first.summary.model) == (128 + signal.SIGUSR1, (), None)
    assert not Path(config.output, "checkpoint").exists()
    with Path(config.output, REFERENCES).open("a") as file:
        file.write('{"set": "data", "rows": [5], "chosen": [-1.0], "rej')  # as a kill leaves it
    assert run(config, stop_after=1).summary.last_step == 1
    resumed = run(config)
    assert passes == [2, 2, 2, 1]
    assert resumed.losses == want.losses
    assert files_of(resumed) == files_of(want)
    passes.clear()
    longer = run(config, steps=4)
    assert passes == [2], "two pairs more, by the weights that the run began with"
    assert longer.losses == run(config, steps=4, output=str(tmp_path / "whole")).losses


def test_pairs_share_a_pass_with_the_same_others_in_a_run_of_more_steps(config: FineTuneConfig) -> None:
    def passes_of(steps: int) -> list[list[int]]:
        task = FineTuneTask(
            dataclasses.replace(config, steps=steps), Path("unused"), resume=False, scratch=None
        )
        assert task._references is not None
        return [pairs.rows.tolist() for pairs in task._references._passes()]

    few, more = passes_of(1), passes_of(3)
    assert few[0] == more[0]
    assert few[-1] == more[-1], "what is held out has passes of its own"
    assert len(more) == len(few) + 2


def test_a_resumed_run_that_is_stopped_in_the_reference_has_the_step_of_its_checkpoint(
    config: FineTuneConfig,
) -> None:
    run(config, steps=1)
    summary = stopped(dataclasses.replace(config, steps=3), pairs=5).summary
    assert (summary.first_step, summary.last_step, summary.trained_steps) == (1, 1, 0)
    assert json.loads(Path(config.output, "summary.json").read_text())["last_step"] == 1


def test_a_reference_of_other_weights_or_pairs_is_not_used(
    config: FineTuneConfig, tmp_path: Path, passes: list[int]
) -> None:
    config = dataclasses.replace(config, steps=1, eval_share=0.0)
    stopped(config, pairs=2)
    run(config)
    assert passes == [2], "both runs need the same two pairs"
    torch.manual_seed(1)
    LLAMA(LLAMA.from_pretrained(config.model).config).save_pretrained(config.model)
    with pytest.raises(ConfigError, match=r"has model = '\w+', .*; the model \(--model\) is not"):
        run(config)
    again = {"resume": "no", "overwrite": True}
    assert run(config, **again).losses[0] == pytest.approx(0.693147, abs=1e-6)
    run(config, **again, seq=23)
    assert passes == [2, 2, 2]
    run(config, **again, objective="sft", dpo_beta=0.1, data_keys="prompt=prompt,completion=chosen")
    assert not Path(config.output, REFERENCES).exists()


@pytest.mark.parametrize(
    "damage",
    [
        lambda lines: ["[]", *lines[1:]],
        lambda lines: [lines[0], lines[1].replace('"rows": [', '"rows": [9'), *lines[2:]],
        lambda lines: [lines[0], lines[1].replace('"chosen": [', '"chosen": [NaN, '), *lines[2:]],
        lambda lines: [lines[0], lines[1].replace('"set": "data"', '"set": "eval_data"'), *lines[2:]],
        lambda lines: [lines[0], "\0", *lines[2:]],
    ],
    ids=["head", "row", "number", "set", "line"],
)
def test_what_is_damaged_is_computed_again(damage: Any, config: FineTuneConfig, passes: list[int]) -> None:
    config = dataclasses.replace(config, steps=1)
    stopped(config, pairs=2)
    file = Path(config.output, REFERENCES)
    before = file.read_text()
    file.write_text("\n".join(damage(before.splitlines())) + "\n")
    stopped(config, pairs=2)
    assert file.read_text() == before
    assert passes == [2, 2]
