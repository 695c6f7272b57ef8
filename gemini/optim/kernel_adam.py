"""Adam over the kernels: what CPUAdam, HybridAdam and FusedAdam share."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar, overload

import torch
from torch.optim.optimizer import Optimizer, ParamsT, StateDict

from gemini.errors import ConfigError, StateError
from gemini.offload.async_file import checked_directory

from .dense import is_dense, ordered_like
from .kernels import (
    TYPE_NAMES,
    AdamHyper,
    AdamStep,
    GradScale,
    Row,
    has_cuda_kernel,
    make_row,
    run_rows,
)
from .state_file import Segment, Source, StateFile
from .state_format import ARRAYS, StateFormat
from .state_import import boxed_state_dict, complete_groups, refuse_unsupported, unboxed_state
from .step_rows import Member, StepRows


@dataclass(frozen=True)
class _Update:
    """One parameter's share of a step: everything is checked, nothing is changed yet."""

    group: int
    grad: torch.Tensor
    source: Source | dict[str, Any]


class KernelAdam(Optimizer):
    """A torch optimizer with the numbers of ``torch.optim.AdamW`` (of ``Adam`` with ``adamw_mode=False``).

    Parameters are dense fp32, bf16 or fp16 tensors on the devices of the subclass; the arithmetic is fp32.
    State dicts and those of torch's AdamW can be loaded into each other; torch has no
    ``bias_correction=False`` and ignores it.
    """

    # Device types whose parameters are taken, and what to do about others.
    devices: ClassVar[frozenset[str]]
    other_devices_hint: ClassVar[str]

    _rows: list[StepRows]  # of the last step, one table per device
    _on_disk: dict[torch.Tensor, _Update]  # this step's

    def __init__(
        self,
        params: ParamsT,
        defaults: dict[str, Any],
        state_format: StateFormat,
        *,
        nvme_offload_fraction: float = 0.0,
        nvme_offload_dir: str | os.PathLike[str] | None = None,
    ) -> None:
        """Prepare; states are made by the first step. Arguments: see the subclasses."""
        AdamHyper.from_group(defaults)
        if not 0.0 <= nvme_offload_fraction <= 1.0:
            raise ConfigError(f"nvme_offload_fraction is {nvme_offload_fraction}; it must be in [0, 1]")
        self._format = state_format
        self._disk_fraction = nvme_offload_fraction
        self._disk_dir = None if nvme_offload_dir is None else os.fspath(nvme_offload_dir)
        if self._disk_fraction > 0 and self._disk_dir is not None:
            checked_directory(self._disk_dir)
        self._reset()
        super().__init__(params, defaults)

    @property
    def disk_fraction(self) -> float:
        """The share of optimizer-state bytes asked to live in a file."""
        return self._disk_fraction

    @property
    def state_format(self) -> StateFormat:
        """How the moments are kept."""
        return self._format

    @overload
    def step(self, closure: None = None, *, grad_scale: float = 1.0) -> None: ...

    @overload
    def step(self, closure: Callable[[], float], *, grad_scale: float = 1.0) -> float: ...

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None, *, grad_scale: float = 1.0) -> float | None:
        """Update every parameter that has a gradient.

        ``grad_scale`` divides the gradients on their way into the update, without a pass of its own: a loss
        scale, times ``max(1, norm / max_norm)`` for clipping.

        Raises:
            ConfigError: a gradient that cannot be used, named; no parameter has changed.
            IoError: the file failed. The update is incomplete: load a checkpoint before going on.
            StateError: the optimizer is closed, or an earlier step was incomplete.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._require_usable()
        if not 0.0 < grad_scale < math.inf or math.isinf(1.0 / grad_scale):
            raise ConfigError(f"grad_scale is {grad_scale}; it must be positive and finite, as its inverse")
        hypers = [AdamHyper.from_group(group) for group in self.param_groups]
        scale = GradScale(pre_scale=1.0 / grad_scale)
        for group in self.param_groups:
            refuse_unsupported(group)
        params = [[p for p in group["params"] if p.grad is not None] for group in self.param_groups]
        if not self._can_repeat(params):
            self._prepare(self._collect())
        for file in self._files:
            self._step_on_disk(file, hypers, scale)
        for rows in self._rows:
            rows.run(hypers, scale)
        self._on_disk = {}
        # The kernel writes past autograd: a graph that saved these tensors must notice.
        torch.autograd.graph.increment_version([p for group in params for p in group if not p.is_inference()])
        return loss

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group as torch does; on a ConfigError for one of its parameters nothing has changed."""
        super().add_param_group(param_group)
        try:
            group = self.param_groups[-1]
            refuse_unsupported(group)
            AdamHyper.from_group(group)
            for index, param in enumerate(group["params"]):
                self._check_param(param, _label(len(self.param_groups) - 1, index, group))
        except BaseException:
            self.param_groups.pop()
            raise

    def state_dict(self) -> StateDict:
        """Return the state as ``torch.optim.AdamW`` does; what is in the file is read into new tensors.

        Moments are fp32 whatever ``state_dtype``; beside them is what gives every bit back on loading.

        Raises:
            IoError: the file cannot be read.
            StateError: the optimizer is closed, or the last step was incomplete.
        """
        self._require_usable()
        with self._all_states_in_memory():
            exported = super().state_dict()
        exported["state"] = {key: self._format.exported(state) for key, state in exported["state"].items()}
        for group in exported["param_groups"]:
            group["decoupled_weight_decay"] = group["adamw_mode"]
        return exported

    def load_state_dict(self, state_dict: StateDict) -> None:
        """Take a copy of the state of an optimizer of ours, of any ``state_dtype``, or torch's Adam or AdamW.

        fp32 moments keep every bit they have; others are rounded, but for those they came from. Also the way
        out after an incomplete step.

        Raises:
            ConfigError: the state asks for what there is not (``amsgrad``, ``maximize``), or its tensors do
                not fit; nothing has changed.
        """
        if self._closed:
            raise StateError(f"this {type(self).__name__} is closed")
        # torch would cast the moments of 16-bit parameters to 16 bits: they pass through it in a box.
        # Registered here, the hook is the last one and sees what the others made of the state.
        hook = self.register_load_state_dict_pre_hook(boxed_state_dict)
        try:
            super().load_state_dict(state_dict)
        finally:
            hook.remove()
        self._rows = []
        if self._incomplete is not None:
            self._close_files()
            self._reset()

    def close(self) -> None:
        """Give the file back. States in it are lost, so the optimizer cannot be used any more. Idempotent."""
        self._close_files()
        self._rows = []
        self._closed = True

    def __getstate__(self) -> dict[str, Any]:
        self._require_usable()
        with self._all_states_in_memory():
            state = dict(self.state)
        return {
            **super().__getstate__(),
            "state": state,
            "_format": self._format,
            "_disk_fraction": self._disk_fraction,
            "_disk_dir": self._disk_dir,
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        defaults = state.get("defaults") or self.defaults
        state = {**state, "state": unboxed_state(state["state"], state.get("_format") or self._format)}
        complete_groups(state["param_groups"], defaults)
        super().__setstate__(state)
        if "_files" not in self.__dict__:
            self._reset()

    def _reset(self) -> None:
        self._files: list[StateFile] = []
        self._file_of: dict[torch.Tensor, StateFile] = {}
        self._on_disk = {}
        self._rows = []
        self._incomplete: str | None = None
        self._closed = False

    def _close_files(self) -> None:
        for file in self._files:
            file.close()

    def _require_usable(self) -> None:
        if self._closed:
            raise StateError(f"this {type(self).__name__} is closed")
        if self._incomplete is not None:
            raise StateError(
                f"{self._incomplete}: some parameters and states are one step ahead of the others; "
                "load a checkpoint of both before going on"
            )

    # -- checks ----------------------------------------------------------------------------------

    def _check_param(self, param: torch.Tensor, label: str) -> None:
        name = type(self).__name__
        if param.dtype not in TYPE_NAMES or param.layout != torch.strided:
            raise ConfigError(
                f"{label} is {param.layout} of {param.dtype}; {name} takes dense fp32, bf16 and fp16"
            )
        if param.device.type not in self.devices | {"meta"}:
            raise ConfigError(f"{label} is on {param.device}; {name} {self.other_devices_hint}")
        if param.device.type == "cuda" and not has_cuda_kernel():
            raise ConfigError(
                f"{label} is on {param.device} and this build has no CUDA kernel; install the CUDA toolkit "
                "(nvcc on PATH) and build again with GEMINI_CUDA=ON"
            )
        if not is_dense(param):
            raise ConfigError(f"{label} with strides {param.stride()} has gaps or overlaps; clone it first")

    def _check_gradient(self, param: torch.Tensor, grad: torch.Tensor, label: str) -> None:
        self._check_param(param, label)
        if param.device.type == "meta":
            raise ConfigError(f"{label} is on {param.device}: it has no memory to update")
        if grad.layout != torch.strided:
            raise ConfigError(f"the gradient of {label} is {grad.layout}; make it dense")
        if grad.device != param.device or grad.dtype not in TYPE_NAMES:
            raise ConfigError(
                f"the gradient of {label} is {grad.dtype} on {grad.device}; "
                f"it must be fp32, bf16 or fp16 on {param.device}"
            )

    def _can_repeat(self, params: list[list[torch.Tensor]]) -> bool:
        """Say whether the rows of the last step are this step's; they then have its gradients."""
        if self._disk_fraction > 0 or len(self._rows) != 1:
            return False
        return self._rows[0].take_gradients(params, self.state)

    def _collect(self) -> dict[torch.Tensor, _Update]:
        """Check everything a step needs and return it; changes nothing."""
        updates: dict[torch.Tensor, _Update] = {}
        for number, group in enumerate(self.param_groups):
            for index, param in enumerate(group["params"]):
                if param.grad is None:
                    continue
                label = _label(number, index, group)
                self._check_gradient(param, param.grad, label)
                grad = ordered_like(param.grad, param, param.grad.dtype)
                source = self._source(param, self.state.get(param) or {}, label)
                updates[param] = _Update(number, grad, source)
        return updates

    def _source(self, param: torch.Tensor, state: dict[str, Any], label: str) -> Source | dict[str, Any]:
        if not state:
            return Source.ZERO
        if self._format.complete(state, param):
            return self._format.fitted(state, param, label)
        file = self._file_of.get(param)
        if file is None or not file.holds(param):
            raise StateError(f"the state of {label} has no moments: {sorted(state)}")
        if file.in_order(param):
            return Source.FILE
        return self._format.fitted({**state, **file.fetch([param])[param]}, param, label)

    # -- states in memory ------------------------------------------------------------------------

    def _prepare(self, updates: dict[torch.Tensor, _Update]) -> None:
        """Make this step's rows and file work from what was collected."""
        self._open_files()
        self._on_disk = {p: update for p, update in updates.items() if p in self._file_of}
        by_device: dict[torch.device, list[Member]] = {}
        for param, update in updates.items():
            if param in self._file_of:
                continue
            if update.source is Source.ZERO:
                self.state[param] = {"step": torch.tensor(0.0), **self._format.zeros(param)}
            elif isinstance(update.source, dict):
                self.state[param].update(update.source)
            member = Member(param, update.grad, update.group, self.state[param])
            by_device.setdefault(param.device, []).append(member)
        self._rows = [StepRows(members, self._format, self.state) for members in by_device.values()]

    # -- states in a file ------------------------------------------------------------------------

    def _open_files(self) -> None:
        """Reserve disk space for the parameters that belong there and have none yet."""
        new = [param for param in self._params_on_disk() if param not in self._file_of]
        if not new:
            return
        file = StateFile(self._disk_dir, new, self._format)
        self._files.append(file)
        self._file_of.update(dict.fromkeys(new, file))

    def _params_on_disk(self) -> list[torch.Tensor]:
        """Choose whole CPU parameters, in order, until their share of the state bytes is reached."""
        if self._disk_fraction == 0:
            return []
        params = [p for group in self.param_groups for p in group["params"] if p.requires_grad and p.numel()]
        wanted = self._disk_fraction * sum(map(self._format.nbytes, params))
        chosen: list[torch.Tensor] = []
        nbytes = 0
        for param in params:
            if nbytes >= wanted:
                break
            if param.device.type == "cpu":
                chosen.append(param)
                nbytes += self._format.nbytes(param)
        return chosen

    def _step_on_disk(self, file: StateFile, hypers: list[AdamHyper], scale: GradScale) -> None:
        work = {p: update for p, update in self._on_disk.items() if self._file_of[p] is file}
        counts = {param: int(self.state[param].get("step", 0)) + 1 for param in work}

        def run(segments: Sequence[Segment], address: int) -> None:
            rows: list[Row] = []
            steps: dict[AdamStep, int] = {}
            for part in segments:
                update = work[part.param]
                step = AdamStep(hypers[update.group], counts[part.param], scale)
                places = {name: address + offset for name, offset in part.offsets.items()}
                rows.append(
                    make_row(
                        part.param,
                        update.grad,
                        places,
                        state_dtype=self._format.state_dtype,
                        start=part.start,
                        numel=part.numel,
                        step_index=steps.setdefault(step, len(steps)),
                    )
                )
            run_rows(rows, list(steps))

        try:
            file.stream({param: update.source for param, update in work.items()}, run)
        except BaseException as error:
            self._incomplete = f"a step stopped half-way ({type(error).__name__}: {error})"
            raise
        for param, count in counts.items():
            kept = {name: value for name, value in self.state[param].items() if name not in ARRAYS}
            # First, as in torch's states.
            self.state[param] = {**kept, "step": torch.tensor(float(count))}

    @contextmanager
    def _all_states_in_memory(self) -> Iterator[None]:
        """Have the states complete inside; copies of those in the file are let go afterwards."""
        on_disk = {
            param
            for param, file in self._file_of.items()
            if self.state.get(param) and "exp_avg" not in self.state[param] and file.holds(param)
        }
        slim = {param: self.state[param] for param in on_disk}
        try:
            for file in self._files:
                mine = [param for param in on_disk if self._file_of[param] is file]
                for param, arrays in file.fetch(mine).items():
                    self.state[param] = {**slim[param], **arrays}
            yield
        finally:
            self.state.update(slim)


def _label(group_number: int, index: int, group: dict[str, Any]) -> str:
    shape = tuple(group["params"][index].shape)
    named = f" {group['param_names'][index]!r}" if "param_names" in group else ""
    return f"parameter{named} {index} of group {group_number} (shape {shape})"
