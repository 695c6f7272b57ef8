"""Muon: updates hidden matrices by an orthogonal matrix near their momentum, and other parameters
by AdamW.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gemini.errors import ConfigError
from gemini.optim.kernels import betas_of, floats_of, require_betas, require_non_negative
from gemini.optim.self_managed import SelfManaged
from gemini.runtime.config import is_hidden_matrix

_COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # of the quintic iteration, as in the original and in torch
_LEAST_NORM = 1e-7
ARRAYS = ("exp_avg", "exp_avg_sq")  # the momentum (both rules); the second moment (AdamW only)


def arrays_of_group(group: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the names of the states that the parameters of a group have per element."""
    return ARRAYS[:1] if group["use_muon"] else ARRAYS


@dataclass(frozen=True)
class MuonHyper:
    """The settings of one step for a group. Raises ConfigError if one is out of range."""

    lr: float
    momentum: float
    weight_decay: float
    eps: float
    betas: tuple[float, float]
    ns_steps: int
    use_muon: bool

    def __post_init__(self) -> None:
        require_non_negative(lr=self.lr, weight_decay=self.weight_decay, eps=self.eps)
        require_betas(self.betas)
        if not 0 <= self.momentum < 1:
            raise ConfigError(f"momentum is {self.momentum}; it must be from 0 to below 1")
        if not 0 < self.ns_steps < 100:
            raise ConfigError(f"ns_steps is {self.ns_steps}; it must be from 1 to 99; 5 is usual")

    @classmethod
    def from_group(cls, group: Mapping[str, Any]) -> MuonHyper:
        """Read the settings from a parameter group; one-element tensors count as numbers."""
        numbers = floats_of(group, "lr", "momentum", "weight_decay", "eps")
        steps, uses = int(group["ns_steps"]), bool(group["use_muon"])
        return cls(**numbers, betas=betas_of(group), ns_steps=steps, use_muon=uses)


class Muon(SelfManaged):
    """Muon (Jordan et al., 2024) for hidden matrices and AdamW for all other parameters, in one optimizer as
    in DeepSpeed.

    Also works for unmanaged parameters. Under management ``GeminiOptimizer(Muon(...), model)`` gives the same
    bits, over ranks too: it needs whole parameters. ``state`` has ``step``, an int, and ``exp_avg``, in the
    parameter's dtype: Muon's or AdamW's momentum; under AdamW also ``exp_avg_sq``. A model wrapped with
    ``optimizer_rule="muon"`` has one state for each hidden matrix and two for every other parameter.

    Args:
        params: ``model.named_parameters()``, or groups. Of named parameters, matrices use Muon unless their
            name contains ``embed`` or ``lm_head``, or one of its parts between dots is ``wte``, ``wpe``,
            ``score`` or ``classifier``. A group has (name, parameter) pairs or the key ``use_muon``. A group
            with names is split into one for Muon, with rate ``lr``, and one for AdamW, with rate ``adam_lr``.
            A group with ``use_muon`` has one rate, ``lr``. :meth:`add_param_group` takes the same groups.
        lr, momentum, ns_steps: for Muon, with Nesterov momentum. A matrix with more rows than columns uses
            ``lr * sqrt(rows / columns)``. ``ns_steps``: steps of the orthogonalizing iteration.
        adam_lr, betas, eps: for AdamW.
        weight_decay: for both, decoupled.

    Raises:
        ConfigError: a value is out of range, a parameter has no name in a group without ``use_muon``, a
            group has ``use_muon`` and ``adam_lr``, or Muon would update a tensor that is not a matrix.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 0.02,
        momentum: float = 0.95,
        weight_decay: float = 0.0,
        *,
        ns_steps: int = 5,
        adam_lr: float = 3e-4,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-10,
    ) -> None:
        self._adam_lr = adam_lr
        defaults = {"lr": lr, "momentum": momentum, "weight_decay": weight_decay}
        super().__init__(params, {**defaults, "eps": eps, "betas": betas, "ns_steps": ns_steps})

    def split_group(self, param_group: dict[str, Any]) -> list[dict[str, Any]]:
        """Return groups that each have ``use_muon`` and a rate. Raises ConfigError like the class."""
        if isinstance(param_group["params"], set):
            return [param_group]  # torch refuses it: it has no order
        given = param_group["params"]
        members = [given] if isinstance(given, Tensor) else list(given)
        options = {name: value for name, value in param_group.items() if name != "params"}
        groups = [_chosen(members, options)] if "use_muon" in options else _split(members, options)
        for group in groups:
            group.setdefault("lr", self.defaults["lr"] if group["use_muon"] else self._adam_lr)
            MuonHyper.from_group({**self.defaults, **group})
        return groups

    def refuse_change(self, index: int, group: Mapping[str, Any], saved: Mapping[str, Any]) -> None:
        """Raise ConfigError if the saved group used Muon and this one uses AdamW, or the reverse."""
        if saved.get("use_muon") != group["use_muon"]:
            raise ConfigError(
                f"group {index} of the state has use_muon={saved.get('use_muon')}, and that of the optimizer "
                f"use_muon={group['use_muon']}: AdamW and Muon keep other states; make the optimizer with "
                "the names, or groups, that it had when the state was saved"
            )

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_adam_lr": self._adam_lr}

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter that has a gradient. Raises ConfigError for a sparse one."""
        if self.driver() is not None:
            return self.step_managed(closure)
        return self.step_plain(closure, MuonHyper.from_group, self._update)

    def _update(self, param: Tensor, state: dict[str, Any], hyper: MuonHyper) -> None:
        assert param.grad is not None
        names = ARRAYS[:1] if hyper.use_muon else ARRAYS
        if not state:
            state.update(step=0, **{name: torch.zeros_like(param) for name in names})
        if names[-1] not in state:
            raise ConfigError(
                "a group changed from use_muon=True to use_muon=False after the first step: AdamW "
                "has no second moments for its parameters; create another optimizer for these groups"
            )
        state["step"] += 1
        if hyper.use_muon:
            muon_update(param, param.grad, state["exp_avg"], hyper)
        else:
            adam_update(param, param.grad, state["exp_avg"], state["exp_avg_sq"], state["step"], hyper)


def _chosen(members: list[Any], options: dict[str, Any]) -> dict[str, Any]:
    """Return the group of ``members``, perhaps with names, if ``use_muon`` is given."""
    if "adam_lr" in options:
        raise ConfigError(
            f"a group has use_muon={options['use_muon']} and adam_lr={options['adam_lr']}, but one rate; "
            "give it as lr, or give names of parameters instead of use_muon"
        )
    params = [each[1] if isinstance(each, tuple) else each for each in members]
    for param in params if options["use_muon"] else ():
        if param.dim() != 2:
            raise ConfigError(
                "Muon updates matrices, and a parameter of a group with use_muon=True has shape "
                f"{tuple(param.shape)}; put it into a group with use_muon=False"
            )
    return {**options, "params": params}


def _split(members: list[Any], options: dict[str, Any]) -> list[dict[str, Any]]:
    """Split named ``members`` into a group of the hidden matrices and one of all others; without members,
    return one empty group.
    """
    parts: dict[bool, list[Tensor]] = {True: [], False: []}
    for each in members:
        if not isinstance(each, tuple):
            raise ConfigError(
                "Muon needs the names of parameters, which tell hidden matrices from embeddings and heads; "
                "give it model.named_parameters(), or groups with use_muon=True or False"
            )
        name, param = each
        parts[is_hidden_matrix(name, param.dim())].append(param)
    adam = {name: value for name, value in options.items() if name not in ("lr", "adam_lr")}
    if "adam_lr" in options:
        adam["lr"] = options["adam_lr"]
    muon = {name: value for name, value in options.items() if name != "adam_lr"}
    groups = [{**muon, "use_muon": True, "params": parts[True]}] if parts[True] else []
    if parts[False] or not groups:
        groups.append({**adam, "use_muon": False, "params": parts[False]})
    return groups


def orthogonal(matrix: Tensor, steps: int) -> Tensor:
    """Return a bf16 approximation of the orthogonal matrix nearest to ``matrix`` (2-D), by ``steps`` steps of
    a Newton-Schulz iteration, with the bits of ``torch.optim.Muon``.
    """
    first, second, third = _COEFFICIENTS
    is_tall = matrix.size(0) > matrix.size(1)
    found = matrix.to(torch.bfloat16, copy=True)
    found = found.T if is_tall else found
    found.div_(found.norm().clamp(min=_LEAST_NORM))
    for _ in range(steps):
        gram = found @ found.T
        found = torch.addmm(found, torch.addmm(gram, gram, gram, beta=second, alpha=third), found, beta=first)
    return found.T if is_tall else found


def muon_update(param: Tensor, grad: Tensor, momentum: Tensor, hyper: MuonHyper) -> None:
    """Update a matrix and its momentum in place. Extra memory: at most four tensors of the
    gradient's size.
    """
    momentum.lerp_(grad, 1 - hyper.momentum)
    update = orthogonal(grad.lerp(momentum, hyper.momentum), hyper.ns_steps)
    rows, columns = param.shape
    param.mul_(1 - hyper.lr * hyper.weight_decay)
    param.add_(update, alpha=-hyper.lr * max(1, rows / columns) ** 0.5)


def adam_update(
    param: Tensor, grad: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, step: int, hyper: MuonHyper
) -> None:
    """Update a parameter and its moments in place by AdamW; ``step`` counts from 1. Extra memory: one tensor
    of the gradient's size.
    """
    first, second = hyper.betas
    exp_avg.lerp_(grad, 1 - first)
    exp_avg_sq.mul_(second).addcmul_(grad, grad, value=1 - second)
    root = exp_avg_sq.sqrt().div_((1 - second**step) ** 0.5).add_(hyper.eps)
    param.mul_(1 - hyper.lr * hyper.weight_decay)
    param.addcdiv_(exp_avg, root, value=-hyper.lr / (1 - first**step))
