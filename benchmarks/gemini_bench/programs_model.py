"""The model of transformers that cases of ``gemini bench programs`` save, load and train."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any

from gemini.errors import ConfigError


@dataclass(frozen=True)
class LlamaSizes:
    """The sizes of a LLaMA-like model with a head that is not tied to its embedding."""

    hidden: int
    intermediate: int
    layers: int
    heads: int
    vocab: int

    @property
    def num_parameters(self) -> int:
        """Embedding, head, and in each block four of attention, three of the MLP and two norms."""
        block = 4 * self.hidden**2 + 3 * self.hidden * self.intermediate + 2 * self.hidden
        return 2 * self.vocab * self.hidden + self.layers * block + self.hidden

    def config(self, **options: Any) -> Any:
        """Return the model's configuration; ``options`` are further ones of ``LlamaConfig``."""
        import transformers

        return transformers.LlamaConfig(
            vocab_size=self.vocab,
            hidden_size=self.hidden,
            intermediate_size=self.intermediate,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            **options,
        )


def require_packages(case: str, *names: str) -> None:
    """Raise ConfigError if a package is missing; the message says how to install it."""
    for name in names:
        try:
            importlib.import_module(name)
        except ImportError as error:
            raise ConfigError(
                f"case {case!r} needs {name}, which is not installed: pip install 'gemini-runtime[hf]'"
            ) from error
