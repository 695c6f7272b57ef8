"""The mixture that ``gemini bench moe`` trains: a Qwen3-MoE of transformers with random weights. Its
experts are rows of two 3-D parameters."""

from __future__ import annotations

import importlib
import statistics
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

import gemini
from gemini.chunk.cpu_memory import CpuDevice

Kind = Literal["plain", "by the expert", "whole arrays"]
KINDS: tuple[Kind, ...] = ("by the expert", "whole arrays", "plain")
STATES_OF_ADAM = 2


@dataclass(frozen=True)
class Mixture:
    """Sizes: ``width`` is that of the model, ``expert_width`` that of an expert, ``head`` that of attention's
    only head; ``top`` experts for each token."""

    layers: int = 2
    width: int = 512
    expert_width: int = 512
    experts: int = 32
    top: int = 2
    head: int = 128
    vocabulary: int = 1024

    def build(self) -> Any:
        """Return the model, with the same random weights every time."""
        transformers = importlib.import_module("transformers")
        torch.manual_seed(0)
        config = transformers.Qwen3MoeConfig(
            vocab_size=self.vocabulary,
            hidden_size=self.width,
            intermediate_size=self.width,
            moe_intermediate_size=self.expert_width,
            num_hidden_layers=self.layers,
            num_attention_heads=1,
            num_key_value_heads=1,
            head_dim=self.head,
            num_experts=self.experts,
            num_experts_per_tok=self.top,
            max_position_embeddings=1024,
        )
        config._experts_implementation = "grouped_mm"
        return transformers.Qwen3MoeForCausalLM(config).train()

    def tokens(self, batch: int, length: int, *, seed: int) -> Tensor:
        """Return random tokens."""
        generator = torch.Generator().manual_seed(seed)
        return torch.randint(self.vocabulary, (batch, length), generator=generator)


class _Routing:
    """Has each token use random experts, whatever the routers say: the same in the same step of every model.
    ``used``: how many a layer used, pass by pass."""

    def __init__(self, model: Any, mixture: Mixture) -> None:
        self.used: list[int] = []
        self._mixture, self._step = mixture, 0
        for number, layer in enumerate(model.model.layers):
            layer.mlp.experts.register_forward_pre_hook(partial(self._replace, number))

    def advance(self) -> None:
        """Begin the next step."""
        self._step += 1

    def _replace(self, layer: int, _module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        states, _, weights = args
        generator = torch.Generator().manual_seed(self._step * self._mixture.layers + layer)
        drawn = torch.rand(len(states), self._mixture.experts, generator=generator)
        chosen = drawn.topk(self._mixture.top).indices
        self.used.append(len(chosen.unique()))
        return states, chosen, weights


class Trainee:
    """A model that trains with HybridAdam: plain, or managed with ``device_bytes`` on DEVICE and the rest on
    DISK, its experts one by one or their arrays as a whole. Leaving it closes what manages it.

    Raises OutOfBudgetError where the budget is too small.
    """

    def __init__(self, mixture: Mixture, kind: Kind, *, device_bytes: int = 0, disk_dir: str = "") -> None:
        self._model: nn.Module = mixture.build()
        self._routing = _Routing(self._model, mixture)
        self._ddp: gemini.GeminiDDP | None = None
        if kind != "plain":
            self._ddp = self._model = _managed(
                self._model, device_bytes, disk_dir, cuts=kind == "by the expert"
            )
        self._optimizer: Any = gemini.HybridAdam(self._model.parameters(), lr=1e-3)
        if self._ddp is not None:
            self._optimizer = gemini.GeminiOptimizer(self._optimizer, self._ddp)

    def __enter__(self) -> Trainee:
        return self

    def __exit__(self, *_error: object) -> None:
        if self._ddp is not None:
            self._ddp.close()

    def step(self, tokens: Tensor) -> float:
        """Train on some tokens and return the loss."""
        loss: Tensor = self._model(input_ids=tokens, labels=tokens, use_cache=False).loss
        if self._ddp is None:
            loss.backward()
        else:
            self._optimizer.backward(loss)
        self._optimizer.step()
        self._optimizer.zero_grad()
        self._routing.advance()
        return loss.item()

    def used_experts(self) -> float:
        """Return how many experts a layer used in a pass, on average."""
        return statistics.fmean(self._routing.used)

    def moved_bytes(self) -> int:
        """Return what was read from DISK and written to it so far."""
        if self._ddp is None:
            return 0
        stats = self._ddp.stats()
        return int(stats["disk_read"]["bytes"]) + int(stats["disk_write"]["bytes"])

    def peak_bytes(self) -> int:
        """Return the most that was on DEVICE."""
        return 0 if self._ddp is None else int(self._ddp.stats()["device"]["peak_bytes"])

    def weights(self) -> dict[str, Tensor]:
        """Return a copy of all parameters, after the updates that wait."""
        return {name: value.clone() for name, value in self._model.state_dict().items()}


def _managed(model: nn.Module, device_bytes: int, disk_dir: str, *, cuts: bool) -> gemini.GeminiDDP:
    with ExitStack() as after:
        after.callback(setattr, CpuDevice, "cuts_chunks", CpuDevice.cuts_chunks)
        CpuDevice.cuts_chunks = cuts
        return gemini.GeminiDDP(
            model, device_bytes=device_bytes, host_bytes=0, disk_dir=disk_dir, non_model_bytes=0
        )


def sizes(mixture: Mixture) -> dict[str, int]:
    """Return bytes: of all ``parameters``; of the largest matrix of one ``expert``; of the largest ``dense``
    parameter, which is the most that an operator without experts needs at once; of ``experts``, all of
    them."""
    params = [param for param in mixture.build().parameters() if param.numel()]
    arrays = [param for param in params if param.dim() == 3]
    return {
        "parameters": sum(param.nbytes for param in params),
        "experts": sum(param.nbytes for param in arrays),
        "expert": max(param[0].nbytes for param in arrays),
        "dense": max(param.nbytes for param in params if param.dim() < 3),
    }


def same_weights(weights: Mapping[str, Tensor], want: Mapping[str, Tensor]) -> bool:
    """Say whether all parameters have the same bits."""
    return weights.keys() == want.keys() and all(torch.equal(weights[name], want[name]) for name in want)
