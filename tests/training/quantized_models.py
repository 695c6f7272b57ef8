"""A small model with quantized weights, each with an adapter beside it, as QLoRA has them."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

WIDTH, VOCABULARY = 64, 96

Quantize = Callable[[nn.Linear], nn.Module]


def _imported(name: str) -> Any:
    """Return a module, imported while tests are collected: it takes seconds. None: it is not installed."""
    return import_module(name) if find_spec(name.partition(".")[0]) else None


BITSANDBYTES = _imported("bitsandbytes")
_AO = _imported("torchao.quantization")
NF4 = _imported("torchao.quantization.quantize_.workflows.nf4.nf4_tensor")


def needs(module: Any) -> Any:
    """Return ``module``; where it is not installed, skip the test."""
    if module is None:
        pytest.skip("the extra 'quantized' is not installed")
    return module


class Adapted(nn.Module):
    """A quantized layer and a trainable product of two small matrices beside it."""

    def __init__(self, base: nn.Linear, quantize: Quantize) -> None:
        super().__init__()
        self.down = nn.Linear(base.in_features, 4, bias=False)
        self.up = nn.Linear(4, base.out_features, bias=False)
        self.base = quantize(base)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x))


class Block(nn.Module):
    """Norm, two layers, and a sum."""

    def __init__(self, quantize: Quantize) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.widen = Adapted(nn.Linear(WIDTH, 4 * WIDTH), quantize)
        self.narrow = Adapted(nn.Linear(4 * WIDTH, WIDTH, bias=False), quantize)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.narrow(F.gelu(self.widen(self.norm(x))))


class Tagger(nn.Module):
    """Blocks whose activations are computed again in backward."""

    def __init__(self, quantize: Quantize, blocks: int = 3) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block(quantize) for _ in range(blocks))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return self.head(x)


def _bitsandbytes_4bit(layer: nn.Linear) -> nn.Module:
    bnb = needs(BITSANDBYTES)
    options = {"bias": layer.bias is not None, "compute_dtype": torch.float32, "quant_type": "nf4"}
    made = bnb.nn.Linear4bit(layer.in_features, layer.out_features, compress_statistics=True, **options)
    made.support_avx512bf16_for_cpu = False  # else its kernel for inference, where there is one
    made.load_state_dict(layer.state_dict())
    return made.to("cpu")


def _bitsandbytes_8bit(layer: nn.Linear) -> nn.Module:
    bnb = needs(BITSANDBYTES)
    options = {"bias": layer.bias is not None, "has_fp16_weights": False}
    made = bnb.nn.Linear8bitLt(layer.in_features, layer.out_features, **options)
    made.load_state_dict(layer.state_dict())
    return made.to("cpu")


def _torchao_8bit(layer: nn.Linear) -> nn.Module:
    ao = needs(_AO)
    whole = nn.Sequential(layer)
    ao.quantize_(whole, ao.Int8WeightOnlyConfig(version=2))
    return whole[0]


def _torchao_4bit(layer: nn.Linear) -> nn.Module:
    values = needs(NF4).to_nf4(layer.weight.detach(), block_size=64, scaler_block_size=64)
    layer.weight = nn.Parameter(values, requires_grad=False)
    return layer


KINDS: dict[str, Quantize] = {
    "bitsandbytes-4bit": _bitsandbytes_4bit,
    "bitsandbytes-8bit": _bitsandbytes_8bit,
    "torchao-4bit": _torchao_4bit,
    "torchao-8bit": _torchao_8bit,
}


def build(kind: str, seed: int = 0) -> Tagger:
    """Return a model whose adapters train alone."""
    torch.manual_seed(seed)
    model = Tagger(KINDS[kind])
    for name, param in model.named_parameters():
        param.requires_grad_(".up." in name or ".down." in name)
    return model


def trained(model: Any) -> list[nn.Parameter]:
    """Return the parameters of the adapters."""
    return [param for param in model.parameters() if param.requires_grad]


def loss_of(model: nn.Module, step: int) -> Tensor:
    """Return the loss of one batch."""
    ids = torch.randint(0, VOCABULARY, (2, 8), generator=torch.Generator().manual_seed(step))
    return F.cross_entropy(model(ids).flatten(0, 1), ids.flatten())


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range = range(4)) -> list[float]:
    """Train; return the losses."""
    losses = []
    for step in steps:
        loss = loss_of(model, step)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses
