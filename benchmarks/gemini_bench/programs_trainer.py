"""A run of transformers' Trainer for the case ``resume``; in its worker only, for it imports transformers."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import transformers

import gemini
from gemini.integrations.accelerate import unwrap_optimizer
from gemini.integrations.transformers import GeminiTrainer
from gemini_bench.peaks import PhasePeaks
from gemini_bench.programs_resume import Settings

_SHARD = "32MiB"
_SEEDS = {"resumed": 1}  # of the weights that training begins with: what resumes must not need the same


class Rows(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Rows of random tokens, always the same."""

    def __init__(self, settings: Settings) -> None:
        shape = (settings.steps * settings.batch, settings.seq)
        self._rows = torch.randint(0, settings.vocab, shape, generator=torch.Generator().manual_seed(0))

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self._rows[index], "labels": self._rows[index]}


class Phases(transformers.TrainerCallback):  # type: ignore[misc, unused-ignore]
    """Says when a phase ends, and has step ``save_step`` saved; 0: none."""

    def __init__(self, peaks: PhasePeaks, begins_by: str, save_step: int) -> None:
        self.peaks, self.begins_by, self.save_step = peaks, begins_by, save_step
        self.trained: list[int] = []

    def on_train_begin(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        """End what comes before the first step, resuming too."""
        self.peaks.end(self.begins_by)

    def on_step_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        """End a step."""
        self.peaks.end("training")
        self.trained.append(state.global_step)
        control.should_save = state.global_step == self.save_step

    def on_save(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        """End a save."""
        self.peaks.end("save")


def train(settings: Settings, kind: str, place: Path) -> dict[str, Any]:
    """Train as one of the case's kinds; checkpoints are below ``place``. Return peaks of phases (bytes),
    losses by step, and a digest of each weight and state; these are computed when peaks no longer count."""
    directory = place / kind
    directory.mkdir(parents=True)
    with PhasePeaks() as peaks:
        trainer = _trainer(settings, kind, directory)
        peaks.end("building")
        save_step = settings.save_step if kind == "saving" else 0
        phases = Phases(peaks, "resume" if kind == "resumed" else "beginning", save_step)
        trainer.add_callback(phases)
        source = place / "saving" / f"checkpoint-{settings.save_step}"
        trainer.train(resume_from_checkpoint=str(source) if kind == "resumed" else None)
        peaks.end("training")
    logs = [log for log in trainer.state.log_history if "loss" in log]  # of steps before a checkpoint, too
    optimizer = unwrap_optimizer(trainer.optimizer)
    digests = dict(_digests(trainer.handle, optimizer))
    return {
        "num_parameters": sum(param.numel() for param in trainer.model.parameters()),
        "moment_bytes": 8 * sum(param.numel() for param in trainer.model.parameters()),
        "disk_bytes": trainer.handle.stats()["disk"]["bytes"],
        "resident": peaks.resident,
        "unmapped": peaks.unmapped,
        "losses": {str(log["step"]): log["loss"] for log in logs if log["step"] in phases.trained},
        "digests": digests,
    }


def _trainer(settings: Settings, kind: str, directory: Path) -> Any:
    config = settings.config(use_cache=False)
    torch.manual_seed(_SEEDS.get(kind, 0))
    with gemini.init_on("meta"):
        model = transformers.LlamaForCausalLM(config)
    gemini.manage(
        model,
        device_bytes=settings.device_bytes,
        host_bytes=settings.host_bytes,
        disk_dir=directory,
        non_model_bytes=0,
        mixed_precision="bf16",
    )
    arguments = transformers.TrainingArguments(
        str(directory),
        per_device_train_batch_size=settings.batch,
        max_steps=settings.steps,
        learning_rate=1e-3,
        warmup_steps=1,
        lr_scheduler_type="cosine",
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        seed=3,
    )
    return GeminiTrainer(model=model, args=arguments, train_dataset=Rows(settings))


def _digests(handle: Any, optimizer: Any) -> Iterator[tuple[str, str]]:
    """Yield the name and digest of each weight (the fp32 master of a bf16 one) and of each state."""
    for shard, _ in handle.state_dict_shard(_SHARD):
        for name, value in shard.items():
            yield name, _digest(value)
    for states, _ in optimizer.state_dict_shard(_SHARD):
        for number, state in states.items():
            for name, value in state.items():
                yield f"{name} of parameter {number}", _digest(value)


def _digest(value: Any) -> str:
    if not isinstance(value, torch.Tensor):
        return repr(value)
    data = value.detach().contiguous().reshape(-1).view(torch.uint8).numpy().data
    return f"{value.dtype} {tuple(value.shape)} {hashlib.blake2b(data, digest_size=16).hexdigest()}"
