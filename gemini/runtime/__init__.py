"""The runtime: managed parameters, the memory manager of a model, and the move of a module into chunks."""

from gemini.runtime.adopt import (
    adopt_module,
    read_state,
    read_values,
    refresh_master,
    unique_parameters,
    write_range,
    write_values,
)
from gemini.runtime.data_sizes import GroupSpec
from gemini.runtime.gemini_mgr import GeminiManager
from gemini.runtime.init import init_on
from gemini.runtime.learned import PlacementContext
from gemini.runtime.param import ManagedParameter, ManagedTensor
from gemini.runtime.snapshot import NO_SNAPSHOT, Snapshot
from gemini.runtime.state_piece import MASTER, StatePiece
from gemini.runtime.storage import (
    ChunkGroup,
    ManagedSlot,
    ModelStorage,
)
from gemini.runtime.tensor_mgr import StatefulTensorMgr, TensorState

__all__ = [
    "MASTER",
    "NO_SNAPSHOT",
    "ChunkGroup",
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
    "read_state",
    "read_values",
    "refresh_master",
    "unique_parameters",
    "write_range",
    "write_values",
]
