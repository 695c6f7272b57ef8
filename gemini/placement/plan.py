"""What a placement policy decides: plain data, carried out by the runtime."""

from __future__ import annotations

from dataclasses import dataclass, replace

from gemini.errors import OutOfBudgetError
from gemini.system.config import format_bytes


@dataclass(frozen=True)
class ModelDataSize:
    """What a policy needs to know of a model, in bytes.

    ``total_bytes``: all chunks. ``working_set_bytes``: what the optimizer needs on DEVICE at once for one
    piece of the model. ``largest_chunk_bytes``: the largest single chunk. ``operator_bytes``: the parameter
    chunks that the submodule ``operator_name`` needs at once, the most of all submodules.
    """

    total_bytes: int
    working_set_bytes: int
    largest_chunk_bytes: int
    operator_bytes: int = 0
    operator_name: str = ""


@dataclass(frozen=True)
class TierCapacity:
    """Hard byte budgets of the tiers; ``non_model_bytes`` is reserved on DEVICE at all times when given."""

    device_bytes: int
    host_bytes: int
    disk_bytes: int
    non_model_bytes: int | None = None


@dataclass(frozen=True)
class PlacementPlan:
    """How model data may use DEVICE during an iteration.

    ``device_limit_bytes``: soft limit for model data (operands of a running operator may exceed it, never the
    budget). ``reserve_bytes``: per moment, what the next period's non-model data needs; empty where nothing
    was recorded. ``sample_non_model``: whether the iteration should measure non-model memory.
    ``retention``: whether to plan what stays on DEVICE between uses, beyond the order of the step.
    """

    device_limit_bytes: int
    reserve_bytes: tuple[int, ...] = ()
    sample_non_model: bool = False
    retention: bool = False

    def withholding(self, nbytes: int, device_bytes: int) -> PlacementPlan:
        """Return the plan that leaves ``nbytes`` more of ``device_bytes`` free, at every moment."""
        if nbytes == 0:
            return self
        if not self.reserve_bytes:
            return replace(self, device_limit_bytes=max(0, self.device_limit_bytes - nbytes))
        least = device_bytes - self.device_limit_bytes
        return replace(self, reserve_bytes=tuple(max(one, least) + nbytes for one in self.reserve_bytes))


class DeviceTooSmallError(OutOfBudgetError):
    """DEVICE cannot hold at once what has to be there at once: ``reason``; with chunks of these sizes
    ``least_bytes`` could. ``otherwise``: another way out."""

    def __init__(self, reason: str, least_bytes: int, otherwise: str) -> None:
        self._reason = reason
        self._otherwise = otherwise
        self.least_bytes = least_bytes
        super().__init__(
            f"{reason}; raise device_bytes to at least {least_bytes} ({format_bytes(least_bytes)}) or "
            f"{otherwise}"
        )

    def asking(self, least_bytes: int) -> DeviceTooSmallError:
        """Return the same, where more is needed: a larger DEVICE has larger chunks."""
        return DeviceTooSmallError(self._reason, least_bytes, self._otherwise)


def check_fits(size: ModelDataSize, capacity: TierCapacity) -> None:
    """Refuse what no placement can fit.

    Raises:
        DeviceTooSmallError: with the numbers and the way out.
    """
    reserved = capacity.non_model_bytes or 0
    _check_total(size, capacity, reserved)
    room = capacity.device_bytes - reserved
    # Chunks that parameters share are a small part of DEVICE already, for their minimum gives way to it. Too
    # large is a chunk that one parameter has for itself, or all parameters of an operator together.
    largest = f"the largest chunk has {size.largest_chunk_bytes} bytes"
    budget = f"device_bytes is {capacity.device_bytes} with {reserved} reserved for non-model data"
    if size.operator_bytes > room:
        raise DeviceTooSmallError(
            f"submodule {size.operator_name!r} needs {size.operator_bytes} bytes of parameter chunks on "
            f"DEVICE at once but {budget}",
            max(size.operator_bytes, size.working_set_bytes) + reserved,
            f"split this submodule, or its parameters ({largest})",
        )
    if size.working_set_bytes > room:
        raise DeviceTooSmallError(
            f"updating one chunk needs {size.working_set_bytes} bytes on DEVICE at once (parameters, "
            f"gradients and optimizer states) but {budget}",
            size.working_set_bytes + reserved,
            f"split the largest parameter ({largest})",
        )


def _check_total(size: ModelDataSize, capacity: TierCapacity, reserved: int) -> None:
    """Refuse model data that all tiers together cannot hold."""
    room = capacity.device_bytes - reserved
    if size.total_bytes <= room or capacity.disk_bytes >= size.total_bytes:
        return
    # A chunk can leave DEVICE only for a free place: the working set must come and go besides what stays. Of
    # two tiers below each may have less left than a chunk takes; one that is smaller than that adds nothing.
    host, disk = capacity.host_bytes, capacity.disk_bytes
    below = max(host, disk, host + disk - size.largest_chunk_bytes)
    passing = size.working_set_bytes + size.largest_chunk_bytes
    held = room - passing + below
    if size.total_bytes > held:
        wanted = size.total_bytes - (room - passing)  # below DEVICE
        host_least = min(wanted, wanted - disk + size.largest_chunk_bytes)
        disk_least = min(size.total_bytes, wanted, wanted - host + size.largest_chunk_bytes)
        more_disk = "raise disk_bytes to" if disk else "give disk_dir and disk_bytes of"
        raise DeviceTooSmallError(
            f"the model data is {size.total_bytes} bytes but the tiers hold {max(held, 0)} besides the "
            f"largest update: DEVICE {room}, HOST {host}, DISK {disk}",
            min(size.total_bytes, size.total_bytes + passing - below) + reserved,
            f"raise host_bytes to at least {host_least} ({format_bytes(host_least)}), or "
            f"{more_disk} at least {disk_least} ({format_bytes(disk_least)})",
        )
