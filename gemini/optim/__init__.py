"""Optimizers: Adam at the memory limit, Lion, Lamb and Muon for plain or managed parameters, and
GeminiOptimizer, which runs an optimizer over the chunks of a managed model.
"""

from gemini.optim.gemini_optimizer import GeminiAdamOptimizer, GeminiOptimizer
from gemini.optim.kernel_adam import CPUAdam, FusedAdam, HybridAdam
from gemini.optim.lamb import Lamb
from gemini.optim.lion import Lion
from gemini.optim.muon import Muon

__all__ = [
    "CPUAdam",
    "FusedAdam",
    "GeminiAdamOptimizer",
    "GeminiOptimizer",
    "HybridAdam",
    "Lamb",
    "Lion",
    "Muon",
]
