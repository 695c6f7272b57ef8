"""PackedModel: one forward pass over the new tokens of several sequences."""

from __future__ import annotations

import inspect
from collections.abc import Sequence as Items
from contextlib import suppress
from typing import Any

import torch

from gemini.errors import ConfigError, StateError
from gemini.inference.kv import Sequence
from gemini.inference.packed_attention import NotPackedError, Packed, refuse_other_models


class RanksLostError(StateError):
    """A process with a part of the model is gone, so no further pass is possible."""


class PackedModel:
    """A causal language model of transformers that computes packed passes; for PEFT's wrapper, the model
    inside, which has the adapters.

    Attributes:
        idle_seconds: time without a pass after which the caller calls :meth:`idle`; None: never.

    Raises:
        ConfigError: its sequences cannot share a pass.
    """

    def __init__(self, model: Any) -> None:
        model = _within_peft(model)
        refuse_other_models(model)
        self.model = model
        self.config = model.config.get_text_config()
        parameters = _parameters_of_forward(type(model))
        if not {"input_ids", "position_ids"} <= parameters:
            raise ConfigError(
                f"{type(model).__name__} is not a causal language model of transformers: its "
                "forward() takes no input_ids and position_ids; if it is a wrapper, give the model "
                "inside (model.module of GeminiDDP)"
            )
        self._keeps_logits = "logits_to_keep" in parameters

    idle_seconds: float | None = None

    def idle(self) -> None:
        """Called after ``idle_seconds`` without a pass. Raises RanksLostError."""

    def close(self) -> None:
        """Declare that there are no further passes. Idempotent."""

    @property
    def device(self) -> torch.device:
        """The device of inputs."""
        device: torch.device = next(iter(self.model.parameters())).device
        return device

    @property
    def longest(self) -> int | None:
        """The most tokens of a sequence; None if the config does not say."""
        found = getattr(self.config, "max_position_embeddings", None)
        return int(found) if found else None

    @property
    def stop_tokens(self) -> frozenset[int]:
        """The tokens that end an answer, from the model's generation_config."""
        generation = getattr(self.model, "generation_config", None)
        found = getattr(generation, "eos_token_id", None)
        if found is None:
            found = getattr(self.config, "eos_token_id", None)
        return frozenset(found if isinstance(found, (list, tuple)) else () if found is None else (found,))

    def logits(self, parts: Items[tuple[Sequence, Items[int]]], ended: Items[bool]) -> list[torch.Tensor]:
        """Run the new tokens of each sequence. Return the logits, [vocabulary], after the last token of each
        sequence with a true entry in ``ended``.

        On return the sequences have grown; after an error they are as before.
        """
        logits = self.run(parts, ended)
        for sequence, tokens in parts:
            sequence.advance(len(tokens))
        return logits

    @torch.no_grad()
    def run(self, parts: Items[tuple[Sequence, Items[int]]], ended: Items[bool]) -> list[torch.Tensor]:
        """Compute :meth:`logits` without growing the sequences, so that the pass may be repeated."""
        device = self.device
        ids = [token for _, tokens in parts for token in tokens]
        positions = [sequence.length + index for sequence, tokens in parts for index in range(len(tokens))]
        last, count = [], 0
        for (_, tokens), is_ended in zip(parts, ended, strict=True):
            count += len(tokens)
            if is_ended:
                last.append(count - 1)
        kept = torch.tensor(last, dtype=torch.long, device=device)
        packed = Packed((sequence, len(tokens)) for sequence, tokens in parts)
        options: dict[str, Any] = {"logits_to_keep": kept} if self._keeps_logits else {}
        with suppress(NotPackedError):  # layers that do not pass on ``packed``; refused below
            out = self.model(
                input_ids=torch.tensor([ids], dtype=torch.long, device=device),
                position_ids=torch.tensor([positions], dtype=torch.long, device=device),
                use_cache=False,
                packed=packed,
                **options,
            )
        if len(packed.layers) != self.config.num_hidden_layers:
            raise ConfigError(
                f"sequences of {type(self.model).__name__} cannot share a pass: {len(packed.layers)} of its "
                f"{self.config.num_hidden_layers} layers take another attention than the one that is set; "
                "use model.generate(), which takes one batch at a time"
            )
        logits = out.logits[0] if self._keeps_logits else out.logits[0, kept]
        return list(logits)


def default_kv_bytes(config: Any, max_batch: int, most: int) -> int:
    """Return an estimate of the bytes for ``max_batch`` sequences of 1,024 tokens, or of the model's limit if
    shorter, at most ``most``. The first pass measures the real size of a token.
    """
    config = config.get_text_config()
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    dtype = config.dtype if isinstance(config.dtype, torch.dtype) else torch.float32
    tokens = min(1024, getattr(config, "max_position_embeddings", None) or 1024)
    wanted = 2 * config.num_hidden_layers * heads * size * dtype.itemsize * tokens * max_batch
    return max(1, min(int(wanted), most))


def _within_peft(model: Any) -> Any:
    """Return the model inside PEFT's wrapper; other models unchanged."""
    kinds = getattr(model, "peft_config", None)
    if not hasattr(model, "get_base_model") or not kinds:
        return model
    if any(getattr(kind, "is_prompt_learning", False) for kind in kinds.values()):
        raise ConfigError(
            "PEFT's learned prompts come before each text and are not part of the inner model; use "
            "model.generate(), which takes one batch at a time"
        )
    return model.get_base_model()


def _parameters_of_forward(kind: type) -> set[str]:
    """Return the parameter names of a class's ``forward``, including those of its base classes."""
    names: set[str] = set()
    for base in kind.__mro__:
        if "forward" in vars(base):
            names |= set(inspect.signature(vars(base)["forward"]).parameters)
    return names
