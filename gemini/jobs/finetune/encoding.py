"""Encodes documents as tokens, and marks the tokens that the loss counts."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from gemini.errors import ConfigError, InputError
from gemini.jobs.finetune.record_kinds import Document
from gemini.system.input_files import errors_of, seconds_in

ANSWERS, ALL = "answers", "all"
LOSS_ON = (ANSWERS, ALL)
ASSISTANT = "assistant"
# For tokenizers without a template. Exported with the model, so that chats are formatted as in training.
PLAIN_TEMPLATE = """\
{%- for message in messages -%}
{{ '### ' + message['role'] + '\\n' }}
{%- if message['role'] == 'assistant' -%}
{% generation %}{{ message['content'] + eos_token }}{% endgeneration %}{{ '\\n\\n' }}
{%- else -%}
{{ message['content'] + '\\n\\n' }}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '### assistant\\n' }}{%- endif -%}
"""
_MARKS = re.compile(r"\{%-?\s*generation\s*-?%\}")
_OF_JINJA = "<template>"  # file name of code that jinja compiles from a text
_THOUGHT = "</think>"  # templates drop everything up to it from earlier messages
_MOST_SECONDS = 10  # a conversation of a thousand messages takes some milliseconds


@dataclass(frozen=True)
class Span:
    """A part of a text, ``start:end``. With ``is_cut``, a token that extends beyond the end does not belong
    to it."""

    start: int
    end: int
    is_cut: bool = False


@dataclass(frozen=True)
class EncodedDocument:
    """The tokens of a document. ``learned`` marks those that the loss counts; None: it counts all."""

    document: Document
    ids: list[int]
    learned: list[bool] | None = None


class Encoder:
    """Encodes documents as tokens.

    A tokenizer without a chat template gets ``PLAIN_TEMPLATE`` at the first conversation.

    Args:
        loss_on: ``"answers"``: the loss counts completions, messages of the assistant, and plain texts as a
            whole; ``"all"``: it counts every token.
        vocabulary: number of tokens with an embedding in ``model``.
    """

    def __init__(self, tokenizer: Any, *, loss_on: str, vocabulary: int, model: str) -> None:
        self.tokenizer = tokenizer
        self._answers = loss_on == ANSWERS
        self._vocabulary = vocabulary
        self._model = model

    @property
    def uses_plain_template(self) -> bool:
        """Whether conversations use the template for tokenizers that have none."""
        return bool(self.tokenizer.chat_template == PLAIN_TEMPLATE)

    def use_plain_template(self) -> None:
        """Give the tokenizer, which has no template, the plain one."""
        self.tokenizer.chat_template = PLAIN_TEMPLATE

    def encode(self, document: Document) -> EncodedDocument:
        """Return the tokens of a document.

        Raises:
            InputError: the chat template or the tokenizer refuses it, or it has no answer to learn from.
            ConfigError: it has tokens without an embedding, or the tokenizer cannot map tokens to the text.
        """
        if document.messages is not None:
            encoded = self._conversation(document, document.messages)
        elif document.completion is not None:
            encoded = self._completion(document, str(document.prompt), document.completion)
        else:
            encoded = EncodedDocument(document, self._ended(self._tokens(document, str(document.text))))
        self._check(encoded)
        return encoded

    def encode_pair(self, document: Document) -> tuple[EncodedDocument, EncodedDocument]:
        """Return the tokens of a preference pair: with the chosen answer, and with the rejected one.

        Both answers begin at the same token, that of the answer that begins first. Raises the errors of
        :meth:`encode`.
        """
        assert document.rejected is not None
        pair = self.encode(document), self.encode(document.rejected)
        start = min((each.learned or [True]).index(True) for each in pair)
        chosen, rejected = (
            replace(each, learned=[place >= start for place in range(len(each.ids))]) for each in pair
        )
        return chosen, rejected

    def _check(self, encoded: EncodedDocument) -> None:
        place, ids = encoded.document.place, encoded.ids
        if ids and max(ids) >= self._vocabulary:
            raise ConfigError(
                f"{place} has token {max(ids)}, but {self._model} has only {self._vocabulary} "
                "embeddings; give the tokenizer of this model, or resize the embeddings "
                "(resize_token_embeddings) and save the model first"
            )
        if encoded.learned is not None and not any(encoded.learned[1:]):
            raise InputError(
                f"{place} has {len(ids)} tokens, none of them in the loss: the chat template or the "
                "tokenizer drops its answers; correct it, or train on every token with --loss-on all"
            )

    def _completion(self, document: Document, prompt: str, completion: str) -> EncodedDocument:
        if self._answers and not completion:
            raise InputError(
                f"{document.place} has an empty completion, so there is nothing to train on; fill it "
                "in or remove it"
            )
        ids = self._ended(self._tokens(document, prompt + completion))
        if not self._answers:
            return EncodedDocument(document, ids)
        given = _common(self._tokens(document, prompt), ids)
        return EncodedDocument(document, ids, [place >= given for place in range(len(ids))])

    def _conversation(self, document: Document, messages: list[dict[str, Any]]) -> EncodedDocument:
        if not self.tokenizer.chat_template:
            self.use_plain_template()
        if self._answers:
            _require_answer(document, messages)
            if not document.num_prompt and self._is_marked(messages):
                return self._marked(document, messages)
        with _template_errors(document):
            text = self._text(document, messages)
            asked, spans = "", []
            if self._answers and document.num_prompt:
                asked = self._text(document, messages[: document.num_prompt], add_generation_prompt=True)
            elif self._answers:
                spans = self._spans(document, messages, text)
        if not self._answers:
            return EncodedDocument(document, self._tokens(document, text, add_special_tokens=False))
        if document.num_prompt:
            ids = self._tokens(document, text, add_special_tokens=False)
            start = _common(self._tokens(document, asked, add_special_tokens=False), ids)
            return EncodedDocument(document, ids, [place >= start for place in range(len(ids))])
        found = self._called(document, text, add_special_tokens=False, return_offsets_mapping=True)
        return EncodedDocument(document, found["input_ids"], _inside(found["offset_mapping"], spans))

    def _is_marked(self, messages: list[dict[str, Any]]) -> bool:
        """Return whether the template itself marks answers. Marks are not used if some answer has weight 0,
        because they cannot exclude single answers."""
        template = self.tokenizer.chat_template
        if isinstance(template, dict):
            template = template.get("default", "")
        return bool(_MARKS.search(template)) and all(message.get("weight", 1) for message in messages)

    def _spans(self, document: Document, messages: list[dict[str, Any]], text: str) -> list[Span]:
        """Return the spans of the answers in ``text``. An answer begins where the template's generation
        prompt ends, and ends with its message."""
        places = [place for place, message in enumerate(messages) if message["role"] == ASSISTANT]
        starts = [self._start(document, messages, place, text) for place in places]
        limits = [*starts[1:], len(text)]
        return [
            self._span(document, messages[: place + 1], text, start, limit)
            for place, start, limit in zip(places, starts, limits, strict=True)
            if messages[place].get("weight", 1)
        ]

    def _start(self, document: Document, messages: list[dict[str, Any]], place: int, text: str) -> int:
        if not place:
            return max(text.find(messages[0]["content"].strip()), 0)
        asked = self._text(document, messages[:place], add_generation_prompt=True)
        start = _common(asked, text)
        if start < len(asked) and start < len(self._text(document, messages[:place])):
            raise _rewritten(document, place)
        return start

    def _span(
        self, document: Document, messages: list[dict[str, Any]], text: str, start: int, limit: int
    ) -> Span:
        """Return the span of the last of ``messages`` in ``text``, between ``start`` and ``limit``. Some
        templates render a message differently if others follow it; its content is then searched for."""
        ended = self._text(document, messages)
        content = messages[-1]["content"].rpartition(_THOUGHT)[2].strip()
        found, shared = text.find(content, start, limit), min(_common(ended, text), limit)
        if found >= 0 and text.startswith(ended):
            return Span(start, len(ended))
        if 0 <= found <= shared - len(content):
            return Span(start, shared, is_cut=True)
        close = ended[ended.rfind(content) + len(content) :]
        found = text.find(content + close, start, limit)
        if found < 0 or content not in ended:
            raise _rewritten(document, len(messages) - 1)
        return Span(start, found + len(content) + len(close))

    def _marked(self, document: Document, messages: list[dict[str, Any]]) -> EncodedDocument:
        """Return the tokens of a conversation, with the template's own marks of answers."""
        with _template_errors(document):
            found = self.tokenizer.apply_chat_template(
                messages, tools=document.tools, return_dict=True, return_assistant_tokens_mask=True
            )
        return EncodedDocument(
            document, found["input_ids"], [bool(each) for each in found["assistant_masks"]]
        )

    def _text(self, document: Document, messages: list[dict[str, Any]], **options: Any) -> str:
        found: str = self.tokenizer.apply_chat_template(
            messages, tools=document.tools, tokenize=False, **options
        )
        return found

    def _tokens(self, document: Document, text: str, **options: Any) -> list[int]:
        found: list[int] = self._called(document, text, **options)["input_ids"]
        return found

    def _called(self, document: Document, text: str, **options: Any) -> Any:
        if options.get("return_offsets_mapping") and not self.tokenizer.is_fast:
            raise ConfigError(
                f"the tokenizer of {self._model} does not map tokens to characters, so answers "
                "cannot be located; give a tokenizer with a tokenizer.json, or train on every token "
                "with --loss-on all"
            )
        with errors_of(f"the tokenizer cannot encode {document.place}"):
            return self.tokenizer(text, verbose=False, **options)

    def _ended(self, tokens: list[int]) -> list[int]:
        end = self.tokenizer.eos_token_id
        return tokens if end is None or (tokens and tokens[-1] == end) else [*tokens, end]


def _rewritten(document: Document, place: int) -> InputError:
    return InputError(
        f"{document.place}: the chat template drops or rewrites message {place + 1}, so its answer "
        "cannot be located; mark answers in the template by {% generation %} ... {% endgeneration "
        "%}, or train on every token with --loss-on all"
    )


def _require_answer(document: Document, messages: list[dict[str, Any]]) -> None:
    learned = [each for each in messages[document.num_prompt :] if each["role"] == ASSISTANT]
    if any((each["content"].strip() or each.get("tool_calls")) and each.get("weight", 1) for each in learned):
        return
    roles = ", ".join(dict.fromkeys(each["role"] for each in messages))
    problem = (
        "its answers are empty" if learned else f"it has messages of {roles:.100}, but none of {ASSISTANT}"
    )
    raise InputError(
        f"{document.place} has no answer to train on: {problem}; correct or remove it, or train on "
        "every token with --loss-on all"
    )


@contextmanager
def _template_errors(document: Document) -> Iterator[None]:
    endless = InputError(
        f"the chat template ran for more than {_MOST_SECONDS} s on {document.place}; correct its "
        "loops, or split the conversation"
    )
    refused = errors_of(
        f"the chat template refuses {document.place}", way_out="correct the roles and their order"
    )
    with refused, seconds_in(_OF_JINJA, _MOST_SECONDS, endless):
        yield


def _inside(offsets: Sequence[tuple[int, int]], spans: list[Span]) -> list[bool]:
    """Return which tokens overlap a span; spans must be in order."""
    learned, at = [False] * len(offsets), 0
    for token, (start, end) in enumerate(offsets):
        while at < len(spans) and start >= spans[at].end:
            at += 1
        if at == len(spans):
            break
        is_over = spans[at].is_cut and end > spans[at].end
        learned[token] = end > spans[at].start and not is_over
    return learned


def _common(one: Any, other: Any) -> int:
    """Return the length of the common prefix of two texts or lists of tokens."""
    low, high = 0, min(len(one), len(other))
    if one[:high] == other[:high]:
        return high
    while low < high:
        middle = (low + high + 1) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
