"""CollectiveSpeeds: how long ranks take for a collective, by its kind and the size of the group."""

from __future__ import annotations

import math
import reprlib
from dataclasses import asdict, dataclass, fields
from typing import Any

from gemini.errors import ConfigError

KINDS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send")
MEASURED, GIVEN, DEFAULT = "measured", "given", "default"
RECORDED = (MEASURED, GIVEN, DEFAULT)
INTERPOLATED, EXTRAPOLATED = "interpolated", "extrapolated"  # sources of speeds without a record

_MOST_RANKS = 2**20
# Sums and products of numbers within these bounds stay finite.
_BOUNDS = {
    "latency_seconds": (0.0, 3600.0),
    "bytes_per_second": (1.0, 1e15),
    "computing_share": (0.0, 1.0),
}


@dataclass(frozen=True)
class Figure:
    """A number and its source."""

    value: float
    source: str = GIVEN


_NO_OVERLAP = Figure(1.0, DEFAULT)


@dataclass(frozen=True)
class CollectiveSpeed:
    """A collective over ``ranks`` ranks takes ``latency_seconds + nbytes / bytes_per_second``.

    ``nbytes``: the bytes that one rank passes to the call: the tensor of an all-reduce or a message, this
    rank's part in an all-gather, the parts for all ranks in a reduce-scatter or an all-to-all.
    ``computing_share``: the share of a rank's computing speed that the collective takes while it runs. The
    default for an unmeasured collective is 1: no overlap, as if the rank waited for it.
    """

    kind: str
    ranks: int
    latency_seconds: Figure
    bytes_per_second: Figure
    computing_share: Figure = _NO_OVERLAP

    def seconds(self, nbytes: float) -> float:
        """Return how long the collective takes."""
        return self.latency_seconds.value + nbytes / self.bytes_per_second.value


@dataclass(frozen=True)
class CollectiveSpeeds:
    """The recorded speeds, one per kind and group size, and estimates for other sizes.

    Raises ConfigError if a record has an impossible number.
    """

    records: tuple[CollectiveSpeed, ...] = ()

    def __post_init__(self) -> None:
        seen = set()
        for record in self.records:
            _check(record)
            if (key := (record.kind, record.ranks)) in seen:
                raise ConfigError(f"collectives: {record.kind} over {record.ranks} ranks is given twice")
            seen.add(key)

    def seconds(self, kind: str, ranks: int, nbytes: float) -> float:
        """Return the duration of a collective; 0 on a single rank. Raises as :meth:`speed`."""
        return 0.0 if ranks == 1 else self.speed(kind, ranks).seconds(nbytes)

    def speed(self, kind: str, ranks: int) -> CollectiveSpeed:
        """Return the record, or an estimate with figures marked as interpolated or extrapolated.

        An estimate divides each latency by the number of sequential messages, and each rate by the bytes on a
        link. Between two group sizes these change linearly in the logarithm of the size; beyond the smallest
        or largest size they stay constant. Messages and bytes are those of ring algorithms: Thakur,
        Rabenseifner and Gropp, "Optimization of Collective Communication Operations in MPICH", 2005; the rate
        per link is the "bus bandwidth" of nccl-tests.

        Raises:
            ConfigError: there is no such kind or group size, or no record of the kind.
        """
        if kind not in KINDS:
            raise ConfigError(f"there is no collective {reprlib.repr(kind)}; they are {', '.join(KINDS)}")
        if type(ranks) is not int or not 2 <= ranks <= _MOST_RANKS:
            raise ConfigError(
                f"{kind} over {reprlib.repr(ranks)} ranks; a group has 2 to {_MOST_RANKS} ranks"
            )
        known = sorted((record for record in self.records if record.kind == kind), key=_size)
        if not known:
            raise ConfigError(
                f'the machine has no speed of {kind}; add it to its "collectives" (docs/plan.md)'
            )
        below = [record for record in known if record.ranks <= ranks]
        above = [record for record in known if record.ranks >= ranks]
        if not below or not above:
            nearest = below[-1] if below else above[0]
            return _estimate(nearest, nearest, ranks, EXTRAPOLATED)
        if below[-1].ranks == ranks:
            return below[-1]
        return _estimate(below[-1], above[0], ranks, INTERPOLATED)

    def to_json(self) -> list[dict[str, Any]]:
        """Return a document that :meth:`from_json` reads."""
        return [asdict(record) for record in self.records]

    @classmethod
    def from_json(cls, document: object) -> CollectiveSpeeds:
        """Parse a document; a bare number has the source "given". Raises ConfigError."""
        if not isinstance(document, list):
            raise ConfigError(f"collectives is {reprlib.repr(document)}; it must be a list")
        return cls(tuple(_record(entry) for entry in document))


def _size(record: CollectiveSpeed) -> int:
    return record.ranks


def _record(entry: object) -> CollectiveSpeed:
    known = {item.name for item in fields(CollectiveSpeed)}
    needed = known - {"computing_share"}
    if not isinstance(entry, dict) or not needed <= entry.keys() <= known:
        raise ConfigError(
            f"collectives: {reprlib.repr(entry)} is no record; it has {', '.join(sorted(needed))}, and may "
            "have computing_share"
        )
    figures = {name: _figure(entry[name]) for name in _BOUNDS if name in entry}
    if figures.get("computing_share") == Figure(0.0, DEFAULT):  # files of version 0.2 contain this
        figures["computing_share"] = _NO_OVERLAP
    return CollectiveSpeed(entry["kind"], entry["ranks"], **figures)


def _figure(value: Any) -> Figure:
    if isinstance(value, dict) and value.keys() == {"value", "source"}:
        return Figure(value["value"], value["source"])
    return Figure(value)


def _check(record: CollectiveSpeed) -> None:
    if record.kind not in KINDS:
        raise ConfigError(
            f"collectives: there is no kind {reprlib.repr(record.kind)}; the kinds are {', '.join(KINDS)}"
        )
    if type(record.ranks) is not int or not 2 <= record.ranks <= _MOST_RANKS:
        raise ConfigError(
            f"collectives: ranks of {record.kind} is {reprlib.repr(record.ranks)}; "
            f"it must be 2 to {_MOST_RANKS}"
        )
    for name, (least, most) in _BOUNDS.items():
        figure: Figure = getattr(record, name)
        where = f"collectives: {name} of {record.kind} over {record.ranks} ranks"
        if type(figure.value) not in (int, float) or not least <= figure.value <= most:
            raise ConfigError(
                f"{where} is {reprlib.repr(figure.value)}; it must be a number from {least:g} to {most:g}"
            )
        if figure.source not in RECORDED:
            raise ConfigError(
                f"{where} has the source {reprlib.repr(figure.source)}; sources are {', '.join(RECORDED)}"
            )


def _messages(kind: str, ranks: int) -> int:
    """Return the number of sequential messages of a ring algorithm."""
    return {"all_reduce": 2 * (ranks - 1), "send": 1}.get(kind, ranks - 1)


def _link_bytes(kind: str, ranks: int) -> float:
    """Return the bytes that a rank sends for each byte that it passes to the call."""
    share = (ranks - 1) / ranks
    return {"all_reduce": 2 * share, "all_gather": ranks - 1.0, "send": 1.0}.get(kind, share)


def _estimate(low: CollectiveSpeed, high: CollectiveSpeed, ranks: int, source: str) -> CollectiveSpeed:
    kind = low.kind
    weight = 0.0 if low is high else math.log(ranks / low.ranks) / math.log(high.ranks / low.ranks)

    def between(first: float, second: float) -> float:
        return (1 - weight) * first + weight * second

    per_message = between(*(each.latency_seconds.value / _messages(kind, each.ranks) for each in (low, high)))
    per_byte = between(
        *(1 / (each.bytes_per_second.value * _link_bytes(kind, each.ranks)) for each in (low, high))
    )
    share = between(low.computing_share.value, high.computing_share.value)
    is_default = low.computing_share.source == high.computing_share.source == DEFAULT
    return CollectiveSpeed(
        kind,
        ranks,
        Figure(per_message * _messages(kind, ranks), source),
        Figure(1 / (per_byte * _link_bytes(kind, ranks)), source),
        Figure(share, DEFAULT if is_default else source),
    )
