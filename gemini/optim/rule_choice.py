"""By which rule an optimizer updates the chunks of a managed model."""

from __future__ import annotations

import torch
from torch import optim as torch_optim

from gemini.errors import ConfigError
from gemini.optim.kernel_adam import KernelAdam
from gemini.optim.lamb import Lamb
from gemini.optim.lion import Lion
from gemini.optim.rule import AdamRule, LionRule, SgdRule, UpdateRule
from gemini.optim.shells import step_of
from gemini.optim.stepped_rule import SteppedRule
from gemini.optim.wrapped import WrappedOptimizer

# What is known of the steps of torch's optimizers: what they make of an element depends on that alone.
_ELEMENT_WISE = (
    torch_optim.ASGD,
    torch_optim.Adadelta,
    torch_optim.Adagrad,
    torch_optim.Adam,
    torch_optim.AdamW,
    torch_optim.Adamax,
    torch_optim.NAdam,
    torch_optim.RAdam,
    torch_optim.RMSprop,
    torch_optim.Rprop,
    torch_optim.SGD,  # with what its own rule does not do
)
# Of those that need a parameter whole, what they keep for each element of it. Older torch has no Muon.
_WHOLE: dict[type[torch.optim.Optimizer], tuple[str, ...]] = {
    torch_optim.Adafactor: (),
    Lamb: ("exp_avg", "exp_avg_sq"),
}
if hasattr(torch_optim, "Muon"):
    _WHOLE[torch_optim.Muon] = ("momentum_buffer",)

_REFUSED = {
    torch_optim.LBFGS: "it evaluates the loss several times in a step and needs all parameters as one vector",
    torch_optim.SparseAdam: "it takes sparse gradients, and those of managed parameters are dense",
}
_WAY_OUT = (
    "GeminiOptimizer drives CPUAdam, HybridAdam, Lion, Lamb, and torch's SGD, Adam, AdamW, Adamax, NAdam, "
    "RAdam, RMSprop, Adagrad, Adadelta, Rprop, ASGD, Muon and Adafactor"
)


def rule_of(optim: torch.optim.Optimizer, *, elementwise: bool = False) -> UpdateRule:
    """Return how ``optim`` updates. ``elementwise``: what the step of a class that is not known makes of an
    element depends on that element alone. Raises ConfigError where nothing here does as it does."""
    if isinstance(optim, WrappedOptimizer):
        raise ConfigError(
            f"it is a {type(optim).__name__} already, which updates the model by itself: use that one, or "
            "make another of the optimizer that it drives"
        )
    if isinstance(optim, KernelAdam):
        return AdamRule(optim.state_format)
    step = step_of(type(optim))

    def is_a(kind: type[torch.optim.Optimizer]) -> bool:
        return isinstance(optim, kind) and step is step_of(kind)

    if is_a(torch_optim.SGD) and not any(group.get("fused") for group in optim.param_groups):
        return SgdRule()
    if is_a(Lion):
        return LionRule()
    for kind, arrays in _WHOLE.items():
        if is_a(kind):
            return SteppedRule(optim, whole=True, arrays=arrays)
    if any(map(is_a, _ELEMENT_WISE)):
        return SteppedRule(optim, whole=False)
    if elementwise:
        return SteppedRule(optim, whole=False, is_known=False)
    name = type(optim).__name__
    for kind, reason in _REFUSED.items():
        if isinstance(optim, kind):
            raise ConfigError(f"{name} cannot update a managed model: {reason}. {_WAY_OUT}")
    raise ConfigError(
        f"nothing is known of the step of {name}, which is run on pieces of parameters: if what it makes of "
        "an element depends on that element alone, say so with GeminiOptimizer(..., elementwise=True), which "
        "tries it first; if not (norms, factors, whole matrices), it cannot update a managed model. "
        f"{_WAY_OUT}"
    )
