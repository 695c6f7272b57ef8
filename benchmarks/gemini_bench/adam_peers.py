"""The optimizers that ours is compared with: torch's fused AdamW and DeepSpeed's CPUAdam."""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer

from gemini.optim.kernels import AdamHyper
from gemini_bench.paired import Contender

TORCH = "torch fused"
DEEPSPEED = "DeepSpeed"
HYPER = AdamHyper(lr=1e-4, weight_decay=0.01)
SAMPLE_NUMEL = 4096


@dataclass(frozen=True)
class Peer:
    """An optimizer class of another library, with the keywords that make it do our job."""

    name: str
    cls: Callable[..., Optimizer]
    options: dict[str, Any]

    def optimizer(self, params: Sequence[Tensor]) -> Optimizer:
        """Return an optimizer of ``params``, which need not have gradients yet."""
        return self.cls(
            params,
            lr=HYPER.lr,
            betas=HYPER.betas,
            eps=HYPER.eps,
            weight_decay=HYPER.weight_decay,
            **self.options,
        )


def torch_peer() -> Peer:
    """Return torch's own fused AdamW."""
    return Peer(TORCH, torch.optim.AdamW, {"fused": True})


def find_peers() -> tuple[list[Peer], dict[str, Any]]:
    """Return the peers that work here, and as plain data: why others do not, and versions.

    DeepSpeed compiles its kernel at the first use, which takes a minute.
    """
    peers = [torch_peer()]
    try:
        # DeepSpeed's device detection logs too: silence it before it is imported.
        logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
        module = importlib.import_module("deepspeed")
        logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
        cls = importlib.import_module("deepspeed.ops.adam").DeepSpeedCPUAdam
        cls([torch.zeros(1, requires_grad=True)])
    except ImportError as error:
        missing = isinstance(error, ModuleNotFoundError) and error.name == "deepspeed"
        reason = "is not installed" if missing else f"cannot be imported: {error}"
        return peers, {"absent": {DEEPSPEED: reason}, "versions": {}}
    except RuntimeError as error:  # what it raises where its kernel does not compile
        return peers, {"absent": {DEEPSPEED: f"does not work here: {error}"}, "versions": {}}
    peers.append(Peer(DEEPSPEED, cls, {"adamw_mode": True, "fp32_optimizer_states": True}))
    return peers, {"absent": {}, "versions": {"deepspeed": module.__version__}}


def fp32_contender(peer: Peer, param: Tensor, grad: Tensor) -> Contender:
    """Return one step of an fp32 parameter: reads 16 bytes per parameter, writes 12."""
    param.grad = grad
    optimizer = peer.optimizer([param])
    return Contender(peer.name, optimizer.step, 28 * param.numel(), lambda: param[:SAMPLE_NUMEL])


def mixed_contender(peer: Peer, master: Tensor, half_grad: Tensor, half_param: Tensor) -> Contender:
    """Return one step of an fp32 master from a bf16 gradient to a bf16 parameter, in three passes.

    The cast gradient has a buffer that is kept from step to step.
    """
    master.grad = torch.zeros_like(master)
    optimizer = peer.optimizer([master])
    buffer = master.grad

    def run() -> None:
        buffer.copy_(half_grad)
        optimizer.step()
        half_param.copy_(master)

    passes = (2 + 4) + 28 + (4 + 2)
    return Contender(mixed_name(peer.name), run, passes * master.numel(), lambda: master[:SAMPLE_NUMEL])


def mixed_name(peer: str) -> str:
    """Return the name of a peer's three passes."""
    return f"{peer} in 3 passes"


def own_bf16_contender(peer: Peer, param: Tensor, grad: Tensor) -> Contender:
    """Return one step of a bf16 parameter without fp32 master: reads 12 bytes per parameter, writes 10."""
    param.grad = grad
    optimizer = peer.optimizer([param])
    return Contender(own_bf16_name(peer.name), optimizer.step, 22 * param.numel())


def own_bf16_name(peer: str) -> str:
    """Return the name of a peer's step of a bf16 parameter."""
    return f"{peer} without master"
