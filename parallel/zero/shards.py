"""One parameter, and the part of it that this rank updates."""

from __future__ import annotations

import torch

_HALVES = (torch.bfloat16, torch.float16)


class ParamShard:
    """A parameter cut into one part per rank; of this rank's part, the tensor that the optimizer updates.

    All parts have ``width`` elements in the row-major order of the parameter; the last ones may be short or
    empty. Where the cuts are depends on the number of ranks alone, so nothing else can change the numbers.

    ``master`` is None where this rank's part is empty. It is fp32 behind a 16-bit parameter and has the
    parameter's type otherwise. It is a view of the parameter (``aliased``) where type, device and memory
    order allow it, and costs nothing then.

    Args:
        param: changed in place: it gets ``dtype``. Must be contiguous in some order, floating-point.
        label: how errors call it.
        dtype: what the model computes in; ``None`` keeps the parameter's.
        home: where the master lives; ``None`` is where the parameter does.
    """

    def __init__(
        self,
        param: torch.Tensor,
        label: str,
        *,
        rank: int,
        world_size: int,
        dtype: torch.dtype | None,
        home: torch.device | None,
    ) -> None:
        self.param, self.label = param, label
        self.shape, self.numel = param.shape, param.numel()
        self.width = -(-self.numel // world_size)
        self.start = min(rank * self.width, self.numel)
        self.stop = min(self.start + self.width, self.numel)
        self.home = home or param.device
        self.master_dtype = torch.float32 if param.dtype in _HALVES else param.dtype
        dtype = dtype or param.dtype
        self.aliased = (
            param.is_contiguous() and dtype == self.master_dtype == param.dtype and param.device == self.home
        )
        # The master comes from the original weight, before the model's copy of it is rounded.
        self.master = self._make_master() if self.start < self.stop else None
        if param.dtype != dtype:
            param.data = param.data.to(dtype)
        self.note_param()

    @property
    def has_master(self) -> bool:
        """Say whether the master knows more than the parameter."""
        return self.param.dtype != self.master_dtype

    def _make_master(self) -> torch.Tensor:
        # detach(), not .data: a view that shares the parameter's version counter, so that autograd sees
        # every update.
        part = self.param.detach().reshape(-1)[self.start : self.stop]
        if not self.aliased:
            part = part.to(self.home, self.master_dtype, copy=True)
        return part.requires_grad_()

    def refresh_master(self) -> None:
        """Take the parameter's present values into the master."""
        if self.master is not None and not self.aliased:
            with torch.no_grad():
                self.master.copy_(self.param.detach().reshape(-1)[self.start : self.stop])
        self.note_param()

    def note_param(self) -> None:
        """Remember the parameter's memory and values as the ones that the master belongs to."""
        self._seen = self._marks()

    def is_as_noted(self) -> bool:
        """Say whether nobody has replaced the parameter's memory or, behind a master, its values."""
        return self._seen == self._marks()

    def _marks(self) -> tuple[int, int]:
        return self.param.data_ptr(), 0 if self.aliased else self.param._version

    # -- rows: (world size, width), padded with zeros -------------------------------------------------

    def put_rows(self, rows: torch.Tensor, values: torch.Tensor) -> None:
        """Write ``values`` (the parameter's shape) over ``rows``."""
        full, flat = self._split(values)
        if full:
            rows[:full].copy_(flat[: full * self.width].view(full, self.width))
        if full < len(rows):
            rows[full:].zero_()
            tail = flat[full * self.width :]
            rows[full, : tail.numel()].copy_(tail)

    def add_rows(self, rows: torch.Tensor, values: torch.Tensor) -> None:
        """Add ``values`` (the parameter's shape) to ``rows``."""
        full, flat = self._split(values)
        if full:
            rows[:full].add_(flat[: full * self.width].view(full, self.width))
        if full < len(rows):
            tail = flat[full * self.width :]
            rows[full, : tail.numel()].add_(tail)

    def _split(self, values: torch.Tensor) -> tuple[int, torch.Tensor]:
        """Return how many rows are full, and the values in one dimension."""
        return self.numel // self.width, values.detach().reshape(-1)

    def write_param(self, rows: torch.Tensor) -> None:
        """Take the values of the whole parameter from ``rows``."""
        with torch.no_grad():
            self.param.copy_(rows.reshape(-1)[: self.numel].view(self.shape))
        self.note_param()

    def fill_own(self, row: torch.Tensor) -> None:
        """Write this rank's part over ``row`` (width)."""
        row[self.stop - self.start :].zero_()
        if self.master is not None:
            row[: self.stop - self.start].copy_(self.master.detach())
