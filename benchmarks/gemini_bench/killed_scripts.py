"""Scripts of users that are killed and started again: ``python -m gemini_bench.killed_scripts NAME``, in the
directory of the run. They go on from what is there, as the documents say.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

STEPS, SAVE_EVERY = 12, 2
_LOSSES = Path("losses.jsonl")


def main(arguments: Sequence[str]) -> int:
    """Run the script that the only argument names."""
    _note(None)
    weights = SCRIPTS[arguments[0]]()
    Path("weights.json").write_text(json.dumps(weights))
    return 0


def _note(value: Any) -> None:
    """Write a line; None begins those of a process."""
    descriptor = os.open(_LOSSES, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    try:
        os.write(descriptor, (json.dumps(value) + "\n").encode())
    finally:
        os.close(descriptor)


def _digests(state: Mapping[str, torch.Tensor]) -> dict[str, str]:
    return {
        name: hashlib.blake2b(
            value.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        ).hexdigest()
        for name, value in state.items()
    }


class _Rows(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    def __init__(self) -> None:
        self._rows = torch.randint(0, 96, (20, 16), generator=torch.Generator().manual_seed(0))

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self._rows[index], "labels": self._rows[index]}


def _trainer() -> dict[str, str]:
    import transformers

    from gemini.integrations.transformers import GeminiTrainer

    class Notes(transformers.TrainerCallback):  # type: ignore[misc, unused-ignore]
        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **others: Any) -> None:
            if "loss" in logs:
                _note([state.global_step, logs["loss"]])

    sizes: dict[str, Any] = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    }
    torch.manual_seed(0)
    config = transformers.LlamaConfig(vocab_size=96, attention_dropout=0.1, **sizes)
    arguments = transformers.TrainingArguments(
        "run",
        per_device_train_batch_size=2,
        max_steps=STEPS,
        learning_rate=1e-2,
        warmup_steps=2,
        lr_scheduler_type="cosine",
        save_strategy="steps",
        save_steps=SAVE_EVERY,
        save_total_limit=2,
        logging_steps=1,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
    )
    trainer = GeminiTrainer(
        model=transformers.LlamaForCausalLM(config),
        args=arguments,
        train_dataset=_Rows(),
        callbacks=[Notes()],
        gemini={"device_bytes": "600KiB", "disk_dir": ".", "non_model_bytes": 0, "mixed_precision": "bf16"},
    )
    last = transformers.trainer_utils.get_last_checkpoint("run") if Path("run").is_dir() else None
    trainer.train(resume_from_checkpoint=True if last else None)
    return _digests(trainer.model.state_dict())


def _lightning() -> dict[str, str]:
    import lightning
    from lightning.pytorch.callbacks import ModelCheckpoint

    from gemini.integrations.lightning import GeminiStrategy

    class Classifier(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(
                nn.Linear(32, 64), nn.GELU(), nn.Dropout(0.1), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 8)
            )

        def training_step(self, batch: Any, index: int) -> torch.Tensor:
            loss = nn.functional.cross_entropy(self.net(batch[0]), batch[1])
            _note([self.global_step + 1, loss.item()])
            return loss

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
            return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.8)]

    torch.manual_seed(0)
    inputs, labels = torch.arange(8 * 32.0).reshape(8, 32).sin(), torch.arange(8) % 8
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(inputs, labels), batch_size=4)
    strategy = GeminiStrategy(
        device_bytes="60KiB",
        host_bytes="1MiB",
        non_model_bytes=0,
        min_chunk_size_mb=0.01,
        search_range_mb=0.01,
    )
    trainer = lightning.Trainer(
        max_epochs=STEPS // SAVE_EVERY,
        accelerator="cpu",
        devices=1,
        strategy=strategy,
        callbacks=[ModelCheckpoint("run", save_last=True, save_top_k=1)],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    module = Classifier()
    trainer.fit(module, loader, ckpt_path="last")
    return _digests(module.state_dict())


SCRIPTS = {"GeminiTrainer": _trainer, "Lightning": _lightning}

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
