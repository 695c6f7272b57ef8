"""The rows that each step learns from: tokens of documents in a file, cut, joined or padded to rows.

The rows of a step are a pure function of ``(tokens, seed, step)``, so a resumed run sees exactly the rows of
an uninterrupted one.
"""

from __future__ import annotations

import hashlib
import tempfile
from abc import ABC, abstractmethod
from array import array
from bisect import bisect_left, insort
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from gemini.errors import ConfigError
from gemini.jobs.finetune.encoding import EncodedDocument
from gemini.jobs.finetune.record_kinds import AUTO, TEXT
from gemini.system.files import io_errors

IGNORED = -100  # label that the loss ignores
WHOLE, CUT, JOINED = "whole", "cut", "joined"
DOCUMENTS = (AUTO, WHOLE, CUT, JOINED)
PADDED = "padded"  # without packing
PAIRS = "pairs"  # preferences: a row with the chosen answer, and a row with the rejected answer
_PACKED_AT_ONCE = 1000
Piece = tuple[int, int]  # (start of its tokens, number of tokens)


@dataclass(frozen=True)
class Batch:
    """Rows for a model.

    Attributes:
        inputs: the model's arguments, int64 ``[batch, seq]``.
        num_tokens: number of tokens that are not padding.
        num_pairs: number of preference pairs. The first half of the rows has the chosen answers, the second
            half the rejected ones in the same order.
        reference: the reference's log probability of each answer, float32 ``[batch]``, if it was computed
            before.
    """

    inputs: dict[str, Tensor]
    num_tokens: int
    num_pairs: int = 0
    reference: Tensor | None = None

    @property
    def num_learned(self) -> int:
        """Number of tokens in the loss: all with a label, except the first token of each row."""
        return int((self.inputs["labels"][:, 1:] != IGNORED).sum())

    @property
    def weight(self) -> int:
        """Number of items over which its loss is the mean: pairs, or tokens."""
        return self.num_pairs or self.num_learned


class Samples:
    """Rows of ``seq`` tokens, made from documents in one of five layouts:

    - ``"whole"``: a row has as many whole documents as fit; a document longer than a row loses its end.
    - ``"cut"``: all documents are concatenated and cut into rows. As in ``"whole"``, attention does not cross
    documents.
    - ``"joined"``: as ``"cut"``, but attention crosses documents.
    - ``"padded"``: each document is a row of its own, truncated or padded.
    - ``"pairs"``: as ``"padded"``, but documents come in pairs, and row numbers are those of pairs.

    ``"auto"`` is ``"cut"`` if the first document is a plain text, otherwise ``"whole"``. Rows without a token
    to learn are dropped.

    Tokens are in an unnamed file in ``directory`` (None: the system's temporary directory), which ends with
    the process. It takes 4 bytes per token, and memory takes about 28 bytes per document.

    Raises:
        ConfigError: there is not a single row.
        IoError: the file cannot be written.
    """

    def __init__(
        self,
        documents: Iterable[EncodedDocument],
        *,
        seq: int,
        layout: str,
        pad: int,
        directory: Path | None,
        option: str = "--data",
    ) -> None:
        self.seq = seq
        self._pad = pad
        self._rows = _Rows()
        self.num_tokens = self.num_learned = self.num_cut = self.num_lost = 0
        self.lengths = array("i")  # tokens of each document
        digest = hashlib.sha256()
        place = str(directory or tempfile.gettempdir())
        with io_errors("store the tokens", place):
            self._file = tempfile.TemporaryFile(dir=directory)  # noqa: SIM115 - mapped for as long as it is used
        layouter: _Layouter | None = None
        for document in documents:
            if layouter is None:
                layout = _chosen(layout, document)
                layouter = _LAYOUTERS[layout](self._rows, seq)
            tokens = np.asarray(document.ids, dtype="<i4")
            learned = np.ones(len(tokens), dtype=bool)
            if document.learned is not None:
                learned = np.asarray(document.learned, dtype=bool)
            data = np.where(learned, tokens, ~tokens).tobytes()
            digest.update(len(tokens).to_bytes(8, "little") + data)
            with io_errors("store the tokens", place):
                self._file.write(data)
            layouter.add(self.num_tokens, learned)
            self.num_tokens += len(tokens)
            self.lengths.append(len(tokens))
            self.num_learned += int(learned.sum())
        if layouter is not None:
            layouter.finish()
            self.num_cut, self.num_lost = layouter.num_cut, layouter.num_lost
        with io_errors("store the tokens", place):
            self._file.flush()
        self.layout = layout
        self.num_rows = len(self._rows) // (2 if layout == PAIRS else 1)
        self.fingerprint = digest.hexdigest()[:16]
        if not self.num_rows:
            found = f"{option} has {self.num_tokens} tokens, {self.num_learned} of them in the loss"
            if not self.num_lost:
                raise ConfigError(f"{found}, which is less than one row of --seq {seq}; give more data")
            raise ConfigError(
                f"{found}, but no answer starts within the {seq} tokens of a row; give a longer "
                "--seq, or more data"
            )
        self._tokens: npt.NDArray[np.int32] = np.memmap(self._file, dtype="<i4", mode="r")
        self._reference: npt.NDArray[np.float32] | None = None

    def stored(self, first: int, count: int) -> npt.NDArray[np.int32]:
        """Return ``count`` tokens of the concatenated documents from ``first`` on. Tokens that the loss
        ignores are stored inverted (``~token``)."""
        return self._tokens[first : first + count]

    def refer_to(self, values: npt.NDArray[np.float32]) -> None:
        """Attach the reference's log probabilities to all batches: float32 ``[pairs, 2]``, chosen and
        rejected answer."""
        self._reference = values

    def rows(self, numbers: Iterable[int]) -> Batch:
        """Return these rows as one batch."""
        numbers = list(numbers)
        num_pairs = len(numbers) if self.layout == PAIRS else 0
        reference = None
        if self._reference is not None:
            reference = torch.from_numpy(self._reference[numbers].T.flatten())
        if num_pairs:
            numbers = [2 * number + which for which in (0, 1) for number in numbers]
        ids, labels, positions, lengths = zip(*(self._row(number) for number in numbers), strict=True)
        inputs = {"input_ids": _stacked(ids), "labels": _stacked(labels)}
        if self.layout in (PADDED, PAIRS):
            inputs["attention_mask"] = (torch.arange(self.seq) < torch.tensor(lengths)[:, None]).long()
        elif self.layout != JOINED:
            inputs["position_ids"] = _stacked(positions)
        return Batch(inputs, sum(lengths), num_pairs, reference)

    def _row(
        self, number: int
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], npt.NDArray[np.int64], int]:
        ids = np.full(self.seq, self._pad, dtype=np.int64)
        labels = np.full(self.seq, IGNORED, dtype=np.int64)
        positions = np.zeros(self.seq, dtype=np.int64)
        filled = 0
        for start, length in self._rows[number]:
            stored = self._tokens[start : start + length].astype(np.int64)
            row = slice(filled, filled + length)
            ids[row] = np.where(stored < 0, ~stored, stored)
            labels[row] = np.where(stored < 0, IGNORED, stored)
            positions[row] = np.arange(length)
            if self.layout in (WHOLE, CUT):
                labels[filled] = IGNORED  # the token before it belongs to another document
            filled += length
        positions[filled:] = np.arange(self.seq - filled)  # the padding is a separate document
        return ids, labels, positions, filled


def _stacked(rows: tuple[npt.NDArray[np.int64], ...]) -> Tensor:
    return torch.from_numpy(np.stack(rows))


def _chosen(layout: str, first: EncodedDocument) -> str:
    if layout != AUTO:
        return layout
    return CUT if first.document.kind == TEXT else WHOLE


class _Rows:
    """The pieces of each row: 12 bytes per piece, and 8 per row."""

    def __init__(self) -> None:
        self._starts, self._lengths, self._ends = array("q"), array("i"), array("q", [0])

    def __len__(self) -> int:
        return len(self._ends) - 1

    def __getitem__(self, number: int) -> list[Piece]:
        row = slice(self._ends[number], self._ends[number + 1])
        return list(zip(self._starts[row], self._lengths[row], strict=True))

    def append(self, pieces: Iterable[Piece]) -> None:
        """Append a row."""
        for start, length in pieces:
            self._starts.append(start)
            self._lengths.append(length)
        self._ends.append(len(self._starts))


class _Layouter(ABC):
    """Arranges documents in rows. ``num_cut`` documents lost their end; ``num_lost`` had nothing left to
    learn."""

    def __init__(self, rows: _Rows, seq: int) -> None:
        self.num_cut = self.num_lost = 0
        self._rows = rows
        self._seq = seq

    @abstractmethod
    def add(self, start: int, learned: npt.NDArray[np.bool_]) -> None:
        """Add a document with its first token at ``start``."""

    def finish(self) -> None:  # noqa: B027 - not every layout has pending documents
        """Make the rows of pending documents."""

    def _kept(self, start: int, learned: npt.NDArray[np.bool_]) -> Piece | None:
        """Return the beginning of a document that fits in a row; None if it has nothing to learn."""
        kept = learned[: self._seq]
        self.num_cut += len(kept) < len(learned)
        if not kept[1:].any():  # the first token cannot be predicted
            self.num_lost += len(learned) > 0
            return None
        return start, len(kept)


class _Padded(_Layouter):
    def add(self, start: int, learned: npt.NDArray[np.bool_]) -> None:
        piece = self._kept(start, learned)
        if piece is not None:
            self._rows.append([piece])


class _Pairs(_Layouter):
    def __init__(self, rows: _Rows, seq: int) -> None:
        super().__init__(rows, seq)
        self._pair: list[Piece | None] = []

    def add(self, start: int, learned: npt.NDArray[np.bool_]) -> None:
        self._pair.append(self._kept(start, learned))
        if len(self._pair) < 2:
            return
        kept = [piece for piece in self._pair if piece is not None]
        if len(kept) == 2:
            for piece in kept:
                self._rows.append([piece])
        self._pair.clear()


class _Whole(_Layouter):
    def __init__(self, rows: _Rows, seq: int) -> None:
        super().__init__(rows, seq)
        self._pieces: list[Piece] = []

    def add(self, start: int, learned: npt.NDArray[np.bool_]) -> None:
        piece = self._kept(start, learned)
        if piece is not None:
            self._pieces.append(piece)
        if len(self._pieces) == _PACKED_AT_ONCE:
            self.finish()

    def finish(self) -> None:
        for row in best_fit(self._pieces, self._seq):
            self._rows.append(row)
        self._pieces.clear()


class _Cut(_Layouter):
    _is_joined = False

    def __init__(self, rows: _Rows, seq: int) -> None:
        super().__init__(rows, seq)
        self._row: list[Piece] = []
        self._filled = 0
        self._teaches = False

    def add(self, start: int, learned: npt.NDArray[np.bool_]) -> None:
        at = 0
        while at < len(learned):
            length = min(self._seq - self._filled, len(learned) - at)
            # The first token of a row has no predecessor, nor has the first of a document unless joined.
            skipped = not (self._is_joined and self._filled)
            self._teaches |= bool(learned[at + skipped : at + length].any())
            self._row.append((start + at, length))
            self._filled += length
            at += length
            if self._filled == self._seq:
                self.finish()

    def finish(self) -> None:
        if self._teaches:
            self._rows.append(self._row)
        self._row, self._filled, self._teaches = [], 0, False


class _Joined(_Cut):
    _is_joined = True


_LAYOUTERS: dict[str, type[_Layouter]] = {
    WHOLE: _Whole,
    CUT: _Cut,
    JOINED: _Joined,
    PADDED: _Padded,
    PAIRS: _Pairs,
}


def best_fit(pieces: list[Piece], room: int) -> Iterator[list[Piece]]:
    """Yield rows of at most ``room`` tokens. Pieces are placed longest first, each into the row with the
    smallest space that holds it, the oldest among equal rows."""
    rows: list[list[Piece]] = []
    spaces: list[int] = []  # distinct free sizes of rows that are not full, ascending
    with_space: dict[int, deque[int]] = defaultdict(deque)
    for piece in sorted(pieces, key=lambda each: -each[1]):
        at = bisect_left(spaces, piece[1])
        if at < len(spaces):
            space = spaces[at]
            row = with_space[space].popleft()
            if not with_space[space]:
                del spaces[at]
        else:
            space, row = room, len(rows)
            rows.append([])
        rows[row].append(piece)
        space -= piece[1]
        if space:
            if not with_space[space]:
                insort(spaces, space)
            with_space[space].append(row)
    yield from rows


class Order:
    """Divides rows into learned and held-out ones. Each epoch shuffles the learned rows again."""

    def __init__(self, num_rows: int, *, eval_share: float, seed: int) -> None:
        self._seed = seed
        shuffled = _shuffled(num_rows, seed, 0)
        held = max(1, round(eval_share * num_rows)) if eval_share else 0
        if held >= num_rows:
            raise ConfigError(
                f"--eval-share {eval_share:g} holds out {held} of {num_rows} rows and leaves none to "
                "train on; give more --data, a shorter --seq or a smaller share"
            )
        self.held_out = np.sort(shuffled[:held])
        self.learned = np.sort(shuffled[held:])
        self._epoch = -1
        self._order = self.learned

    def __getitem__(self, index: int) -> int:
        """Return the row that is learned at position ``index``, counted over all epochs."""
        epoch, place = divmod(index, len(self.learned))
        if epoch != self._epoch:
            self._epoch = epoch
            self._order = self.learned[_shuffled(len(self.learned), self._seed, epoch + 1)]
        return int(self._order[place])


def _shuffled(count: int, seed: int, stream: int) -> npt.NDArray[np.int64]:
    # Raw Philox words are stable across NumPy versions; Generator's shuffle need not be.
    words = np.random.Philox(key=[seed % 2**64, stream]).random_raw(count)
    return np.argsort(words, kind="stable").astype(np.int64)
