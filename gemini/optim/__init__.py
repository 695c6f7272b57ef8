"""Optimizers: Adam at the memory limit on plain parameters, and over the chunks of a managed model."""

from gemini.optim.cpu_adam import CPUAdam
from gemini.optim.fused_adam import FusedAdam
from gemini.optim.gemini_adam_optimizer import GeminiAdamOptimizer
from gemini.optim.gemini_optimizer import GeminiOptimizer
from gemini.optim.hybrid_adam import HybridAdam

__all__ = ["CPUAdam", "FusedAdam", "GeminiAdamOptimizer", "GeminiOptimizer", "HybridAdam"]
