"""The runtime of a managed model: managed parameters, the memory manager, and moving a module into chunks."""

from gemini.runtime.gate.gate import StatefulTensorMgr, TensorState
from gemini.runtime.intercept.tensors import ManagedParameter
from gemini.runtime.manager import GeminiManager
from gemini.runtime.storage.initialization import init_on

__all__ = [
    "GeminiManager",
    "ManagedParameter",
    "StatefulTensorMgr",
    "TensorState",
    "init_on",
]
