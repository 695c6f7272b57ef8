"""What is asked of each model of the zoo over ranks: the bits of plain torch that averages gradients."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import torch
from builders import built
from catalogue import Row
from torch import distributed as dist
from torch import nn
from zoo_runs import ADAM, STEPS, assert_same_step, assert_same_tensors, facts_of, managed, step

import gemini
from gemini.placement.policies import DeviceTooSmallError


class RankByRank(torch.optim.Optimizer):
    """Averages gradients over the ranks, added in their order, before each step of ``optimizer``. A gradient
    that one rank alone has counts as zeros on the others."""

    def __init__(self, optimizer: torch.optim.Optimizer, params: Iterable[nn.Parameter]) -> None:
        self._optimizer, self._params = optimizer, list(params)

    def step(self) -> None:  # type: ignore[override]
        ranks = dist.get_world_size()
        has = torch.tensor([param.grad is not None for param in self._params]).int()
        dist.all_reduce(has)
        for param, anywhere in zip(self._params, has.tolist(), strict=True):
            if anywhere:
                own = torch.zeros_like(param) if param.grad is None else param.grad
                every = [torch.empty(param.shape, dtype=param.dtype) for _ in range(ranks)]
                dist.all_gather(every, own.contiguous())
                param.grad = torch.stack(every).sum(0) / ranks
        self._optimizer.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        self._optimizer.zero_grad(set_to_none)


def conform_over_ranks(row: Row, directory: str) -> None:
    """Assert on this rank that the model of ``row`` trains over all ranks as plain torch does, each with
    batches in another order, with all data on DEVICE and within a budget; ``directory`` is for files."""
    torch.backends.mha.set_fastpath_enabled(False)  # as conftest.py does for models in one process
    order = [(index + dist.get_rank()) % STEPS for index in range(STEPS)]
    plain = built(row)
    trained = [param for param in plain.parameters() if param.requires_grad]
    optimizer = RankByRank(gemini.HybridAdam(trained, **ADAM), trained)
    want = [step(row, plain, optimizer, index) for index in order]
    for budget in (None, _budget(row, directory, facts_of(row, plain).device_bytes)):
        with managed(row, Path(directory), device_bytes=budget) as (model, handle, adam):
            assert handle.peers is not None
            for index, seen in zip(order, want, strict=True):
                assert_same_step(step(row, model, adam, index), seen, f"batch {index}, DEVICE {budget}")
            assert_same_tensors(handle.state_dict(), plain.state_dict(), f"weights, DEVICE {budget}")


def _budget(row: Row, directory: str, device_bytes: int) -> int:
    """Return the budget that one process has or, where a rank needs more at once (gradients of whole layers
    of experts, say), the least that it can do with."""
    try:
        with managed(row, Path(directory), device_bytes=device_bytes):
            return device_bytes
    except DeviceTooSmallError as error:
        return error.least_bytes
