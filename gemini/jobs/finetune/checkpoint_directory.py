"""What a Hugging Face directory says before anything is loaded: its config, its tokenizer, its limits."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from gemini.errors import ConfigError, InputError
from gemini.integrations.model_directory import CONFIG, MAX_CONFIG_BYTES, check_kinds, check_model
from gemini.jobs.finetune.config import FineTuneConfig
from gemini.jobs.finetune.samples import Document, data_files, documents
from gemini.system.files import read_regular
from gemini.system.input_files import InputDirectory, errors_of, seconds_in

DEFAULT_SEQ = 1024
_OF_JINJA = "<template>"  # what it compiles a text as
_MOST_SECONDS = 10  # a conversation of a thousand messages takes some milliseconds
_WEIGHTS = (".safetensors", ".bin")
_TOKENIZERS = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "spiece.model",
    "vocab.json",
    "vocab.txt",
)


class ModelDirectory:
    """The model that a run starts from, as far as its files tell without its weights.

    Raises:
        ConfigError: transformers is not installed, or the directory is none of a causal language model.
    """

    def __init__(self, config: FineTuneConfig) -> None:
        try:
            import transformers
        except ImportError as error:
            raise ConfigError(
                f"gemini finetune needs the package transformers: pip install 'gemini-runtime[hf]' ({error})"
            ) from error
        self._transformers: Any = transformers
        self._options = config
        self.path = Path(config.model)
        if not (self.path / CONFIG).is_file():
            raise ConfigError(
                f"--model {self.path} has no {CONFIG}; give a directory that save_pretrained() has made "
                "(hf download NAME --local-dir DIR gets one)"
            )
        check_model(self.path)
        self._weights = [name for name in InputDirectory(self.path).names if name.endswith(_WEIGHTS)]
        if not self._weights:
            raise ConfigError(
                f"--model {self.path} has no weights (*.safetensors); copy them there, or name the directory "
                "that has them"
            )
        self.config: Any = self._read("config", transformers.AutoConfig, self.path)
        if type(self.config) not in transformers.AutoModelForCausalLM._model_mapping:
            raise ConfigError(
                f"--model {self.path} is a {self.config.model_type!r}, which transformers has no "
                "AutoModelForCausalLM for; gemini finetune trains models that continue text, for others use "
                "GeminiTrainer (docs/huggingface.md)"
            )
        with errors_of(f"transformers cannot read the config of {self.path}"):
            text = self.config.get_text_config()
            self._vocabulary = int(text.vocab_size)
            found = getattr(text, "max_position_embeddings", None)
        # How many tokens a sequence may have; None: any number.
        self.limit = found if type(found) is int and found > 0 else None

    def seq(self) -> int:
        """Return the length of a row. Raise ConfigError for one over the model's limit."""
        limit, asked = self.limit, self._options.seq
        if asked is None:
            return min(DEFAULT_SEQ, limit or DEFAULT_SEQ)
        if limit is not None and asked > limit:
            raise ConfigError(
                f"--seq {asked} is over the {limit} positions of {self.path}; give --seq {limit} or less, or "
                "raise max_position_embeddings in its config.json, with rope_scaling where it has that"
            )
        return asked

    def fingerprint(self) -> str:
        """Return a hash of the config and the sizes of the weights: equal for a copy, at any path."""
        digest = hashlib.sha256(read_regular(self.path / CONFIG, MAX_CONFIG_BYTES))
        for name in self._weights:
            size = (self.path / name).stat().st_size
            digest.update(f"{name}\0{size}\n".encode("utf-8", "surrogateescape"))
        return digest.hexdigest()[:16]

    def tokenizer(self) -> Any:
        """Return the tokenizer of the directory, or of ``--tokenizer``.

        Raises:
            ConfigError: there is none, or it lacks the token that ``packing = false`` fills rows up with.
        """
        chosen = self._options.tokenizer
        path = self.path if chosen is None else Path(chosen)
        if not any((path / name).is_file() for name in _TOKENIZERS):
            raise ConfigError(
                f"{path} has no tokenizer; copy tokenizer.json and tokenizer_config.json there from where "
                "the model is from, or name a directory that has them by --tokenizer"
            )
        if chosen is not None:
            check_kinds(InputDirectory(path))
        tokenizer = self._read("tokenizer", self._transformers.AutoTokenizer, path)
        if not self._options.packing and tokenizer.pad_token_id is None:
            raise ConfigError(
                f"the tokenizer of {path} has no pad token, and --no-packing fills rows up with it; leave "
                '--no-packing out, or add "pad_token" to its tokenizer_config.json'
            )
        return tokenizer

    def tokens(self, tokenizer: Any) -> Iterator[list[int]]:
        """Yield the tokens of each document of ``--data``.

        Raises:
            ConfigError: a document cannot be read, the tokenizer has no chat template for messages, or it
                makes tokens that the model does not have.
        """
        for document in documents(data_files(self._options.data)):
            tokens = _encoded(tokenizer, document)
            if tokens and max(tokens) >= self._vocabulary:
                raise ConfigError(
                    f"{document.place} has token {max(tokens)}, and {self.path} has embeddings for "
                    f"{self._vocabulary}; the tokenizer is another model's, or the embeddings are to be "
                    "resized (resize_token_embeddings) and saved first"
                )
            yield tokens

    def _read(self, what: str, owner: Any, path: Path) -> Any:
        # None would ask on standard input whether to run what the directory has of its own.
        with errors_of(f"transformers cannot read the {what} of {path}"):
            return owner.from_pretrained(path, local_files_only=True, trust_remote_code=False)


def _encoded(tokenizer: Any, document: Document) -> list[int]:
    """Return the tokens of a document; a text ends with the end-of-sequence token, where there is one."""
    if document.messages is None:
        tokens = _tokens(tokenizer, document, str(document.text))
        end = tokenizer.eos_token_id
        return tokens if end is None or (tokens and tokens[-1] == end) else [*tokens, end]
    if not tokenizer.chat_template:
        raise ConfigError(
            f"{document.place} has messages, and the tokenizer has no chat template; put chat_template.jinja "
            'beside tokenizer.json, or give documents with a "text"'
        )
    endless = InputError(
        f"the chat template takes more than {_MOST_SECONDS} s for {document.place}; correct its loops, or "
        "split the conversation"
    )
    refused = errors_of(f"the chat template refuses {document.place}", way_out="correct the roles")
    with refused, seconds_in(_OF_JINJA, _MOST_SECONDS, endless):
        text = tokenizer.apply_chat_template(document.messages, tokenize=False)
    return _tokens(tokenizer, document, text, add_special_tokens=False)


def _tokens(tokenizer: Any, document: Document, text: str, **options: Any) -> list[int]:
    with errors_of(f"the tokenizer cannot take {document.place}"):
        found: list[int] = tokenizer(text, verbose=False, **options)["input_ids"]
        return found
