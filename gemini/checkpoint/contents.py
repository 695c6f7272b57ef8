"""What a checkpoint holds: names of its files, and what it says about the model it was made for."""

from __future__ import annotations

from typing import Any, Protocol

import torch

from gemini.chunk import ChunkKind
from gemini.ddp import GeminiDDP
from gemini.optim.gemini_optimizer import GeminiOptimizer
from gemini.runtime import ManagedParameter

MOMENTS = {"exp_avg": ChunkKind.EXP_AVG, "exp_avg_sq": ChunkKind.EXP_AVG_SQ}
BUFFERS = "model-buffers.safetensors"
INDEX = "model.safetensors.index.json"


class Scheduler(Protocol):
    """What a checkpoint needs of a learning-rate scheduler."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> None: ...


def weights_file(number: int) -> str:
    """Return the name of the file with the weights of a parameter chunk."""
    return f"model-{number:05d}.safetensors"


def moment_file(moment: str, number: int) -> str:
    """Return the name of the file with one moment of a parameter chunk."""
    return f"{moment}-{number:05d}.safetensors"


def parameter_shapes(model: GeminiDDP) -> dict[str, list[int]]:
    """Return the shape of every parameter by name."""
    return {name: list(slot.param_view.shape) for name, slot in model.storage.slots.items()}


def group_members(optimizer: GeminiOptimizer) -> list[list[str]]:
    """Return the names of the parameters in each parameter group."""
    return [[param._slot.name for param in group["params"]] for group in optimizer.param_groups]


def buffers(model: GeminiDDP) -> dict[str, torch.Tensor]:
    """Return the tensors of the module's state that are not managed."""
    state = model.module.state_dict(keep_vars=True)
    return {
        name: value
        for name, value in state.items()
        if isinstance(value, torch.Tensor) and not isinstance(value, ManagedParameter)
    }


def extra_states(model: GeminiDDP) -> dict[str, Any]:
    """Return what the module's ``get_extra_state`` methods add to its state."""
    state = model.module.state_dict(keep_vars=True)
    return {name: value for name, value in state.items() if not isinstance(value, torch.Tensor)}


def aliases(model: GeminiDDP) -> dict[str, str]:
    """Return the further names of tied parameters, each with the name under which the parameter is stored."""
    state = model.module.state_dict(keep_vars=True)
    managed = {name: value._slot.name for name, value in state.items() if isinstance(value, ManagedParameter)}
    return {name: stored for name, stored in managed.items() if name != stored}
