"""The states of those parameters of one optimizer that live in files, and their steps."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from gemini import _C
from gemini.chunk.chunk import BLOCK_NUMEL
from gemini.optim.adam_rows import AdamRow, KeptAdamTable
from gemini.optim.kernels import AdamHyper, AdamStep, GradScale
from gemini.optim.state_file import Batch, Segment, Source, State, StateFile, state_bytes
from gemini.optim.state_format import ARRAYS, StateFormat
from gemini.optim.state_ring import Extent, StateRing
from gemini.optim.step_rows import Member
from gemini.system.threads import usable_processors


@dataclass(frozen=True)
class Update:
    """One parameter's share of a step: everything is checked, nothing is changed yet.

    ``group`` is its index in ``param_groups``, ``grad`` is in its memory order.
    """

    group: int
    grad: torch.Tensor
    source: Source | dict[str, Any]


# How C++ looks at a tensor in one call; torch before 2.10 has none.
_EXCHANGE = getattr(torch.Tensor, "__dlpack_c_exchange_api__", None)


def choose_for_disk(
    params: Sequence[torch.Tensor], nbytes: float, state_format: StateFormat
) -> dict[torch.Tensor, int]:
    """Choose CPU parameters, in order, whose states have ``nbytes``: of the last one the first elements only.

    Return the number of elements of each; together they have up to one block of 256 elements more.
    """
    chosen: dict[torch.Tensor, int] = {}
    for param in params:
        if nbytes <= 0:
            break
        if param.device.type != "cpu":
            continue
        blocks = math.ceil(nbytes / state_bytes(param, BLOCK_NUMEL, state_format))
        chosen[param] = min(blocks * BLOCK_NUMEL, param.numel())
        nbytes -= state_bytes(param, chosen[param], state_format)
    return chosen


class DiskStates:
    """Owns a file for every time that parameters were added, and the buffers; not thread-safe."""

    def __init__(
        self, directories: Sequence[str] | None, state_format: StateFormat, *, checksums: bool = False
    ) -> None:
        """Own nothing yet; arguments as for :class:`StateFile`."""
        self._directories = directories
        self._format = state_format
        self._checksums = checksums
        self._ring = StateRing()
        self._files: list[StateFile] = []
        self._file_of: dict[torch.Tensor, StateFile] = {}
        self._numels: dict[torch.Tensor, int] = {}  # that have a place in a file

    def __contains__(self, param: torch.Tensor) -> bool:
        return param in self._file_of

    @property
    def nbytes(self) -> int:
        """Bytes of states that have a place in a file."""
        return sum(state_bytes(param, numel, self._format) for param, numel in self._numels.items())

    @property
    def state_format(self) -> StateFormat:
        """How the moments are kept."""
        return self._format

    @property
    def ring(self) -> StateRing:
        """The buffers."""
        return self._ring

    def file_of(self, param: torch.Tensor) -> StateFile | None:
        """Return the file that has a place for ``param``'s state."""
        return self._file_of.get(param)

    def reserve(self, params: Sequence[torch.Tensor], fraction: float) -> None:
        """Reserve disk space until ``fraction`` of the state bytes of ``params`` have it.

        Raises:
            IoError: it cannot be had; nothing has changed.
        """
        wanted = fraction * sum(map(self._format.nbytes, params))
        without = [param for param in params if param not in self._file_of]
        numels = choose_for_disk(without, wanted - self.nbytes, self._format)
        if numels:
            file = StateFile(self._directories, numels, self._format, self._ring, checksums=self._checksums)
            self._files.append(file)
            self._file_of.update(dict.fromkeys(numels, file))
            self._numels.update(numels)

    def batches_of(
        self, params: Collection[torch.Tensor]
    ) -> tuple[list[tuple[StateFile, Batch, Extent]], list[tuple[StateFile, Batch, torch.Tensor]]]:
        """Return the batches that have something of ``params``: those in files, and those in memory."""

        def has_any(batch: Batch) -> bool:
            return any(segment.param in params for segment in batch.segments)

        stored, held = [], []
        for file in self._files:
            pairs = zip(file.batches, file.extents, strict=True)
            stored += [(file, batch, extent) for batch, extent in pairs if has_any(batch)]
            held += [(file, batch, memory) for batch, memory in file.rests if has_any(batch)]
        return stored, held

    def keep(self, params: Sequence[torch.Tensor]) -> None:
        """Note that the states of ``params`` are here now, in the order their parameters have."""
        for param in params:
            self._file_of[param].keep(param)

    def settle(self) -> None:
        """Wait for the last step's writes. Raises IoError: states of it are lost."""
        self._ring.settle()

    def fetch(self, states: Mapping[torch.Tensor, Any]) -> dict[torch.Tensor, dict[str, torch.Tensor]]:
        """Return copies of the arrays that are here and not in ``states``. Raises IoError."""
        found = {
            param: file.empty(param)
            for param, file in self._file_of.items()
            if file.holds(param) and states.get(param) and "exp_avg" not in states[param]
        }
        if not found:
            return {}
        stored, held = self.batches_of(found)

        def take(index: int, buffer: torch.Tensor) -> None:
            file, batch, _extent = stored[index]
            file.take(batch, buffer, found)

        self._ring.read([extent for _file, _batch, extent in stored], take)
        for file, batch, memory in held:
            file.take(batch, memory, found)
        return found

    def close(self) -> None:
        """Give the files back; the states in them are lost. Idempotent."""
        self._ring.close()
        self._files.clear()
        self._file_of.clear()
        self._numels.clear()


def _num_threads() -> int:
    # A processor is left to the file's own thread: a disk that waits for it costs more than a kernel does.
    return max(1, min(torch.get_num_threads(), len(usable_processors()) - 1))


@dataclass(frozen=True)
class _Stop:
    """A batch and its rows in the table."""

    file: StateFile
    batch: Batch
    first: int
    last: int


class DiskRows:
    """Rows of parameters whose states are in files, for the batches that have them.

    As :class:`StepRows`, and with its way of counting steps. A row is a segment. What changes is where a
    batch's buffer is, so the table has its segments' offsets until the batch has been read.
    """

    def __init__(
        self,
        members: Sequence[Member],
        sources: Mapping[torch.Tensor, Source | State],
        disk: DiskStates,
        all_states: dict[torch.Tensor, Any],
    ) -> None:
        """Build the table of ``members``, of which there is at least one; all have been checked.

        ``sources``: where the first run gets their states from; after it they are in the files and no longer
        in ``all_states``, the optimizer's. ``members`` have dicts that are in it.
        """
        self.device = torch.device("cpu")
        self.params = [member.param for member in members]
        self._members, self._disk, self._all_states = list(members), disk, all_states
        self._sources: Mapping[torch.Tensor, Source | State] | None = sources
        self._watch: _C.TensorWatch | None = None
        self._groups = np.array([member.group for member in members], dtype=np.int64)
        self._counts = np.array([int(member.state.get("step", 0)) for member in members], dtype=np.float32)
        self._make_table({member.param: index for index, member in enumerate(members)})

    def __len__(self) -> int:
        return len(self.params)

    def take_gradients(self, params: list[list[torch.Tensor]], all_states: dict[torch.Tensor, Any]) -> bool:
        """Take the gradients of ``params``, by group; as :meth:`StepRows.take_gradients`."""
        # Arrays that were put into a state since are to be used; the watch knows the earlier ones only.
        if self._watch is None or any("exp_avg" in state for state in self._states):
            return False
        return self._table.take_gradients(self._watch, params, all_states)

    def let_gradients_go(self) -> None:
        """Keep no gradients any longer."""
        self._table.let_gradients_go()

    def run(self, hypers: Sequence[AdamHyper], scale: GradScale) -> None:
        """Update all rows and count the step; ``hypers`` by group.

        Raises:
            IoError: a transfer failed: some parameters and states are new, others old.
        """
        keys = self._groups + len(hypers) * (self._counts.astype(np.int64) + 1)
        distinct, indices = np.unique(keys, return_inverse=True)
        self._table.set_steps(indices[self._owners])
        steps = [AdamStep(hypers[key % len(hypers)], int(key // len(hypers)), scale) for key in distinct]
        self._options = [step.options() for step in steps]
        self._threads = _num_threads()
        self._disk.ring.update(self._extents, self._old, self._visit)
        for stop, memory in self._held:
            self._update_batch(stop, memory)
        self._counts += 1.0
        if self._sources is not None:
            self._settle_in()

    def _make_table(self, index_of: Mapping[torch.Tensor, int]) -> None:
        rows: list[AdamRow] = []
        owners: list[int] = []
        offsets: list[list[int]] = []

        def stop_at(file: StateFile, batch: Batch) -> _Stop:
            first = len(rows)
            for segment in batch.segments:
                owner = index_of.get(segment.param)
                if owner is not None:
                    rows.append(self._row(owner, segment))
                    owners.append(owner)
                    offsets.append([segment.offsets.get(name, -1) for name in ARRAYS])
            return _Stop(file, batch, first, len(rows))

        stored, held = self._disk.batches_of(index_of.keys())
        self._stops = [stop_at(file, batch) for file, batch, _extent in stored]
        self._held = [(stop_at(file, batch), memory) for file, batch, memory in held]
        self._extents = [extent for _file, _batch, extent in stored]
        self._old = [file.has_any_of(batch) for file, batch, _extent in stored]
        self._owners = np.array(owners, dtype=np.int64)
        self._table = KeptAdamTable(rows, owners)
        by_name = zip(ARRAYS, np.array(offsets, dtype=np.int64).T, strict=True)
        self._offsets = {name: starts for name, starts in by_name if starts.max() >= 0}

    def _row(self, owner: int, segment: Segment) -> AdamRow:
        member = self._members[owner]
        return AdamRow(
            member.param,
            member.grad,
            dict.fromkeys(segment.offsets),  # where they are is known once a batch was read
            state_dtype=self._disk.state_format.state_dtype,
            elements=slice(segment.start, segment.start + segment.numel),
        )

    def _visit(self, index: int, buffer: torch.Tensor) -> None:
        self._update_batch(self._stops[index], buffer)

    def _update_batch(self, stop: _Stop, memory: torch.Tensor) -> None:
        if self._sources is not None:
            stop.file.put(stop.batch, memory, self._sources)
        here = slice(stop.first, stop.last)
        self._table.place_states(here, self._offsets, memory)
        self._table.run_on_cpu(self._options, threads=self._threads, rows=here)

    def _settle_in(self) -> None:
        """Let go of the states that are in the files now, and watch what the table relies on."""
        states = [member.state for member in self._members]
        for state, count in zip(states, torch.from_numpy(self._counts).unbind(), strict=True):
            others = {name: value for name, value in state.items() if name not in ("step", *ARRAYS)}
            state.clear()  # in place: other rows know it
            state.update({"step": count, **others})  # first, as in torch's states
        self._disk.keep(self.params)
        all_states = list(self._all_states.values())
        # The watch compares identities and holds nothing: what it knows must not go away before it does.
        self._states = states
        self._kept = ([list(state.values()) for state in states], all_states)
        self._watch = _C.TensorWatch(
            self.params,
            self._groups.tolist(),
            states,
            ["step"],
            [member.grad for member in self._members],
            all_states,
            _EXCHANGE,
        )
        self._old = [True] * len(self._old)
        self._sources, self._members = None, []
