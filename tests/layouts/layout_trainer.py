"""Trains a case with transformers' Trainer in one process, and with GeminiTrainer over ranks."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from layout_cases import SAVED_AT, STEPS, Case
from layout_models import batch_of
from layout_training import ADAM, Trained, budgets, model_of
from torch import Tensor
from torch import distributed as dist

from gemini import GeminiError, handle_of


def train_plain(case: Case) -> Trained:
    """Train in one process, with the batches of all ranks as one."""
    from transformers import PrinterCallback, Trainer

    _forget_last_run()
    trainer = Trainer(**_parts(case, "unused", case.rows * case.world))
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    return _seen(trainer)


def train_on_ranks(case: Case, directory: str) -> Trained:
    """Train over the ranks of the default group; a second layout goes on from the first one's checkpoint."""
    from transformers import PrinterCallback

    from gemini.integrations.transformers import GeminiTrainer

    found = Trained()
    try:
        with _as_launched():
            _forget_last_run()
            for number, layout in enumerate(case.layouts):
                place = Path(directory, "tiers", str(number))
                options = budgets(case, layout, place) | ({"plan": layout.plan} if layout.plan else {})
                saved = f"{directory}/run/checkpoint-{SAVED_AT}" if number else None
                trainer = GeminiTrainer(**_parts(case, f"{directory}/run", case.rows, number), gemini=options)
                trainer.remove_callback(PrinterCallback)
                trainer.train(resume_from_checkpoint=saved)
                found = _seen(trainer)
                handle_of(trainer.model).close()
    except GeminiError as error:
        found.refused = f"{type(error).__name__}: {error}"
    return found


def _parts(case: Case, directory: str, rows: int, number: int = 0) -> dict[str, Any]:
    """Return the arguments of a trainer that takes ``rows`` on each process."""
    from transformers import TrainingArguments

    model = model_of(case, seed=13 + number)
    if any(layout.recompute for layout in case.layouts) and hasattr(model, "activation_checkpointing_enable"):
        model.activation_checkpointing_enable({"use_reentrant": False})
    saves = len(case.layouts) > 1 and directory != "unused"
    args = TrainingArguments(
        directory,
        per_device_train_batch_size=rows,
        gradient_accumulation_steps=case.accumulate,
        max_steps=STEPS,
        learning_rate=ADAM["lr"],
        adam_epsilon=ADAM["eps"],
        weight_decay=ADAM["weight_decay"],
        max_grad_norm=case.max_norm,
        logging_steps=1,
        save_strategy="steps" if saves else "no",
        save_steps=SAVED_AT,
        report_to=[],
        log_level="error",
        use_cpu=True,
        disable_tqdm=True,
        seed=3,
    )
    return {"model": model, "args": args, "train_dataset": _Rows(case)}


class _Rows(torch.utils.data.Dataset[dict[str, Tensor]]):
    """Enough rows for all steps, of one length."""

    def __init__(self, case: Case) -> None:
        count = STEPS * case.rows * case.world * case.accumulate
        self._batch = batch_of(
            case.subject, 1000 * case.seed, count, case.lengths[0], case.padding, case.ignores
        )

    def __len__(self) -> int:
        return len(self._batch["labels"])

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {name: value[index] for name, value in self._batch.items()}


def _seen(trainer: Any) -> Trained:
    """Return what a trainer logged, and the weights that it has on the first rank."""
    logs = [log for log in trainer.state.log_history if "grad_norm" in log]
    state = {name: value.detach().clone() for name, value in trainer.model.state_dict().items()}
    return Trained(
        losses=[log["loss"] for log in logs],
        norms=[float(log["grad_norm"]) for log in logs],
        weights=state if not dist.is_initialized() or dist.get_rank() == 0 else {},
    )


def _forget_last_run() -> None:
    """Have accelerate look again at how this process was started: it remembers that of its first run."""
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(reset_partial_state=True)


@contextmanager
def _as_launched() -> Iterator[None]:
    """Set what torchrun sets."""
    rank, world = dist.get_rank(), dist.get_world_size()
    said = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world}
    said |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 29557}
    os.environ.update({name: str(value) for name, value in said.items()})
    try:
        yield
    finally:
        for name in said:
            del os.environ[name]
