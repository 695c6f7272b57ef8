"""Runs of ``gemini finetune`` that are small, and the same by an ordinary loop."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from hf_models import SIZES, saved

import gemini
from gemini.jobs.finetune import job
from gemini.jobs.finetune.config import FineTuneConfig
from gemini.jobs.finetune.job import FineTuneResult
from gemini.jobs.finetune.task import FineTuneTask
from gemini.jobs.run.display import SilentDisplay
from gemini.jobs.run.report import StepReport
from gemini.jobs.run.training import shaped_factor

transformers = pytest.importorskip("transformers", reason="the extra 'hf' is not installed")
tokenizers = pytest.importorskip("tokenizers", reason="comes with transformers")

LLAMA = transformers.LlamaForCausalLM


def save_tokenizer(directory: Path, **options: Any) -> None:
    """Save one that has a token for each letter, an end, and no pad token unless ``options`` name it."""
    letters = {chr(code): code - 30 for code in range(32, 126)}
    bpe = tokenizers.models.BPE(vocab={"<end>": 0, "<unk>": 1, **letters}, merges=[], unk_token="<unk>")
    inner = tokenizers.Tokenizer(bpe)
    options = {"eos_token": "<end>", "unk_token": "<unk>", **options}
    transformers.PreTrainedTokenizerFast(tokenizer_object=inner, **options).save_pretrained(directory)


def small_run(tmp_path: Path) -> FineTuneConfig:
    """Return a run over a model, a tokenizer and data that are made in ``tmp_path``."""
    sizes = {**SIZES, "max_position_embeddings": 64, "bos_token_id": None, "eos_token_id": 0}
    saved(transformers.LlamaConfig(**sizes), LLAMA, tmp_path / "base")
    save_tokenizer(tmp_path / "base")
    lines = [json.dumps({"text": "all work and no play " * (1 + row % 3)}) for row in range(20)]
    (tmp_path / "data.jsonl").write_text("\n".join(lines))
    return FineTuneConfig(
        model=str(tmp_path / "base"),
        data=str(tmp_path / "data.jsonl"),
        output=str(tmp_path / "run"),
        seq=24,
        batch=2,
        steps=6,
        lr=1e-2,
        device_bytes=240 * 2**10,
        disk_dir=str(tmp_path / "disk"),
        non_model_bytes=0,
    )


class Signalling(SilentDisplay):
    """Be told by ``signum`` to stop when ``step`` is shown."""

    def __init__(self, step: int, signum: int = signal.SIGUSR1) -> None:
        self._step = step
        self._signum = signum

    def step(self, report: StepReport) -> None:
        if report.step == self._step:
            os.kill(os.getpid(), self._signum)

    def stopping(self) -> None:
        """Say nothing."""


def run(
    config: FineTuneConfig, stop_after: int = 0, stop_before_evaluation: int = 0, **changes: Any
) -> FineTuneResult:
    """Run, to be told to stop when a step is shown, or within a step: then it is not evaluated."""
    with pytest.MonkeyPatch.context() as patch:
        if stop_before_evaluation:
            trained = FineTuneTask.step

            def step(task: FineTuneTask, engine: Any, number: int) -> tuple[float, int]:
                if number + 1 == stop_before_evaluation:
                    os.kill(os.getpid(), signal.SIGUSR1)
                return trained(task, engine, number)

            patch.setattr(FineTuneTask, "step", step)
        return job.run(dataclasses.replace(config, **changes), show=lambda _: Signalling(stop_after))


def files_of(result: FineTuneResult) -> dict[str, bytes]:
    assert result.summary.model is not None
    return {file.name: file.read_bytes() for file in Path(result.summary.model).iterdir()}


def plainly_trained(
    config: FineTuneConfig, adapter: Any = None, owner: Any = LLAMA, **loading: Any
) -> tuple[Any, list[float]]:
    """Return the model and the losses of an ordinary loop over the same rows, with an ``adapter`` of PEFT.
    ``owner`` is the model's class, and ``loading`` what transformers loads it with."""
    task = FineTuneTask(config, Path("unused"), resume=False, scratch=None)
    torch.manual_seed(config.seed)
    model = owner.from_pretrained(config.model, **loading)
    if adapter is not None:
        model = pytest.importorskip("peft").get_peft_model(model, adapter)
    model.train()
    model.config.use_cache = False  # or packed documents see each other
    trained = [param for param in model.parameters() if param.requires_grad]
    adam = gemini.HybridAdam(trained, lr=config.learning_rate, betas=(0.9, 0.999), weight_decay=0.0)
    losses, steps = [], task.options.steps
    for step in range(steps):
        batches = [task._batch(step, micro) for micro in range(config.accumulate)]
        tokens = [batch.num_learned for batch in batches]
        adam.zero_grad()
        adam.param_groups[0]["lr"] = config.learning_rate * shaped_factor(
            step, steps=steps, warmup=0, shape="cosine"
        )
        parts = []
        for batch, count in zip(batches, tokens, strict=True):
            loss = model(**batch.inputs).loss * (count / sum(tokens))
            loss.backward()
            parts.append(loss.item())
        torch.nn.utils.clip_grad_norm_(model.parameters(), config.clip)
        adam.step()
        losses.append(sum(parts))
    return model, losses
