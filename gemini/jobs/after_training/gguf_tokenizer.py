"""Converts a Hugging Face tokenizer to GGUF fields: tokens, merges or scores, special tokens, the chat
template.

GGUF only names the rule that splits a text before merges apply; programs that read it have these rules built
in. So this file recognizes a rule by its steps, and reports a rule that it does not know.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gemini.errors import ConfigError, InputError
from gemini.system.files import read_regular
from gemini.system.input_files import AGAIN, InputDirectory

_TOKENIZER, _SETTINGS, _TEMPLATE = "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"
_MAX_BYTES = 2**28
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = 1, 2, 3, 4, 5, 6  # gguf.TokenType
_BLANK = "\u2581"
_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
# Result of steps() -> GGUF's name of the splitting rule.
_RULES = {
    (("ByteLevel", True),): "gpt-2",
    (("Digits", True), ("ByteLevel", True)): "smollm",
    (("Split", f"{_WORDS}\\p{{N}}{_REST}"), ("ByteLevel", False)): "qwen2",
    (("Split", f"{_WORDS}\\p{{N}}{{1,3}}{_REST}"), ("ByteLevel", False)): "llama-bpe",
}
_SPECIAL = ("bos", "eos", "unk", "pad")


@dataclass
class TokenizerFields:
    """GGUF's fields of a tokenizer.

    Attributes:
        model: ``"gpt2"`` (byte-level BPE, with ``merges``) or ``"llama"`` (SentencePiece, with ``scores``).
        notes: messages for the user.
    """

    model: str
    tokens: list[str]
    types: list[int]
    pre: str = ""
    merges: list[str] = field(default_factory=list)
    scores: list[float] = field(default_factory=list)
    special: dict[str, int] = field(default_factory=dict)
    adds: dict[str, bool] = field(default_factory=dict)
    prefixes_blank: bool | None = None
    template: str | None = None
    notes: list[str] = field(default_factory=list)

    def add_to(self, writer: Any) -> None:
        """Add the fields to a GGUFWriter."""
        writer.add_tokenizer_model(self.model)
        writer.add_tokenizer_pre(self.pre)
        writer.add_token_list(self.tokens)
        writer.add_token_types(self.types)
        if self.merges:
            writer.add_token_merges(self.merges)
        if self.scores:
            writer.add_token_scores(self.scores)
        for name, number in self.special.items():
            getattr(writer, f"add_{name}_token_id")(number)
        for name, value in self.adds.items():
            getattr(writer, f"add_add_{name}_token")(value)
        if self.prefixes_blank is not None:
            writer.add_add_space_prefix(self.prefixes_blank)
        if self.template:
            writer.add_chat_template(self.template)


def read_tokenizer(path: Path, num_tokens: int, config: Mapping[str, Any]) -> TokenizerFields:
    """Return the GGUF fields of the tokenizer in the directory ``path``, for a model with ``num_tokens``
    embeddings. If the tokenizer does not name a special token, the model's ``config`` may.

    Raises:
        ConfigError: there is no tokenizer, GGUF does not support its kind, or it is damaged.
    """
    directory = InputDirectory(path)
    if _TOKENIZER not in directory:
        raise ConfigError(
            f"{path} has no {_TOKENIZER}; load its tokenizer with AutoTokenizer and save it there with "
            "save_pretrained()"
        )
    found = directory.json(_TOKENIZER, _MAX_BYTES)
    settings = directory.json(_SETTINGS, _MAX_BYTES) if _SETTINGS in directory else {}
    model = found.get("model")
    if not isinstance(model, dict) or model.get("type", "BPE") != "BPE" or not _is_vocab(model.get("vocab")):
        kind = model.get("type") if isinstance(model, dict) else None
        raise ConfigError(
            f"{path / _TOKENIZER} is of type {kind!r:.50}; gemini exports only BPE to GGUF. For "
            "others use convert_hf_to_gguf.py of llama.cpp"
        )
    tokens, types = _tokens(found, model["vocab"], num_tokens, path)
    pairs = _pairs(model.get("merges"), path)
    is_bytes = any(kind == "ByteLevel" for kind, _ in steps(found.get("pre_tokenizer")))
    make = _byte_level if is_bytes else _sentence_piece
    fields = make(found, model, pairs, TokenizerFields("", tokens, types), path)
    numbers = {token: number for number, token in enumerate(tokens)}
    _add_special(fields, settings, numbers, config)
    begin, end = _ends(found.get("post_processor"))
    fields.adds = {"bos": begin == _text(settings.get("bos_token")) is not None}
    fields.adds["eos"] = end == _text(settings.get("eos_token")) is not None
    fields.template = _template(directory, settings)
    return fields


def steps(pre_tokenizer: Any) -> tuple[tuple[str, Any], ...]:
    """Return the steps of a pre-tokenizer, each with the settings that it depends on."""
    if not isinstance(pre_tokenizer, dict):
        return ()
    kind = str(pre_tokenizer.get("type"))
    if kind == "Sequence":
        inner = pre_tokenizer.get("pretokenizers")
        return tuple(step for each in inner for step in steps(each)) if isinstance(inner, list) else ()
    if kind == "Split":
        pattern = pre_tokenizer.get("pattern")
        is_usual = pre_tokenizer.get("behavior") == "Isolated" and not pre_tokenizer.get("invert")
        regex = pattern.get("Regex") if isinstance(pattern, dict) and is_usual else None
        return ((kind, regex),)
    if kind == "ByteLevel":
        # No known rule has a blank before the text: return a setting that matches none.
        is_prefixed = pre_tokenizer.get("add_prefix_space", True)
        return ((kind, None if is_prefixed else bool(pre_tokenizer.get("use_regex", True))),)
    if kind == "Digits":
        return ((kind, bool(pre_tokenizer.get("individual_digits"))),)
    return ((kind, None),)


def _byte_level(
    found: Mapping[str, Any], model: Mapping[str, Any], pairs: list[tuple[str, str]], fields: TokenizerFields,
    path: Path,
) -> TokenizerFields:  # fmt: skip
    if not pairs:
        raise ConfigError(
            f"{path / _TOKENIZER} has no merges, which every GGUF tokenizer needs; train a tokenizer "
            "with merges"
        )
    fields.model = "gpt2"
    fields.merges = [f"{one} {other}" for one, other in pairs]
    rule = steps(found.get("pre_tokenizer"))
    fields.pre = _RULES.get(rule, "default")
    if rule not in _RULES:
        fields.notes.append(
            "the tokenizer splits texts by a rule without a known name in GGUF: its pre-tokenizer is "
            "written as 'default', and other programs may tokenize differently"
        )
    return fields


def _sentence_piece(
    found: Mapping[str, Any], model: Mapping[str, Any], pairs: list[tuple[str, str]], fields: TokenizerFields,
    path: Path,
) -> TokenizerFields:  # fmt: skip
    """Fill the fields of a SentencePiece tokenizer. SentencePiece merges the pair with the best score, so the
    score of a token is the negative rank of its merge."""
    if not model.get("byte_fallback") or _blank_prefix(found) is None:
        raise ConfigError(
            f"{path / _TOKENIZER} is neither a byte-level nor a SentencePiece BPE, and GGUF supports "
            "only these; use convert_hf_to_gguf.py of llama.cpp"
        )
    ranks: dict[str, int] = {}
    for rank, (one, other) in enumerate(pairs):
        ranks.setdefault(one + other, rank)
    known = set(pairs)
    vocab = model["vocab"]
    for token in ranks:
        for one, other in ((token[:at], token[at:]) for at in range(1, len(token))):
            if one in vocab and other in vocab and (one, other) not in known:
                raise ConfigError(
                    f"{path / _TOKENIZER} has the token {token!r} but never merges {one!r} and "
                    f"{other!r}; GGUF follows SentencePiece, which would merge them, so it cannot "
                    "represent this tokenizer"
                )
    fields.model, fields.pre = "llama", "default"
    fields.prefixes_blank = _blank_prefix(found)
    last = len(pairs)
    fields.scores = [
        0.0 if kind != _NORMAL else -float(ranks.get(token, last))
        for token, kind in zip(fields.tokens, fields.types, strict=True)
    ]
    return fields


def _blank_prefix(found: Mapping[str, Any]) -> bool | None:
    """Return whether a text gets a leading blank; None if blanks are not marked in SentencePiece's way."""
    for step in _parts(found.get("pre_tokenizer")):
        if step.get("type") == "Metaspace":
            is_usual = step.get("replacement") == _BLANK and not step.get("split", True)
            return step.get("prepend_scheme", "always") != "never" if is_usual else None
    normal = list(_parts(found.get("normalizer")))
    replaces = any(each.get("type") == "Replace" and each.get("content") == _BLANK for each in normal)
    if not replaces or found.get("pre_tokenizer") is not None:
        return None
    return any(each.get("type") == "Prepend" and each.get("prepend") == _BLANK for each in normal)


def _parts(node: Any) -> Iterator[Mapping[str, Any]]:
    if not isinstance(node, dict):
        return
    if node.get("type") != "Sequence":
        yield node
        return
    for key in ("normalizers", "pretokenizers", "processors"):
        inner = node.get(key)
        for each in inner if isinstance(inner, list) else ():
            yield from _parts(each)


def _tokens(
    found: Mapping[str, Any], vocab: Mapping[str, int], num_tokens: int, path: Path
) -> tuple[list[str], list[int]]:
    """Return the tokens and their types by number. Numbers without a token get a name that occurs in no
    text."""
    numbered = {number: (token, _NORMAL) for token, number in vocab.items()}
    unknown = found["model"].get("unk_token")
    for number, (token, _) in list(numbered.items()):
        if token == unknown:
            numbered[number] = (token, _UNKNOWN)
        elif len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
            numbered[number] = (token, _BYTE)
    for entry in found.get("added_tokens") or ():
        place, content = (entry.get("id"), entry.get("content")) if isinstance(entry, dict) else (None, None)
        if type(place) is not int or not isinstance(content, str):
            raise InputError(f"{path / _TOKENIZER} has an added token without an id and content; {AGAIN}")
        kind = _CONTROL if entry.get("special") else _USER_DEFINED
        numbered[place] = (content, _UNKNOWN if content == unknown else kind)
    if numbered and not 0 <= min(numbered) <= max(numbered) < num_tokens:
        raise ConfigError(
            f"the tokenizer in {path} has token {max(numbered)}, but the model has only {num_tokens} "
            "embeddings; give the tokenizer that the model was trained with"
        )
    all_tokens = [numbered.get(number, (f"[PAD{number}]", _UNUSED)) for number in range(num_tokens)]
    return [token for token, _ in all_tokens], [kind for _, kind in all_tokens]


def _is_vocab(vocab: Any) -> bool:
    return isinstance(vocab, dict) and all(type(number) is int for number in vocab.values())


def _pairs(merges: Any, path: Path) -> list[tuple[str, str]]:
    """Return the merges as pairs; files have pairs, or texts with a blank between."""
    found = []
    for each in merges if isinstance(merges, list) else []:
        parts = each.split(" ") if isinstance(each, str) else each
        if not isinstance(parts, list) or len(parts) != 2 or not all(isinstance(part, str) for part in parts):
            raise InputError(f"{path / _TOKENIZER} has a merge {each!r:.100}, which is not a pair; {AGAIN}")
        found.append((parts[0], parts[1]))
    return found


def _text(token: Any) -> str | None:
    """Return a special token from the settings, which have a text or an object that contains one."""
    found = token.get("content") if isinstance(token, dict) else token
    return found if isinstance(found, str) else None


def _add_special(
    fields: TokenizerFields,
    settings: Mapping[str, Any],
    numbers: Mapping[str, int],
    config: Mapping[str, Any],
) -> None:
    for name in _SPECIAL:
        token = _text(settings.get(f"{name}_token"))
        said = config.get(f"{name}_token_id")
        said = said[0] if isinstance(said, list) and said else said
        if token is not None and token in numbers:
            fields.special[name] = numbers[token]
        elif type(said) is int and 0 <= said < len(fields.tokens):
            fields.special[name] = said


def _ends(post_processor: Any) -> tuple[str | None, str | None]:
    """Return the special tokens with which every text begins and ends."""
    for each in _parts(post_processor):
        single = each.get("single")
        if each.get("type") == "TemplateProcessing" and isinstance(single, list) and single:
            return _special_of(single[0]), _special_of(single[-1])
    return None, None


def _special_of(piece: Any) -> str | None:
    inner = piece.get("SpecialToken") if isinstance(piece, dict) else None
    found = inner.get("id") if isinstance(inner, dict) else None
    return found if isinstance(found, str) else None


def _template(directory: InputDirectory, settings: Mapping[str, Any]) -> str | None:
    if _TEMPLATE in directory:
        try:
            return read_regular(directory.file(_TEMPLATE), _MAX_BYTES).decode()
        except ValueError as error:
            raise InputError(f"{directory.path / _TEMPLATE} is not UTF-8 ({error}); {AGAIN}") from error
    found = settings.get("chat_template")
    if isinstance(found, list):  # several templates with names
        named = [each for each in found if isinstance(each, dict) and each.get("name") == "default"]
        found = named[0].get("template") if named else None
    return found if isinstance(found, str) else None
