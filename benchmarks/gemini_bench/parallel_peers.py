"""Torch's contenders of ``gemini bench parallel``: DTensor, pipelining with DDP, FSDP2.

What is imported here is so before ranks are forked: their optimizers would each import torch's compiler.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import pipelining
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    loss_parallel,
    parallelize_module,
)

from gemini_bench.llama import Llama, rotary
from gemini_bench.parallel_job import ADAM, Contender, Job, token_loss
from gemini_bench.trainee import Batch


class _Loop:
    """A training loop; ``around_loss`` makes the context of the loss and its backward pass."""

    def __init__(self, model: nn.Module, around_loss: Callable[[], AbstractContextManager[object]]) -> None:
        self._model, self._around_loss, self._optimizer = model, around_loss, _adam(model)

    def step(self, batch: Batch) -> float:
        """Train on one batch; return its loss."""
        with self._around_loss():
            loss = token_loss(self._model(batch[0]), batch[1])
            loss.backward()
        self._optimizer.step()
        self._optimizer.zero_grad()
        found = loss.detach()
        return float(found.to_local() if isinstance(found, DTensor) else found)

    def close(self) -> None:
        """Nothing is held but memory."""


def _adam(model: nn.Module) -> torch.optim.Optimizer:
    """Return torch's fused AdamW; a call of its kernel takes tensors of one mesh and one kind."""
    groups: dict[Any, list[nn.Parameter]] = {}
    for param in model.parameters():
        kind = getattr(param, "device_mesh", None)
        groups.setdefault(kind, []).append(param)
    found = [{"params": params} for params in groups.values()]
    return torch.optim.AdamW(found, fused=True, **ADAM)


def parallelized(job: Job) -> Contender:
    """``parallelize_module`` as PyTorch's own trainers use it: one copy of the input of each half of a block,
    local tensors inside, logits and loss by parts of the vocabulary."""
    mesh = init_device_mesh("cpu", (job.tp,), mesh_dim_names=("tp",))
    model = job.make_model()
    _cut_layers(model, mesh)
    return _Loop(model, loss_parallel)


def fsdp2_and_tensor(job: Job) -> Contender:
    """The same under ``fully_shard``, per block and at the root."""
    mesh = init_device_mesh("cpu", (job.dp, job.tp), mesh_dim_names=("dp", "tp"))
    model = job.make_model()
    _cut_layers(model, mesh["tp"])
    for block in model.blocks:
        fully_shard(block, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])
    return _Loop(model, loss_parallel)


def _cut_layers(model: Llama, mesh: DeviceMesh) -> None:
    whole = Replicate()
    plan: dict[str, Any] = {
        "tokens": RowwiseParallel(input_layouts=whole, output_layouts=whole),
        "blocks.*.attention": PrepareModuleInput(
            input_layouts=(whole, None, None), desired_input_layouts=(whole, None, None)
        ),
        "blocks.*.mlp": PrepareModuleInput(input_layouts=(whole,), desired_input_layouts=(whole,)),
        "blocks.*.attention.out": RowwiseParallel(),
        "blocks.*.mlp.down": RowwiseParallel(),
        "head": ColwiseParallel(output_layouts=Shard(-1), use_local_output=False),
    }
    for name in ("attention.query", "attention.key", "attention.value", "mlp.gate", "mlp.up"):
        plan[f"blocks.*.{name}"] = ColwiseParallel()
    parallelize_module(model, mesh, plan)


class _Stage(nn.Module):
    """Some blocks of a model, with what is before the first and behind the last."""

    def __init__(self, whole: Llama, blocks: range, num_blocks: int) -> None:
        super().__init__()
        self.tokens = whole.tokens if blocks.start == 0 else None
        self.blocks = nn.ModuleList(whole.blocks[number] for number in blocks)
        is_last = blocks.stop == num_blocks
        self.norm = whole.norm if is_last else None
        self.head = whole.head if is_last else None
        self._width = whole.width

    def forward(self, x: Tensor) -> Tensor:
        if self.tokens is not None:
            x = self.tokens(x)
        cos, sin = rotary(x.shape[1], self._width, x)
        for block in self.blocks:
            x = block(x, cos, sin)
        if self.norm is not None and self.head is not None:
            x = self.head(self.norm(x))
        return x


class _Scheduled:
    """A schedule of torch's, and an optimizer for its stages."""

    def __init__(self, schedule: Any, modules: nn.ModuleList, *, first: bool, last: bool) -> None:
        self._schedule, self._optimizer = schedule, _adam(modules)
        self._first, self._last = first, last

    def step(self, batch: Batch) -> float | None:
        """Train on one batch; return its loss where the last stage is."""
        losses: list[Tensor] = []
        inputs = (batch[0],) if self._first else ()
        if self._last:
            self._schedule.step(*inputs, target=batch[1], losses=losses, return_outputs=False)
        else:
            self._schedule.step(*inputs)
        self._optimizer.step()
        self._optimizer.zero_grad()
        return float(torch.stack(losses).detach().mean()) if self._last else None

    def close(self) -> None:
        """Nothing is held but memory."""


def scheduled(job: Job, style: str) -> Contender:
    """``torch.distributed.pipelining``, each stage under DDP where there are several copies of it."""
    mesh = init_device_mesh("cpu", (job.pp, job.dp), mesh_dim_names=("pp", "dp"))
    chunks = job.chunks if style == "interleaved" else 1
    rank, count = mesh["pp"].get_local_rank(), job.pp * chunks
    whole, layers = job.make_model(), job.model.layers
    modules, stages = nn.ModuleList(), []
    for index in range(rank, count, job.pp):
        blocks = range(layers * index // count, layers * (index + 1) // count)
        module: nn.Module = _Stage(whole, blocks, layers)
        modules.append(module)
        if job.dp > 1:
            module = nn.parallel.DistributedDataParallel(
                module, process_group=mesh["dp"].get_group(), gradient_as_bucket_view=True
            )
        taken, given = _forms(job, index, count)
        stages.append(
            pipelining.PipelineStage(
                module,
                index,
                count,
                torch.device("cpu"),
                input_args=taken,
                output_args=given,
                group=mesh["pp"].get_group(),
            )
        )
    one = len(stages) == 1
    make: Any = pipelining.Schedule1F1B if one else pipelining.ScheduleInterleaved1F1B
    schedule = make(stages[0] if one else stages, job.microbatches, loss_fn=token_loss)
    return _Scheduled(schedule, modules, first=rank == 0, last=rank == job.pp - 1)


def _forms(job: Job, index: int, count: int) -> tuple[Tensor, Tensor]:
    """Return what a stage takes and what it gives, without memory; ``requires_grad`` says for what torch
    expects a gradient."""
    rows, model = job.batch // job.microbatches, job.model
    inner = torch.empty(rows, job.seq, model.hidden, device="meta", requires_grad=True)
    logits = torch.empty(rows, job.seq, model.vocab, device="meta", requires_grad=True)
    taken = torch.empty(rows, job.seq, dtype=torch.int64, device="meta") if index == 0 else inner
    given = logits if index == count - 1 else inner
    return taken, given
