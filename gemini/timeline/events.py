"""The timeline of recorded steps as plain data, the labels of its tensors, chunks and operators, and two
views of it: spans of computing, and the transfers of a link one after another. Times are seconds since the
recording began.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from gemini.chunk.chunk import ChunkKind, CutChunk
from gemini.memstats.trace import FORWARD
from gemini.runtime.storage.model_storage import ChunkGroup, ModelStorage

LINKS = ("h2d", "d2h", "disk_read", "disk_write")
TIERS = ("device", "host", "disk")


@dataclass(frozen=True, slots=True)
class Operator:
    """One operator: its chunks were requested (``asked_s``), pinned (``begin_s``) and unpinned (``end_s``).

    Between the first two the runtime prepares it and may wait. ``moment``: its index in the step's order, -1
    outside it (an evaluation, saving). ``late``: part of an update that the previous step deferred.
    ``depth``: the number of operators within which it runs.
    """

    phase: str
    label: str
    asked_s: float
    begin_s: float
    end_s: float
    moment: int = -1
    late: bool = False
    depth: int = 0


@dataclass(frozen=True, slots=True)
class WaitShare:
    """The part of a wait that one running transfer explains."""

    link: str
    chunk: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Wait:
    """The training thread waited until the chunks of ``label`` were ready.

    The time that ``shares`` do not cover was spent on mapping memory and on decisions.
    """

    label: str
    begin_s: float
    end_s: float
    shares: tuple[WaitShare, ...] = ()


@dataclass(frozen=True, slots=True)
class Transfer:
    """A transfer of a chunk: submitted, started, ended. ``kind``: fetch, load, evict or spill.

    Transfers of a disk link may overlap, because the file works on several; those of other links do not.
    """

    kind: str
    link: str
    chunk: int
    nbytes: int
    submitted_s: float
    begin_s: float
    end_s: float
    ok: bool = True


@dataclass(frozen=True, slots=True)
class Update:
    """An update of one chunk group that the previous step had deferred."""

    label: str
    begin_s: float
    end_s: float


@dataclass(frozen=True, slots=True)
class Fill:
    """Bytes of model data on each tier from this time on; ``limit_bytes``: the limit of model data
    on DEVICE.
    """

    time_s: float
    device_bytes: int
    host_bytes: int
    disk_bytes: int
    limit_bytes: int


@dataclass(frozen=True, slots=True)
class Phase:
    """A span of forward, backward or optimizer; deferred updates do not interrupt it."""

    name: str
    begin_s: float
    end_s: float


@dataclass(frozen=True, slots=True)
class StepSpan:
    """One optimizer step, ``number`` from 1. ``complete`` is False if the recording or the step was
    interrupted.
    """

    number: int
    begin_s: float
    end_s: float
    complete: bool = True


@dataclass(frozen=True)
class Timeline:
    """Everything that was recorded, each kind of event in order of start.

    ``chunk_labels``: a description of each chunk's contents. ``budget_bytes``: per tier; 0 if it is absent.
    """

    steps: tuple[StepSpan, ...] = ()
    phases: tuple[Phase, ...] = ()
    operators: tuple[Operator, ...] = ()
    waits: tuple[Wait, ...] = ()
    transfers: tuple[Transfer, ...] = ()
    updates: tuple[Update, ...] = ()
    fills: tuple[Fill, ...] = ()
    chunk_labels: tuple[str, ...] = ()
    budget_bytes: Mapping[str, int] | None = None
    model_data_bytes: int = 0

    @property
    def num_events(self) -> int:
        """The number of events to draw."""
        kinds = (self.operators, self.waits, self.transfers, self.updates, self.fills)
        return sum(len(events) for events in kinds)

    @property
    def end_s(self) -> float:
        """The time when the last event ended."""
        spans = (self.steps, self.operators, self.waits, self.transfers, self.updates)
        return max((event.end_s for events in spans for event in events), default=0.0)

    def operators_of(self, step: StepSpan) -> list[Operator]:
        """Return the operators that began in ``step``."""
        return [operator for operator in self.operators if step.begin_s <= operator.asked_s < step.end_s]

    def budget(self, tier: str) -> int:
        """Return the budget of ``tier`` in bytes; 0 if it is absent."""
        return self.budget_bytes.get(tier, 0) if self.budget_bytes is not None else 0

    def tiers(self) -> list[str]:
        """Return the tiers with a budget."""
        return [tier for tier in TIERS if self.budget(tier) > 0]

    def chunk_label(self, chunk: int) -> str:
        """Return the number and contents of ``chunk`` as text."""
        label = self.chunk_labels[chunk] if 0 <= chunk < len(self.chunk_labels) else ""
        return f"chunk {chunk}: {label}" if label else f"chunk {chunk}"


def computing(operators: Sequence[Operator], step: StepSpan) -> Iterator[Phase]:
    """Yield the spans of ``step`` outside the preparation of its ``operators``, each in the phase of the
    operator before it.

    They are disjoint and ordered. Time before the first operator counts as forward.
    """
    phase, since = FORWARD, step.begin_s
    for operator in operators:
        if operator.asked_s > since:
            yield Phase(phase, since, operator.asked_s)
        phase, since = operator.phase, operator.begin_s
    if step.end_s > since:
        yield Phase(phase, since, step.end_s)


def in_turn(transfers: Iterable[Transfer]) -> Iterator[tuple[Transfer, float, float]]:
    """Yield (transfer, begin, end) for the transfers of one link without overlaps.

    A disk link works on several transfers at once and reports them in order; a span begins where the previous
    one ended. The spans are disjoint and cover the busy time of the link.
    """
    last = float("-inf")
    for transfer in sorted(transfers, key=lambda t: (t.end_s, t.begin_s)):
        begin = min(max(last, transfer.begin_s), transfer.end_s)
        yield transfer, begin, transfer.end_s
        last = transfer.end_s


@dataclass
class Names:
    """Labels of one model by tensor and chunk id; refers to none of its memory."""

    chunks: tuple[str, ...] = ()
    chunk_of: dict[int, int] = field(default_factory=dict)
    params: dict[int, str] = field(default_factory=dict)
    grads: dict[int, str] = field(default_factory=dict)
    _operators: dict[tuple[int, ...], str] = field(default_factory=dict)

    def operator(self, tensors: Sequence[int]) -> str:
        """Return the label of an operator on ``tensors``: the module that they have in common."""
        key = tuple(tensors)
        label = self._operators.get(key)
        if label is None:
            label = self._operators[key] = self._label(key)
        return label

    def chunk_ids(self, tensors: Sequence[int]) -> frozenset[int]:
        """Return the chunks of ``tensors``."""
        return frozenset(self.chunk_of[tensor] for tensor in tensors if tensor in self.chunk_of)

    def _label(self, tensors: tuple[int, ...]) -> str:
        params = [self.params[tensor] for tensor in tensors if tensor in self.params]
        grads = [self.grads[tensor] for tensor in tensors if tensor in self.grads]
        states = len(params) + len(grads) < len(tensors)
        if states:
            return f"update of {_several(params)}" if params else "optimizer states"
        if params:
            return common_module(params)
        return f"gradient of {_several(grads)}"


def name_model(storage: ModelStorage) -> Names:
    """Return the labels of a managed model."""
    chunks = storage.chunks.chunks
    labels = [""] * len(chunks)
    names = Names()
    for name, slot in storage.slots.items():
        names.params |= dict.fromkeys(slot.param_ref.tensors, name)
        if slot.grad is not None:
            names.grads |= dict.fromkeys(slot.grad.ref.tensors, name)
    for group in storage.groups:
        for chunk, kind, held in _contents(group):
            labels[chunk] = f"{kind} of {_several(held)}"
    table = storage.chunks.table
    names.chunk_of = {tensor: table.chunk_of(tensor) for tensor in range(table.num_tensors())}
    names.chunks = tuple(labels)
    return names


def common_module(params: Sequence[str]) -> str:
    """Return the only parameter, or the module that owns all of them; else the first name and how many more.

    >>> common_module(["blocks.0.mlp.up.weight", "blocks.0.mlp.up.bias"])
    'blocks.0.mlp.up'
    """
    if len(set(params)) == 1:
        return params[0]
    owners = {name.rpartition(".")[0] for name in params}
    return owners.pop() or _several(params) if len(owners) == 1 else _several(params)


def _contents(group: ChunkGroup) -> list[tuple[int, str, list[str]]]:
    """Return (chunk id, kind, names of the parameters in it) for each chunk of a group."""
    everything = [slot.name for slot in group.slots]
    contents: list[tuple[int, str, list[str]]] = []
    for held, kind in ((group.param, ChunkKind.PARAM), (group.grad, ChunkKind.GRAD)):
        if held is not None:
            chunks = held.parts if isinstance(held, CutChunk) else (held,)
            contents += [(chunk.id, kind.value, everything) for chunk in chunks]
    for piece in group.pieces:
        inside = [slot.name for slot in group.slots if slot.start < piece.stop and piece.start < slot.stop]
        contents += [(chunk.id, kind, inside) for kind, chunk in piece.chunks.items()]
    return contents


def _several(names: Sequence[str]) -> str:
    each = list(dict.fromkeys(names))
    if len(each) < 2:
        return "".join(each)
    return f"{each[0]} and {len(each) - 1} more"
