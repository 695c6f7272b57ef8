"""Messages: what ranks say to each other, between CPUs."""

from __future__ import annotations

import struct
from array import array
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from gemini.comm.peers import Topic
from gemini.errors import StateError

FAILED = "failed: "  # how what a rank says begins that could not do its part
_HEAD = struct.Struct("=qq")  # the topic, and how many bytes are said
_FRAME_BYTES = 512  # of each message; what is longer follows in a second one


def _wait(work: Any, _doing: str) -> None:
    work.wait()


class Messages:
    """Over a gloo ``group``, for one thread. ``ranks`` are its global ranks in the order in which answers are
    returned.

    Each message says what it is about, and all first ones are equally long. So ranks that do different things
    find out, where messages of different lengths would end the process, or be mistaken for each other.
    """

    def __init__(
        self, group: dist.ProcessGroup, ranks: Sequence[int], wait: Callable[[Any, str], None] = _wait
    ) -> None:
        """``wait(work, doing)`` waits for a collective."""
        self._group = group
        self._wait = wait
        self._order = [dist.get_group_rank(group, rank) for rank in ranks]

    def numbers(self, topic: Topic, mine: Sequence[int]) -> list[list[int]]:
        """Return what every rank has given here: 64-bit integers. Raises as :meth:`text`."""
        return [array("q", said).tolist() for said in self._exchange(topic, array("q", mine).tobytes())]

    def text(self, text: str, topic: Topic = Topic.AGREEMENT) -> list[str]:
        """Return what every rank has said here.

        Raises:
            StateError: on all ranks: they do not all speak of the same.
        """
        return [said.decode() for said in self._exchange(topic, text.encode())]

    def _exchange(self, topic: Topic, mine: bytes) -> list[bytes]:
        room = _FRAME_BYTES - _HEAD.size
        doing = topic.doing
        frames = self._gather(_HEAD.pack(topic, len(mine)) + mine[:room].ljust(room, b"\0"), doing)
        heads = [_HEAD.unpack_from(frame) for frame in frames]
        said = [frame[_HEAD.size :][:nbytes] for frame, (_, nbytes) in zip(frames, heads, strict=True)]
        _refuse_different([Topic(about) for about, _ in heads], said)
        longest = max(nbytes for _, nbytes in heads)
        if longest > room:
            whole = self._gather(mine.ljust(longest, b"\0"), doing)
            said = [each[:nbytes] for each, (_, nbytes) in zip(whole, heads, strict=True)]
        return said

    def _gather(self, mine: bytes, doing: str) -> list[bytes]:
        """Return what every rank has given, in order; equally long for all."""
        message = torch.frombuffer(bytearray(mine), dtype=torch.uint8)
        said = [torch.empty_like(message) for _ in self._order]
        self._wait(dist.all_gather(said, message, group=self._group, async_op=True), doing)
        return [said[index].numpy().tobytes() for index in self._order]


def _refuse_different(topics: Sequence[Topic], said: Sequence[bytes]) -> None:
    if len(set(topics)) == 1:
        return
    each = []
    for rank, (topic, text) in enumerate(zip(topics, said, strict=True)):
        failed = topic in (Topic.AGREEMENT, Topic.SETTINGS) and text.startswith(FAILED.encode())
        why = f" ({text.decode(errors='replace')})" if failed else ""
        each.append(f"rank {rank} {topic.doing}{why}")
    raise StateError(
        f"ranks do different things: {', '.join(each)}; all of them must make the calls that ranks make "
        "together, as often and in the same order (docs/notes/zero.md)"
    )
