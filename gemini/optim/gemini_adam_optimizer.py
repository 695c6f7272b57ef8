"""GeminiAdamOptimizer: HybridAdam and GeminiOptimizer in one call."""

from __future__ import annotations

from typing import Any

from torch import nn

from gemini.model.handle import ManagedModel, handle_of
from gemini.optim.adam import HybridAdam
from gemini.optim.gemini_optimizer import GeminiOptimizer
from gemini.optim.self_managed import SelfManaged
from gemini.optim.state_import import TORCH_FLAGS
from gemini.system.config import keyword_names, refuse_unknown

SelfManaged.be_driven_by(GeminiOptimizer)  # it is made of every one of them, and so imports them
_OWN = keyword_names(GeminiOptimizer) - {"optim", "model"}
_ADAM = keyword_names(HybridAdam) - {"params"} | TORCH_FLAGS.keys()


class GeminiAdamOptimizer(GeminiOptimizer):
    """HybridAdam over all parameters of a wrapped model: ``GeminiAdamOptimizer(model, lr=1e-3,
    max_norm=1.0)``."""

    def __init__(self, model: nn.Module | ManagedModel, **defaults: Any) -> None:
        """Split keywords between HybridAdam and GeminiOptimizer; unknown ones are a TypeError."""
        refuse_unknown(type(self).__name__, defaults, _OWN | _ADAM)
        own = {name: defaults.pop(name) for name in list(defaults) if name in _OWN}
        handle = handle_of(model)
        params = [param for param in handle.module.parameters() if param.requires_grad]
        super().__init__(HybridAdam(params, **defaults), handle, **own)
