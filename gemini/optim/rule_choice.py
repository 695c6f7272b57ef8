"""Chooses the update rule for an optimizer over a managed model."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import optim as torch_optim

from gemini.errors import ConfigError
from gemini.optim.kernel_adam import KernelAdam
from gemini.optim.lamb import Lamb
from gemini.optim.lion import Lion
from gemini.optim.muon import ARRAYS, Muon, arrays_of_group
from gemini.optim.rule import AdamRule, LionRule, SgdRule, SteppedRule, UpdateRule
from gemini.optim.self_managed import SelfManaged
from gemini.optim.shared_step import GivenLoss, Inseparable, refuse, refuse_kept_identities
from gemini.optim.trials import PieceTrial
from gemini.optim.unknown_optimizer import PerParameterRule, PieceRule
from gemini.optim.wrapped_optimizer import HOOKS, WrappedOptimizer, step_of

# torch's optimizers with element-wise steps.
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
    torch_optim.SGD,  # with options that SgdRule does not have
)
# Optimizers that need whole parameters -> their states with one value per element. Older torch has no Muon.
_WHOLE: dict[type[torch.optim.Optimizer], tuple[str, ...]] = {
    torch_optim.Adafactor: (),
    Lamb: ("exp_avg", "exp_avg_sq"),
    Muon: ARRAYS,
}
# For those with different states from group to group.
_OF_GROUP: dict[type[torch.optim.Optimizer], Callable[[Mapping[str, Any]], tuple[str, ...]]] = {
    Muon: arrays_of_group
}
if hasattr(torch_optim, "Muon"):
    _WHOLE[torch_optim.Muon] = ("momentum_buffer",)

_REFUSED = {
    torch_optim.LBFGS: "it evaluates the loss several times in a step and needs all parameters as one vector",
    torch_optim.SparseAdam: "it needs sparse gradients, but gradients of managed parameters are dense",
}


# Names that a subclass may override and still step like its parent: torch's steps use none of them.
_BESIDE_STEPS = frozenset(("_given_to", "add_param_group", "load_state_dict", "state_dict", "zero_grad"))


def steps_as(optim: torch.optim.Optimizer, kind: type[torch.optim.Optimizer]) -> bool:
    """Return whether the step of ``optim`` is that of ``kind``, with nothing that it calls overridden in a
    subclass or on the object.
    """
    if not isinstance(optim, kind) or step_of(type(optim)) is not step_of(kind):
        return False
    below = [each for each in type(optim).__mro__ if not issubclass(kind, each)]
    own = {name for each in below for name in vars(each)} | vars(optim).keys()
    # On an object, "step" is a scheduler's wrapper, which only counts; others are refused elsewhere.
    own -= {"step", *_BESIDE_STEPS}
    return not any(
        callable(getattr(kind, name, None))
        for name in own
        if not name.startswith("__") or name in ("__getattribute__", "__getattr__", "__setattr__")
    )


def steps_by_element(optim: torch.optim.Optimizer) -> bool:
    """Return whether ``optim`` is of a known element-wise class."""
    return any(steps_as(optim, kind) for kind in (*_ELEMENT_WISE, KernelAdam, Lion))


def refuse_unlike(optim: torch.optim.Optimizer, cut_unless: str) -> None:
    """Raise ConfigError if an ``optim`` of an unknown class cannot step over other tensors than its
    parameters.

    It cannot if it looks its parameters up by identity. If the tensors are parts of parameters, it also
    cannot if trial steps show that its updates are not element-wise. ``cut_unless``: advice for the error,
    how to have whole parameters; "" if the tensors are whole.
    """
    if steps_by_element(optim):
        return
    try:
        refuse_kept_identities(optim)
    except Inseparable as reason:
        raise ConfigError(
            f"{type(optim).__name__} is to update other tensors than the model has, and {reason}. Use "
            "torch's DistributedDataParallel (TorchDDPPlugin): it updates the parameters themselves"
        ) from reason
    if cut_unless:
        PieceTrial(optim, cut_unless=cut_unless).of_groups(optim.param_groups, torch.float32)


def refuse_closure(
    optim: torch.optim.Optimizer, groups: Sequence[Mapping[str, Any]], cut_unless: str
) -> None:
    """Raise ConfigError if a step of ``optim`` with a closure gives other results when the closure has run
    before the step and only returns its loss again.

    ``groups`` hold the parameters of the model; ``cut_unless`` as in :func:`refuse_unlike`.
    """
    loss = GivenLoss(torch.tensor(0.7, dtype=torch.float32, device="cpu"))
    if cut_unless:
        PieceTrial(optim, cut_unless=cut_unless).of_groups(groups, torch.float32, loss)
        return
    way = "Use torch's DistributedDataParallel (TorchDDPPlugin), under which it runs the closure as it likes"
    trial = PieceTrial(optim, cut_unless=way, claim="is to step over gradients that the closure has left")
    trial.of_closure(groups, torch.float32, loss)


def rule_of(optim: torch.optim.Optimizer, *, elementwise: bool = False, whole: bool = False) -> UpdateRule:
    """Return the update rule for ``optim``. Raises ConfigError if no rule reproduces its step.

    ``elementwise``, ``whole``: as in :class:`gemini.GeminiOptimizer`, for classes that are not known.
    """
    if isinstance(optim, WrappedOptimizer):
        raise ConfigError(
            f"it is a {type(optim).__name__} already, which updates the model by itself: use that one, or "
            "make another of the optimizer that it drives"
        )
    if elementwise and whole:
        raise ConfigError(
            "elementwise=True (update pieces) and whole=True (update whole parameters) "
            "contradict each other; give one of them"
        )
    is_inside = (
        isinstance(optim, SelfManaged) and optim.makes_driver
    )  # the optimizer is making its own driver

    def is_a(kind: type[torch.optim.Optimizer]) -> bool:
        return isinstance(optim, kind) if is_inside else steps_as(optim, kind)

    if isinstance(optim, KernelAdam):
        if is_a(KernelAdam):
            return AdamRule(optim.state_format)
        raise ConfigError(
            f"{type(optim).__name__} has a step() of its own, which a GeminiOptimizer would not run. Use it "
            "by itself over the managed parameters: optimizer.step() runs it, and updates chunks. Or derive "
            "it from torch.optim.AdamW"
        )
    if is_a(torch_optim.SGD) and not any(group.get("fused") for group in optim.param_groups):
        return SgdRule()
    if is_a(Lion):
        return LionRule()
    for kind, arrays in _WHOLE.items():
        if is_a(kind):
            return SteppedRule(optim, whole=True, arrays=arrays, of_group=_OF_GROUP.get(kind))
    if any(map(is_a, _ELEMENT_WISE)):
        return SteppedRule(optim, whole=False)
    for kind, reason in _REFUSED.items():
        if isinstance(optim, kind):
            raise refuse(optim, reason)
    if not all(hasattr(optim, name) for name in HOOKS):
        raise refuse(optim, "it is an Optimizer whose __init__ does not call that of torch.optim.Optimizer")
    return PieceRule(optim) if elementwise else PerParameterRule(optim, is_declared=whole)
