"""One short fine-tuning run, by an unmanaged Trainer and by ours, with the same optimizer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers
from hf_models import SIZES

import gemini
from gemini.integrations.transformers import GeminiTrainer

FIGURES = ("step", "loss", "grad_norm", "learning_rate", "eval_loss")


class Tokens(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Rows of tokens, always the same."""

    def __init__(self, rows: int) -> None:
        self._rows = torch.randint(0, 96, (rows, 10), generator=torch.Generator().manual_seed(0))

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self._rows[index], "labels": self._rows[index]}


def arguments(directory: Path, **more: Any) -> Any:
    """Return TrainingArguments for six steps, with what makes numbers differ where it is forgotten."""
    return transformers.TrainingArguments(
        str(directory),
        **{
            "per_device_train_batch_size": 2,
            "num_train_epochs": 1,
            "learning_rate": 1e-2,
            "weight_decay": 0.1,
            "adam_beta2": 0.95,
            "warmup_steps": 2,
            "lr_scheduler_type": "cosine",
            "logging_steps": 1,
            "report_to": [],
            "use_cpu": True,
            "disable_tqdm": True,
            "save_strategy": "no",
            "seed": 3,
            **more,
        },
    )


def build() -> Any:
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES, attention_dropout=0.1))


def unmanaged(args: Any, model: Any = None) -> Any:
    """Train with transformers' Trainer and our AdamW."""
    adam = {
        "lr": args.learning_rate,
        "betas": (args.adam_beta1, args.adam_beta2),
        "eps": args.adam_epsilon,
    }
    trainer = transformers.Trainer(
        model=build() if model is None else model,
        args=args,
        train_dataset=Tokens(12),
        eval_dataset=Tokens(4),
        optimizer_cls_and_kwargs=(gemini.HybridAdam, adam),
    )
    trainer.train()
    return trainer


def ours(args: Any, model: Any = None, resume: str | None = None, **options: Any) -> Any:
    """Train with GeminiTrainer under a tight budget."""
    trainer = GeminiTrainer(
        model=build() if model is None else model,
        args=args,
        train_dataset=Tokens(12),
        eval_dataset=Tokens(4),
        gemini=options or tight(args.output_dir) if model is None else None,
    )
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def tight(directory: str) -> dict[str, Any]:
    Path(directory).mkdir(parents=True, exist_ok=True)
    return {"device_bytes": "200KiB", "disk_dir": directory, "non_model_bytes": 0}


def figures(trainer: Any) -> list[dict[str, float]]:
    """Return what was printed of each step and evaluation."""
    kept = [{k: v for k, v in log.items() if k in FIGURES} for log in trainer.state.log_history]
    return [log for log in kept if len(log) > 1]
