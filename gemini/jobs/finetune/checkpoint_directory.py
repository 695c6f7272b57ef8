"""Reads the config, the tokenizer and the limits of a Hugging Face directory, before any weights are
loaded."""

from __future__ import annotations

import hashlib
import inspect
import os
from pathlib import Path
from typing import Any

from gemini.errors import ConfigError
from gemini.integrations.model_directory import CONFIG, MAX_CONFIG_BYTES, check_kinds, check_model
from gemini.jobs.finetune.config import FineTuneConfig
from gemini.jobs.finetune.encoding import Encoder
from gemini.jobs.finetune.preferences import DPO
from gemini.jobs.finetune.samples import JOINED, PADDED, PAIRS
from gemini.system.files import open_regular, read_regular
from gemini.system.input_files import InputDirectory, errors_of

DEFAULT_SEQ = 1024
_BLOCK = 2**20  # bytes to read at a time
# Samples of each weights file for a fingerprint.
_SAMPLES = 64
_SAMPLE_BYTES = 2**12
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
    """The initial model of a run, as described by its files without the weights.

    Raises:
        ConfigError: transformers is not installed, or the directory does not have a causal language model.
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
                f"--model {self.path} has no {CONFIG}; give a directory in the format of "
                "save_pretrained() (hf download NAME --local-dir DIR makes one)"
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
                f"--model {self.path} is a {self.config.model_type!r}, for which transformers has no "
                "AutoModelForCausalLM; gemini finetune trains causal language models only; for other "
                "models use GeminiTrainer (docs/huggingface.md)"
            )
        with errors_of(f"transformers cannot read the config of {self.path}"):
            text = self.config.get_text_config()
            # Number of tokens with an embedding.
            self.vocabulary = int(text.vocab_size)
            found = getattr(text, "max_position_embeddings", None)
        # Maximum length of a sequence; None: no limit.
        self.limit = found if type(found) is int and found > 0 else None

    def seq(self) -> int:
        """Return the length of a row. Raise ConfigError if it is above the model's limit."""
        limit, asked = self.limit, self._options.seq
        if asked is None:
            return min(DEFAULT_SEQ, limit or DEFAULT_SEQ)
        if limit is not None and asked > limit:
            raise ConfigError(
                f"--seq {asked} is above the {limit} positions of {self.path}; give --seq {limit} or "
                "less, or raise max_position_embeddings in its config.json (and adapt rope_scaling, "
                "if it is set)"
            )
        return asked

    def fingerprint(self) -> str:
        """Return a hash of the config, and of sizes and samples of the weights' files. It is equal for a copy
        at any path, and differs for other weights of the same shapes. Raises OSError."""
        digest = hashlib.sha256(read_regular(self.path / CONFIG, MAX_CONFIG_BYTES))
        for name in self._weights:
            with os.fdopen(open_regular(self.path / name), "rb") as file:
                size = os.fstat(file.fileno()).st_size
                digest.update(f"{name}\0{size}\n".encode("utf-8", "surrogateescape"))
                for sample in range(_SAMPLES):
                    file.seek(size * sample // _SAMPLES)
                    digest.update(file.read(_SAMPLE_BYTES))
        return digest.hexdigest()[:16]

    def weights_digest(self) -> str:
        """Return a hash of the config and of all bytes of the weights. Raises OSError."""
        digest = hashlib.blake2b(read_regular(self.path / CONFIG, MAX_CONFIG_BYTES))
        for name in self._weights:
            digest.update(f"{name}\0".encode("utf-8", "surrogateescape"))
            with os.fdopen(open_regular(self.path / name), "rb") as file:
                while block := file.read(_BLOCK):
                    digest.update(block)
        return digest.hexdigest()

    def tokenizer(self) -> Any:
        """Return the tokenizer of the directory, or of ``--tokenizer``.

        Raises:
            ConfigError: there is no tokenizer.
        """
        chosen = self._options.tokenizer
        path = self.path if chosen is None else Path(chosen)
        if not any((path / name).is_file() for name in _TOKENIZERS):
            raise ConfigError(
                f"{path} has no tokenizer; copy tokenizer.json and tokenizer_config.json there from "
                "the source of the model, or give a directory that has them with --tokenizer"
            )
        if chosen is not None:
            check_kinds(InputDirectory(path))
        return self._read("tokenizer", self._transformers.AutoTokenizer, path)

    def encoder(self, tokenizer: Any) -> Encoder:
        """Return the encoder of documents for the options of the run."""
        return Encoder(
            tokenizer, loss_on=self._options.loss_on, vocabulary=self.vocabulary, model=str(self.path)
        )

    def layout(self) -> str:
        """Return the layout of documents in rows. Raise ConfigError if the layout needs position_ids and the
        model does not take them."""
        if self._options.objective == DPO:
            return PAIRS
        if not self._options.packing:
            return PADDED
        if self._options.documents == JOINED:
            return JOINED
        owner = self._transformers.AutoModelForCausalLM._model_mapping[type(self.config)]
        if "position_ids" not in inspect.signature(owner.forward).parameters:
            raise ConfigError(
                f"--model {self.path} is a {self.config.model_type!r}, which takes no position_ids, "
                "so packed documents would attend to each other; give --no-packing (one document per "
                "row), or --documents joined to allow that"
            )
        return self._options.documents

    def _read(self, what: str, owner: Any, path: Path) -> Any:
        # With trust_remote_code=None, transformers would ask on standard input whether to run own code.
        with errors_of(f"transformers cannot read the {what} of {path}"):
            return owner.from_pretrained(path, local_files_only=True, trust_remote_code=False)
