"""Our contenders of ``gemini bench parallel``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from gemini.model.ddp import GeminiDDP
from gemini.optim import CPUAdam, GeminiOptimizer
from gemini.parallel import Booster, HybridParallelPlugin, Layout, Mesh, parallelize
from gemini.parallel.mesh import Axis
from gemini.parallel.tensor.loss import vocabulary_cross_entropy
from gemini.parallel.tensor.styles import Column, Head, Row, Style, Vocabulary
from gemini_bench.parallel_job import ADAM, Contender, Job, token_loss
from gemini_bench.trainee import Batch


class _Loop:
    """A training loop in the program's own words. ``close`` gives back what the model has."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: Any,
        loss: Callable[[Tensor, Tensor], Tensor],
        backward: Callable[[Tensor], object],
        close: Callable[[], None],
    ) -> None:
        self._model, self._optimizer, self._loss = model, optimizer, loss
        self._backward, self.close = backward, close

    def step(self, batch: Batch) -> float:
        """Train on one batch; return its loss."""
        loss = self._loss(self._model(batch[0]), batch[1])
        self._backward(loss)
        self._optimizer.step()
        self._optimizer.zero_grad()
        return float(loss.detach())


class _Executed:
    """Batches through ``execute_pipeline``."""

    def __init__(self, booster: Booster, model: GeminiDDP, optimizer: Any) -> None:
        self._booster, self._model, self._optimizer = booster, model, optimizer

    def step(self, batch: Batch) -> float:
        """Train on one batch; return its loss."""
        out = self._booster.execute_pipeline(iter([batch]), self._model, _criterion, self._optimizer)
        self._optimizer.step()
        self._optimizer.zero_grad()
        return float(out["loss"])

    def close(self) -> None:
        """Give memory back."""
        self._model.close()


def _criterion(logits: Tensor, batch: Batch) -> Tensor:
    return token_loss(logits, batch[1])


def _plan(job: Job) -> dict[str, Style | str]:
    """Return how the layers are cut: attention between heads, the vocabulary, logits into parts."""
    head = job.model.hidden // job.model.heads
    return {
        "tokens": Vocabulary(),
        **{f"blocks.*.attention.{name}": Column(unit=head) for name in ("query", "key", "value")},
        "blocks.*.attention.out": Row(unit=head),
        "blocks.*.mlp.gate": Column(),
        "blocks.*.mlp.up": Column(),
        "blocks.*.mlp.down": Row(),
        "head": Head(gathers=False),
    }


def _loss_by_parts(axis: Axis, vocab: int) -> Callable[[Tensor, Tensor], Tensor]:
    return lambda logits, labels: vocabulary_cross_entropy(logits, labels, axis, vocab)


def _budgets(job: Job, share: float) -> dict[str, Any]:
    """Return options that leave ``share`` of the model data in memory and the rest on DISK; 1: all, without a
    DISK tier."""
    if share == 1:
        return {}
    return {"device_bytes": int(share * job.model_data_bytes()), "disk_dir": job.place, "non_model_bytes": 0}


def hybrid(job: Job, share: float = 1) -> Contender:
    """Train by HybridParallelPlugin over data and tensor parallelism, ``share`` of the model data in
    memory."""
    plugin = HybridParallelPlugin(tp_size=job.tp, tp_plan=_plan(job), **_budgets(job, share))
    booster, module = Booster(plugin=plugin), job.make_model()
    model, optimizer, *_ = booster.boost(module, CPUAdam(module.parameters(), **ADAM))
    assert isinstance(model, GeminiDDP)
    loss: Callable[[Tensor, Tensor], Tensor] = token_loss
    if job.tp > 1:
        assert plugin.mesh is not None
        axis = plugin.mesh.axis("tp")
        assert axis is not None
        loss = _loss_by_parts(axis, job.model.vocab)
    return _Loop(model, optimizer, loss, optimizer.backward, model.close)


def layers_alone(job: Job) -> Contender:
    """Cut the layers, and leave the rest to torch: its AdamW over plain parameters."""
    mesh = Mesh(Layout(tp=job.tp))
    axis = mesh.axis("tp")
    assert axis is not None
    model = job.make_model()
    parallelize(model, mesh, _plan(job))
    optimizer = torch.optim.AdamW(model.parameters(), fused=True, **ADAM)
    loss = _loss_by_parts(axis, job.model.vocab)
    return _Loop(model, optimizer, loss, Tensor.backward, lambda: mesh.leave("ended"))


def pipeline(job: Job, style: str, share: float = 1) -> Contender:
    """Train by HybridParallelPlugin over stages and data, blocks divided evenly, ``share`` of the model data
    in memory."""
    chunks = job.chunks if style == "interleaved" else 1
    stages = job.pp * chunks
    starts = [f"blocks.{job.model.layers * stage // stages}" for stage in range(1, stages)]
    plugin = HybridParallelPlugin(
        pp_size=job.pp,
        pp_style=style,
        num_model_chunks=chunks,
        num_microbatches=job.microbatches,
        split=starts,
        **_budgets(job, share),
    )
    return _executed(plugin, job)


def single(job: Job) -> Contender:
    """Train by HybridParallelPlugin on one process, through ``execute_pipeline``."""
    return _executed(HybridParallelPlugin(num_microbatches=1), job)


def _executed(plugin: HybridParallelPlugin, job: Job) -> Contender:
    booster, module = Booster(plugin=plugin), job.make_model()
    model, optimizer, *_ = booster.boost(module, CPUAdam(module.parameters(), **ADAM))
    assert isinstance(model, GeminiDDP)
    return _Executed(booster, model, optimizer)


def gemini_ddp(job: Job) -> Contender:
    """Train by GeminiDDP."""
    model = GeminiDDP(job.make_model(), optimizer_rule="adam")
    optimizer = GeminiOptimizer(CPUAdam(model.parameters(), **ADAM), model)
    return _Loop(model, optimizer, token_loss, optimizer.backward, model.close)
