"""By which rule an optimizer updates the chunks of a managed model."""

from __future__ import annotations

import torch
from torch import optim as torch_optim

from gemini.errors import ConfigError
from gemini.optim.kernel_adam import KernelAdam
from gemini.optim.lamb import Lamb
from gemini.optim.lion import Lion
from gemini.optim.lone_rule import LoneRule
from gemini.optim.rule import AdamRule, LionRule, SgdRule, SteppedRule, UpdateRule
from gemini.optim.shared_step import GroupSettings, refuse, step_of
from gemini.optim.trials import PieceTrial, kinds_of
from gemini.optim.wrapped import HOOKS, WrappedOptimizer

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


def refuse_gathering(optim: torch.optim.Optimizer) -> None:
    """Raise ConfigError where ``optim``, whose parameters are to be cut, is of a class of which nothing is
    known, and trial steps show that its updates are not element by element."""
    known = (*_ELEMENT_WISE, KernelAdam, Lion)
    if any(isinstance(optim, kind) and step_of(type(optim)) is step_of(kind) for kind in known):
        return
    trial = PieceTrial(optim, at_once=True)
    for group in optim.param_groups:
        trial.states(GroupSettings.of(group), torch.float32, kinds_of(group["params"]))


def rule_of(optim: torch.optim.Optimizer, *, elementwise: bool = False, whole: bool = False) -> UpdateRule:
    """Return how ``optim`` updates. ``elementwise``: what the step of a class that is not known makes of an
    element depends on that element alone. Raises ConfigError where nothing here does as it does."""
    if isinstance(optim, WrappedOptimizer):
        raise ConfigError(
            f"it is a {type(optim).__name__} already, which updates the model by itself: use that one, or "
            "make another of the optimizer that it drives"
        )
    if elementwise and whole:
        raise ConfigError("elementwise=True and whole=True contradict: over pieces, or a parameter at a time")
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
    for kind, reason in _REFUSED.items():
        if isinstance(optim, kind):
            raise refuse(optim, reason)
    if not all(hasattr(optim, name) for name in HOOKS):
        raise refuse(optim, "it is an Optimizer whose __init__ does not call that of torch.optim.Optimizer")
    return LoneRule(optim, is_said=whole)
