"""The contenders of ``gemini bench exact``, each used as its own documentation says."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor

import gemini
from gemini import checkpoint
from gemini_bench.exact_deepspeed import DeepSpeed, zero_stage
from gemini_bench.exact_plain import PlainLoop, Recipe
from gemini_bench.exact_settings import (
    ADAM,
    LOSS_SCALE,
    Batch,
    Contender,
    NotOffered,
    Setting,
    Task,
    join_alone,
    set_launched,
    token_loss,
)
from gemini_bench.llama import num_parameters

PLAIN = "plain torch, again"
OURS = "gemini-runtime"
OUR_ADAM = "gemini-runtime, its Adam"
FSDP2 = "FSDP2"
ACCELERATE = "accelerate"
DEEPSPEED = "deepspeed"  # as a module
_REFERENCE = Recipe()


@dataclass(frozen=True)
class Kind:
    """A contender. ``twin``: the plain loop with the contender's parts, which explains the differences that
    the runtime does not cause. ``module``: the package to install.
    """

    make: Callable[[Task], Contender]
    twin: Callable[[Setting], Recipe] = lambda _setting: _REFERENCE
    module: str = ""

    def other_twin(self, setting: Setting) -> Recipe | None:
        """Return the twin, unless it is the reference itself."""
        twin = self.twin(setting)
        return None if twin == _REFERENCE else twin


class Again:
    """Plain torch: one process, also for the batches of several ranks."""

    def __init__(self, task: Task) -> None:
        self._task, self._step = task, 0
        self._loop = PlainLoop(task, _REFERENCE)

    def step(self, batches: Sequence[Batch]) -> list[float]:
        """Train on the micro-batches of all ranks, of which the first has ``batches``."""
        job, setting = self._task.job, self._task.setting
        others = [job.micro_batches(setting, self._step, rank) for rank in range(1, setting.ranks)]
        self._step += 1
        return self._loop.step([batches, *others])

    def weights(self) -> dict[str, Tensor]:
        """Return the weights."""
        return self._loop.weights()

    def save(self, directory: str) -> None:
        """Save the state dicts."""
        torch.save({"step": self._step, **self._loop.state_dict()}, Path(directory, "state"))

    def load(self, directory: str) -> None:
        """Load the state dicts."""
        state = torch.load(Path(directory, "state"), weights_only=True)
        self._step = state["step"]
        self._loop.load_state_dict(state)


class Ours:
    """The lines of README.md and docs/changed-lines.md: with torch's AdamW, as in a script that had it, or
    with ``own_adam``. Budgets leave a part of the model data on DEVICE."""

    def __init__(self, task: Task, *, own_adam: bool = False) -> None:
        setting = task.setting
        self._setting = setting
        precision = None if setting.precision == "fp32" else setting.precision
        module = task.make_model()
        rule = "adam" if own_adam else None
        self._model = gemini.GeminiDDP(
            module, mixed_precision=precision, optimizer_rule=rule, **_budgets(task)
        )
        keywords: dict[str, Any] = {"max_norm": setting.max_norm}
        if setting.precision == "fp16":
            keywords["initial_scale"] = LOSS_SCALE
        if own_adam:
            self._optimizer: gemini.GeminiOptimizer
            self._optimizer = gemini.GeminiAdamOptimizer(self._model, **ADAM, **keywords)
        else:
            adam = torch.optim.AdamW(self._model.parameters(), **ADAM)
            self._optimizer = gemini.GeminiOptimizer(adam, self._model, **keywords)

    def step(self, batches: Sequence[Batch]) -> list[float]:
        """Train on the micro-batches; ranks exchange gradients in the last one."""
        losses = []
        for number, (tokens, labels) in enumerate(batches, start=1):
            waits = self._setting.ranks > 1 and number < len(batches)
            with self._model.no_sync() if waits else nullcontext():
                loss = token_loss(self._model(tokens), labels)
                self._optimizer.backward(loss / len(batches))
            losses.append(float(loss.detach()))
        self._optimizer.step()
        self._optimizer.zero_grad()
        return losses

    def weights(self) -> dict[str, Tensor]:
        """Return the fp32 weights."""
        return dict(self._model.state_dict())

    def save(self, directory: str) -> None:
        """Save a checkpoint."""
        checkpoint.save(directory, self._model, self._optimizer)

    def load(self, directory: str) -> None:
        """Load the checkpoint."""
        checkpoint.load(directory, self._model, self._optimizer)


def _budgets(task: Task) -> dict[str, Any]:
    """Return budgets that keep a third of the model data on DEVICE where weights are offloaded, and the part
    that weights and gradients need where states are; none where nothing is."""
    setting = task.setting
    if not setting.offloads:
        return {}
    total = 16 * num_parameters(task.job.model)
    share = 1 / 3 if setting.weights else 0.6
    found: dict[str, Any] = {"device_bytes": int(share * total), "non_model_bytes": 0}
    if "disk" in (setting.weights, setting.states):
        return {**found, "disk_dir": task.directory}
    return {**found, "host_bytes": 2 * total}


def _our_twin(setting: Setting, *, own_adam: bool = False) -> Recipe:
    several = setting.ranks > 1
    return Recipe(
        "gemini" if own_adam else "torch",
        order="ranks" if several else "whole",
        norm="exact" if several and setting.max_norm else "torch",
    )


class Fsdp2:
    """``fully_shard`` per block and at the root, with torch's AdamW."""

    def __init__(self, task: Task) -> None:
        setting = task.setting
        if "disk" in (setting.weights, setting.states):
            raise NotOffered("has no tier on disk")
        self._setting = setting
        join_alone(setting)
        model = task.make_model()
        half = setting.precision != "fp32"
        keywords: dict[str, Any] = {
            "mesh": init_device_mesh("cpu", (setting.ranks,)),
            "mp_policy": MixedPrecisionPolicy(setting.dtype, torch.float32)
            if half
            else MixedPrecisionPolicy(),
            # Pages are locked for a GPU alone.
            "offload_policy": CPUOffloadPolicy(pin_memory=False) if setting.offloads else OffloadPolicy(),
        }
        for block in model.blocks:
            fully_shard(block, **keywords)
        fully_shard(model, **keywords)
        self._model: Any = model
        self._optimizer = torch.optim.AdamW(model.parameters(), **ADAM)
        # Gradients stay finite at this scale, so it never changes.
        self._scaler = torch.amp.GradScaler("cpu", LOSS_SCALE, enabled=setting.precision == "fp16")

    def step(self, batches: Sequence[Batch]) -> list[float]:
        """Train on the micro-batches; ranks exchange gradients in the last one."""
        losses = []
        for number, (tokens, labels) in enumerate(batches, start=1):
            self._model.set_requires_gradient_sync(number == len(batches))
            loss = token_loss(self._model(tokens), labels)
            self._scaler.scale(loss / len(batches)).backward()
            losses.append(float(loss.detach()))
        if self._setting.max_norm:
            torch.nn.utils.clip_grad_norm_(self._model.parameters(), self._setting.max_norm)
        self._scaler.step(self._optimizer)
        self._scaler.update()
        self._optimizer.zero_grad()
        return losses

    def weights(self) -> dict[str, Tensor]:
        """Gather the shards."""
        found = {}
        for name, param in self._model.named_parameters():
            assert isinstance(param, DTensor)
            found[name] = param.full_tensor().detach()
        return found

    def save(self, directory: str) -> None:
        """Save with torch.distributed.checkpoint."""
        dcp, state = self._state()
        dcp.save(state, checkpoint_id=directory)

    def load(self, directory: str) -> None:
        """Load with torch.distributed.checkpoint."""
        dcp, state = self._state()
        dcp.load(state, checkpoint_id=directory)
        helpers = importlib.import_module("torch.distributed.checkpoint.state_dict")
        helpers.set_state_dict(
            self._model,
            self._optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
        )

    def _state(self) -> tuple[Any, dict[str, Any]]:
        helpers = importlib.import_module("torch.distributed.checkpoint.state_dict")
        model, optimizer = helpers.get_state_dict(self._model, self._optimizer)
        dcp = importlib.import_module("torch.distributed.checkpoint")
        return dcp, {"model": model, "optimizer": optimizer}


class Accelerated:
    """``Accelerator`` over CPU processes, with torch's AdamW; torch's DDP if there are several."""

    def __init__(self, task: Task) -> None:
        setting = task.setting
        self._setting = setting
        if setting.ranks > 1:
            set_launched(task)
        accelerate = importlib.import_module("accelerate")
        keywords: dict[str, Any] = {}
        if setting.offloads:
            plugin = accelerate.FullyShardedDataParallelPlugin
            keywords["fsdp_plugin"] = plugin(fsdp_version=2, cpu_offload=True)
        self._accelerator = accelerate.Accelerator(
            cpu=True,
            gradient_accumulation_steps=setting.parts,
            mixed_precision="no" if setting.precision == "fp32" else setting.precision,
            **keywords,
        )
        kind = self._accelerator.distributed_type.value
        if setting.offloads and kind != "FSDP":
            raise NotOffered(
                f"offloads nothing on a CPU: with its FSDP plugin distributed_type stays {kind!r}"
            )
        if setting.precision != "fp32" and not self._accelerator.native_amp:
            raise NotOffered(
                f"computes in fp32 on a CPU: mixed_precision={setting.precision!r} has no effect"
            )
        model = task.make_model()
        adam = torch.optim.AdamW(model.parameters(), **ADAM)
        self._model, self._optimizer = self._accelerator.prepare(model, adam)

    def step(self, batches: Sequence[Batch]) -> list[float]:
        """Train on the micro-batches."""
        losses = []
        for tokens, labels in batches:
            around: AbstractContextManager[object] = self._accelerator.accumulate(self._model)
            with around:
                loss = token_loss(self._model(tokens), labels)
                self._accelerator.backward(loss)
                if self._setting.max_norm and self._accelerator.sync_gradients:
                    self._accelerator.clip_grad_norm_(self._model.parameters(), self._setting.max_norm)
                self._optimizer.step()
                self._optimizer.zero_grad()
            losses.append(float(loss.detach()))
        return losses

    def weights(self) -> dict[str, Tensor]:
        """Return the weights."""
        module: nn.Module = self._accelerator.unwrap_model(self._model)
        return {name: each.detach() for name, each in module.named_parameters()}

    def save(self, directory: str) -> None:
        """Save with ``save_state``."""
        self._accelerator.save_state(directory)

    def load(self, directory: str) -> None:
        """Load with ``load_state``."""
        self._accelerator.load_state(directory)


def _peer_twin(setting: Setting) -> Recipe:
    """Return what torch's own classes do: gradients of a rank add up before the ranks exchange them."""
    return Recipe(order="ranks" if setting.ranks > 1 else "whole")


def _accelerated_twin(setting: Setting) -> Recipe:
    """Return the same, with fp32 weights under autocast for 16 bits."""
    return replace(_peer_twin(setting), autocast=setting.precision != "fp32")


def _deepspeed_twin(setting: Setting, *, torch_adam: bool = False) -> Recipe:
    """Return DeepSpeed's parts: its Adam by where the states are, and its way to clip. ZeRO updates flat
    vectors. Its third stage has hooks at modules, and adds the gradients of ranks after each micro-batch."""
    adam = "DeepSpeed CPUAdam" if setting.states else "DeepSpeed FusedAdam"
    clips = "ZeRO" if zero_stage(setting) else "DeepSpeed"
    return Recipe(
        "torch" if torch_adam else adam,
        order="parts" if setting.ranks > 1 else "whole",
        norm=clips if setting.max_norm else "torch",
        flat=zero_stage(setting) > 0,
        hooks=zero_stage(setting) == 3,
    )


CONTENDERS: Mapping[str, Kind] = MappingProxyType(
    {
        PLAIN: Kind(Again),
        OURS: Kind(Ours, _our_twin),
        OUR_ADAM: Kind(partial(Ours, own_adam=True), partial(_our_twin, own_adam=True)),
        FSDP2: Kind(Fsdp2, _peer_twin),
        ACCELERATE: Kind(Accelerated, _accelerated_twin, "accelerate"),
        "DeepSpeed": Kind(DeepSpeed, _deepspeed_twin, DEEPSPEED),
        "DeepSpeed, torch's AdamW": Kind(
            partial(DeepSpeed, torch_adam=True),
            partial(_deepspeed_twin, torch_adam=True),
            DEEPSPEED,
        ),
    }
)
