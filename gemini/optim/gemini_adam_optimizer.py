"""GeminiAdamOptimizer: HybridAdam and GeminiOptimizer in one call."""

from __future__ import annotations

import inspect
from typing import Any

from gemini.ddp import GeminiDDP
from gemini.optim.gemini_optimizer import GeminiOptimizer
from gemini.optim.hybrid_adam import HybridAdam

_OWN = frozenset(
    name
    for name, parameter in inspect.signature(GeminiOptimizer).parameters.items()
    if parameter.kind is inspect.Parameter.KEYWORD_ONLY
)


class GeminiAdamOptimizer(GeminiOptimizer):
    """HybridAdam over all parameters of a wrapped model: ``GeminiAdamOptimizer(model, lr=1e-3,
    max_norm=1.0)``."""

    def __init__(self, model: GeminiDDP, **defaults: Any) -> None:
        """Split keywords between HybridAdam and GeminiOptimizer; unknown ones are a TypeError."""
        own = {name: defaults.pop(name) for name in list(defaults) if name in _OWN}
        params = [param for param in model.parameters() if param.requires_grad]
        super().__init__(HybridAdam(params, **defaults), model, **own)
