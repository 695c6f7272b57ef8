"""The ranks that share a model, over torch.distributed: collectives of tensors, messages between CPUs, and
agreement on success or failure.
"""

from __future__ import annotations

import json
import os
import struct
from array import array
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from gemini.comm.groups import devices_of, in_time, is_over_gloo, new_group, shortest_timeout, store_of
from gemini.comm.heartbeats import Heartbeats
from gemini.comm.peers import Peers, Share, Topic, Transfer
from gemini.errors import CheckpointError, ConfigError, GeminiError, StateError

_Result = TypeVar("_Result")


FAILED = "failed: "  # prefix of the message of a rank that failed
_HEAD = struct.Struct("=qq")  # the topic, and the length of the message in bytes
_FRAME_BYTES = 512  # size of every first message; longer ones are sent again in a second


def _wait(work: Any, _doing: str) -> None:
    work.wait()


class Messages:
    """Exchanges messages over a gloo ``group``, from one thread. ``ranks``: its global ranks, in the order in
    which answers are returned.

    Each message has a topic, and all first messages have equal length. So ranks in different calls find out;
    messages of different lengths would end the process or be mistaken for each other.
    """

    def __init__(
        self, group: dist.ProcessGroup, ranks: Sequence[int], wait: Callable[[Any, str], None] = _wait
    ) -> None:
        """``wait(work, doing)`` waits for a collective."""
        self._group = group
        self._wait = wait
        self._order = [dist.get_group_rank(group, rank) for rank in ranks]

    def numbers(self, topic: Topic, mine: Sequence[int]) -> list[list[int]]:
        """Return the 64-bit integers of every rank. Raises like :meth:`text`."""
        return [array("q", said).tolist() for said in self._exchange(topic, array("q", mine).tobytes())]

    def text(self, text: str, topic: Topic = Topic.AGREEMENT) -> list[str]:
        """Return the text of every rank.

        Raises:
            StateError: on all ranks, if their topics differ.
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
        """Return the bytes of every rank, in order; all have equal length."""
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


_DONE = "done: "


def _alone(text: str) -> Sequence[str]:
    return [text]


@dataclass(frozen=True)
class Rank:
    """Process ``index`` of ``count`` that act together, for example to save a checkpoint.

    Attributes:
        index, count: this process, and the number of processes.
        exchange: ``exchange(text)`` waits until all processes have called it and returns their texts in order
            of index, like ``torch.distributed.all_gather_object``.
        several_hosts: whether the processes run on more than one machine.
        failure: the error that the others raise if one process fails.
        parts: this process among those with its index that have the other parts of a model that is cut over
            ranks. Then ``count`` processes have this part, and all processes of all parts agree together, so
            that no part is saved or loaded without the others. None: the model is whole.
    """

    index: int = 0
    count: int = 1
    exchange: Callable[[str], Sequence[str]] = _alone
    several_hosts: bool = False
    failure: type[GeminiError] = CheckpointError  # raised on the other ranks if one fails
    parts: Rank | None = None

    @property
    def is_alone(self) -> bool:
        """Whether no other process takes part."""
        return self.count == 1 and self.parts is None

    @property
    def part(self) -> int:
        """The index of this process's part of the model."""
        return 0 if self.parts is None else self.parts.index

    def agree(self, action: Callable[[], str]) -> str:
        """Run ``action`` on every rank; return its result on rank 0 once all have succeeded. Raises like
        :meth:`collect`.
        """
        return self.collect(action)[0]

    def collect(self, action: Callable[[], str]) -> list[str]:
        """Run ``action`` on every rank; return its results on the ranks with this part, once all have
        succeeded. Raises like :meth:`collect_parts`.
        """
        return self.collect_parts(action)[self.part]

    def collect_parts(self, action: Callable[[], str]) -> list[list[str]]:
        """Run ``action`` on every rank; return all results, by part, once all have succeeded.

        Raises:
            GeminiError: ``failure``, if it failed on another rank. An error on this rank is passed on.
        """
        try:
            result = action()
        except BaseException as error:
            self.tell_failure(error)
            raise
        said = self._meet(_DONE + result)
        for part, texts in enumerate(said):
            for index, text in enumerate(texts):
                if text.startswith(FAILED):
                    raise self.failure(f"rank {index} of {self.count}{self._named(part)} {text}")
        return [[text.removeprefix(_DONE) for text in texts] for texts in said]

    def _meet(self, text: str) -> list[list[str]]:
        """Return the texts of all ranks, by part."""
        own = list(self.exchange(text))
        if self.parts is None:
            return [own]
        return [json.loads(said) for said in self.parts.exchange(json.dumps(own))]

    def _named(self, part: int) -> str:
        return "" if self.parts is None else f" with part {part} of {self.parts.count} of the model"

    def require_same_directory(self, directory: str | os.PathLike[str]) -> None:
        """Check that all ranks use the same directory: another rank's directory would be ignored.

        Raises:
            CheckpointError: on all ranks.
        """

        def names() -> str:
            path = Path(os.fsdecode(directory))
            return json.dumps([str(path.absolute()), str(path.resolve())])

        said = [json.loads(text) for text in self.collect(names)]
        if any(
            len({each[kind] for each in said}) == 1 for kind in range(2)
        ):  # one kind suffices: links may differ by host
            return
        each = ", ".join(f"rank {rank} {name!r}" for rank, (name, _) in enumerate(said))
        raise CheckpointError(f"ranks name different directories: {each}; pass the same on all of them")

    def together(self, action: Callable[[], _Result]) -> _Result:
        """Run ``action`` on every rank; return its result on this rank, once all have succeeded. Raises like
        :meth:`collect`.
        """
        results: list[_Result] = []

        def run() -> str:
            results.append(action())
            return ""

        self.collect(run)
        return results[0]

    def tell_failure(self, error: BaseException) -> None:
        """Make the others' next :meth:`agree` raise instead of waiting for this rank."""
        with suppress(RuntimeError):  # the others are elsewhere or gone; ``error`` is the one to report
            self._meet(f"{FAILED}{type(error).__name__}: {error}")


_CPU = torch.device("cpu")
_STORE_TIMEOUT = timedelta(minutes=5)  # the default of TCPStore
_BREAK_TAG = 0x6E4F  # no message with this tag is ever sent
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")  # differs between machines


@dataclass
class Traffic:
    """Bytes that this rank has sent to others, by purpose."""

    gathered: int = 0
    reduced: int = 0
    replicated: int = 0
    rounds: int = 0


class ProcessGroupPeers(Peers):
    """Implements :class:`Peers` over process groups."""

    def __init__(
        self, group: dist.ProcessGroup, replicas: dist.ProcessGroup | None, ranks: list[int]
    ) -> None:
        """``group``: the ranks with this copy of the model, at least two. ``replicas``: the ranks with this
        part of the other copies. ``ranks``: all ranks, in order of their places.
        """
        self.group = group
        self.traffic = Traffic()
        self._replicas = replicas
        self._share = Share(dist.get_rank(group), dist.get_world_size(group))
        if replicas is not None:
            copy, copies = dist.get_rank(replicas), dist.get_world_size(replicas)
            self._share = replace(self._share, replica=copy, replicas=copies)
        # A group of its own: rounds overtake transfers, and on a GPU need not wait for its stream.
        self._ranks = ranks
        self._timeout = shortest_timeout(group, replicas)
        self._among_all = new_group(ranks, self._timeout)
        self.heartbeats = Heartbeats(
            store_of(self._among_all), self._share.place, len(ranks), self._among_all
        )
        self._messages = Messages(self._among_all, ranks, self._wait)
        # Beside a GPU, CPU tensors need a group with a CPU backend among the ranks of this copy.
        self._on_host = group
        if not any(device.type == "cpu" for device in devices_of(group)):
            self._on_host = new_group(dist.get_process_group_ranks(group), self._timeout)
        self._aside: Messages | None = None
        self._several_hosts: bool | None = None  # not asked yet

    @property
    def share(self) -> Share:
        return self._share

    @property
    def ranks_on_this_host(self) -> int:
        said = os.environ.get("LOCAL_WORLD_SIZE", "")  # set by torchrun
        return int(said) if said.isdigit() and int(said) > 0 else self._share.world

    def on_several_hosts(self) -> bool:
        """Return whether the ranks run on more than one machine. Collective."""
        if self._several_hosts is None:
            self._several_hosts = len(set(self.say(_BOOT_ID.read_text()))) > 1
        return self._several_hosts

    def exchange(self, topic: Topic, mine: Sequence[int]) -> list[list[int]]:
        self.traffic.rounds += 1
        return self._messages.numbers(topic, mine)

    def gather(self, shard: torch.Tensor, whole: torch.Tensor) -> Transfer:
        self.traffic.gathered += (self._share.size - 1) * shard.nbytes
        if shard.device.type != "cpu":
            return _started(all_gather(whole, shard, group=self.group, async_op=True))
        # gloo's all_gather copies through its own buffers; point-to-point messages use the tensors' memory.
        own, parts = self._share.rank, whole.view(self._share.size, -1)
        works = [self._send(shard, rank) for rank in self._others()]
        works += [self._receive(parts[rank], rank) for rank in self._others()]
        parts[own].copy_(shard)
        return self._as_one(works, shard.nbytes)

    def gather_to(self, rank: int, shard: torch.Tensor, whole: torch.Tensor | None) -> Transfer:
        if whole is None:
            self.traffic.gathered += shard.nbytes
            return self._as_one([self._send(shard, rank)], shard.nbytes)
        parts = whole.view(self._share.size, -1)
        parts[rank].copy_(shard)
        return self._as_one([self._receive(parts[other], other) for other in self._others()], shard.nbytes)

    def _others(self) -> list[int]:
        """Return the other ranks, starting after this one, so that no rank is everyone's first target."""
        size, rank = self._share.size, self._share.rank
        return [(rank + distance) % size for distance in range(1, size)]

    def _as_one(self, works: Sequence[Any], nbytes: int) -> Transfer:
        """Combine transfers of ``nbytes`` each into one, with a time limit."""
        limit = self.heartbeats.longest_transfer(nbytes)
        if self._timeout is not None:
            limit = min(limit, self._timeout)
        return _Works(works, limit, self.heartbeats)

    def _send(self, tensor: torch.Tensor, rank: int) -> Any:
        return self.begin(lambda: dist.isend(tensor, group=self.group, group_dst=rank))

    def _receive(self, tensor: torch.Tensor, rank: int) -> Any:
        return self.begin(lambda: dist.irecv(tensor, group=self.group, group_src=rank))

    def begin(self, call: Callable[[], Any]) -> Any:
        """Return the handle of the message that ``call`` starts. Raises StateError if its connection broke
        earlier: gloo then fails at once.
        """
        try:
            work = call()
        except RuntimeError as error:
            raise self.heartbeats.explain(error) from error
        return _started(work)

    def scatter_all(self, whole: torch.Tensor, parts: torch.Tensor) -> Transfer:
        size = self._share.size
        self.traffic.reduced += whole.nbytes // size * (size - 1)
        if whole.device.type != "cpu":
            return _started(dist.all_to_all_single(parts, whole, group=self.group, async_op=True))
        # Point-to-point as in gather(); this rank's own part is not copied.
        mine, theirs = whole.view(size, -1), parts.view(size, -1)
        works = [self._send(mine[rank], rank) for rank in self._others()]
        works += [self._receive(theirs[rank], rank) for rank in self._others()]
        return self._as_one(works, mine[0].nbytes)

    def __deepcopy__(self, _memo: dict[int, Any]) -> ProcessGroupPeers:
        """Return this object: a copy of a model uses the same ranks."""
        return self

    def say(self, text: str) -> list[str]:
        """Return the text of every rank, in order of their places. Raises like :meth:`exchange`."""
        return self._messages.text(text)

    def together(self, action: Callable[[], _Result]) -> _Result:
        say = partial(self._messages.text, topic=Topic.SETTINGS)
        rank = Rank(self._share.place, self._share.world, say, failure=ConfigError)
        return rank.together(action)

    def say_aside(self) -> Callable[[str], list[str]]:
        """Return a second channel like :meth:`say`, for use by another thread."""
        if self._aside is None:
            self._aside = Messages(new_group(self._ranks, self._timeout), self._ranks)
        return self._aside.text

    def swap_copies(self, messages: Sequence[tuple[int, torch.Tensor, torch.Tensor]]) -> None:
        group, sizes = self._replicas, [sent.nbytes for _copy, sent, _got in messages]
        self.traffic.replicated += sum(sizes)
        ways = [dist.P2POp(dist.isend, sent, group=group, group_peer=copy) for copy, sent, _got in messages]
        ways += [dist.P2POp(dist.irecv, got, group=group, group_peer=copy) for copy, _sent, got in messages]
        try:
            works = dist.batch_isend_irecv(ways)
        except RuntimeError as error:
            raise self.heartbeats.explain(error) from error
        if all(sent.device.type == "cpu" for _copy, sent, _got in messages):
            self._as_one(works, max(sizes)).wait()
            return
        for work in works:
            work.wait()  # these are GPU tensors: it only orders streams

    def broadcast(self, tensor: torch.Tensor) -> None:
        if tensor.device.type == "cpu":
            work = dist.broadcast(tensor, group=self._among_all, src=self._ranks[0], async_op=True)
            self._wait(work, "takes over weights of the first rank (wrapping)")
            return
        dist.broadcast(tensor, group=self.group, group_src=0)
        if self._replicas is not None:
            dist.broadcast(tensor, group=self._replicas, group_src=0)

    def sum(self, values: torch.Tensor) -> None:
        doing = "adds up a norm (clipping), weights (state_dict, saving) or a whole parameter (step)"
        self._reduce(values, dist.ReduceOp.SUM, doing)

    def largest(self, values: torch.Tensor) -> None:
        self._reduce(values, dist.ReduceOp.MAX, "looks for overflow (step) or takes a norm (clipping)")

    def leave(self, why: str) -> None:
        """Tell the other ranks ``why`` this rank has stopped making calls with them. Idempotent."""
        self.heartbeats.leave(why)

    def _reduce(self, values: torch.Tensor, how: Any, doing: str) -> None:
        group = self._group_for(values)
        work = dist.all_reduce(values, how, group=group, async_op=True)
        self._wait(work, doing, group, values.device)

    def _wait(
        self, work: Any, doing: str, group: dist.ProcessGroup | None = None, device: torch.device = _CPU
    ) -> None:
        """Wait for a collective of ``group`` (None: of all ranks) with memory of ``device``. Raises like
        :meth:`Heartbeats.wait`.
        """
        group = self._among_all if group is None else group
        if not is_over_gloo(group, device):
            work.wait()  # on a GPU it only orders streams
            return
        self.heartbeats.wait(work, doing, partial(break_off, group))

    def _group_for(self, tensor: torch.Tensor) -> dist.ProcessGroup:
        """Return the group of this copy with a backend for the memory of ``tensor``."""
        return self._on_host if tensor.device.type == "cpu" else self.group


def break_off(group: dist.ProcessGroup) -> None:
    """Make the pending operations of a gloo group fail; otherwise the process would wait for them at its end.
    An operation that times out closes all connections of its group, so this starts one with a short timeout.
    """
    with suppress(RuntimeError):
        other = 1 if dist.get_rank(group) == 0 else 0
        nothing = torch.empty(1, dtype=torch.uint8, device="cpu")
        work: Any = dist.irecv(nothing, group=group, group_src=other, tag=_BREAK_TAG)
        work.wait(timedelta(milliseconds=1))


class _Works(Transfer):
    """Several transfers as one."""

    def __init__(self, works: Sequence[Any], limit: timedelta, heartbeats: Heartbeats) -> None:
        """``limit``: the time limit of each transfer; exceeding it closes the connections."""
        self._works, self._limit, self._heartbeats = works, limit, heartbeats

    def wait(self) -> None:
        for work in self._works:
            try:
                work.wait(self._limit)
            except RuntimeError as error:
                raise self._heartbeats.explain(error) from error


# torch 2.13 renamed ``all_gather_into_tensor`` and deprecates the old name.
all_gather: Callable[..., Any] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def _started(work: Any) -> Transfer:
    assert work is not None, "this rank is no member of the process group"
    started: Transfer = work
    return started


def make_peers(process_group: object | None) -> ProcessGroupPeers | None:
    """Return the ranks of ``process_group``; None if it has only one rank.

    ``process_group``: a ProcessGroup; a DeviceMesh with one dimension, or with two, the first of which
    replicates and the second shards; or None for all ranks of torch.distributed, if it is initialized.

    Raises:
        ConfigError: it is something else.
    """
    if isinstance(process_group, DeviceMesh):
        return _peers_on(process_group)
    if process_group is None:
        group = dist.group.WORLD if dist.is_available() and dist.is_initialized() else None
    elif isinstance(process_group, dist.ProcessGroup):
        group = process_group
    else:
        raise ConfigError(
            f"process_group is a {type(process_group).__name__}; pass a torch.distributed.ProcessGroup, a "
            "DeviceMesh, or None for all ranks"
        )
    if group is None or dist.get_world_size(group) == 1:
        return None
    return ProcessGroupPeers(group, None, dist.get_process_group_ranks(group))


def _peers_on(mesh: DeviceMesh) -> ProcessGroupPeers | None:
    if mesh.ndim > 2:
        raise ConfigError(
            f"process_group is a DeviceMesh of {mesh.ndim} dimensions; pass the one that shards, for example "
            "mesh['dp'], or one that replicates and one that shards: mesh['replicate', 'shard']"
        )
    if mesh.size() == 1:
        return None
    if any(bool((mesh.mesh.diff(dim=dim) <= 0).any()) for dim in range(mesh.ndim)):
        raise ConfigError(
            f"the ranks of the DeviceMesh {mesh.mesh.tolist()} do not ascend along its dimensions; make it "
            "with init_device_mesh"
        )
    if mesh.size(-1) == 1:
        raise ConfigError(
            f"process_group is a DeviceMesh of the shape {tuple(mesh.shape)}: its last dimension shards, and "
            "one rank alone has nothing to share; replicate with torch's DistributedDataParallel"
        )
    replicas = in_time(mesh.get_group(0)) if mesh.ndim == 2 and mesh.size(0) > 1 else None
    return ProcessGroupPeers(in_time(mesh.get_group(-1)), replicas, mesh.mesh.flatten().tolist())


def join_ranks(backend: str | None = None, timeout: timedelta | None = None) -> bool:
    """Initialize torch.distributed among the processes that torchrun started; return whether there are any.

    Does nothing if it is already initialized, or without torchrun. Unlike a plain ``init_process_group`` it
    is safe after a restart: torchrun keeps its store, with the addresses of dead ranks.

    Args:
        backend: as for ``init_process_group``.
        timeout: how long a rank waits for the others, here and in every collective, before it raises; None:
            torch's default, half an hour for gloo.
    """
    if dist.is_initialized():
        return True
    if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
        return False
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    hosted = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == str(True)
    store = dist.TCPStore(  # type: ignore[attr-defined]
        os.environ["MASTER_ADDR"],
        int(os.environ["MASTER_PORT"]),
        is_master=rank == 0 and not hosted,
        timeout=_STORE_TIMEOUT if timeout is None else timeout,
    )
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    own = dist.PrefixStore(f"attempt-{attempt}", store)  # type: ignore[attr-defined]
    dist.init_process_group(backend, timeout=timeout, store=own, rank=rank, world_size=world)
    return True
