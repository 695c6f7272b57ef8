"""Text from tokens that come one by one, up to the first stop text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

_CONTEXT = 8  # tokens of the prompt that the first token is decoded with
_UNFINISHED = "\ufffd"  # what a tokenizer makes of some bytes of a character


class TextStream:
    """Turns tokens into pieces of text. A piece holds whole characters, and nothing that a stop text may
    still begin with. Together the pieces are the text of all tokens behind ``prompt``, up to the one of
    ``stops`` that is complete first."""

    def __init__(self, tokenizer: Any, stops: Sequence[str] = (), prompt: Sequence[int] = ()) -> None:
        self._tokenizer = tokenizer
        self._stops = tuple(stop for stop in stops if stop)
        self._tokens = list(prompt[-_CONTEXT:])
        self._context = 0  # first token that the next ones are decoded with
        self._decoded = len(self._tokens)  # tokens whose text was taken
        self._held = ""
        self.is_stopped = False

    def push(self, token: int) -> str:
        """Take a token, and return the text that is certain now."""
        if self.is_stopped:
            return ""
        self._tokens.append(token)
        new = self._new_text()
        if not new or new.endswith(_UNFINISHED):
            return ""
        self._context, self._decoded = self._decoded, len(self._tokens)
        return self._give(new)

    def end(self) -> str:
        """Return what is left, after the last token."""
        if self.is_stopped:
            return ""
        text = self._give(self._new_text())
        held, self._held = self._held, ""  # nothing, if a stop text has come
        return text + held

    def _new_text(self) -> str:
        """Return the text of new tokens. It is decoded with tokens before: a tokenizer may begin a text
        without the space that a token has."""
        known = self._decode(self._tokens[self._context : self._decoded])
        text = self._decode(self._tokens[self._context :])
        if not text.startswith(known):  # the prompt ends within a character
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
    """Return the length of the longest end of ``text`` that ``stop`` begins with."""
    longest = min(len(text), len(stop) - 1)
    return next((length for length in range(longest, 0, -1) if text.endswith(stop[:length])), 0)
