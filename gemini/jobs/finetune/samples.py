"""Samples: documents as tokens in a file, and which of them each step learns from.

Which rows a step has is a pure function of ``(tokens, seed, step)``, so a resumed run sees exactly the rows
that an uninterrupted one would have seen.
"""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from gemini.errors import ConfigError
from gemini.system.files import io_errors

IGNORED = -100  # a label that no loss looks at

Batch = dict[str, Tensor]
"""``input_ids`` and ``labels``, int64 ``[batch, seq]``; where rows are filled up also ``attention_mask``."""


class Samples:
    """Rows of ``seq`` tokens. With ``pad`` each document is a row of its own, cut or filled up to ``seq``;
    without, all are put together and cut into rows, the last tokens left out.

    Tokens are in a file without a name in ``directory`` (None: the system's place for temporary files),
    which goes with the process: memory does not grow with the data.

    Raises:
        ConfigError: there is not one row.
        IoError: the file cannot be written.
    """

    def __init__(
        self, documents: Iterable[list[int]], *, seq: int, pad: int | None, directory: Path | None
    ) -> None:
        self.seq = seq
        self._pad = pad
        digest, ends = hashlib.sha256(), [0]
        place = str(directory or tempfile.gettempdir())
        with io_errors("set the tokens aside", place):
            self._file = tempfile.TemporaryFile(dir=directory)  # noqa: SIM115 - mapped for as long as it is used
            for tokens in documents:
                kept = tokens if pad is None else tokens[:seq]
                if not kept or (pad is not None and len(kept) < 2):  # nothing follows on the first
                    continue
                data = np.asarray(kept, dtype="<i4").tobytes()
                digest.update(len(kept).to_bytes(8, "little") + data)
                self._file.write(data)
                ends.append(ends[-1] + len(kept))
            self._file.flush()
        self.num_tokens = ends[-1]
        self._ends: npt.NDArray[np.int64] = np.asarray(ends, dtype=np.int64)
        self.num_rows = len(ends) - 1 if pad is not None else self.num_tokens // seq
        self.fingerprint = digest.hexdigest()[:16]
        if not self.num_rows:
            raise ConfigError(
                f"--data has {self.num_tokens} tokens and a row takes {seq if pad is None else 2}: give more "
                "data" + (", or a shorter --seq" if pad is None else "")
            )
        self._tokens: npt.NDArray[np.int32] = np.memmap(self._file, dtype="<i4", mode="r")

    def rows(self, numbers: Iterable[int]) -> Batch:
        """Return these rows as one batch."""
        ids, labels = zip(*(self._row(number) for number in numbers), strict=True)
        labelled = torch.from_numpy(np.stack(labels))
        batch = {"input_ids": torch.from_numpy(np.stack(ids)), "labels": labelled}
        return batch if self._pad is None else {**batch, "attention_mask": (labelled != IGNORED).long()}

    def _row(self, number: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        if self._pad is None:
            row = self._tokens[number * self.seq : (number + 1) * self.seq].astype(np.int64)
            return row, row
        tokens = self._tokens[self._ends[number] : self._ends[number + 1]].astype(np.int64)
        ids = np.full(self.seq, self._pad, dtype=np.int64)
        labels = np.full(self.seq, IGNORED, dtype=np.int64)
        ids[: len(tokens)] = labels[: len(tokens)] = tokens
        return ids, labels


class Order:
    """Which rows are learned from and which are held out; each epoch shuffles the former anew."""

    def __init__(self, num_rows: int, *, eval_share: float, seed: int) -> None:
        self._seed = seed
        shuffled = _shuffled(num_rows, seed, 0)
        held = max(1, round(eval_share * num_rows)) if eval_share else 0
        if held >= num_rows:
            raise ConfigError(
                f"--eval-share {eval_share:g} holds out {held} of {num_rows} rows and leaves none to learn "
                "from; give more --data, a shorter --seq or a smaller share"
            )
        self.held_out = np.sort(shuffled[:held])
        self.learned = np.sort(shuffled[held:])
        self._epoch = -1
        self._order = self.learned

    def __getitem__(self, index: int) -> int:
        """Return the row that is the ``index``-th to be learned from, over all epochs."""
        epoch, place = divmod(index, len(self.learned))
        if epoch != self._epoch:
            self._epoch = epoch
            self._order = self.learned[_shuffled(len(self.learned), self._seed, epoch + 1)]
        return int(self._order[place])


def num_learned(batch: Batch) -> int:
    """Return how many tokens of a batch a loss is made of: all with a label but the first of each row."""
    return int((batch["labels"][:, 1:] != IGNORED).sum())


def _shuffled(count: int, seed: int, stream: int) -> npt.NDArray[np.int64]:
    # Raw Philox words are stable across NumPy versions; Generator's shuffle need not be.
    words = np.random.Philox(key=[seed % 2**64, stream]).random_raw(count)
    return np.argsort(words, kind="stable").astype(np.int64)
