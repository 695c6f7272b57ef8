"""Recognizes the kind of a record by its keys, and converts it to a document."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from gemini.errors import ConfigError, InputError
from gemini.jobs.finetune.preferences import CHOSEN, REJECTED, split_prompt
from gemini.jobs.finetune.record_files import DataFiles, Record, format_of, read_records
from gemini.system.config import did_you_mean
from gemini.system.parsing import SyntaxProblem, parse_record

AUTO = "auto"
TEXT, COMPLETION, ALPACA = "text", "prompt-completion", "alpaca"
SHAREGPT, MESSAGES = "sharegpt", "messages"
PREFERENCE = "preference"
DATA_FORMATS = (AUTO, TEXT, COMPLETION, ALPACA, SHAREGPT, MESSAGES, PREFERENCE)
_SPEAKERS = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "assistant": "assistant",
    "system": "system",
    "tool": "tool",
}
_NOUNS = {
    TEXT: ("text", "texts"),
    COMPLETION: ("prompt with its completion", "prompts with completions"),
    ALPACA: ("instruction", "instructions"),
    SHAREGPT: ("conversation", "conversations"),
    MESSAGES: ("conversation", "conversations"),
    PREFERENCE: ("preference pair", "preference pairs"),
}
# Guesses for records of unknown kinds: keys, a name for such records, and the option that reads them.
_LIKELY: tuple[tuple[tuple[str, ...], str, str], ...] = (
    (("input_ids",), "tokens already", "give the text that they were made of"),
    (("question", "answer"), "questions with answers", "--data-keys prompt=question,completion=answer"),
    (("query", "response"), "queries with responses", "--data-keys prompt=query,completion=response"),
    (("prompt", "response"), "prompts with responses", "--data-keys completion=response"),
    (("prompt", "answer"), "prompts with answers", "--data-keys completion=answer"),
    (("instruction", "context", "response"), "Dolly", "--data-keys input=context,output=response"),
    (("instruction", "response"), "instructions", "--data-keys output=response"),
    (("input", "output"), "inputs with outputs", "--data-keys prompt=input,completion=output"),
    (("source", "target"), "sources with targets", "--data-keys prompt=source,completion=target"),
    (("dialogue", "summary"), "dialogues with summaries", "--data-keys prompt=dialogue,completion=summary"),
    (("document", "summary"), "documents with summaries", "--data-keys prompt=document,completion=summary"),
    (("conversation",), "conversations", "--data-keys messages=conversation"),
    (("dialog",), "conversations", "--data-keys messages=dialog"),
    (("content",), "texts", "--data-keys text=content"),
    (("document",), "texts", "--data-keys text=document"),
    (("body",), "texts", "--data-keys text=body"),
)
_PREFERENCE = (
    "is a preference pair (chosen, rejected); train with --objective dpo, or only on the chosen "
    "answers: --data-keys {}"
)


@dataclass(frozen=True)
class Document:
    """The learned content of a record: a ``text``, a ``prompt`` with its ``completion``, or ``messages``.

    Attributes:
        place: names the record in messages to the user.
        kind: one of ``DATA_FORMATS``.
        num_prompt: number of messages that form a given prompt; 0: every answer is learned.
        rejected: for a preference pair, the same prompt with the rejected answer.
    """

    place: str
    kind: str
    text: str | None = None
    prompt: str | None = None
    completion: str | None = None
    messages: list[dict[str, Any]] | None = None
    num_prompt: int = 0
    tools: Any = None
    rejected: Document | None = None


def parse_keys(text: str) -> dict[str, str]:
    """Parse ``--data-keys``: ``prompt=question`` gives ``{"question": "prompt"}``. Raises ConfigError."""
    found: dict[str, str] = {}
    for part in filter(None, text.split(",")):
        name, is_there, key = (word.strip() for word in part.partition("="))
        if not is_there or not key or name not in _KEYS:
            guess = f" (did you mean {key}={name}?)" if key in _KEYS else did_you_mean(name, _KEYS)
            raise ConfigError(
                f"--data-keys {text} has {part!r}{guess}; write NAME=KEY, such as prompt=question, "
                f"where NAME is one of {', '.join(_KEYS)} and KEY is a key of your records"
            )
        found[key] = name
    return found


class Documents:
    """Reads the documents of all files; with ``pairs``, all must be preference pairs. ``counts`` has the
    number of documents of each kind that were read.

    Raises during iteration:
        InputError: a file cannot be read, or a record has an unknown kind, or a kind other than
            ``data_format``.
    """

    def __init__(
        self, data: DataFiles, *, data_format: str = AUTO, keys: str = "", pairs: bool = False
    ) -> None:
        self.counts: Counter[str] = Counter()
        self._pairs = pairs
        self._data = data
        self._format = data_format
        self._as_lines = data_format not in (AUTO, TEXT)
        self._keys = parse_keys(keys)

    def __iter__(self) -> Iterator[Document]:
        self.counts.clear()
        for file in self._data.files:
            for record in read_records(
                file, as_lines=self._as_lines, is_text=self._format == TEXT, option=self._data.option
            ):
                document = self._document(record)
                self.counts[document.kind] += 1
                yield document

    def describe(self) -> str:
        """Return a description of the data, such as ``40 instructions (alpaca) in JSON, train.json``."""
        found = [f"{count:,} {_NOUNS[kind][count != 1]} ({kind})" for kind, count in self.counts.items()]
        files = self._data.files
        formats = dict.fromkeys(format_of(file, as_lines=self._as_lines) for file in files)
        if found and any(formats):
            found[-1] += f" in {' and '.join(name or 'plain text' for name in formats)}"
        names = [files[0].name if len(files) == 1 else f"{len(files):,} files"]
        if self._data.left_out:
            names.append(f"without {', '.join(each.name for each in self._data.left_out):.200}")
        return ", ".join(found + names)

    def _document(self, record: Record) -> Document:
        if record.is_file:
            document = Document(record.place, TEXT, text=record.value)
        else:
            document = as_document(record, self._format, self._keys, pairs=self._pairs)
        if self._pairs and document.rejected is None:
            noun = _NOUNS[document.kind][0]
            raise InputError(
                f"{document.place} is a {noun}, but --objective dpo needs preference pairs: "
                f"{_SHAPES[PREFERENCE]}; give those, or leave --objective out"
            )
        return document


def as_document(
    record: Record,
    data_format: str = AUTO,
    keys: Mapping[str, str] | None = None,
    *,
    pairs: bool = False,
) -> Document:
    """Convert a record to a document. Preference pairs are permitted only with ``pairs``.

    Raises:
        InputError: the record matches no kind, several kinds, or not ``data_format``.
    """
    place, value = record.place, record.value
    if not isinstance(value, dict):
        raise InputError(
            f'{place} is not a JSON object; write {{"text": ...}}, {{"messages": [...]}} or another kind of '
            "record "
            "(gemini finetune --help)"
        )
    for key, name in (keys or {}).items():
        if key in value:
            value = {**{each: value[each] for each in value if each != key}, name: value[key]}
    given, value = value, {key: each for key, each in value.items() if each is not None}
    if not pairs and data_format in (AUTO, PREFERENCE) and _is_preference(value):
        is_chat = isinstance(value[CHOSEN], list)
        raise InputError(
            f"{place} {_PREFERENCE.format('messages=chosen' if is_chat else 'completion=chosen')}"
        )
    if pairs:
        _refuse_half_a_pair(place, value)
    if data_format != AUTO:
        if not _RECOGNIZED[data_format](value):
            raise InputError(
                f"{place} is not a record of --data-format {data_format}, which has "
                f"{_SHAPES[data_format]}; it has {_keys_of(value)}"
            )
        return _READERS[data_format](place, value)
    _refuse_judged(place, value)
    kinds = [kind for kind, is_of in _RECOGNIZED.items() if is_of(value)]
    if PREFERENCE in kinds:
        kinds = [PREFERENCE]  # the prompt of a pair may look like another kind
    if not kinds:
        raise _unknown(place, value, [key for key in given if key not in value])
    if len(kinds) > 1:
        raise InputError(
            f"{place} fits several kinds of records, {' and '.join(kinds)}; choose one, such as "
            f"--data-format {kinds[-1]}"
        )
    return _READERS[kinds[0]](place, value)


def _refuse_half_a_pair(place: str, value: Mapping[str, Any]) -> None:
    for name, other in ((CHOSEN, REJECTED), (REJECTED, CHOSEN)):
        if name in value and other not in value:
            raise InputError(
                f"{place} has {name!r} but no {other!r}, and --objective dpo needs both; add it, "
                f"name its key with --data-keys {other}=KEY, or leave the record out"
            )


def _refuse_judged(place: str, value: Mapping[str, Any]) -> None:
    if isinstance(value.get("label"), bool) and "completion" in value:
        raise InputError(
            f"{place} is a rated completion (prompt, completion, label) for KTO, which gemini "
            "finetune does not support; keep only the records with a label of true, without the label"
        )


def _unknown(place: str, value: Mapping[str, Any], empty: Sequence[str]) -> InputError:
    """Return the error for a record of no kind. ``empty``: its keys without a value (null)."""
    for names, seems, way_out in _LIKELY:
        if all(name in value for name in names):
            return InputError(f"{place} seems to be {seems} ({_keys_of(value)}); give {way_out}")
    for key, wanted in _TYPES.items():
        if key in value:
            kind = type(value[key]).__name__
            return InputError(f"{place} has {key!r} of type {kind}, not {wanted}; correct or remove it")
    if unfilled := [key for key in empty if key in _KEYS]:
        return InputError(
            f"{place} has no value for {', '.join(map(repr, unfilled))}; fill it in, or remove the record"
        )
    renamed = [f"{key.lower()}={key}" for key in value if key.lower() in _KEYS and key not in _KEYS]
    if renamed:
        return InputError(f"{place} has {_keys_of(value)}; give --data-keys {','.join(renamed)}")
    inner = [
        key for key, each in value.items() if isinstance(each, list) and each and isinstance(each[0], dict)
    ]
    hint = ""
    if len(inner) == 1 and len(value) <= 3:
        hint = f"; the records may be the list under {inner[0]!r}: jq -c '.{inner[0]}[]' FILE > data.jsonl"
    shapes = "; ".join(f"{kind}: {shape}" for kind, shape in _SHAPES.items())
    return InputError(
        f"{place} is not a known kind of record: it has {_keys_of(value)}{hint}. Name its keys with "
        f"--data-keys, such as prompt=question,completion=answer ({shapes})"
    )


def _keys_of(value: Mapping[str, Any]) -> str:
    return f"{', '.join(map(repr, value)) or 'nothing':.300}"


def _is_text(value: Mapping[str, Any]) -> bool:
    return isinstance(value.get("text"), str)


def _is_completion(value: Mapping[str, Any]) -> bool:
    return "prompt" in value and "completion" in value


def _is_alpaca(value: Mapping[str, Any]) -> bool:
    return "instruction" in value and "output" in value


def _is_sharegpt(value: Mapping[str, Any]) -> bool:
    return any(_first_has(value.get(key), "from") for key in ("conversations", "messages"))


def _is_messages(value: Mapping[str, Any]) -> bool:
    return not _is_sharegpt(value) and any(_is_list(value.get(key)) for key in ("messages", "conversations"))


def _is_preference(value: Mapping[str, Any]) -> bool:
    return CHOSEN in value and REJECTED in value


_RECOGNIZED: dict[str, Callable[[Mapping[str, Any]], bool]] = {
    TEXT: _is_text,
    COMPLETION: _is_completion,
    ALPACA: _is_alpaca,
    SHAREGPT: _is_sharegpt,
    MESSAGES: _is_messages,
    PREFERENCE: _is_preference,
}
_SHAPES = {
    TEXT: '{"text"}',
    COMPLETION: '{"prompt", "completion"}',
    ALPACA: '{"instruction", "input", "output"}',
    SHAREGPT: '{"conversations": [{"from", "value"}]}',
    MESSAGES: '{"messages": [{"role", "content"}]}',
    PREFERENCE: '{"prompt", "chosen", "rejected"}',
}
# The types of keys that a record of some kind has by themselves.
_TYPES = {"text": "text", "messages": "a list", "conversations": "a list"}
_KEYS = (
    "text",
    "prompt",
    "completion",
    "instruction",
    "input",
    "output",
    "system",
    "conversations",
    "messages",
    CHOSEN,
    REJECTED,
)


def _is_list(value: Any) -> bool:
    return isinstance(value, list) or (isinstance(value, str) and value.lstrip().startswith("["))


def _first_has(value: Any, key: str) -> bool:
    if isinstance(value, str) and _is_list(value):
        return f'"{key}"' in value[:200]
    return isinstance(value, list) and bool(value) and isinstance(value[0], dict) and key in value[0]


def _of_text(place: str, value: Mapping[str, Any]) -> Document:
    return Document(place, TEXT, text=value["text"])


def _of_completion(place: str, value: Mapping[str, Any]) -> Document:
    prompt, completion = value["prompt"], value["completion"]
    if isinstance(prompt, str) and isinstance(completion, str):
        return Document(place, COMPLETION, prompt=prompt, completion=completion)
    if isinstance(prompt, list) and isinstance(completion, list):
        given, learned = _messages(place, "prompt", prompt), _messages(place, "completion", completion)
        tools = _tools(place, value)
        return Document(place, COMPLETION, messages=given + learned, num_prompt=len(given), tools=tools)
    raise InputError(
        f"{place} needs a prompt and a completion that are both text, or both lists of messages; they are "
        f"{type(prompt).__name__} and {type(completion).__name__}"
    )


def _of_alpaca(place: str, value: Mapping[str, Any]) -> Document:
    for key in ("instruction", "input", "output", "system"):
        if not isinstance(value.get(key, ""), str):
            raise InputError(f"{place} has an {key} that is not text ({value[key]!r:.100}); write it as text")
    if not value["output"].strip():
        raise InputError(
            f"{place} has an empty output, so there is nothing to train on; fill it in or remove it"
        )
    history = value.get("history", [])
    pairs = isinstance(history, list) and all(
        isinstance(turn, list) and len(turn) == 2 and all(isinstance(each, str) for each in turn)
        for turn in history
    )
    if not pairs:
        raise InputError(
            f"{place} has a history that is not a list of pairs of texts; write [[question, answer]]"
        )
    asked = "\n\n".join(part for part in (value["instruction"], value.get("input", "")) if part.strip())
    messages = [{"role": "system", "content": value["system"]}] if value.get("system", "").strip() else []
    for question, answer in history:
        messages += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    messages += [{"role": "user", "content": asked}, {"role": "assistant", "content": value["output"]}]
    return Document(place, ALPACA, messages=messages)


def _of_preference(place: str, value: Mapping[str, Any]) -> Document:
    prompt, chosen, rejected = split_prompt(place, value, _prompt_of(place, value))
    if isinstance(prompt, str):
        texts = [Document(place, PREFERENCE, prompt=prompt, completion=each) for each in (chosen, rejected)]
        return replace(texts[0], rejected=texts[1])
    given, tools = _spoken(place, "prompt", prompt), _tools(place, value)
    given = _with_system(value, given)
    chats = [
        Document(
            place,
            PREFERENCE,
            messages=given + _spoken(place, name, answer),
            num_prompt=len(given),
            tools=tools,
        )
        for name, answer in ((CHOSEN, chosen), (REJECTED, rejected))
    ]
    return replace(chats[0], rejected=chats[1])


def _prompt_of(place: str, value: Mapping[str, Any]) -> Any:
    """Return the prompt of a preference pair: text or messages; None if the answers begin with it."""
    if "prompt" in value:
        return value["prompt"]
    if "instruction" in value:
        return _of_alpaca(place, {**value, "output": "any"}).messages[:-1]  # type: ignore[index]
    for key in ("conversations", "messages"):
        if _is_list(value.get(key)):
            return _turns(place, key, value[key])
    chosen, rejected = value[CHOSEN], value[REJECTED]
    if isinstance(chosen, str) and isinstance(rejected, str):
        raise InputError(
            f"{place} has no prompt before its chosen and rejected answers; add one, or name its key: "
            "--data-keys prompt=question"
        )
    return None


def _spoken(place: str, key: str, value: Any) -> list[dict[str, Any]]:
    """Return ShareGPT or role-and-content messages in the latter form."""
    return _sharegpt(place, key, value) if _first_has(value, "from") else _messages(place, key, value)


def _of_sharegpt(place: str, value: Mapping[str, Any]) -> Document:
    key = "conversations" if _first_has(value.get("conversations"), "from") else "messages"
    messages = _with_system(value, _sharegpt(place, key, value[key]))
    return Document(place, SHAREGPT, messages=messages, tools=_tools(place, value))


def _sharegpt(place: str, key: str, value: Any) -> list[dict[str, Any]]:
    messages = []
    for turn in _turns(place, key, value):
        speaker, content = turn.get("from"), turn.get("value")
        if not isinstance(speaker, str) or not isinstance(content, str):
            raise InputError(
                f"{place} has the turn {turn!r:.100}; each turn needs a from and a value, both text"
            )
        if speaker.lower() not in _SPEAKERS:
            raise InputError(
                f"{place} has the unknown speaker {speaker!r:.100}; use one of "
                f"{', '.join(_SPEAKERS)}, or write messages with a role and a content"
            )
        messages.append({"role": _SPEAKERS[speaker.lower()], "content": content})
    return messages


def _of_messages(place: str, value: Mapping[str, Any]) -> Document:
    key = "messages" if _is_list(value.get("messages")) else "conversations"
    messages = _with_system(value, _messages(place, key, value[key]))
    return Document(place, MESSAGES, messages=messages, tools=_tools(place, value))


_READERS: dict[str, Callable[[str, Mapping[str, Any]], Document]] = {
    TEXT: _of_text,
    COMPLETION: _of_completion,
    ALPACA: _of_alpaca,
    SHAREGPT: _of_sharegpt,
    MESSAGES: _of_messages,
    PREFERENCE: _of_preference,
}


def _with_system(value: Mapping[str, Any], messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the messages, with the record's separate system prompt in front."""
    system = value.get("system")
    if not isinstance(system, str) or not system.strip() or messages[0]["role"] == "system":
        return messages
    return [{"role": "system", "content": system}, *messages]


def _messages(place: str, key: str, value: Any) -> list[dict[str, Any]]:
    found = []
    for turn in _turns(place, key, value):
        content, calls = _content(place, turn.get("content")), turn.get("tool_calls")
        if not isinstance(turn.get("role"), str) or (content is None and not calls):
            raise InputError(
                f"{place} has the message {turn!r:.100}; each message needs a role and a content, both text"
            )
        found.append({**turn, "content": "" if content is None else content})
    return found


def _turns(place: str, key: str, value: Any) -> list[dict[str, Any]]:
    if isinstance(value, str):  # a cell of a table
        try:
            value = parse_record(value)
        except SyntaxProblem as problem:
            raise InputError(
                f"{place} has {key} that are not valid JSON: {problem.reason}; correct them"
            ) from problem
    if not isinstance(value, list):
        raise InputError(f"{place} has {key} that are not a list; write a list of messages")
    if not value:
        raise InputError(f"{place} has no messages, so there is nothing to train on; remove it")
    for turn in value:
        if not isinstance(turn, dict):
            raise InputError(
                f"{place} has the message {turn!r:.100}; each message needs a role and a content, both text"
            )
    # Columnar files have a key in every row if any row has it.
    return [{name: each for name, each in turn.items() if each is not None} for turn in value]


def _content(place: str, content: Any) -> str | None:
    """Return the text of a message; a list of parts is joined."""
    if content is None or isinstance(content, str):
        return content
    parts = []
    for part in content if isinstance(content, list) else [content]:
        text = part.get("text") if isinstance(part, dict) else part
        if not isinstance(text, str):
            kind = part.get("type") if isinstance(part, dict) else type(part).__name__
            raise InputError(
                f"{place} has a message with a part of type {kind!r:.100}, but gemini finetune "
                "trains only on text; remove it"
            )
        parts.append(text)
    return "".join(parts)


def _tools(place: str, value: Mapping[str, Any]) -> Any:
    tools = value.get("tools")
    if not isinstance(tools, str):
        return tools
    try:
        return parse_record(tools) if tools.strip() else None
    except SyntaxProblem as problem:
        raise InputError(
            f"{place} has tools that are not valid JSON: {problem.reason}; correct them"
        ) from problem
