"""One short run of a script with Lightning, by an ordinary strategy or by ours."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning
import torch
from lightning.pytorch.callbacks import Callback
from torch import nn

from gemini.integrations.lightning import GeminiStrategy

TIGHT: dict[str, Any] = {
    "device_bytes": "60KiB",
    "host_bytes": "1MiB",
    "non_model_bytes": 0,
    "min_chunk_size_mb": 0.01,
    "search_range_mb": 0.01,
}


class Classifier(lightning.LightningModule):
    """Calls itself in training and its parts in evaluation, as modules of users do either."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(32, 64)
        self.last = nn.Sequential(nn.GELU(), nn.Dropout(0.1), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 8))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.last(self.first(inputs))

    def training_step(self, batch: Any, _index: int) -> torch.Tensor:
        loss = nn.functional.cross_entropy(self(batch[0]), batch[1])
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: Any, _index: int) -> None:
        self.log("val_loss", nn.functional.cross_entropy(self.last(self.first(batch[0])), batch[1]))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]


class Figures(Callback):
    """Keeps what is logged."""

    def __init__(self) -> None:
        self.kept: list[float] = []

    def on_train_batch_end(self, trainer: Any, *_others: Any) -> None:
        self.kept += [float(trainer.callback_metrics["loss"]), trainer.optimizers[0].param_groups[0]["lr"]]

    def on_validation_end(self, trainer: Any, _module: Any) -> None:
        self.kept.append(float(trainer.callback_metrics["val_loss"]))


def loader(rows: int = 24) -> Any:
    inputs, labels = torch.arange(rows * 32.0).reshape(rows, 32).sin(), torch.arange(rows) % 8
    return torch.utils.data.DataLoader(torch.utils.data.TensorDataset(inputs, labels), batch_size=4)


def trainer(directory: Path, strategy: Any = "auto", **options: Any) -> tuple[Any, Figures]:
    figures = Figures()
    options = {"max_epochs": 2, "devices": 1, "enable_checkpointing": False, **options}
    made = lightning.Trainer(
        accelerator="cpu",
        strategy=strategy,
        default_root_dir=str(directory),
        callbacks=[figures, *options.pop("callbacks", ())],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        **options,
    )
    return made, figures


def run(
    directory: Path,
    *,
    managed: bool,
    resume: Any = None,
    module: Any = None,
    ordinary: str = "auto",
    **options: Any,
) -> tuple[Any, Any, list[float]]:
    """Train; return the trainer, the module and what was logged."""
    torch.manual_seed(1)
    own = options.pop("gemini", {})
    strategy = GeminiStrategy(**{**TIGHT, **own}) if managed else ordinary
    made, figures = trainer(directory, strategy, **options)
    module = Classifier() if module is None else module
    made.fit(module, loader(), loader(8), ckpt_path=resume)
    return made, module, figures.kept
