"""Adam and AdamW over our kernels: CPUAdam, with states in memory or partly in a file; FusedAdam, with one
GPU launch per layout; HybridAdam, which updates each parameter on its device.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from itertools import chain
from types import MappingProxyType
from typing import Any, ClassVar, overload

import torch
from torch.optim.optimizer import ParamsT, StateDict

from gemini.chunk.layout import is_dense, ordered_like
from gemini.errors import ConfigError, IoError, StateError
from gemini.offload.async_file import Directories, checked_directories
from gemini.optim.disk_states import DiskRows, DiskStates, Extent, Source, StreamedUpdate
from gemini.optim.kernels import TYPE_NAMES, AdamHyper, GradScale, StateFormat, has_cuda_kernel, step_count
from gemini.optim.self_managed import SelfManaged
from gemini.optim.state_exchange import (
    boxed_state_dict,
    complete_groups,
    param_numbers,
    refuse_flags,
    refuse_unsupported,
    torch_flags_in,
    unboxed_state,
)
from gemini.optim.step_rows import Member, StepRows
from gemini.runtime import ManagedParameter

_UNSCALED = GradScale()
_START_ANEW = "load state_dict() into a new optimizer"


class KernelAdam(SelfManaged):
    """A torch optimizer with the numbers of ``torch.optim.AdamW`` (of ``Adam`` with ``adamw_mode=False``).

    Parameters are dense fp32, bf16 or fp16 tensors on the devices of the subclass; the arithmetic is fp32.
    State dicts can be exchanged with torch's AdamW in both directions; torch has no ``bias_correction=False``
    and ignores it.
    """

    # Accepted device types, and the advice in the error for others.
    devices: ClassVar[frozenset[str]]
    other_devices_hint: ClassVar[str]

    # The last step's tables: one per device, and one for parameters with states in files.
    _rows: list[StepRows]
    _disk_rows: DiskRows | None

    def __init__(
        self,
        params: ParamsT,
        defaults: dict[str, Any],
        state_format: StateFormat,
        *,
        nvme_offload_fraction: float = 0.0,
        nvme_offload_dir: Directories | None = None,
        nvme_offload_checksums: bool = False,
        torch_flags: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        """Make the optimizer; the first step makes the states. Arguments: see the subclasses."""
        refuse_flags(type(self).__name__, torch_flags)
        AdamHyper.from_group(defaults)
        if not 0.0 <= nvme_offload_fraction <= 1.0:
            raise ConfigError(f"nvme_offload_fraction is {nvme_offload_fraction}; it must be in [0, 1]")
        self._format = state_format
        self._disk_fraction = nvme_offload_fraction
        self._disk_dirs: list[str] | None = None
        if self._disk_fraction > 0 and nvme_offload_dir is not None:
            self._disk_dirs = checked_directories(nvme_offload_dir)
        self._disk_checksums = nvme_offload_checksums
        self._reset()
        super().__init__(params, defaults)

    @property
    def disk_fraction(self) -> float:
        """The share of optimizer-state bytes to keep in a file."""
        return self._disk_fraction

    @property
    def disk_directories(self) -> list[str] | None:
        """The directories for that file; None: no preference."""
        return self._disk_dirs

    @property
    def disk_checksums(self) -> bool:
        """Whether data read from the file is verified."""
        return self._disk_checksums

    @property
    def disk_extents(self) -> list[Extent]:
        """The file ranges that contain states, in the order in which a step reads them."""
        params = {param for group in self.param_groups for param in group["params"]}
        stored, _held = self._disk.batches_of(params)
        return [extent for _file, _batch, extent in stored]

    @property
    def state_format(self) -> StateFormat:
        """How the moments are stored."""
        return self._format

    @overload
    def step(self, closure: None = None, *, grad_scale: float = 1.0) -> None: ...

    @overload
    def step(self, closure: Callable[[], float], *, grad_scale: float = 1.0) -> float: ...

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None, *, grad_scale: float = 1.0) -> float | None:
        """Update every parameter that has a gradient.

        ``grad_scale`` divides the gradients within the update, without an extra pass: a loss scale, times
        ``max(1, norm / max_norm)`` for clipping.

        Raises:
            ConfigError: names a gradient that cannot be used; no parameter has changed.
            IoError: the file failed. This update, or the last one, is incomplete: load a checkpoint before
                going on.
            StateError: the optimizer is closed, or an earlier step was incomplete.
        """
        if self.driver() is not None:
            if grad_scale != 1.0:
                raise ConfigError(
                    f"grad_scale is {grad_scale} and the parameters are managed: backward() scales the loss "
                    "and clip_grad_by_norm() clips; leave grad_scale out"
                )
            return self.step_managed(closure)  # type: ignore[no-any-return]
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._require_usable()
        scale = _grad_scale(grad_scale)
        hypers = [AdamHyper.from_group(group) for group in self.param_groups]
        for group in self.param_groups:
            refuse_unsupported(group)
        try:
            if not self._can_repeat():
                self._prepare(self._collect())
            params = list(chain.from_iterable(rows.params for rows in self._all_rows()))
            self._update(hypers, scale)
        finally:
            for rows in self._all_rows():
                rows.let_gradients_go()
        _increment_versions(params)
        return loss

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group as torch does. After a ConfigError for one of its parameters nothing has changed."""
        refuse_flags(type(self).__name__, torch_flags_in(param_group))
        if "decoupled_weight_decay" in param_group:  # the group comes from torch's AdamW
            param_group.setdefault("adamw_mode", param_group["decoupled_weight_decay"])
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
        """Return the state as ``torch.optim.AdamW`` does; states in the file are read into new tensors.

        Moments are fp32 for every ``state_dtype``; extra entries let loading restore every bit.

        Raises:
            IoError: the file cannot be read.
            StateError: the optimizer is closed, or the last step was incomplete.
        """
        if self.driver() is not None:
            return super().state_dict()
        self._require_usable()
        with self._all_states_in_memory():
            exported = super().state_dict()
        for key in exported["state"].keys() & param_numbers(exported):
            exported["state"][key] = self._format.exported(exported["state"][key])
        for group in exported["param_groups"]:
            group["decoupled_weight_decay"] = group["adamw_mode"]
        return exported

    def load_state_dict(self, state_dict: StateDict) -> None:
        """Load a copy of the state of one of our optimizers, with any ``state_dtype``, or of torch's Adam or
        AdamW.

        fp32 moments keep every bit; other formats round, except moments that come from the same format. Also
        recovers from an incomplete step.

        Raises:
            ConfigError: the state needs an unsupported variant (``amsgrad``, ``maximize``), or its tensors do
                not fit; nothing has changed.
        """
        if self.driver() is not None:
            super().load_state_dict(state_dict)
            return
        if self._closed:
            raise StateError(f"this {type(self).__name__} is closed")
        with suppress(IoError):  # the lost states are about to be replaced
            self._settle()
        # torch would cast the moments of 16-bit parameters to 16 bits, so they pass through it in a box.
        # Registered last, the hook sees the state after all user hooks.
        hook = self.register_load_state_dict_pre_hook(boxed_state_dict)
        try:
            super().load_state_dict(state_dict)
        finally:
            hook.remove()
        self._forget_rows()
        if self._incomplete is not None:
            self._disk.close()
            self._reset()

    def close(self) -> None:
        """Close the file. The states in it are lost, so the optimizer cannot be used any more. Idempotent."""
        self._disk.close()
        self._forget_rows()
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
            "_disk_dirs": self._disk_dirs,
            "_disk_checksums": self._disk_checksums,
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        defaults = state.get("defaults") or self.defaults
        own_format = state.get("_format") or self._format
        state = {**state, "state": unboxed_state(state["state"], own_format)}
        complete_groups(state["param_groups"], defaults)
        super().__setstate__(state)
        if "_disk" not in self.__dict__:
            self._reset()

    def _reset(self) -> None:
        self._disk = DiskStates(self._disk_dirs, self._format, checksums=self._disk_checksums)
        self._forget_rows()
        self._incomplete: str | None = None
        self._closed = False

    def _forget_rows(self) -> None:
        self._rows, self._disk_rows = [], None

    def _require_usable(self) -> None:
        if self._closed:
            raise StateError(f"this {type(self).__name__} is closed")
        if self._incomplete is not None:
            raise StateError(
                f"{self._incomplete}: some parameters and states are one step ahead of the rest; "
                "load a checkpoint of both before you continue"
            )
        self._settle()

    def _settle(self) -> None:
        """Wait for the writes of the last step."""
        try:
            self._disk.settle()
        except IoError as error:
            self._incomplete = f"states of the last step could not be written ({error})"
            raise

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
            raise ConfigError(f"{label} is on {param.device} and has no memory to update")
        if type(param) is ManagedParameter:  # the kernel takes addresses, but its chunk may be evicted
            raise ConfigError(
                f"{label} is managed; create gemini.GeminiOptimizer(optimizer, model) and call its step()"
            )
        if grad.layout != torch.strided:
            raise ConfigError(f"the gradient of {label} is {grad.layout}; make it dense")
        if grad.device != param.device or grad.dtype not in TYPE_NAMES:
            raise ConfigError(
                f"the gradient of {label} is {grad.dtype} on {grad.device}; "
                f"it must be fp32, bf16 or fp16 on {param.device}"
            )

    def _can_repeat(self) -> bool:
        """Return whether the rows of the last step fit this step; if so, they have taken its gradients."""
        every = self._all_rows()
        if not every:
            return False
        params = [list(group["params"]) for group in self.param_groups]
        if len(every) == 1:
            return every[0].take_gradients(params, self.state)
        for rows in every:
            here = (rows is self._disk_rows, rows.device)
            mine = [[p for p in group if (p in self._disk, p.device) == here] for group in params]
            if not rows.take_gradients(mine, self.state):
                return False
        with_gradient = sum(p.grad is not None for group in params for p in group)
        return sum(len(rows) for rows in every) == with_gradient

    def _collect(self) -> dict[torch.Tensor, StreamedUpdate]:
        """Check all inputs of a step and return them; changes nothing."""
        updates: dict[torch.Tensor, StreamedUpdate] = {}
        for number, group in enumerate(self.param_groups):
            for index, param in enumerate(group["params"]):
                if param.grad is None:
                    continue
                label = _label(number, index, group)
                self._check_gradient(param, param.grad, label)
                grad = ordered_like(param.grad, param, param.grad.dtype)
                source = self._source(param, self.state.get(param) or {}, label)
                updates[param] = StreamedUpdate(number, grad, source)
        return updates

    def _source(self, param: torch.Tensor, state: dict[str, Any], label: str) -> Source | dict[str, Any]:
        file = self._disk.file_of(param)
        if file is not None and not file.has_room(param):
            raise ConfigError(f"{label} differs in size or dtype from its states in the file; {_START_ANEW}")
        if not state:
            return Source.ZERO
        count = float(state.get("step", -1.0))
        if not 0.0 <= count < 2.0**53:
            raise ConfigError(f"the step of {label} is {state.get('step')}; it counts the steps taken")
        if self._format.complete(state, param):
            return self._format.fitted(state, param, label)
        if file is None or not file.holds(param):
            raise ConfigError(f"the state of {label} is not complete: {sorted(state)}; {_START_ANEW}")
        if file.in_order(param):
            return Source.FILE
        return self._format.fitted({**state, **self._disk.fetch({param: state})[param]}, param, label)

    def _update(self, hypers: list[AdamHyper], scale: GradScale) -> None:
        """Run all rows. If this fails after something changed, mark the optimizer incomplete."""
        done = self._disk_rows is not None  # if the file fails, some states have already changed
        try:
            for rows in self._all_rows():
                rows.run(hypers, scale)
                done = True
        except BaseException as error:
            if done:
                self._incomplete = f"a step stopped half-way ({type(error).__name__}: {error})"
            raise

    def _all_rows(self) -> list[DiskRows | StepRows]:
        return [*self._rows] if self._disk_rows is None else [self._disk_rows, *self._rows]

    # -- states in memory ------------------------------------------------------------------------

    def _prepare(self, updates: dict[torch.Tensor, StreamedUpdate]) -> None:
        """Build the rows of this step from the collected inputs."""
        if self._disk_fraction > 0:
            params = [p for group in self.param_groups for p in group["params"]]
            self._disk.reserve([p for p in params if p.requires_grad and p.numel()], self._disk_fraction)
        stored: list[Member] = []
        by_device: dict[torch.device, list[Member]] = {}
        for param, update in updates.items():
            state = self.state[param] = self.state.get(param) or {}
            member = Member(param, update.grad, update.group, state)
            if param in self._disk:
                stored.append(member)
                continue
            if update.source is Source.ZERO:
                state.update({"step": step_count(0), **self._format.zeros(param)})
            elif isinstance(update.source, dict):
                state.update(update.source)
            by_device.setdefault(param.device, []).append(member)
        self._rows = [StepRows(members, self._format, self.state) for members in by_device.values()]
        sources = {member.param: updates[member.param].source for member in stored}
        self._disk_rows = DiskRows(stored, sources, self._disk, self.state) if stored else None

    @contextmanager
    def _all_states_in_memory(self) -> Iterator[None]:
        """Read all states into memory for the block; copies of states in the file are released afterwards."""
        arrays = self._disk.fetch(self.state)
        slim = {param: self.state[param] for param in arrays}
        try:
            for param, found in arrays.items():
                # The live step tensor keeps counting; copy it, so that it stays that of these moments.
                self.state[param] = {**slim[param], "step": step_count(slim[param]["step"]), **found}
            yield
        finally:
            self.state.update(slim)


def _grad_scale(divisor: float) -> GradScale:
    if divisor == 1.0:
        return _UNSCALED
    inverse = 1.0 / divisor if divisor > 0.0 else 0.0
    as_the_kernel_takes_it = torch.tensor(inverse, dtype=torch.float32, device="cpu")
    if not 0.0 < float(as_the_kernel_takes_it) < math.inf:
        raise ConfigError(
            f"grad_scale is {divisor}; it must be positive and finite, and its inverse too. "
            "Gradients with a norm that is not finite cause this: skip the step"
        )
    return GradScale(pre_scale=1.0 / divisor)


def _increment_versions(params: list[torch.Tensor]) -> None:
    """Increment version counters, so that a graph that saved these tensors notices the update: the kernel
    bypasses autograd.
    """
    try:
        torch.autograd.graph.increment_version(params)
    except RuntimeError:  # inference tensors have no version; incrementing others twice is harmless
        torch.autograd.graph.increment_version([p for p in params if not p.is_inference()])


def _label(group_number: int, index: int, group: dict[str, Any]) -> str:
    shape = tuple(group["params"][index].shape)
    named = f" {group['param_names'][index]!r}" if "param_names" in group else ""
    return f"parameter{named} {index} of group {group_number} (shape {shape})"


class CPUAdam(KernelAdam):
    """Adam for CPU tensors; :class:`KernelAdam` describes the arithmetic."""

    devices = frozenset({"cpu"})
    other_devices_hint = "takes CPU tensors: move the model there first, or use HybridAdam"

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
        nvme_offload_dir: Directories | None = None,
        *,
        state_dtype: str = "fp32",
        master_remainders: bool = False,
        nvme_offload_checksums: bool = False,
        **torch_flags: Any,
    ) -> None:
        """Make the optimizer; the first step makes the states.

        Args:
            params: as for every torch optimizer; groups may override the arguments from lr to adamw_mode.
            lr: learning rate.
            bias_correction: divide the moments by ``1 - beta ** step``.
            betas: decay of the two moments, in [0, 1).
            eps: added to the denominator.
            weight_decay: coefficient; decoupled with ``adamw_mode``, else added to the gradient.
            adamw_mode: AdamW, else Adam.
            nvme_offload_fraction: share in [0, 1] of the state bytes to keep in a file, filled with the
                states of CPU parameters in order; the last one's may be split. It changes no result. ``step``
                reads and writes the file once, through at most 32 MiB of memory. For a managed model, with or
                without ``disk_dir``, at least this share is in the file, at most one chunk more.
            nvme_offload_dir: the directory of the file, or several on different drives, which then work in
                parallel. None: a managed model's ``disk_dir``, else the system's directory for temporary
                files.
            state_dtype: how the moments are stored: ``"fp32"`` (8 bytes per parameter, torch's numbers),
                ``"bf16"`` (4 bytes) or ``"int8"`` (2 bytes, and 8 per 256 parameters). The last two round
                deterministically and change the numbers a little.
            master_remainders: for bf16 parameters, keep the 16 bits that rounding cuts off (2 bytes per
                parameter): updates then work on exact fp32 masters. The parameter is its master rounded to
                nearest, ties away from zero.
            nvme_offload_checksums: keep a CRC32C of every 4 KiB of the file in memory and verify reads: a
                corrupted read raises ``ChecksumError`` instead of changing the training.
            torch_flags: ``amsgrad``, ``maximize``, ``foreach``, ``capturable``, ``differentiable`` and
                ``fused``, accepted with the defaults of torch's AdamW only.

        Raises:
            ConfigError: a value out of range, a directory that cannot be used, a parameter on another
                device, not dense, or of another dtype.
        """
        defaults = {
            "lr": lr,
            "bias_correction": bias_correction,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "adamw_mode": adamw_mode,
        }
        super().__init__(
            params,
            defaults,
            StateFormat(state_dtype, master_remainders),
            nvme_offload_fraction=nvme_offload_fraction,
            nvme_offload_dir=nvme_offload_dir,
            nvme_offload_checksums=nvme_offload_checksums,
            torch_flags=torch_flags,
        )


class HybridAdam(CPUAdam):
    """``CPUAdam`` for CPU and CUDA tensors together; same arguments.

    The CPU kernel updates CPU tensors, with states in memory or streamed from a file. The CUDA kernel updates
    CUDA tensors, with states beside them, in one launch per device and combination of dtypes.
    """

    devices = frozenset({"cpu", "cuda"})
    other_devices_hint = "takes CPU and CUDA tensors"


class FusedAdam(KernelAdam):
    """Adam for CUDA tensors; :class:`KernelAdam` describes the arithmetic."""

    devices = frozenset({"cuda"})
    other_devices_hint = "takes CUDA tensors: use CPUAdam or HybridAdam for others"

    def __init__(
        self,
        params: ParamsT,
        lr: float | torch.Tensor = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        adamw_mode: bool = True,
        *,
        state_dtype: str = "fp32",
        master_remainders: bool = False,
        **torch_flags: Any,
    ) -> None:
        """Make the optimizer; the first step makes the states. Arguments: as in :class:`CPUAdam`.

        Raises:
            ConfigError: a value out of range, or a parameter that is not on a GPU, not dense, or of another
                dtype.
        """
        defaults = {
            "lr": lr,
            "bias_correction": bias_correction,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "adamw_mode": adamw_mode,
        }
        super().__init__(
            params, defaults, StateFormat(state_dtype, master_remainders), torch_flags=torch_flags
        )
