"""Plain torch as the reference of ``gemini bench exact``, or with some parts of a contender.

One process takes the batches of all ranks. In 16 bits the module is a copy of fp32 masters: its gradients,
cast to fp32 and divided by the loss scale, are those of the masters, torch.optim.AdamW updates these, and the
copy is rounded from them after each step.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from gemini.optim import HybridAdam
from gemini.optim.gradients import exact_squares, norm_of
from gemini_bench.exact_settings import ADAM, LOSS_SCALE, Batch, Job, Setting, Task, token_loss
from gemini_bench.io_peers import silent_deepspeed


@dataclass(frozen=True)
class Recipe:
    """What a plain loop is made of. The defaults are the reference's.

    Attributes:
        optimizer: whose Adam: "torch", "gemini", "DeepSpeed FusedAdam" or "DeepSpeed CPUAdam".
        order: how gradients are added: "whole" batches of all ranks, micro-batch after micro-batch; "ranks":
            all of a rank's, then the ranks; "parts": the ranks of a micro-batch, then the micro-batches.
        norm: how gradients are clipped: as "torch", "DeepSpeed" or its "ZeRO" do, or by the "exact" norm.
        autocast: fp32 weights under ``torch.autocast`` instead of a 16-bit copy.
        flat: the optimizer updates one vector of all parameters for each rank, with an equal part of each. An
            Adam may round the last elements of a vector in another way than the others.
        hooks: each module's input passes through an autograd function that changes nothing, as where hooks
            gather its weights. An input that the module uses twice then has its two gradients added first.
    """

    optimizer: str = "torch"
    order: str = "whole"
    norm: str = "torch"
    autocast: bool = False
    flat: bool = False
    hooks: bool = False

    def __str__(self) -> str:
        said = [] if self.optimizer == "torch" else [f"Adam of {self.optimizer}"]
        if self.order != "whole":
            said.append({"ranks": "sums rank by rank", "parts": "sums of ranks by micro-batch"}[self.order])
        said += [] if self.norm == "torch" else [f"{self.norm} norm"]
        said += ["autocast"] if self.autocast else []
        said += ["updates of flat vectors"] if self.flat else []
        said += ["sums of gradients module by module"] if self.hooks else []
        return ", ".join(said)


class _Passed(torch.autograd.Function):
    """The identity, as a separate node in the graph."""

    @staticmethod
    def forward(_context: Any, value: Tensor) -> Tensor:
        return value.view_as(value)

    @staticmethod
    def backward(_context: Any, grad: Tensor) -> Tensor:
        return grad


def _pass_inputs(_module: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Any, ...]:
    apply: Any = _Passed.apply
    return tuple(apply(each) if each.requires_grad else each for each in inputs)


class PlainLoop:
    """A training loop of torch alone."""

    def __init__(self, task: Task, recipe: Recipe) -> None:
        self._setting, self._recipe = task.setting, recipe
        self._module = task.make_model()
        self._names = [name for name, _ in self._module.named_parameters()]
        self._masters = [nn.Parameter(each.detach().clone()) for each in self._module.parameters()]
        if task.setting.precision != "fp32" and not recipe.autocast:
            self._module.to(task.setting.dtype)
        else:
            self._masters = list(self._module.parameters())
        for module in self._module.modules() if recipe.hooks else ():
            module.register_forward_pre_hook(_pass_inputs)
        self._vectors = [nn.Parameter(each) for each in self._flattened(self._masters)] if recipe.flat else []
        self._optimizer = make_optimizer(recipe.optimizer, self._vectors or self._masters)
        self._scale = LOSS_SCALE if task.setting.precision == "fp16" else 1.0

    def step(self, batches: Sequence[Sequence[Batch]]) -> list[float]:
        """Train on the micro-batches of all ranks; return their losses, rank by rank, or those of whole
        batches."""
        losses = self._gradients(batches)
        for master, copy in zip(self._masters, self._module.parameters(), strict=True):
            assert copy.grad is not None
            master.grad = copy.grad.float().div_(self._scale)
            if not bool(master.grad.isfinite().all()):
                raise OverflowError(f"gradients overflow at the loss scale {self._scale:g}")
        self._clip_and_update()
        self._module.zero_grad()
        self._copy_masters()
        return losses

    def weights(self) -> dict[str, Tensor]:
        """Return all weights in fp32, by name."""
        return {name: each.detach() for name, each in zip(self._names, self._masters, strict=True)}

    def state_dict(self) -> dict[str, Any]:
        """Return weights and the optimizer's state."""
        return {"weights": self.weights(), "optimizer": self._optimizer.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state."""
        with torch.no_grad():
            for name, master in zip(self._names, self._masters, strict=True):
                master.copy_(state["weights"][name])
        self._copy_masters()
        self._optimizer.load_state_dict(state["optimizer"])

    def _copy_masters(self) -> None:
        """Round the copy from its masters, if there are any."""
        with torch.no_grad():
            for master, copy in zip(self._masters, self._module.parameters(), strict=True):
                if copy is not master:
                    copy.copy_(master)

    def _gradients(self, batches: Sequence[Sequence[Batch]]) -> list[float]:
        """Fill the gradients of the module in the order of the recipe."""
        parts = list(zip(*batches, strict=True))  # of each micro-batch, the ranks'
        if self._recipe.order == "whole":
            joined = [tuple(torch.cat(tokens) for tokens in zip(*ranks, strict=True)) for ranks in parts]
            return [self._backward(batch, len(parts)) for batch in joined]
        groups = batches if self._recipe.order == "ranks" else parts
        sums, losses = [], []
        for group in groups:
            losses += [self._backward(batch, len(parts)) for batch in group]
            sums.append([each.grad for each in self._module.parameters()])
            self._module.zero_grad()
        for each, grads in zip(self._module.parameters(), zip(*sums, strict=True), strict=True):
            total = grads[0]
            for grad in grads[1:]:
                total = total + grad
            each.grad = total / len(batches)
        return losses

    def _backward(self, batch: Any, parts: int) -> float:
        enabled = self._recipe.autocast
        with torch.autocast("cpu", self._setting.dtype if enabled else torch.bfloat16, enabled=enabled):
            logits = self._module(batch[0])
        loss = token_loss(logits, batch[1])
        (loss * (self._scale / parts)).backward()
        return float(loss.detach())

    def _clip_and_update(self) -> None:
        limit, norm = self._setting.max_norm, self._recipe.norm
        if not limit or norm == "torch":
            if limit:
                torch.nn.utils.clip_grad_norm_(self._masters, limit)
            self._update()
            return
        grads = [each.grad for each in self._masters if each.grad is not None]
        if norm == "exact":
            squares = torch.stack([exact_squares(grad.flatten()) for grad in grads]).sum(0)
            torch.nn.utils.clip_grads_with_norm_(self._masters, limit, norm_of(squares))
        elif norm == "DeepSpeed":
            found = torch.stack([grad.norm(2) for grad in grads]).pow(2).sum().pow(0.5)
            torch.nn.utils.clip_grads_with_norm_(self._masters, limit, found)
        else:
            _clip_as_zero(grads, limit)
        self._update()

    def _update(self) -> None:
        """Run the optimizer, over flat vectors if the recipe has them."""
        if not self._vectors:
            self._optimizer.step()
            return
        for vector, grad in zip(
            self._vectors, self._flattened([each.grad for each in self._masters]), strict=True
        ):
            vector.grad = grad
        self._optimizer.step()
        start = 0
        with torch.no_grad():
            for master in self._masters:
                size = -(-master.numel() // len(self._vectors))
                whole = torch.cat([vector[start : start + size] for vector in self._vectors])
                master.copy_(whole[: master.numel()].view_as(master))
                start += size

    def _flattened(self, tensors: Sequence[Any]) -> list[Tensor]:
        """Return a vector per rank, with an equal part of each tensor, the last one filled up with zeros."""
        ranks = self._setting.ranks
        parts = []
        for each in tensors:
            flat = each.detach().flatten()
            filled = torch.nn.functional.pad(flat, (0, -flat.numel() % ranks))
            parts.append(filled.chunk(ranks))
        return [torch.cat(rank) for rank in zip(*parts, strict=True)]


def _clip_as_zero(grads: Sequence[Tensor], limit: float) -> None:
    """Divide as DeepSpeed's ZeRO does, where the quotient is above 1: by (norm + 1e-6) / limit, in double."""
    norm = math.sqrt(sum(float(grad.double().norm(2)) ** 2 for grad in grads))
    for grad in grads:
        grad.mul_(1.0 / max(1.0, (norm + 1e-6) / limit))


def make_optimizer(name: str, params: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
    """Return an Adam over plain parameters."""
    if name == "torch":
        return torch.optim.AdamW(params, **ADAM)
    if name == "gemini":
        return HybridAdam(params, **ADAM)
    silent_deepspeed()
    adams = importlib.import_module("deepspeed.ops.adam")
    make: Callable[..., torch.optim.Optimizer]
    make = adams.FusedAdam if name == "DeepSpeed FusedAdam" else adams.DeepSpeedCPUAdam
    return make(params, **ADAM)


def train_plain(job: Job, setting: Setting, recipe: Recipe) -> tuple[list[list[float]], dict[str, Tensor]]:
    """Train one process on the batches of all ranks; return the losses of each step, and the weights. It does
    not stop in between, even if the setting resumes.
    """
    loop = PlainLoop(Task(job, setting, 0, ""), recipe)
    losses = []
    for step in range(job.steps):
        ranks = [job.micro_batches(setting, step, rank) for rank in range(setting.ranks)]
        losses.append(loop.step(ranks))
    return losses, loop.weights()
