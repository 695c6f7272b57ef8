"""CutGradient: the gradient of a parameter that lies in several chunks, itself in as many chunks.

Rows arrive one by one. A part that no backward pass has reached takes no memory and counts as zeros.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from math import prod

import torch
from torch._C import DisableTorchFunctionSubclass as PlainTensors
from torch._C._functorch import is_legacy_batchedtensor

from gemini.runtime.gate.gate import CutRef, TensorState
from gemini.runtime.gate.guards import span_bytes
from gemini.runtime.storage.gradient import Left, SlotGradient


class RowUse:
    """A use of some rows of a parameter by one operator, as long as its graph may run backward."""

    __slots__ = ("_uses", "rows")

    def __init__(self, uses: Counter[int], rows: range) -> None:
        self._uses, self.rows = uses, rows
        uses.update(rows)

    @property
    def is_alone(self) -> bool:
        """Whether no other operator uses any of the rows."""
        return all(self._uses[row] == 1 for row in self.rows)

    def __del__(self) -> None:
        for row in self.rows:
            if self._uses[row] > 1:
                self._uses[row] -= 1
            else:
                del self._uses[row]


class CutGradient(SlotGradient):
    """Gradient of a contiguous parameter that is cut between rows. Each part is in its chunk, or counts as
    zeros."""

    __slots__ = ("_made", "_part_numel", "_taken", "_uses")

    ref: CutRef

    def __init__(self, name: str, ref: CutRef, view: torch.Tensor) -> None:
        super().__init__(name, ref.manager, ref, view)
        self._made: set[int] = set()  # parts with content
        self._taken: set[int] = set()  # parts that an update has taken
        self._part_numel = ref.part_bytes // view.itemsize
        self._uses: Counter[int] = Counter()  # uses of rows by operators of live graphs

    # -- rows, as backward makes them ----------------------------------------------------------------

    def row_use(self, first: int, numel: int) -> RowUse:
        """Return an object that counts as a use of the rows with elements ``[first, first + numel)`` while it
        lives."""
        row_numel = prod(self.view.shape[1:])
        return RowUse(self._uses, range(first // row_numel, -(-(first + numel) // row_numel)))

    def takes_rows(self, use: RowUse, grad: torch.Tensor) -> bool:
        """Say whether ``grad``, of the rows of ``use``, may be added directly. If several operators use a
        row, autograd must add up their gradients first: adding them one by one would change the order and the
        bits."""
        plain = grad.layout is torch.strided and not is_legacy_batchedtensor(grad)
        return plain and not torch.is_grad_enabled() and not self._gate.resident and use.is_alone

    def collect_rows(
        self, first: int, shape: Sequence[int], stride: Sequence[int], grad: torch.Tensor
    ) -> None:
        """Add the gradient of a view of the parameter; ``first`` is the view's first element.

        Raises:
            ConfigError: it belongs to a loss that was not scaled.
        """
        with PlainTensors():
            grad = self._gate.gradient_scale.admit(grad)
            self._gate.count_gradient()
            if self._loose is not None:
                self._within(self._loose, first, shape, stride).add_(grad)
            else:
                self._add(self._within(self.view, first, shape, stride), grad)
            self._left = Left.NOTHING

    @staticmethod
    def _within(whole: torch.Tensor, first: int, shape: Sequence[int], stride: Sequence[int]) -> torch.Tensor:
        return whole.as_strided(shape, stride, whole.storage_offset() + first)

    def _add(self, into: torch.Tensor, grad: torch.Tensor) -> None:
        """Add to a part of the view, one chunk at a time."""
        parts = self._parts_of(into)
        if len(parts) > 1:
            for row, given in zip(into, grad, strict=True):
                self._add(row, given)
        elif parts:
            (part,) = parts
            with self._pinned(part):  # runs the update that has taken the part first
                self._taken.discard(part)
                if part in self._made:
                    into.add_(grad)
                elif into.numel() == self._part_numel:
                    into.copy_(grad)
                    if self._left is Left.ZEROS:  # plain torch adds it to zeros: -0.0 becomes 0.0
                        into.add_(0.0)
                else:
                    self._flat(part).zero_()
                    into.add_(grad)
                self._note_made(part)

    def _parts_of(self, tensor: torch.Tensor) -> range:
        begin = (tensor.data_ptr() - self.ref.begin) // self.ref.part_bytes
        end = tensor.data_ptr() + span_bytes(tensor) - self.ref.begin
        return range(begin, -(-end // self.ref.part_bytes))

    # -- parts -------------------------------------------------------------------------------------------

    def _flat(self, part: int) -> torch.Tensor:
        begin = part * self._part_numel
        return self.view.as_strided((self._part_numel,), (1,), self.view.storage_offset() + begin)

    def _pinned(self, part: int) -> AbstractContextManager[None]:
        tensors = (self.ref.tensors[part],)
        return self._gate.operator(tensors, tensors)

    def _note_made(self, part: int) -> None:
        self._made.add(part)
        self._in_chunk = True

    def _parts_under(self, start: int, stop: int) -> range:
        if self._loose is not None:
            return range(0)
        return range(start // self._part_numel, -(-stop // self._part_numel))

    def tensors_under(self, start: int, stop: int) -> tuple[int, ...]:
        """Return the ids to pin before elements ``[start, stop)`` of :attr:`value` are used."""
        return tuple(self.ref.tensors[part] for part in self._parts_under(start, stop))

    def unmade_under(self, start: int, stop: int) -> tuple[int, ...]:
        """Return the ids among :meth:`tensors_under` that :meth:`make_under` writes to."""
        parts = self._parts_under(start, stop)
        return tuple(self.ref.tensors[part] for part in parts if part not in self._taken)

    def make_under(self, start: int, stop: int) -> None:
        """Fill elements ``[start, stop)``, which are pinned for an update, with zeros if no gradient has
        arrived for them."""
        for part in self._parts_under(start, stop):
            if part not in self._taken:
                self._flat(part).zero_()
                self._taken.add(part)

    def end_under(self, start: int, stop: int) -> None:
        """Free the parts that end within ``[start, stop)``, after an update has used these elements."""
        for part in self._parts_under(start, stop):
            tensor = self.ref.tensors[part]
            ends = start < (part + 1) * self._part_numel <= stop
            if ends and self._gate.tensors.state(tensor) == TensorState.HOLD:
                self._gate.chunks.free((tensor,))
                self._taken.discard(part)

    def hand_over(self) -> None:
        """Leave the existing parts to an update; parts that arrive later belong to the next gradient."""
        if self._loose is None:
            self._taken |= self._made
            self._made.clear()
            self._in_chunk = False

    @property
    def _is_taken(self) -> bool:
        """False: parts that an update has taken are no longer part of the gradient."""
        return False

    def _make_all(self) -> None:
        """Fill all missing parts with zeros, one by one."""
        for part, tensor in enumerate(self.ref.tensors):
            if part not in self._made:
                with self._gate.operator((tensor,), (tensor,)), torch.no_grad(), PlainTensors():
                    self._flat(part).zero_()
                self._note_made(part)

    # -- the whole ---------------------------------------------------------------------------------------

    def gathered(self) -> torch.Tensor:
        """Return the whole gradient, which must exist, flat in the parameter's memory order: a copy if it is
        in chunks. Extra memory: one parameter."""
        if self._loose is not None:
            return self._loose
        whole = torch.zeros_like(self.view)
        for part in sorted(self._made):
            begin = part * self._part_numel
            with self._gate.operator((self.ref.tensors[part],)), torch.no_grad():
                whole.view(-1)[begin : begin + self._part_numel].copy_(self._flat(part))
        return whole

    def held(self) -> Iterator[tuple[tuple[int, ...], torch.Tensor]]:
        """Yield the existing parts of the gradient: the ids to pin, and the values."""
        if self._loose is not None:
            yield (), self._loose
        elif self.exists:
            for part in sorted(self._made):
                yield (self.ref.tensors[part],), self._flat(part)

    def alias(self) -> torch.Tensor | None:
        """Return the value of ``param.grad`` as :meth:`SlotGradient.alias`; missing parts become zeros in
        memory."""
        self._gate.lock.refuse(self.ref.tensors)
        self.make_zeros()
        if self._loose is None and self.exists:
            self._make_all()
        return super().alias()

    def fill_zero(self) -> None:
        """Set the gradient to zeros if it exists or the last step has taken it."""
        if self._loose is not None or not self.exists:
            super().fill_zero()
            return
        for part in sorted(self._made):
            with self._pinned(part):
                self._flat(part).zero_()

    def use_up(self) -> None:
        """Free the parts that are in chunks. Raises as :meth:`SlotGradient.use_up`."""
        if not self._in_chunk:
            return
        self._gate.backward_pins.settle()
        try:
            for part, tensor in enumerate(self.ref.tensors):
                if part not in self._taken and self._gate.tensors.state(tensor) != TensorState.FREE:
                    self._gate.chunks.free((tensor,))
                self._made.discard(part)
        finally:
            self._in_chunk = bool(self._made)
            if not self._in_chunk:
                self.retire_aliases()

    def _write(self, grad: torch.Tensor, add: bool) -> None:
        if not add:
            self._made.clear()
            self._in_chunk = True
        if grad.dim() == 0:  # zeros: no part needs memory
            return
        with PlainTensors():
            rows = self._part_numel // prod(self.view.shape[1:])
            for into, given in zip(self.view.split(rows), grad.split(rows), strict=True):
                self._add(into, given)
