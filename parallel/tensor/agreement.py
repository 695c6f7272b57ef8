"""Whether a cut model is the whole one, asked once: on the first batch that it trains on.

A plan cuts what the user names, and nothing in a module says what it does with a part: a parameter between
a column and a row layer gets part of its gradient, a softmax over cut features is one of a part, a weight of
query, key and value that is cut in one piece gives each rank other heads than it takes them for. All of these
have shapes that fit. So numbers are compared, and the program ends before its first update where they differ:

- gradients of parameters that are whole on all ranks are the same on all;
- outputs are those of the whole model, where the plan is the user's.

A weight of zeros hides what is before and behind it: an adapter, a gate or an output projection often begins
so. A gradient of zeros is therefore looked at again, and outputs are compared with other numbers in the place
of such weights.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.autograd import Variable
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle

from gemini.errors import ConfigError, in_words
from gemini.parallel.mesh import Axis
from gemini.parallel.partition import Partition
from gemini.parallel.tensor.region import device_of
from gemini.system.rng import generator_states, set_generator_states

_SAMPLED = 2**16  # elements of a gradient
_FREQUENCY = 1.7  # of the waves that a gradient is weighed by: no two neighbours count alike
_SHOWN = 3
_TRUSTED_DIGITS = 0.6  # of those of a type: 7e-5 of fp32, 0.05 of bf16
_LOOK = ("is there", "epsilon", "norm", "sum over a sine", "sum over a cosine")  # what is kept of a gradient


_CAUSES = (
    "something computes over features of which each rank has a part (a softmax, a mean or a norm between a "
    "column and a row layer), a row layer is given whole features, another layer is given the part that a "
    "column layer returns, or a weight that holds several projections side by side, as query, key and value, "
    "is cut in one piece (Column(sections=3) cuts each). check=False (tp_check=False) trains without looking"
)


class FirstGradients:
    """Compares, over the ranks of a cut, the first gradient of each parameter that is whole on all. One that
    is zero, or not finite, tells nothing: the next one is compared."""

    def __init__(self, model: nn.Module, axis: Axis, partition: Partition) -> None:
        self._axis = axis
        self._names: dict[int, str] = {}
        self._found: dict[int, torch.Tensor] = {}
        self._hooks: dict[int, RemovableHandle] = {}
        self._is_asked_for = False
        for name, param in model.named_parameters():
            if partition.cut_of(param) is None and param.is_floating_point():
                trains = param.requires_grad
                self._names[id(param)] = name
                # Behind the hooks that add gradients up over ranks: autograd calls them as they were made.
                hook = param.requires_grad_(True).register_hook(partial(self._note, id(param)))
                self._hooks[id(param)] = hook
                param.requires_grad_(trains)

    def _note(self, key: int, grad: torch.Tensor) -> None:
        """Keep what a gradient looks like; at the end of the backward pass, compare."""
        if grad.layout == torch.strided:
            self._found[key] = _look_of(grad)
        if not self._is_asked_for:
            self._is_asked_for = True
            Variable._execution_engine.queue_callback(self._compare)

    def _compare(self) -> None:
        """Raise ConfigError on all ranks where a gradient is not the same on all."""
        self._is_asked_for = False
        nothing = torch.zeros(len(_LOOK), dtype=torch.float64, device="cpu")
        looks = torch.stack([self._found.get(key, nothing) for key in self._names])
        every = torch.stack(self._axis.all_gather(looks))
        for index, key in enumerate(self._names):
            if key in self._found and _tells(every[:, index]):
                self._hooks.pop(key).remove()
        self._found.clear()
        names = list(self._names.values())
        wrong = [name for index, name in enumerate(names) if not _agree(every[:, index])]
        if wrong:
            more = f" and {len(wrong) - _SHOWN} more" if len(wrong) > _SHOWN else ""
            raise ConfigError(
                f"the gradients of {', '.join(map(repr, wrong[:_SHOWN]))}{more} differ between the ranks of "
                f"{self._axis.name!r}: these parameters are whole on all ranks, and compute with, or before, "
                "a rank's part of what a column layer returns. Cut their module (plan=, tp_plan=), name it "
                "with PartialGradient(), which adds up the parts, or freeze it"
            )

    def __deepcopy__(self, _memo: object) -> FirstGradients:
        return self


def _look_of(grad: torch.Tensor) -> torch.Tensor:
    flat = grad.detach().reshape(-1)
    some = flat[:: max(1, flat.numel() // _SAMPLED)].double()
    wave = torch.arange(some.numel(), dtype=torch.float64, device=some.device) * _FREQUENCY
    sums = torch.stack([some.norm(), (some * wave.sin()).sum(), (some * wave.cos()).sum()]).cpu()
    return torch.cat(
        [torch.tensor([1.0, torch.finfo(grad.dtype).eps], dtype=torch.float64, device="cpu"), sums]
    )


def _tells(looks: torch.Tensor) -> bool:
    """Say whether the looks of a gradient, by rank, are of finite numbers that are not all zero."""
    return bool(torch.isfinite(looks).all()) and float(looks[:, 2].max()) > 0


def _agree(looks: torch.Tensor) -> bool:
    """Say whether the looks of a gradient, by rank, are of equal ones. One that overflowed tells nothing."""
    if not bool(torch.isfinite(looks).all()):
        return True
    largest = float(looks[:, 2].max())
    # Kernels of a GPU may add up in another order each time.
    tolerance = float(looks[:, 1].max()) ** 0.5 * largest
    same = (looks - looks[:1]).abs()[:, 2:] <= tolerance
    return bool(same.all()) and bool((looks[:, 0] == looks[0, 0]).all())


class WholeModel:
    """The model as it was before it was cut, without its weights. The first batch of training is also run
    through it."""

    def __init__(self, model: nn.Module) -> None:
        memo: dict[int, Any] = {}
        for param in model.parameters():
            empty = nn.Parameter(torch.empty_like(param, device="meta"), requires_grad=False)
            memo[id(param)] = empty
        self._whole = copy.deepcopy(model, memo)
        self._partition: Partition | None = None

    def watch(self, model: nn.Module, partition: Partition) -> None:
        """Compare ``model``, which has been cut, on the first batch that it trains on."""
        self._partition = partition
        self._hook = model.register_forward_pre_hook(self._compare, with_kwargs=True, prepend=True)

    @torch.no_grad()
    def _compare(self, model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Raise ConfigError on all ranks where outputs are not those of the whole model. A hook before a
        forward pass. Both evaluate: nothing is random then."""
        partition = self._partition
        if not model.training or partition is None or partition.axis is None:
            return
        self._hook.remove()
        self._partition = None
        weights = partition.gather_state(dict(model.named_parameters()))
        weights = {name: value.detach().to(device_of(model)) for name, value in weights.items()}
        zeros = {name: v for name, v in weights.items() if v.is_floating_point() and not v.any()}
        drawn = {name: _drawn_like(value) for name, value in zeros.items()}
        rank, params = partition.axis.rank, dict(model.named_parameters())
        cuts = {name: partition.cut_of(params[name]) for name in drawn}
        parts = {name: cut.part(drawn[name], rank) if cut else drawn[name] for name, cut in cuts.items()}
        far = self._look(model, partition.axis, parts, weights | drawn, (args, kwargs))
        error = torch.tensor([far], dtype=torch.float64, device="cpu")
        partition.axis.all_reduce(error, largest=True)
        if float(error) > 1.0:
            raise ConfigError(
                f"the outputs of the cut model are not those of the whole one on the first batch: {_CAUSES}"
            )

    def _look(
        self,
        model: nn.Module,
        axis: Axis,
        parts: dict[str, torch.Tensor],
        weights: dict[str, torch.Tensor],
        call: tuple[tuple[Any, ...], Mapping[str, Any]],
    ) -> float:
        """Return how far the outputs of ``model``, with ``parts`` in the place of some parameters, are from
        those of the whole one with ``weights``.

        Raises:
            ConfigError: torch refuses an operator of the cut model, and none of the whole one. Nothing is
                agreed on first: the other ranks may be within the model, and wait.
        """
        device = device_of(model)
        states = generator_states(device)
        modes = [(module, module.training) for module in model.modules()]
        model.eval()
        got: list[Any] = []
        failure: RuntimeError | None = None
        try:
            try:
                got = tree_leaves(_run_with(model, parts, *call))
            except RuntimeError as error:
                if type(error) is not RuntimeError:  # memory that ran out, say
                    raise
                failure = error
            after = generator_states(device)
            set_generator_states(device, states)
            whole, self._whole = self._whole.eval(), nn.Identity()
            wanted = tree_leaves(_run_with(whole, weights | dict(model.named_buffers()), *call))
            has_drawn = not all(map(torch.equal, generator_states(device), states))
            # Between a column and a row layer each rank draws fewer numbers than the whole model does.
            is_random = has_drawn and (
                device.type != "cpu" or not all(map(torch.equal, generator_states(device), after))
            )
        finally:
            for module, mode in modes:
                module.training = mode
            set_generator_states(device, states)
        if failure is not None:
            raise ConfigError(
                "the cut model does not run on the first batch, and the whole one does "
                f"({in_words(failure)}): {_CAUSES}"
            ) from failure
        got = [_whole_of(*each, axis) for each in zip(got, wanted, strict=False)]
        return 0.0 if is_random else max(map(_distance, got, wanted), default=0.0)

    def __deepcopy__(self, _memo: object) -> WholeModel:
        return self


def _run_with(
    model: nn.Module, tensors: dict[str, torch.Tensor], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Any:
    """Run ``model`` with ``tensors`` in the place of some of its parameters and buffers."""
    if not tensors:
        return model(*args, **kwargs)
    return torch.func.functional_call(model, tensors, args, dict(kwargs))


def _drawn_like(zeros: torch.Tensor) -> torch.Tensor:
    """Return numbers for a weight of zeros, the same ones on all ranks; of many inputs each weighs less."""
    numbers = torch.Generator().manual_seed(zeros.numel())
    drawn = torch.randn(zeros.shape, generator=numbers, dtype=torch.float32, device="cpu")
    inputs = zeros.numel() / len(zeros) if zeros.dim() else 1.0
    drawn *= 0.3 / max(inputs, 1.0) ** 0.5
    return drawn.to(zeros)


def _whole_of(got: Any, wanted: Any, axis: Axis) -> Any:
    """Return the ranks' parts of an output side by side, where ``got`` is one (``Head(gathers=False)``)."""
    if not (isinstance(got, torch.Tensor) and isinstance(wanted, torch.Tensor) and got.dim() == wanted.dim()):
        return got
    cut = [dim for dim in range(got.dim()) if got.size(dim) < wanted.size(dim) <= axis.size * got.size(dim)]
    if got.shape == wanted.shape or len(cut) != 1:
        return got
    return torch.cat(axis.all_gather(got), cut[0]).narrow(cut[0], 0, wanted.size(cut[0]))


def _distance(got: Any, wanted: Any) -> float:
    """Return how far a value is from the one of the whole model, in units of what rounding explains."""
    if not (isinstance(got, torch.Tensor) and isinstance(wanted, torch.Tensor) and got.is_floating_point()):
        return 0.0
    if got.shape != wanted.shape:
        return float("inf")
    if not wanted.numel() or not bool(wanted.isfinite().all()):
        return 0.0
    if not bool(got.isfinite().all()):
        return float("inf")
    epsilon = float(torch.finfo(got.dtype).eps)
    if _is_coarse(got):
        epsilon = max(epsilon, 2.0**-11)
    far, scale = float((got.double() - wanted.double()).abs().max()), float(wanted.double().abs().max())
    allowed: float = scale * epsilon**_TRUSTED_DIGITS
    return far / max(allowed, float(torch.finfo(torch.float64).tiny))


def _is_coarse(x: torch.Tensor) -> bool:
    """Say whether products were taken in TF32."""
    return x.is_cuda and torch.get_float32_matmul_precision() != "highest"
