"""BoostedOptimizer: a torch optimizer with a loss scale and gradient clipping."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.amp.grad_scaler import GradScaler

from gemini.comm.peers import ModelRanks
from gemini.errors import ConfigError, StateError


class BoostedOptimizer(torch.optim.Optimizer):
    """Wrap ``optim`` and share its parameter groups, state and hooks, so a scheduler may hold either object.

    Args:
        optim: any torch optimizer.
        scaler: scales the loss in :meth:`backward`; None does not scale.
        model_ranks: the ranks with the other parts of the model; they clip by one norm and skip steps
            together.
    """

    def __init__(
        self,
        optim: torch.optim.Optimizer,
        scaler: GradScaler | None = None,
        model_ranks: ModelRanks | None = None,
    ) -> None:
        # Do not call Optimizer.__init__: groups and state are those of ``optim`` and must exist only once.
        self.optim = optim
        self._scaler = scaler
        self._model_ranks = model_ranks
        self._unscaled = False  # whether clipping has unscaled the gradients since the last step
        self._measured: float | None = None  # norm of the gradients that were clipped since the last step
        self._grad_norm: float | None = None

    def __getstate__(self) -> dict[str, Any]:
        # Do not use Optimizer's: it keeps groups and state only, and its __setstate__ wraps step() in hooks,
        # but the hooks of ``optim`` already run inside step().
        return dict(self.__dict__)

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)

    def __getattr__(self, name: str) -> Any:
        if name == "optim":  # the object is being copied or unpickled
            raise AttributeError(name)
        return getattr(self.optim, name)

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """The groups of the torch optimizer."""
        return self.optim.param_groups

    @property
    def state(self) -> Any:  # type: ignore[override]
        """The state of the torch optimizer."""
        return self.optim.state

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]
        """The defaults of the torch optimizer."""
        return self.optim.defaults

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, as in torch."""
        self.optim.add_param_group(param_group)

    # -- one iteration ---------------------------------------------------------------------------

    def backward(self, loss: torch.Tensor) -> None:
        """Compute gradients of ``loss``, scaled under fp16.

        Raises:
            StateError: gradients were clipped, and therefore unscaled, since the last step.
        """
        if self._scaler is None:
            loss.backward()
            return
        if self._unscaled:
            raise StateError("gradients cannot be added after clipping; clip once, before step()")
        self._scaler.scale(loss).backward()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Discard the gradients."""
        self.optim.zero_grad(set_to_none)
        self._measured = None
        self._finish_scaling()

    def clip_grad_by_norm(self, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        """Scale all gradients to a global norm of at most ``max_norm``; return the norm before scaling."""
        self._unscale()
        params = list(self._parameters())
        if self._model_ranks is None:
            norm = torch.nn.utils.clip_grad_norm_(params, max_norm, norm_type)
        else:
            norm = norm_over_parts(params, self._model_ranks, norm_type)
            torch.nn.utils.clip_grads_with_norm_(params, max_norm, norm)
        self._measured = float(norm)
        return norm

    def clip_grad_by_value(self, clip_value: float) -> None:
        """Clamp every gradient element to ``[-clip_value, clip_value]``."""
        self._unscale()
        torch.nn.utils.clip_grad_value_(list(self._parameters()), clip_value)

    def get_grad_norm(self) -> float | None:
        """Return the norm of the last step's gradients before clipping; None if they were not clipped."""
        return self._grad_norm

    def get_param_grad(self, param: torch.Tensor) -> torch.Tensor | None:
        """Return a copy of the gradient of ``param`` without loss scale; None if it has none."""
        if param.grad is None:
            return None
        if self._scaler is None or self._unscaled:
            return param.grad.clone()
        return param.grad / self._scaler.get_scale()

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the parameters. Under fp16, skip the update if a gradient overflowed, and adapt the scale.

        Raises:
            ConfigError: a closure was given under fp16; its gradients could not be unscaled.
        """
        self._grad_norm, self._measured = self._measured, None
        if self._scaler is None:
            return self.optim.step(closure) if closure is not None else self.optim.step()
        if closure is not None:
            raise ConfigError("a loss scale does not work with a closure; call backward() and step()")
        self._unscale()
        if not self._unscaled:  # no gradients: nothing to check for overflow
            return self.optim.step()
        result = self._scaler.step(self.optim)
        self._finish_scaling()
        return result

    # -- state -----------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the torch optimizer's state, plus the loss scale under fp16."""
        state = self.optim.state_dict()
        if self._scaler is not None:
            scale = self._scaler.state_dict()
            state["loss_scale"] = {"scale": scale["scale"], "clean_steps": scale["_growth_tracker"]}
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state of :meth:`state_dict`, or of the torch optimizer only."""
        state = {key: value for key, value in state_dict.items() if key != "loss_scale"}
        self.optim.load_state_dict(state)
        if self._scaler is not None and "loss_scale" in state_dict:
            scale = state_dict["loss_scale"]
            own = self._scaler.state_dict()
            self._scaler.load_state_dict(
                {**own, "scale": scale["scale"], "_growth_tracker": int(scale["clean_steps"])}
            )

    # -- internal --------------------------------------------------------------------------------

    def _parameters(self) -> Iterator[torch.Tensor]:
        for group in self.param_groups:
            yield from group["params"]

    def _unscale(self) -> None:
        """Remove the loss scale from the gradients, once per step."""
        if self._scaler is None or self._unscaled:
            return
        if any(param.grad is not None for param in self._parameters()):
            self._scaler.unscale_(self.optim)
            self._unscaled = True
            if self._model_ranks is not None:
                share_overflow(self._scaler, self.optim, self._model_ranks)

    def _finish_scaling(self) -> None:
        """Adapt the loss scale after gradients were unscaled."""
        if self._scaler is not None and self._unscaled:
            self._scaler.update()
            self._unscaled = False


def norm_over_parts(
    params: Sequence[torch.Tensor], model_ranks: ModelRanks, norm_type: float
) -> torch.Tensor:
    """Return the gradient norm of a model with parts on several ranks. A gradient that several ranks have
    counts once. Collective.
    """
    grads = [p.grad for p in params if p.grad is not None and model_ranks.counts(p)]
    device = params[0].device if params else torch.device("cpu")
    own = torch.nn.utils.get_total_norm(grads, norm_type).to(device)
    if math.isinf(norm_type):
        largest = own.float().reshape(1)
        model_ranks.peers.largest(largest)
        return largest[0]
    total = own.double().pow(norm_type).reshape(1)
    model_ranks.peers.sum(total)
    return total[0].pow(1 / norm_type).float()


def share_overflow(scaler: GradScaler, optim: torch.optim.Optimizer, model_ranks: ModelRanks) -> None:
    """Make all ranks skip the step and back off if a gradient overflowed on any of them. Collective."""
    found = scaler._per_optimizer_states[id(optim)]["found_inf_per_device"]
    for value in found.values():
        shared = value.reshape(1).contiguous()
        model_ranks.peers.largest(shared)
        value.copy_(shared[0])
