"""GeminiAdamOptimizer: HybridAdam and GeminiOptimizer in one call."""

from __future__ import annotations

from typing import Any

from gemini.ddp import GeminiDDP
from gemini.optim.gemini_optimizer import GeminiOptimizer
from gemini.optim.hybrid_adam import HybridAdam


class GeminiAdamOptimizer(GeminiOptimizer):
    """HybridAdam over all parameters of a wrapped model: ``GeminiAdamOptimizer(model, lr=1e-3,
    max_norm=1.0)``."""

    _OWN = frozenset(
        [
            "max_norm",
            "norm_type",
            "initial_scale",
            "min_scale",
            "growth_factor",
            "backoff_factor",
            "growth_interval",
            "hysteresis",
            "max_scale",
            "gpu_margin_mem_ratio",
            "overlap",
        ]
    )

    def __init__(self, model: GeminiDDP, **defaults: Any) -> None:
        """Split keywords between HybridAdam and GeminiOptimizer; unknown ones are a TypeError."""
        own = {name: defaults.pop(name) for name in list(defaults) if name in self._OWN}
        params = [param for param in model.parameters() if param.requires_grad]
        super().__init__(HybridAdam(params, **defaults), model, **own)
