"""Generates texts with a trained model within byte budgets: the weights stay in the checkpoint and are read
when they are needed."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import gemini
from gemini.errors import ConfigError, GeminiError, InputError, in_words
from gemini.inference.text import TextStream
from gemini.integrations.adapters import with_saved_adapters
from gemini.integrations.model_directory import tokenizer_of
from gemini.jobs.after_training.model_copy import read_config
from gemini.jobs.run.managed import make_disk_directory
from gemini.model.in_place import InPlace
from gemini.system.input_files import errors_of


@dataclass(frozen=True)
class SampleConfig:
    """Options of ``gemini sample``. Sizes are in bytes; None lets the runtime choose a budget.
    ``temperature`` 0 takes the most likely token. Raise ConfigError for impossible options."""

    model: Path
    prompts: Sequence[str]
    adapter: Path | None = None
    chat: bool = False
    max_new_tokens: int = 64
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0
    device: str = "cpu"
    device_bytes: int | None = None
    host_bytes: int | None = None
    disk_dir: str | None = None

    def __post_init__(self) -> None:
        if not self.prompts:
            raise ConfigError("no prompt is given; give --prompt TEXT once or more")
        if self.max_new_tokens < 1:
            raise ConfigError(f"--max-new-tokens is {self.max_new_tokens}; it must be at least 1")
        if not 0 <= self.temperature < float("inf"):
            raise ConfigError(f"--temperature is {self.temperature}; it must be at least 0")
        if not 0 < self.top_p <= 1:
            raise ConfigError(f"--top-p is {self.top_p}; it must be above 0 and at most 1")
        if not 0 <= self.seed < 2**63:
            raise ConfigError(f"--seed is {self.seed}; it must be from 0 to 2**63 - 1")


@dataclass
class Sampled:
    """Counts of the text generated so far, valid also after an interruption.

    Attributes:
        peak_bytes, budget_bytes: model data on DEVICE.
        read_bytes: bytes read from the checkpoint.
    """

    num_prompts: int = 0
    num_tokens: int = 0
    seconds: float = 0.0
    peak_bytes: int = 0
    budget_bytes: int | None = None
    model_data_bytes: int = 0
    read_bytes: int = 0

    @property
    def tokens_per_second(self) -> float:
        """Generated tokens per second, including the time for prompts."""
        return self.num_tokens / self.seconds if self.seconds else 0.0


def sample(config: SampleConfig, say: Callable[[str], None], sampled: Sampled) -> None:
    """Generate a text for each prompt.

    ``say`` gets pieces of text as soon as they are whole characters: the prompt, its continuation, and a
    newline. ``sampled`` is filled even if an error is raised.

    Raises:
        ConfigError: the model, its tokenizer or the adapters cannot be loaded.
        OutOfBudgetError: the model cannot fit the budgets.
    """
    read_config(config.model)
    tokenizer = tokenizer_of(config.model, config.adapter)
    asked = [_encoded(config, tokenizer, prompt) for prompt in config.prompts]
    if config.disk_dir is not None:
        make_disk_directory(config.disk_dir)
    with _loaded(config) as (model, handle), torch.no_grad():
        try:
            for prompt, ids in zip(config.prompts, asked, strict=True):
                say(prompt if not config.chat else f"> {prompt}\n")
                torch.manual_seed(config.seed)
                _generate(config, model, tokenizer, ids, say, sampled)
                sampled.num_prompts += 1
        finally:
            stats = handle.stats()
            sampled.peak_bytes = stats["device"]["peak_bytes"]
            sampled.budget_bytes = stats["device"]["budget_bytes"]
            sampled.model_data_bytes = stats["model_data_bytes"]
            sampled.read_bytes = stats["disk_read"]["bytes"]


class _Streamer:
    """Passes on a growing text, as transformers' ``streamer=``."""

    def __init__(self, tokenizer: Any, say: Callable[[str], None], sampled: Sampled) -> None:
        self._text, self._say, self._sampled = TextStream(tokenizer), say, sampled
        self._is_prompt = True

    def put(self, value: torch.Tensor) -> None:
        """Skip the prompt, which comes in the first call; then take one token at a time."""
        if self._is_prompt:
            self._is_prompt = False
            return
        for token in value.reshape(-1).tolist():
            self._sampled.num_tokens += 1
            piece = self._text.push(token)
            if piece:
                self._say(piece)

    def end(self) -> None:
        """Pass on the rest of the text."""
        self._say(self._text.end() + "\n")


def _generate(
    config: SampleConfig,
    model: Any,
    tokenizer: Any,
    ids: torch.Tensor,
    say: Callable[[str], None],
    sampled: Sampled,
) -> None:
    chosen: dict[str, Any] = {"do_sample": False, "temperature": None, "top_p": None, "top_k": None}
    if config.temperature:
        chosen = {"do_sample": True, "temperature": config.temperature, "top_p": config.top_p, "top_k": 0}
    streamer = _Streamer(tokenizer, say, sampled)
    started = time.perf_counter()
    try:
        ids = ids.to(next(iter(model.parameters())).device)
        model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=config.max_new_tokens,
            pad_token_id=_filler(tokenizer),
            streamer=streamer,
            **chosen,
        )
    except (GeminiError, OSError, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # a generation_config.json may cause any exception
        raise InputError(
            f"transformers cannot generate text with the model of {config.model}: {in_words(error)}"
        ) from error
    finally:
        sampled.seconds += time.perf_counter() - started


def _filler(tokenizer: Any) -> int:
    return int(tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id or 0)


def _encoded(config: SampleConfig, tokenizer: Any, prompt: str) -> torch.Tensor:
    """Return the tokens of a prompt, int64 ``[1, tokens]``."""
    if config.chat:
        if not getattr(tokenizer, "chat_template", None):
            raise ConfigError(
                f"--chat needs a chat template, and the tokenizer of {config.model} has none; leave --chat "
                "out, or put a chat_template.jinja beside the tokenizer"
            )
        with errors_of("the chat template cannot be applied"):
            text = tokenizer.apply_chat_template(
                [{"role": "user", "content": prompt}], tokenize=False, add_generation_prompt=True
            )
            ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    else:
        with errors_of("the prompt cannot be tokenized"):
            ids = tokenizer(prompt)["input_ids"]
    if not ids:
        raise ConfigError(f"--prompt {prompt!r:.100} has no tokens; give a text")
    return torch.tensor([ids])


@contextmanager
def _loaded(config: SampleConfig) -> Iterator[tuple[Any, InPlace]]:
    """Yield the model with its adapters, and the handle of its weights."""
    model = gemini.from_pretrained(
        config.model.absolute(),
        "AutoModelForCausalLM",
        trains=False,
        local_files_only=True,
        device=config.device,
        device_bytes=config.device_bytes,
        host_bytes=config.host_bytes,
        disk_dir=config.disk_dir,
    ).eval()
    handle = gemini.handle_of(model)
    assert isinstance(handle, InPlace)
    try:
        yield (model if config.adapter is None else with_saved_adapters(model, config.adapter)), handle
    finally:
        handle.close()
