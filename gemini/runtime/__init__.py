"""The runtime of a managed model: managed parameters, the memory manager, and moving a module into chunks."""

from gemini.runtime.adopt import (
    adopt_module,
    read_state,
    read_values,
    refresh_master,
    unique_parameters,
    write_range,
    write_values,
)
from gemini.runtime.gate.gate import StatefulTensorMgr, TensorState
from gemini.runtime.gate.gradients import MASTER, StatePiece
from gemini.runtime.gate.pending_work import NO_SNAPSHOT, Snapshot
from gemini.runtime.growth import Filling
from gemini.runtime.intercept.tensors import ManagedParameter, ManagedTensor
from gemini.runtime.manager import GeminiManager
from gemini.runtime.step.order import PlacementContext
from gemini.runtime.storage.data_sizes import GroupSpec
from gemini.runtime.storage.initialization import init_on, initialize_buffers
from gemini.runtime.storage.model_storage import (
    ChunkGroup,
    ManagedSlot,
    ModelStorage,
)

__all__ = [
    "MASTER",
    "NO_SNAPSHOT",
    "ChunkGroup",
    "Filling",
    "GeminiManager",
    "GroupSpec",
    "ManagedParameter",
    "ManagedSlot",
    "ManagedTensor",
    "ModelStorage",
    "PlacementContext",
    "Snapshot",
    "StatePiece",
    "StatefulTensorMgr",
    "TensorState",
    "adopt_module",
    "init_on",
    "initialize_buffers",
    "read_state",
    "read_values",
    "refresh_master",
    "unique_parameters",
    "write_range",
    "write_values",
]
