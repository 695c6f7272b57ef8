"""Tokenizers of the kinds that models have, trained on the spot on a few sentences."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

transformers = pytest.importorskip("transformers", reason="the extra 'hf' is not installed")
tokenizers = pytest.importorskip("tokenizers", reason="comes with transformers")

SENTENCES = [
    "Hello, how are you today? Fine, thanks; it rains.",
    "Name the capital of France. The capital of France is Paris.",
    "What color is the sky? It is blue, and red in the evening.",
    "def add(one, other):\n    return one + other\n",
] * 3
_SPECIAL = re.compile(r"<\|[^|>\s]*\|>|<(?:start|end)_of_turn>")


def _byte_level() -> Any:
    inner = tokenizers.Tokenizer(tokenizers.models.BPE())
    inner.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    inner.train_from_iterator(
        SENTENCES,
        tokenizers.trainers.BpeTrainer(vocab_size=330, initial_alphabet=alphabet, show_progress=False),
    )
    return inner


def _sentence_piece(model: str) -> Any:
    """Return one with a mark for blanks, as those of SentencePiece are; bytes stand for unknown letters."""
    unknown = [f"<0x{byte:02X}>" for byte in range(256)]
    if model == "unigram":
        inner = tokenizers.Tokenizer(tokenizers.models.Unigram())
        trainer = tokenizers.trainers.UnigramTrainer(
            vocab_size=120, special_tokens=["<unk>"], unk_token="<unk>", show_progress=False
        )
    else:
        inner = tokenizers.Tokenizer(tokenizers.models.BPE(unk_token="<unk>", byte_fallback=True))
        trainer = tokenizers.trainers.BpeTrainer(
            vocab_size=380, special_tokens=["<unk>", *unknown], show_progress=False
        )
    if model == "prefixed":
        inner.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace()
        inner.decoder = tokenizers.decoders.Metaspace()
    else:
        inner.normalizer = tokenizers.normalizers.Replace(" ", "\u2581")
        inner.decoder = tokenizers.decoders.Replace("\u2581", " ")
    inner.train_from_iterator(SENTENCES, trainer)
    return inner


def _beginning(inner: Any, token: str) -> Any:
    number = inner.token_to_id(token)
    if number is None:
        inner.add_special_tokens([token])
        number = inner.token_to_id(token)
    inner.post_processor = tokenizers.processors.TemplateProcessing(
        single=f"{token} $A", special_tokens=[(token, number)]
    )
    return inner


def _template(name: str) -> str:
    trl = pytest.importorskip("trl", reason="only the extra 'test' brings it")
    found = Path(trl.__file__).parent / "chat_templates" / f"{name}.jinja"
    return found.read_text(encoding="utf-8")


# Of each model: its tokens, the name of its chat template among those of TRL, what texts begin with, and the
# end of sequence.
MODELS: dict[str, tuple[Callable[[], Any], str | None, str | None, str]] = {
    "llama3": (_byte_level, "llama3", "<|begin_of_text|>", "<|eot_id|>"),
    "qwen3-instruct": (_byte_level, "qwen3_instruct_2507", None, "<|im_end|>"),
    "gemma3": (lambda: _sentence_piece("bpe"), "gemma3", "<bos>", "<eos>"),
    "phi3": (lambda: _sentence_piece("prefixed"), "phi3", None, "<|endoftext|>"),
    "cohere2": (lambda: _sentence_piece("unigram"), "cohere2", "<BOS_TOKEN>", "<|END_OF_TURN_TOKEN|>"),
    "gpt2": (_byte_level, None, None, "<|endoftext|>"),  # no chat template
}


def make_tokenizer(model: str) -> Any:
    """Return a tokenizer like that of ``model``, with its special tokens and its chat template."""
    tokens, template, begin, end = MODELS[model]
    inner = tokens()
    text = "" if template is None else _template(template)
    if begin is not None:
        _beginning(inner, begin)
    made = transformers.PreTrainedTokenizerFast(tokenizer_object=inner, bos_token=begin, eos_token=end)
    made.add_special_tokens({"additional_special_tokens": sorted({*_SPECIAL.findall(text)} - {begin, end})})
    made.chat_template = text or None
    return made
