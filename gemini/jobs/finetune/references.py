"""The reference of DPO if all weights train: the initial model's log probability of each answer, computed
before the first step.

It is computed once, and stored in the run's directory as it is produced, so that resumed and interrupted runs
do not compute it again.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
from torch import Tensor

from gemini.comm.ranks import Rank
from gemini.errors import ConfigError
from gemini.jobs.finetune.samples import Batch, Samples
from gemini.jobs.run.display import Display
from gemini.jobs.run.training import StopRequest
from gemini.system.durable import replacing
from gemini.system.files import append_whole, io_errors, parse_json, read_regular

REFERENCES = "references.jsonl"  # in the directory of a run
_MAX_BYTES = 2**32  # enough for ten million pairs
_OF = "reference"  # key of the first line
_SET, _ROWS, _CHOSEN, _REJECTED = "set", "rows", "chosen", "rejected"  # keys of the other lines
_READING, _WRITING = "read the reference", "store the reference"


class Referring(Protocol):
    """A model that can compute log probabilities of answers."""

    def reference(self, batch: Batch) -> Tensor:
        """Return the log probabilities of the answers of a batch, the chosen ones first."""


@dataclass(frozen=True)
class PairSet:
    """Pairs of ``samples``, by their ``rows`` in the order of passes. Parts of a set have the name of the
    set."""

    name: str
    samples: Samples
    rows: npt.NDArray[np.int64]


class References:
    """Log probabilities of the answers of ``sets`` under the initial weights.

    They are stored in :data:`REFERENCES` in ``directory``: a line with ``digest``, which identifies the data
    and weights, and a line for each pass of ``batch`` pairs. Unusable lines are computed again. The pairs of
    a pass depend only on their places in ``rows``, not on which values are known: a pass with other pairs may
    give other rounding errors. ``rank``: this process among those that share the passes; the first rank reads
    and writes the file.
    """

    def __init__(
        self, directory: Path, digest: str, sets: Sequence[PairSet], *, batch: int, rank: Rank
    ) -> None:
        self._path = directory / REFERENCES
        self._digest = digest
        self._sets = sets
        self._batch = batch
        self._rank = rank
        # float32 [pairs, 2] of each set: the chosen answer, the rejected one; nan if not known
        self._values = {each.name: np.full((each.samples.num_rows, 2), np.nan, np.float32) for each in sets}

    def complete(self, model: Referring, display: Display, stop: StopRequest) -> bool:
        """Compute the missing log probabilities with ``model``, which still has its initial weights, and
        attach all of them to the samples. Return False if ``stop`` was requested before the end.

        Raises:
            ConfigError: a log probability is not finite.
            IoError: the file cannot be read or written.
        """
        known = self._rank.agree(lambda: "" if self._rank.index else "\n".join(self._kept()))
        self._take(known.splitlines())
        passes, total = list(self._passes()), sum(len(each.rows) for each in self._sets)
        missing = sum(len(each.rows) for each in passes)
        if missing:
            display.note(
                f"reference: the model computes {missing:,} of {total:,} pairs before the first step"
            )
        for first in range(0, len(passes), self._rank.count):
            together = passes[first : first + self._rank.count]
            self._compute(model, together)
            missing -= sum(len(each.rows) for each in together)
            display.progress("reference, pairs", total - missing, total)
            stop.agree()
            if stop.requested and missing:
                display.note(
                    f"reference: {total - missing:,} of {total:,} pairs are in {self._path}; run the "
                    "same command again to compute the rest"
                )
                return False
        for each in self._sets:
            each.samples.refer_to(self._values[each.name])
        return True

    def _compute(self, model: Referring, passes: Sequence[PairSet]) -> None:
        """Run a pass on each rank. Ranks without a pass repeat the first one, because all ranks must run
        one."""
        own = passes[self._rank.index if self._rank.index < len(passes) else 0]
        found = model.reference(own.samples.rows(own.rows.tolist())).tolist()
        lines = self._rank.collect(lambda: _line(own, found))[: len(passes)]
        self._rank.agree(lambda: self._keep(lines))
        self._take(lines)

    def _keep(self, lines: Sequence[str]) -> str:
        """Append the results of passes to the file, on the first rank. Returns "" for :meth:`Rank.agree`."""
        if not self._rank.index:
            with io_errors(_WRITING, self._path):
                append_whole(self._path, "".join(f"{line}\n" for line in lines).encode("ascii"))
        return ""

    def _passes(self) -> Iterator[PairSet]:
        """Yield the missing pairs, one part per pass."""
        for each in self._sets:
            values = self._values[each.name]
            for first in range(0, len(each.rows), self._batch):
                together = each.rows[first : first + self._batch]
                rows = together[np.isnan(values[together, 0])]
                if len(rows):
                    yield PairSet(each.name, each.samples, rows)

    def _kept(self) -> list[str]:
        """Return the usable lines of the file, and remove all others: lines for another model or other data,
        and half-written ones."""
        data = b""
        with io_errors(_READING, self._path):
            if self._path.is_symlink() or self._path.exists():
                data = read_regular(self._path, _MAX_BYTES, os.O_NOFOLLOW)
        head, *lines = data.decode("ascii", errors="replace").split("\n")
        good: list[str] = []
        if _parsed(head) == {_OF: self._digest}:
            for line in lines:
                if not self._is_good(_parsed(line)):
                    break
                good.append(line)
        text = "".join(f"{line}\n" for line in (json.dumps({_OF: self._digest}), *good))
        if data != text.encode("ascii"):
            with replacing(self._path, _WRITING) as temporary:
                temporary.write_text(text, encoding="ascii")
        return good

    def _is_good(self, record: Any) -> bool:
        """Return whether a record is a valid result of a pass."""
        if not isinstance(record, dict) or record.keys() != {_SET, _ROWS, _CHOSEN, _REJECTED}:
            return False
        values = self._values.get(str(record[_SET]))
        rows, numbers = record[_ROWS], (record[_CHOSEN], record[_REJECTED])
        if values is None or not isinstance(rows, list):
            return False
        return all(type(row) is int and 0 <= row < len(values) for row in rows) and all(
            isinstance(each, list)
            and len(each) == len(rows)
            and all(type(number) is float and math.isfinite(number) for number in each)
            for each in numbers
        )

    def _take(self, lines: Iterable[str]) -> None:
        for record in map(json.loads, lines):
            found = np.asarray([record[_CHOSEN], record[_REJECTED]], dtype=np.float32)
            self._values[record[_SET]][record[_ROWS]] = found.T


def remove_references(directory: Path) -> None:
    """Remove the file of an older run from its directory. Raises IoError."""
    path = directory / REFERENCES
    with io_errors("remove the reference of an older run", path):
        path.unlink(missing_ok=True)


def _line(pairs: PairSet, found: list[float]) -> str:
    """Return the line of a pass. ``found``: the chosen answers first."""
    rows = pairs.rows.tolist()
    for number, value in zip([*rows, *rows], found, strict=True):
        if not math.isfinite(value):
            raise ConfigError(
                f"the reference of pair {number + 1} cannot be computed: the initial model gives an "
                f"answer the log probability {value}; try --precision fp32, or another model"
            )
    half = len(rows)
    return json.dumps({_SET: pairs.name, _ROWS: rows, _CHOSEN: found[:half], _REJECTED: found[half:]})


def _parsed(line: str) -> Any:
    try:
        return parse_json(line)
    except ValueError:
        return None
