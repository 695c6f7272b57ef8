"""The states of those parameters of one optimizer that live in files, and their steps."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from .kernels import AdamHyper, AdamStep, GradScale, Row, make_row, run_rows
from .state_file import Segment, Source, StateFile
from .state_format import ARRAYS, StateFormat


@dataclass(frozen=True)
class Update:
    """One parameter's share of a step: everything is checked, nothing is changed yet.

    ``group`` is its index in ``param_groups``, ``grad`` is in its memory order.
    """

    group: int
    grad: torch.Tensor
    source: Source | dict[str, Any]


def choose_for_disk(
    params: Sequence[torch.Tensor], fraction: float, state_format: StateFormat
) -> list[torch.Tensor]:
    """Choose whole CPU parameters, in order, until ``fraction`` of the state bytes is reached."""
    wanted = fraction * sum(map(state_format.nbytes, params))
    chosen: list[torch.Tensor] = []
    nbytes = 0
    for param in params:
        if nbytes >= wanted:
            break
        if param.device.type == "cpu":
            chosen.append(param)
            nbytes += state_format.nbytes(param)
    return chosen


class DiskStates:
    """Owns one file for every time that parameters were added; not thread-safe."""

    def __init__(self, directory: str | None, state_format: StateFormat) -> None:
        """Own nothing yet; ``directory`` as for :class:`StateFile`."""
        self._directory = directory
        self._format = state_format
        self._files: list[StateFile] = []
        self._file_of: dict[torch.Tensor, StateFile] = {}

    def __contains__(self, param: torch.Tensor) -> bool:
        return param in self._file_of

    def file_of(self, param: torch.Tensor) -> StateFile | None:
        """Return the file that has a place for ``param``'s state."""
        return self._file_of.get(param)

    def reserve(self, params: Sequence[torch.Tensor]) -> None:
        """Reserve disk space for those of ``params`` that have none. On an IoError nothing has changed."""
        new = [param for param in params if param not in self._file_of]
        if new:
            file = StateFile(self._directory, new, self._format)
            self._files.append(file)
            self._file_of.update(dict.fromkeys(new, file))

    def step(
        self,
        updates: Mapping[torch.Tensor, Update],
        states: dict[torch.Tensor, Any],
        hypers: Sequence[AdamHyper],
        scale: GradScale,
    ) -> None:
        """Update the parameters of ``updates``, whose states then are in the files and their steps counted.

        Raises:
            IoError: a transfer failed: some parameters and states are new, others old.
        """
        for file in self._files:
            mine = {param: update for param, update in updates.items() if self._file_of[param] is file}
            self._step_in(file, mine, states, hypers, scale)

    def fetch(self, states: Mapping[torch.Tensor, Any]) -> dict[torch.Tensor, dict[str, torch.Tensor]]:
        """Return copies of the arrays that are in the files and not in ``states``. Raises IoError."""
        found: dict[torch.Tensor, dict[str, torch.Tensor]] = {}
        for file in self._files:
            found.update(file.fetch(self._absent(states, file)))
        return found

    def close(self) -> None:
        """Give the files back; the states in them are lost. Idempotent."""
        for file in self._files:
            file.close()

    def _absent(self, states: Mapping[torch.Tensor, Any], file: StateFile) -> Collection[torch.Tensor]:
        return [
            param
            for param, home in self._file_of.items()
            if home is file and file.holds(param) and states.get(param) and "exp_avg" not in states[param]
        ]

    def _step_in(
        self,
        file: StateFile,
        work: Mapping[torch.Tensor, Update],
        states: dict[torch.Tensor, Any],
        hypers: Sequence[AdamHyper],
        scale: GradScale,
    ) -> None:
        numbers = {param: int(states[param].get("step", 0)) + 1 for param in work}
        steps = {p: AdamStep(hypers[update.group], numbers[p], scale) for p, update in work.items()}

        def run(segments: Sequence[Segment], address: int) -> None:
            self._update(segments, address, work, steps)

        file.stream({param: update.source for param, update in work.items()}, run)
        for param, number in numbers.items():
            kept = {name: value for name, value in states[param].items() if name not in ARRAYS}
            # First, as in torch's states.
            states[param] = {**kept, "step": torch.tensor(float(number))}

    def _update(
        self,
        segments: Sequence[Segment],
        address: int,
        work: Mapping[torch.Tensor, Update],
        steps: Mapping[torch.Tensor, AdamStep],
    ) -> None:
        rows: list[Row] = []
        distinct: dict[AdamStep, int] = {}
        for part in segments:
            step = steps[part.param]
            rows.append(
                make_row(
                    part.param,
                    work[part.param].grad,
                    {name: address + offset for name, offset in part.offsets.items()},
                    state_dtype=self._format.state_dtype,
                    start=part.start,
                    numel=part.numel,
                    step_index=distinct.setdefault(step, len(distinct)),
                )
            )
        run_rows(rows, list(distinct))
