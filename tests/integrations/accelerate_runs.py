"""One short run of a script with Accelerate, whose model is managed or not."""

from __future__ import annotations

from typing import Any

import torch
from accelerate import Accelerator
from torch import nn

import gemini

BATCHES = 6
TIGHT = {
    "device_bytes": "200KiB",
    "host_bytes": "1MiB",
    "non_model_bytes": 0,
    "min_chunk_size_mb": 0.01,
    "search_range_mb": 0.01,
}


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 8))


def run(
    kind: type[Accelerator],
    *,
    managed: bool,
    clip: float | None = 0.3,
    save: str = "",
    load: str = "",
    **options: Any,
) -> tuple[list[float], dict[str, torch.Tensor], str]:
    """Train as a script does; return losses and norms, weights, and the class of the prepared model.

    ``save``: a directory for everything after the fourth batch; ``load``: begin there.
    """
    accelerator = kind(gradient_accumulation_steps=2, cpu=True, **options)
    model = net()
    if managed and "gemini" not in options:  # else prepare() does both
        gemini.manage(model, **TIGHT)
        optimizer: Any = gemini.GeminiAdamOptimizer(model, lr=1e-2)
    else:
        optimizer = gemini.CPUAdam(model.parameters(), lr=1e-2)
    ranks = accelerator.num_processes
    rows = 8 * BATCHES * ranks
    inputs, labels = torch.arange(rows * 32.0).reshape(rows, 32).sin(), torch.arange(rows) % 8
    data = torch.utils.data.TensorDataset(inputs, labels)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    loader = torch.utils.data.DataLoader(data, batch_size=8)
    model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
    figures = []
    if load:
        accelerator.load_state(load)
    for number, (given, wanted) in enumerate(loader):
        if load and number < 4:
            continue
        with accelerator.accumulate(model):
            loss = nn.functional.cross_entropy(model(given), wanted)
            accelerator.backward(loss)
            figures.append(loss.item())
            if accelerator.sync_gradients and clip is not None:
                figures.append(float(accelerator.clip_grad_norm_(model.parameters(), clip)))
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        if save and number == 3:
            accelerator.save_state(save)
    module = accelerator.unwrap_model(model)
    state = gemini.handle_of(module).state_dict() if managed else module.state_dict()  # type: ignore[attr-defined]
    weights = {name: value.clone() for name, value in state.items()}
    if managed:
        gemini.handle_of(module).close()
    return figures, weights, type(model).__name__


def assert_equal(got: dict[str, torch.Tensor], want: dict[str, torch.Tensor]) -> None:
    assert got.keys() == want.keys()
    assert all(torch.equal(value, want[name]) for name, value in got.items())
