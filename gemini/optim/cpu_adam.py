"""Adam and AdamW for CPU parameters, with the states in memory or, in part, in a file."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, overload

import torch
from torch.optim.optimizer import Optimizer, ParamsT, StateDict

from gemini.errors import ConfigError, StateError
from gemini.offload.async_file import checked_directory

from .kernels import AdamHyper, AdamStep, is_dense, ordered_like, update_piece
from .moment_file import MomentFile, Moments, Source
from .state_import import boxed_state_dict, complete_groups, refuse_unsupported, unboxed_state

PARAM_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True)
class _Update:
    """One parameter's share of a step: everything is checked, nothing is changed yet."""

    grad: torch.Tensor
    step: AdamStep
    source: Source | Moments


class CPUAdam(Optimizer):
    """A torch optimizer with the numbers of ``torch.optim.AdamW`` (of ``Adam`` with ``adamw_mode=False``).

    Parameters are fp32, bf16 or fp16; moments and arithmetic are fp32. State dicts and those of torch's
    AdamW can be loaded into each other; torch has no ``bias_correction=False`` and ignores it.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | torch.Tensor = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        adamw_mode: bool = True,
        nvme_offload_fraction: float = 0.0,
        nvme_offload_dir: str | os.PathLike[str] | None = None,
    ) -> None:
        """Prepare; states are made by the first step.

        Args:
            params: as for every torch optimizer; parameter groups may override what follows up to adamw_mode.
            lr: learning rate.
            bias_correction: divide the moments by ``1 - beta ** step``.
            betas: decay of the two moments, in [0, 1).
            eps: added to the denominator.
            weight_decay: coefficient, decoupled with ``adamw_mode``, else added to the gradient.
            adamw_mode: AdamW, else Adam.
            nvme_offload_fraction: share in [0, 1] of the state bytes kept in a file: whole parameters, in
                order, until it is reached. No value of it changes a result.
            nvme_offload_dir: where the file is; None is the system's directory for temporary files.

        Raises:
            ConfigError: a value out of range, a directory that cannot be used, a parameter not on the CPU,
                not dense, or of another type.
        """
        defaults = {
            "lr": lr,
            "bias_correction": bias_correction,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "adamw_mode": adamw_mode,
        }
        AdamHyper.from_group(defaults)
        if not 0.0 <= nvme_offload_fraction <= 1.0:
            raise ConfigError(f"nvme_offload_fraction is {nvme_offload_fraction}; it must be in [0, 1]")
        self._disk_fraction = nvme_offload_fraction
        self._disk_dir = None if nvme_offload_dir is None else os.fspath(nvme_offload_dir)
        if self._disk_fraction > 0 and self._disk_dir is not None:
            checked_directory(self._disk_dir)
        self._reset_files()
        super().__init__(params, defaults)

    @property
    def disk_fraction(self) -> float:
        """The share of optimizer-state bytes asked to live in a file."""
        return self._disk_fraction

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Update every parameter that has a gradient.

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
        updates = self._collect()
        self._open_files()
        for file in self._files:
            self._step_on_disk(file, updates)
        for param, update in updates.items():
            if param not in self._file_of:
                self._step_in_memory(param, update)
        # The kernel writes past autograd: a graph that saved these tensors must notice.
        torch.autograd.graph.increment_version([p for p in updates if not p.is_inference()])
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

        Raises:
            IoError: the file cannot be read.
            StateError: the optimizer is closed, or the last step was incomplete.
        """
        self._require_usable()
        with self._all_moments_in_memory():
            exported = super().state_dict()
        for group in exported["param_groups"]:
            group["decoupled_weight_decay"] = group["adamw_mode"]
        return exported

    def load_state_dict(self, state_dict: StateDict) -> None:
        """Take a copy of the state of a ``CPUAdam``, ``HybridAdam`` or torch Adam or AdamW.

        Moments become fp32 and keep every bit they have. Also the way out after an incomplete step.

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
        if self._incomplete is not None:
            self._close_files()
            self._reset_files()

    def close(self) -> None:
        """Give the file back. States in it are lost, so the optimizer cannot be used any more. Idempotent."""
        self._close_files()
        self._closed = True

    def __getstate__(self) -> dict[str, Any]:
        self._require_usable()
        with self._all_moments_in_memory():
            state = dict(self.state)
        return {
            **super().__getstate__(),
            "state": state,
            "_disk_fraction": self._disk_fraction,
            "_disk_dir": self._disk_dir,
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        defaults = state.get("defaults") or self.defaults
        state = {**state, "state": unboxed_state(state["state"])}
        complete_groups(state["param_groups"], defaults)
        super().__setstate__(state)
        if "_files" not in self.__dict__:
            self._reset_files()

    def _reset_files(self) -> None:
        self._files: list[MomentFile] = []
        self._file_of: dict[torch.Tensor, MomentFile] = {}
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

    def _check_param(self, param: torch.Tensor, label: str) -> None:
        if param.dtype not in PARAM_DTYPES or param.layout != torch.strided:
            raise ConfigError(
                f"{label} is {param.layout} of {param.dtype}; "
                f"{type(self).__name__} takes dense fp32, bf16 and fp16"
            )
        if param.device.type not in ("cpu", "meta"):
            raise ConfigError(self._wrong_device(label, param.device))
        if not is_dense(param):
            raise ConfigError(f"{label} with strides {param.stride()} has gaps or overlaps; clone it first")

    def _wrong_device(self, label: str, device: torch.device) -> str:
        return f"{label} is on {device}; CPUAdam takes CPU tensors: move the model there first"

    def _check_gradient(self, param: torch.Tensor, grad: torch.Tensor, label: str) -> None:
        self._check_param(param, label)
        if param.device.type != "cpu":
            raise ConfigError(f"{label} is on {param.device}: it has no memory to update")
        if grad.layout != torch.strided:
            raise ConfigError(f"the gradient of {label} is {grad.layout}; make it dense")
        if grad.device.type != "cpu" or grad.dtype not in PARAM_DTYPES:
            raise ConfigError(
                f"the gradient of {label} is {grad.dtype} on {grad.device}; "
                "it must be fp32, bf16 or fp16 on the CPU"
            )

    def _collect(self) -> dict[torch.Tensor, _Update]:
        """Check everything a step needs and return it; changes nothing."""
        updates: dict[torch.Tensor, _Update] = {}
        for number, group in enumerate(self.param_groups):
            hyper = AdamHyper.from_group(group)
            refuse_unsupported(group)
            for index, param in enumerate(group["params"]):
                if param.grad is None:
                    continue
                label = _label(number, index, group)
                self._check_gradient(param, param.grad, label)
                state = self.state.get(param) or {}
                step = AdamStep(hyper, int(state["step"].item()) + 1 if state else 1)
                grad = ordered_like(param.grad, param, param.grad.dtype)
                updates[param] = _Update(grad, step, self._source(param, state, label))
        return updates

    def _source(self, param: torch.Tensor, state: dict[str, Any], label: str) -> Source | Moments:
        if not state:
            return Source.ZERO
        if all(name in state for name in _MOMENTS):
            return state["exp_avg"], state["exp_avg_sq"]
        file = self._file_of.get(param)
        if file is None or not file.holds(param):
            raise StateError(f"the state of {label} has no moments: {sorted(state)}")
        return Source.FILE

    def _open_files(self) -> None:
        """Reserve disk space for the parameters that belong there and have none yet."""
        new = [param for param in self._params_on_disk() if param not in self._file_of]
        if not new:
            return
        file = MomentFile(self._disk_dir, new)
        self._files.append(file)
        self._file_of.update(dict.fromkeys(new, file))

    def _params_on_disk(self) -> list[torch.Tensor]:
        """Choose whole parameters, in order, until their share of the state bytes is reached."""
        if self._disk_fraction == 0:
            return []
        params = [p for group in self.param_groups for p in group["params"] if p.requires_grad and p.numel()]
        wanted = self._disk_fraction * sum(param.numel() for param in params)
        chosen: list[torch.Tensor] = []
        numel = 0
        for param in params:
            if numel >= wanted:
                break
            chosen.append(param)
            numel += param.numel()
        return chosen

    def _step_on_disk(self, file: MomentFile, updates: dict[torch.Tensor, _Update]) -> None:
        work = {p: update.source for p, update in updates.items() if self._file_of.get(p) is file}

        def run(param: torch.Tensor, start: int, numel: int, exp_avg: int, exp_avg_sq: int) -> None:
            update = updates[param]
            update_piece(param, update.grad, (exp_avg, exp_avg_sq), update.step, start=start, numel=numel)

        try:
            file.stream(work, run)
        except BaseException as error:
            self._incomplete = f"a step stopped half-way ({type(error).__name__}: {error})"
            raise
        for param in work:
            for name in _MOMENTS:
                self.state[param].pop(name, None)
            self._count_step(param)

    def _step_in_memory(self, param: torch.Tensor, update: _Update) -> None:
        state = self.state[param]
        if update.source is Source.ZERO:
            for name in _MOMENTS:
                state[name] = torch.zeros_like(
                    param, dtype=torch.float32, memory_format=torch.preserve_format
                )
        moments = (state["exp_avg"].data_ptr(), state["exp_avg_sq"].data_ptr())
        update_piece(param, update.grad, moments, update.step)
        self._count_step(param)

    def _count_step(self, param: torch.Tensor) -> None:
        state = self.state[param]
        if "step" not in state:
            # First, as in torch's states.
            self.state[param] = state = {"step": torch.tensor(0.0, dtype=torch.float32), **state}
        state["step"] += 1

    @contextmanager
    def _all_moments_in_memory(self) -> Iterator[None]:
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
                for param, (exp_avg, exp_avg_sq) in file.fetch(mine).items():
                    self.state[param] = {**slim[param], "exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq}
            yield
        finally:
            self.state.update(slim)


def _label(group_number: int, index: int, group: dict[str, Any]) -> str:
    shape = tuple(group["params"][index].shape)
    named = f" {group['param_names'][index]!r}" if "param_names" in group else ""
    return f"parameter{named} {index} of group {group_number} (shape {shape})"
