"""Optimizers: of plain parameters, Adam at the memory limit, and over the chunks of a managed model."""

from gemini.optim.cpu_adam import CPUAdam
from gemini.optim.fused_adam import FusedAdam
from gemini.optim.gemini_adam_optimizer import GeminiAdamOptimizer
from gemini.optim.gemini_optimizer import GeminiOptimizer
from gemini.optim.hybrid_adam import HybridAdam
from gemini.optim.lamb import Lamb
from gemini.optim.lion import Lion

__all__ = ["CPUAdam", "FusedAdam", "GeminiAdamOptimizer", "GeminiOptimizer", "HybridAdam", "Lamb", "Lion"]
