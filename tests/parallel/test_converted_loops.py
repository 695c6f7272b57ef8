"""A loop that ``gemini convert-config`` prints trains over ranks the weights of one process."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from processes import run_on_ranks
from torch import nn

from gemini.cli.conversion import Target
from gemini.cli.conversion_programs import program
from gemini.cli.convert_config import convert

ROWS = torch.rand(6, 2, 6, generator=torch.Generator().manual_seed(1))
CONFIGURATION: dict[str, Any] = {
    "gradient_clipping": 0.05,
    "gradient_accumulation_steps": 2,
    "train_micro_batch_size_per_gpu": 1,
    "optimizer": {"type": "AdamW", "params": {"weight_decay": 0.1}},
    "scheduler": {
        "type": "WarmupDecayLR",
        "params": {"warmup_max_lr": 0.01, "warmup_num_steps": 2, "total_num_steps": 5},
    },
    "zero_optimization": {"stage": 3},
}


class _Output(NamedTuple):
    loss: torch.Tensor


class _Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))

    def forward(self, x: torch.Tensor) -> _Output:
        """Return the loss over a batch."""
        return _Output(self.body(x).square().mean())


def _train(text: str) -> tuple[int, dict[str, torch.Tensor]]:
    """Run the program: each rank has a row of every batch, one process has all of them."""
    names: dict[str, Any] = {"model": _Model()}
    world_size = dist.get_world_size() if dist.is_initialized() else 1
    own = slice(dist.get_rank(), dist.get_rank() + 1) if world_size > 1 else slice(None)
    names["loader"] = [{"x": batch[own]} for batch in ROWS]
    exec(compile(text, "printed", "exec"), names)
    return world_size, names["model"].state_dict()


def test_a_printed_loop_trains_over_ranks_as_on_one_process(tmp_path: Path) -> None:
    file = tmp_path / "ds_config.json"
    file.write_text(json.dumps(CONFIGURATION))
    text = program(convert(file, Target.LOOP))
    _, wanted = _train(text)
    assert not torch.equal(wanted["body.0.weight"], _Model().state_dict()["body.0.weight"])
    for world_size, weights in run_on_ranks(_train, 2, text):
        assert world_size == 2
        for name, value in wanted.items():
            assert torch.allclose(weights[name], value, rtol=1e-5, atol=1e-7), name
