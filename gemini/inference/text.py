"""TextStream: text from tokens that arrive one by one, up to the first stop text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

_CONTEXT = 8  # prompt tokens decoded together with the first token
_UNFINISHED = "\ufffd"  # the result of decoding an incomplete character


class TextStream:
    """Turns tokens into pieces of text. A piece consists of whole characters and never contains the beginning
    of a possible stop text. All pieces together are the text after ``prompt``, up to the first complete text
    of ``stops``.
    """

    def __init__(self, tokenizer: Any, stops: Sequence[str] = (), prompt: Sequence[int] = ()) -> None:
        self._tokenizer = tokenizer
        self._stops = tuple(stop for stop in stops if stop)
        self._tokens = list(prompt[-_CONTEXT:])
        self._context = 0  # index of the first token to decode together with new ones
        self._decoded = len(self._tokens)  # number of tokens already turned into text
        self._held = ""
        self.is_stopped = False

    def push(self, token: int) -> str:
        """Add a token, and return the text that is final now."""
        if self.is_stopped:
            return ""
        self._tokens.append(token)
        new = self._new_text()
        if not new or new.endswith(_UNFINISHED):
            return ""
        self._context, self._decoded = self._decoded, len(self._tokens)
        return self._give(new)

    def end(self) -> str:
        """Return the remaining text, after the last token."""
        if self.is_stopped:
            return ""
        text = self._give(self._new_text())
        held, self._held = self._held, ""  # empty if a stop text was found
        return text + held

    def _new_text(self) -> str:
        """Return the text of new tokens. They are decoded together with earlier ones, because a tokenizer may
        drop the leading space of the first token.
        """
        known = self._decode(self._tokens[self._context : self._decoded])
        text = self._decode(self._tokens[self._context :])
        if not text.startswith(known):  # the prompt ends inside a character
            known = known.rstrip(_UNFINISHED)
        return text[len(known) :]

    def _decode(self, tokens: Sequence[int]) -> str:
        text: str = self._tokenizer.decode(
            tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        return text

    def _give(self, new: str) -> str:
        text = self._held + new
        found = [(text.index(stop) + len(stop), text.index(stop)) for stop in self._stops if stop in text]
        if found:
            self.is_stopped, self._held = True, ""
            return text[: min(found)[1]]
        held = max((_overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - held :]
        return text[: len(text) - held]


def _overlap(text: str, stop: str) -> int:
    """Return the length of the longest suffix of ``text`` that is a proper prefix of ``stop``."""
    longest = min(len(text), len(stop) - 1)
    return next((length for length in range(longest, 0, -1) if text.endswith(stop[:length])), 0)
