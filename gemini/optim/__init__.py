"""Optimizers: of plain parameters, Adam at the memory limit, and over the chunks of a managed model."""

from gemini.optim.adam import CPUAdam, FusedAdam, HybridAdam
from gemini.optim.gemini_adam_optimizer import GeminiAdamOptimizer
from gemini.optim.gemini_optimizer import GeminiOptimizer
from gemini.optim.lamb import Lamb
from gemini.optim.lion import Lion

__all__ = ["CPUAdam", "FusedAdam", "GeminiAdamOptimizer", "GeminiOptimizer", "HybridAdam", "Lamb", "Lion"]
