"""A program of the documents on several processes: layers of the launched mode, wrapped and saved."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import torch
from processes import run_on_ranks
from torch import distributed as dist
from torch import nn

import gemini.compat as documents
from gemini.parallel.launch import shutdown

warnings.filterwarnings("ignore", message="gemini.compat.*", category=DeprecationWarning)


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = documents.nn.Linear(8, 32), documents.nn.Linear(32, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.tanh(self.up(x)))


def train(directory: str, parallel: dict[str, Any]) -> tuple[list[int], dict[str, torch.Tensor]]:
    documents.launch_from_torch(config={"parallel": parallel})
    gpc, mode = documents.core.global_context, documents.context.ParallelMode
    model = Mlp()
    part = list(model.up.weight.shape)
    batch = torch.randn(8, 8, generator=torch.Generator().manual_seed(1))
    rows = batch.chunk(gpc.get_world_size(mode.DATA))[gpc.get_local_rank(mode.DATA)]
    file = Path(directory, f"{dist.get_world_size()}.pt")
    with documents.nn.parallel.GeminiDDP(model, "cpu", mixed_precision=None, verbose=False) as wrapped:
        optimizer = documents.zero.GeminiAdamOptimizer(wrapped, lr=1e-2)
        for _ in range(3):
            optimizer.zero_grad()
            optimizer.backward(wrapped(rows).square().mean())
            optimizer.step()
        documents.utils.save_checkpoint(file, 3, wrapped)
        for param in wrapped.parameters():
            param.data.zero_()
        assert documents.utils.load_checkpoint(file, wrapped) == 3
        documents.utils.save_checkpoint(file, 4, wrapped)
    shutdown()
    return part, torch.load(file, weights_only=True)["model"]


def train_colo(directory: str, degree: int) -> dict[str, torch.Tensor]:
    tensor = documents.tensor
    documents.launch_from_torch(config={})
    group = tensor.ProcessGroup(tp_degree=degree)
    with documents.zero.ColoInitContext(default_pg=group):
        torch.manual_seed(5)
        model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 4))
    for param in model[0].parameters():
        spec = tensor.ShardSpec([0], [group.tp_world_size()])
        param.set_tensor_spec(spec, tensor.ComputeSpec(tensor.ComputePattern.TP1D))
    with documents.nn.parallel.GeminiDDP(model, "cpu", mixed_precision=None, verbose=False) as wrapped:
        optimizer = documents.zero.GeminiAdamOptimizer(wrapped, lr=1e-2)
        optimizer.backward(wrapped(torch.ones(2, 8)).square().mean())
        optimizer.step()
        assert wrapped.state_dict()["0.weight"].shape == (32 // degree, 8)
        file = Path(directory, f"colo{degree}.pt")
        documents.utils.save_checkpoint(file, 1, wrapped)
        assert documents.utils.load_checkpoint(file, wrapped) == 1
    shutdown()
    return torch.load(file, weights_only=True)["model"]


def test_parameters_cut_by_their_specs_are_saved_whole(tmp_path: Path) -> None:
    (want,) = run_on_ranks(train_colo, 1, str(tmp_path), 1)
    for got in run_on_ranks(train_colo, 2, str(tmp_path), 2):
        for name, value in want.items():
            torch.testing.assert_close(got[name], value, rtol=1e-4, atol=1e-6)


def test_parts_are_trained_and_saved_as_the_whole(tmp_path: Path) -> None:
    ((whole, want),) = run_on_ranks(train, 1, str(tmp_path), {})
    found = run_on_ranks(train, 4, str(tmp_path), {"tensor": {"size": 2, "mode": "1d"}})
    assert whole == [32, 8]
    for part, got in found:
        assert part == [16, 8]
        for name, value in want.items():
            torch.testing.assert_close(got[name], value, rtol=1e-4, atol=1e-6)
