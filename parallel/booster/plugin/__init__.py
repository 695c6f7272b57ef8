"""Plugins: one class for each way in which a booster trains."""

from gemini.parallel.booster.plugin.base import Plugin
from gemini.parallel.booster.plugin.gemini import GeminiPlugin
from gemini.parallel.booster.plugin.hybrid import HybridParallelPlugin, MoeHybridParallelPlugin
from gemini.parallel.booster.plugin.low_level_zero import LowLevelZeroPlugin
from gemini.parallel.booster.plugin.torch_ddp import TorchDDPPlugin
from gemini.parallel.booster.plugin.torch_fsdp import TorchFSDPPlugin

__all__ = [
    "GeminiPlugin",
    "HybridParallelPlugin",
    "LowLevelZeroPlugin",
    "MoeHybridParallelPlugin",
    "Plugin",
    "TorchDDPPlugin",
    "TorchFSDPPlugin",
]
