"""The models that the cases on a GPU compare: torch's bf16 with fp32 masters, and the same one managed."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from gemini.errors import ConfigError, StateError
from gemini.jobs.gpt.model import language_loss
from gemini.optim import GeminiOptimizer, HybridAdam
from gemini.optim.managed_groups import Margin
from gemini.runtime import init_on
from gemini.system.device import free_memory_bytes
from gemini_bench.adam_peers import HYPER
from gemini_bench.gpu_device import BenchDevice
from gemini_bench.llama import Llama, LlamaConfig, num_parameters
from gemini_bench.trainee import Batch

# Parameter and gradient in bf16, master and two moments in fp32.
MODEL_DATA_BYTES_PER_PARAMETER = 16
# Sums in another order, bf16 in between: far below what another update would change.
_TOLERANCE = 0.02
SEED = 1234
_MARGIN = 0.90
# Of what autograd saves, generously: bf16 values per token, in units of a layer's widths; fp32 logits thrice.
_SAVED_HIDDEN, _SAVED_INNER, _SAVED_LOGITS_BYTES = 24, 5, 16


class Trainee(Protocol):
    """A model and its optimizer."""

    def step(self, batch: Batch) -> Tensor:
        """Train on one batch and return its loss, on the device: this thread waits for nothing."""

    def settle(self) -> None:
        """See to it that no transfer is under way."""

    def model_data_bytes(self) -> int:
        """Return the device bytes under windows, with those kept for the next ones."""


class PlainTrainee:
    """Plain torch: bf16 parameters and gradients, fp32 masters under torch's fused AdamW."""

    def __init__(self, config: LlamaConfig, device: BenchDevice) -> None:
        where = device.compute.torch_device
        torch.manual_seed(SEED)
        self._model = Llama(config)
        self._masters = [param.detach().to(where, copy=True) for param in self._model.parameters()]
        self._model.to(where, torch.bfloat16)
        self._params = list(self._model.parameters())
        self._optimizer = torch.optim.AdamW(
            self._masters,
            lr=HYPER.lr,
            betas=HYPER.betas,
            eps=HYPER.eps,
            weight_decay=HYPER.weight_decay,
            fused=True,
        )

    def step(self, batch: Batch) -> Tensor:
        """Train on one batch and return its loss."""
        loss = language_loss(self._model(batch[0]), batch[1])
        loss.backward()
        with torch.no_grad():
            for master, param in zip(self._masters, self._params, strict=True):
                assert param.grad is not None
                master.grad, param.grad = param.grad.float(), None
            self._optimizer.step()
            self._optimizer.zero_grad()
            for master, param in zip(self._masters, self._params, strict=True):
                param.copy_(master)
        return loss.detach()

    def settle(self) -> None:
        """Do nothing: there is no transfer."""

    def model_data_bytes(self) -> int:
        """Return 0: all of it is in torch's allocator."""
        return 0


class ManagedTrainee:
    """The same model under GeminiDDP, built on ``meta``. ``max_norm`` and ``gpu_margin_mem_ratio`` are
    GeminiOptimizer's, ``options`` are keywords of GeminiDDP."""

    def __init__(
        self,
        config: LlamaConfig,
        device: BenchDevice,
        *,
        max_norm: float = 0.0,
        gpu_margin_mem_ratio: Margin = "auto",
        **options: Any,
    ) -> None:
        torch.manual_seed(SEED)
        with init_on("meta"):
            module = Llama(config)
        self.model = device.wrap(module, mixed_precision="bf16", optimizer_rule="adam", **options)
        adam = HybridAdam(
            self.model.parameters(),
            lr=HYPER.lr,
            betas=HYPER.betas,
            eps=HYPER.eps,
            weight_decay=HYPER.weight_decay,
        )
        self._optimizer = GeminiOptimizer(
            adam, self.model, max_norm=max_norm, gpu_margin_mem_ratio=gpu_margin_mem_ratio
        )

    def step(self, batch: Batch) -> Tensor:
        """Train on one batch and return its loss."""
        loss = language_loss(self.model(batch[0]), batch[1])
        self._optimizer.backward(loss)
        self._optimizer.step()
        return loss.detach()

    def settle(self) -> None:
        """See to it that no transfer is under way."""
        self.model._gemini.manager.chunks.drain()

    def model_data_bytes(self) -> int:
        """Return what windows take of the device, with what is kept for the next ones."""
        return self.model._gemini.manager.chunks.arena_bytes()

    def require_resident(self) -> None:
        """Raise StateError if a part of the model data may leave DEVICE."""
        if not self.model._gemini.manager.resident:
            raise StateError(
                "not everything stayed on DEVICE: too little memory of this GPU is free for this case"
            )

    def close(self) -> None:
        """Release the memory."""
        self.model.close()


def make_batches(
    config: LlamaConfig, device: BenchDevice, *, count: int, shape: Sequence[int]
) -> list[Batch]:
    """Return ``count`` batches of ``shape`` (sequences, tokens) on the device, the same in every process."""
    generator = torch.Generator().manual_seed(SEED)
    where = device.compute.torch_device
    batches = []
    for _ in range(count):
        tokens = torch.randint(config.vocab, (shape[0], shape[1] + 1), generator=generator).to(where)
        batches.append((tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()))
    return batches


def require_same_losses(losses: dict[str, list[float]]) -> None:
    """Raise StateError if the losses of two models differ: then their times compare nothing."""
    (first, one), (second, other) = losses.items()
    apart = max(abs(a - b) for a, b in zip(one, other, strict=True))
    if not apart <= _TOLERANCE:
        raise StateError(
            f"the losses of {second!r} differ from those of {first!r} by up to {apart:g} "
            f"(allowed: {_TOLERANCE:g}): {other} against {one}"
        )


def fitted(
    config: LlamaConfig, tokens: int, *, device_bytes_each: float, host_bytes_each: float, free_bytes: int
) -> LlamaConfig:
    """Return the model with as many of its layers as fit: model data of so many bytes per parameter on the
    device, beside what steps of ``tokens`` save there, and on the host.

    Raises:
        ConfigError: not even one layer does.
    """
    host_bytes = free_memory_bytes()
    for layers in range(config.layers, 0, -1):
        fewer = dataclasses.replace(config, layers=layers)
        numel = num_parameters(fewer)
        on_device = device_bytes_each * numel + saved_bytes(fewer, tokens)
        if on_device <= _MARGIN * free_bytes and host_bytes_each * numel <= _MARGIN * host_bytes:
            return fewer
    raise ConfigError(
        f"a model of one layer does not fit: {free_bytes / 1e9:.1f} GB of the GPU's memory and "
        f"{host_bytes / 1e9:.1f} GB of the host's are free; end what else uses them"
    )


def saved_bytes(config: LlamaConfig, tokens: int) -> int:
    """Return an upper estimate of the bytes that a step of so many tokens saves for backward."""
    layer = 2 * (_SAVED_HIDDEN * config.hidden + _SAVED_INNER * config.inner)
    layers = config.layers * layer
    if config.checkpointing:  # the inputs of all, and what one saves when it runs again
        layers = config.layers * 2 * config.hidden + layer
    return tokens * (layers + _SAVED_LOGITS_BYTES * config.vocab)
