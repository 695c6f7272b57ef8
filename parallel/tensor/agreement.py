"""Check, on the first training batch, that a cut model computes the same as the whole one.

A plan cuts the modules that the user names, and a module does not tell how it uses a part. A parameter
between a column and a row layer gets only part of its gradient. A softmax over cut features is computed over
a part. A fused query-key-value weight that is cut in one piece gives each rank other heads than it assumes.
Shapes match in all these cases. Therefore numbers are compared, and a difference raises before the first
update:

- gradients of parameters that are whole on all ranks must be equal on all ranks;
- for a user's plan, outputs and all gradients must be those of the whole model. Copies of both models, as
  they are before the model is wrapped, train on the batch without dropout. If they draw other random numbers,
  they are compared in evaluation mode.

A weight of zeros hides the layers before and behind it; an adapter, a gate or an output projection often
starts as zeros. Therefore a zero gradient is checked again in later passes, and outputs are compared with
random numbers instead of zero weights.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.autograd import Variable
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten
from torch.utils.hooks import RemovableHandle

from gemini.errors import ConfigError, in_words
from gemini.parallel.mesh import Axis
from gemini.parallel.partition import Partition, PartOfTensor
from gemini.parallel.tensor.region import Region
from gemini.system.device import first_device
from gemini.system.rng import generator_states, set_generator_states

_SAMPLED = 2**16  # elements sampled of a gradient
_FREQUENCY = 1.7  # of the sine and cosine weights: neighbouring elements get different weights
_SHOWN = 3
_TRUSTED_DIGITS = 0.6  # exponent of a type's epsilon: tolerance 7e-5 in fp32, 0.05 in bf16
_TRUSTED_OF_GRADIENTS = 0.3  # 0.008 in fp32, 0.23 in bf16: gradients of unsummed parts differ more
_LOOK = ("is there", "epsilon", "norm", "sum over a sine", "sum over a cosine")  # recorded of a gradient


_CAUSES = (
    "some operator computes over features that are cut over the ranks (a softmax, a mean or a norm between "
    "a column and a row layer), a row layer gets whole features, another layer gets the part that a column "
    "layer returns, or a weight of several projections side by side, such as query, key and value, is cut "
    "as one piece (Column(sections=3) cuts each). check=False (tp_check=False) skips this comparison"
)


class FirstGradients:
    """Compares, over the ranks of a cut, the first gradient of each parameter that is whole on all ranks. A
    zero or non-finite gradient proves nothing; the next one is compared.
    """

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
                # Autograd calls hooks in order of registration: this runs after the hooks that sum over
                # ranks.
                hook = param.requires_grad_(True).register_hook(partial(self._note, id(param)))
                self._hooks[id(param)] = hook
                param.requires_grad_(trains)

    def _note(self, key: int, grad: torch.Tensor) -> None:
        """Record features of a gradient, and compare at the end of the backward pass."""
        if grad.layout == torch.strided:
            self._found[key] = _look_of(grad)
        if not self._is_asked_for:
            self._is_asked_for = True
            Variable._execution_engine.queue_callback(self._compare)

    def _compare(self) -> None:
        """Raise ConfigError on all ranks if a gradient differs between ranks."""
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
            raise ConfigError(
                f"the gradients of {_listed(wrong)} differ between the ranks of {self._axis.name!r}: these "
                "parameters are whole on all ranks, but are used on or before this rank's part of a column "
                "layer's output; cut their module (plan=, tp_plan=), name it with PartialGradient(), which "
                "sums the parts, or freeze it"
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
    """Return whether the gradients with these features, by rank, are finite and not all zero."""
    return bool(torch.isfinite(looks).all()) and float(looks[:, 2].max()) > 0


def _agree(looks: torch.Tensor) -> bool:
    """Return whether gradients with these features, by rank, are equal. Overflow counts as equal."""
    if not bool(torch.isfinite(looks).all()):
        return True
    largest = float(looks[:, 2].max())
    # Kernels of a GPU may sum in another order each time.
    tolerance = float(looks[:, 1].max()) ** 0.5 * largest
    same = (looks - looks[:1]).abs()[:, 2:] <= tolerance
    return bool(same.all()) and bool((looks[:, 0] == looks[0, 0]).all())


class WholeOutline:
    """The model before it was cut, without its weights. The first training batch also runs through it,
    forward and backward.
    """

    def __init__(self, model: nn.Module) -> None:
        self._whole = _outline(model, {})
        self._hooks = _hooks_of(model)

    def watch(self, model: nn.Module, partition: Partition, region: Region) -> None:
        """Compare ``model``, which was cut and computes in ``region``, on its first training batch. It is
        compared as it is now, even if it is wrapped later.
        """
        self._partition, axis = partition, partition.axis
        self._cut = _outline(model, {id(region): region.alike(), id(axis): axis})
        own = _hooks_of(model)
        self._hooks = {name: [e for e in own[name] if e not in self._hooks.get(name, ())] for name in own}
        self._watch = model.register_forward_pre_hook(self._compare, with_kwargs=True, prepend=True)

    def _compare(self, model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Pre-hook: raise ConfigError on all ranks if outputs or gradients are not the whole model's."""
        axis = self._partition.axis
        if not (model.training and torch.is_grad_enabled()) or axis is None:
            return
        self._watch.remove()
        cut, whole = self._cut, self._whole
        self._cut = self._whole = nn.Identity()
        _train_as(model, cut)
        _train_as(model, whole)
        params, device = dict(model.named_parameters()), first_device(model.parameters())
        gathered = self._partition.gather_state(params)
        weights = {name: value.detach().to(device, copy=True) for name, value in gathered.items()}
        zeros = {name: v for name, v in weights.items() if v.is_floating_point() and not v.any()}
        weights |= {name: _drawn_like(value) for name, value in zeros.items()}
        cuts = {name: self._partition.cut_of(param) for name, param in params.items()}
        parts = {name: c.part(weights[name], axis.rank) if c else weights[name] for name, c in cuts.items()}
        trains = {name: param.requires_grad for name, param in params.items()}
        buffers, call = dict(model.named_buffers()), (args, dict(kwargs))
        ran = partial(_Ran, buffers=buffers, trains=trains, call=call, device=device)
        looked = _OutlineComparison(ran, axis, cuts, self._hooks)
        found: _Found | None = None
        # Evaluation mode is tried if the models draw random numbers other than dropout's, and 16-bit types if
        # they do not run in fp32.
        for exact, evaluates in ((True, False), (True, True), (False, False), (False, True)):
            found = found or looked.at(cut, whole, parts, weights, exact=exact, evaluates=evaluates)
        self._agree_on(axis, found or _Found(0.0, []))

    def _agree_on(self, axis: Axis, found: _Found) -> None:
        """Raise ConfigError on all ranks if any of them has ``found`` a difference."""
        names = list(self._hooks)
        told = [found.far > 1.0, *(name in found.wrong for name in [*names, *_INPUTS])]
        error = torch.tensor(told, dtype=torch.float64, device="cpu")
        axis.all_reduce(error, largest=True)
        if float(error[0]):
            raise ConfigError(
                "the outputs of the cut model differ from those of the whole one on the first batch: "
                f"{_CAUSES}"
            )
        wrong = [name for name, is_wrong in zip([*names, *_INPUTS], error[1:], strict=True) if is_wrong]
        if wrong:
            raise ConfigError(
                f"the gradients of {_listed(wrong)} differ from those of the whole model on the first batch, "
                "although the outputs agree: in backward, the ranks' parts of a gradient are not summed, or "
                f"are summed although each rank has the whole gradient (PartialGradient()); or {_CAUSES}"
            )

    def __deepcopy__(self, _memo: object) -> WholeOutline:
        return self


@dataclass(frozen=True)
class _Found:
    """The result of a comparison. ``far``: the distance of the outputs, in units of the rounding tolerance;
    ``wrong``: the names with different gradients.
    """

    far: float
    wrong: list[str]


_INPUTS = tuple(f"input {index}" for index in range(8))  # names of the model's inputs that need a gradient


class _Ran:
    """An outline to run on a batch, with ``weights`` instead of its parameters, and copies of buffers. They
    stay in the outline after forward, because backward may recompute blocks.
    """

    def __init__(
        self,
        outline: nn.Module,
        weights: Mapping[str, torch.Tensor],
        *,
        buffers: Mapping[str, torch.Tensor],
        trains: Mapping[str, bool],
        call: tuple[tuple[Any, ...], dict[str, Any]],
        device: torch.device,
        exact: bool,
    ) -> None:
        """``exact``: 16-bit values are converted to 32 bits."""
        typed = _in_32_bits if exact else _same
        self.weights = {
            name: typed(value.detach()).requires_grad_(trains[name]) for name, value in weights.items()
        }
        leaves, form = tree_flatten(call)
        leaves = [_apart(each, typed) for each in leaves]
        self.call = tree_unflatten(leaves, form)
        inputs = [each for each in leaves if isinstance(each, torch.Tensor) and each.requires_grad]
        self.inputs = dict(zip(_INPUTS, inputs, strict=False))
        own = dict(outline.named_buffers())
        places = {id(own[name]): typed(value.clone()) for name, value in buffers.items() if name in own}
        for module in outline.modules():
            for key, buffer in module._buffers.items():
                module._buffers[key] = places.get(id(buffer), buffer)
        names = {id(param): name for name, param in outline.named_parameters()}
        for module in outline.modules():
            for key, param in module._parameters.items():
                if param is not None:
                    module._parameters[key] = self.weights[names[id(param)]]  # type: ignore[assignment]
        self.outline, self.has_drawn = outline, False
        self._device, self._exact = device, exact

    def forward(self) -> list[Any]:
        """Run the outline and return its outputs as a flat list."""
        states = generator_states(self._device)
        own_types = torch.autocast(self._device.type, enabled=False) if self._exact else nullcontext()
        with torch.enable_grad(), saved_tensors_hooks(_same, _same), _WithoutDropout(), own_types:
            args, kwargs = self.call
            outputs = tree_leaves(self.outline(*args, **kwargs))
        after = generator_states(self._device)
        self.has_drawn = not all(map(torch.equal, after, states))
        return outputs

    def backward(self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Compute gradients of the weights from (output, gradient) pairs."""
        if pairs:
            outputs, factors = zip(*pairs, strict=True)
            with torch.enable_grad(), _WithoutDropout():
                # torch.autograd.backward() would leave the mode, which recomputation needs.
                Variable._execution_engine.run_backward(
                    outputs, factors, False, False, (), allow_unreachable=True, accumulate_grad=True
                )

    def gradients(self) -> dict[str, torch.Tensor | None]:
        """Return the gradients of weights and inputs, by name."""
        return {name: each.grad for name, each in {**self.weights, **self.inputs}.items()}


class _OutlineComparison:
    """Compares the outlines of the cut and the whole model on one batch."""

    def __init__(
        self,
        ran: Callable[..., _Ran],
        axis: Axis,
        cuts: Mapping[str, PartOfTensor | None],
        hooks: Mapping[str, Sequence[Any]],
    ) -> None:
        self._ran, self._axis, self._cuts, self._hooks = ran, axis, cuts, hooks

    def at(
        self,
        cut: nn.Module,
        whole: nn.Module,
        parts: Mapping[str, torch.Tensor],
        weights: Mapping[str, torch.Tensor],
        *,
        exact: bool,
        evaluates: bool,
    ) -> _Found | None:
        """Run both outlines and compare them. Return None if both draw different random numbers, or the whole
        model does not run in this precision.

        Raises:
            ConfigError: torch refuses an operator of the cut model and none of the whole model. This rank
                raises without agreement: the other ranks may be inside the model, waiting.
        """
        modes = [(each, each.training) for model in (cut, whole) for each in model.modules()]
        if evaluates:
            cut, whole = cut.eval(), whole.eval()
        device = next(iter(weights.values())).device if weights else torch.device("cpu")
        states = generator_states(device)
        failure: RuntimeError | None = None
        try:
            try:
                here = self._ran(cut, parts, exact=exact)
                for name, hooks in self._hooks.items():
                    for hook in hooks if here.weights[name].requires_grad else ():
                        here.weights[name].register_hook(hook)
                got = here.forward()
            except RuntimeError as error:
                if type(error) is not RuntimeError:  # for example out of memory
                    raise
                failure = error
            after = generator_states(device)
            set_generator_states(device, states)
            there = self._ran(whole, weights, exact=exact)
            try:
                wanted = there.forward()
            except RuntimeError:
                if exact and type(failure) is RuntimeError:
                    return None
                raise
            # Between a column and a row layer each rank draws fewer numbers than the whole model.
            same = device.type == "cpu" and all(map(torch.equal, generator_states(device), after))
            if failure is not None:
                raise ConfigError(
                    "the cut model does not run on the first batch, but the whole one does "
                    f"({in_words(failure)}): {_CAUSES}"
                ) from failure
            if there.has_drawn and not same:
                return None
            return self._compared(here, there, got, wanted)
        finally:
            set_generator_states(device, states)
            for module, mode in modes:
                module.training = mode

    def _compared(self, here: _Ran, there: _Ran, got: list[Any], wanted: list[Any]) -> _Found:
        own, others = [], []
        far = 0.0
        for out, other in zip(got, wanted, strict=False):
            far = max(far, _distance(_whole_of(_detached(out), other, self._axis), _detached(other)))
            if _is_differentiable(out) and _is_differentiable(other):
                by = _waves_like(other)
                others.append((other, by))
                own.append((out, _part_of(by, out, self._axis).to(out.dtype)))
        worst = torch.tensor([far], dtype=torch.float64, device="cpu")
        self._axis.all_reduce(worst, largest=True)
        if float(worst) > 1.0:
            return _Found(far, [])
        here.backward(own)
        there.backward(others)
        return _Found(far, self._wrong(here.gradients(), there.gradients()))

    def _wrong(
        self, got: Mapping[str, torch.Tensor | None], wanted: Mapping[str, torch.Tensor | None]
    ) -> list[str]:
        """Return the names of weights and inputs with a gradient other than the whole model's."""
        largest: dict[str, float] = defaultdict(float)  # the largest gradient norm in each module
        for name, grad in wanted.items():
            if grad is not None and bool(grad.isfinite().all()):
                for key in (_owner(name), ""):
                    largest[key] = max(largest[key], float(grad.double().norm()))
        wrong = []
        for name, grad in wanted.items():
            cut, own = self._cuts.get(name), got[name]
            grad = None if grad is None else cut.part(grad, self._axis.rank) if cut is not None else grad
            if grad is None and own is None:
                continue
            if grad is None or own is None:
                there = own if grad is None else grad
                assert there is not None
                own, grad = (torch.zeros_like(there) if each is None else each for each in (own, grad))
            if not bool(grad.isfinite().all()):
                continue
            epsilon = _epsilon(grad)
            noise = epsilon * (8 * largest[_owner(name)] + 4 * largest[""])
            allowed = epsilon**_TRUSTED_OF_GRADIENTS * float(grad.double().norm()) + noise
            distance = float((own.double() - grad.double()).norm())
            if not distance <= allowed:
                wrong.append(name)
        return wrong


def _outline(model: nn.Module, memo: dict[int, Any]) -> nn.Module:
    """Return a copy of ``model`` without its weights."""
    for param in model.parameters():
        memo[id(param)] = nn.Parameter(torch.empty_like(param, device="meta"), requires_grad=False)
    return copy.deepcopy(model, memo)


def _hooks_of(model: nn.Module) -> dict[str, list[Any]]:
    """Return the hooks of parameters, which change their gradients."""
    return {name: list((param._backward_hooks or {}).values()) for name, param in model.named_parameters()}


def _train_as(model: nn.Module, outline: nn.Module) -> None:
    """Set the training modes of the modules of ``outline`` to those of the modules of ``model``, by name."""
    modes = {name: module.training for name, module in model.named_modules()}
    for name, module in outline.named_modules():
        module.training = modes.get(name, model.training)


class _WithoutDropout(TorchFunctionMode):
    """Runs a training model with dropout disabled."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run ``func``; a dropout keeps everything."""
        kwargs, name = kwargs or {}, getattr(func, "__name__", "")
        if name in _DROPOUTS:
            return args[0] if args else kwargs["input"]
        if name == "scaled_dot_product_attention":
            args, kwargs = (*args[:4], *((0.0,) if len(args) > 4 else ()), *args[5:]), {**kwargs}
            kwargs.update({"dropout_p": 0.0} if "dropout_p" in kwargs else {})
        elif name == "multi_head_attention_forward":
            kwargs = {**kwargs, "training": False}
        elif name == "bernoulli_" and not isinstance(args[1] if len(args) > 1 else None, torch.Tensor):
            return args[0].fill_(args[1] if len(args) > 1 else kwargs.get("p", 0.5))
        return func(*args, **kwargs)


_DROPOUTS = frozenset(
    prefix + name + suffix
    for prefix in ("", "feature_")
    for name in ("dropout", "alpha_dropout", "dropout1d", "dropout2d", "dropout3d")
    for suffix in ("", "_")
)


def _same(value: Any) -> Any:
    return value


def _detached(value: Any) -> Any:
    return value.detach() if isinstance(value, torch.Tensor) else value


def _in_32_bits(value: torch.Tensor) -> torch.Tensor:
    return value.float() if value.dtype in (torch.bfloat16, torch.float16) else value


def _apart(value: Any, typed: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Return an input as a leaf of its own, so that its gradient flows no further."""
    if not isinstance(value, torch.Tensor):
        return value
    if not value.requires_grad:
        return typed(value)
    return typed(value.detach().clone()).requires_grad_()


def _is_differentiable(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point() and value.requires_grad


def _waves_like(output: torch.Tensor) -> torch.Tensor:
    """Return the gradient to use for an output, equal on all ranks; neighbouring elements differ."""
    wave = torch.arange(output.numel(), dtype=torch.float32, device=output.device)
    return (wave * _FREQUENCY).sin().add(0.5).reshape(output.shape).to(output.dtype)


def _part_of(whole: torch.Tensor, out: torch.Tensor, axis: Axis) -> torch.Tensor:
    """Return the part of ``whole`` that corresponds to ``out``, which may be this rank's padded part."""
    for dim in range(whole.dim()):
        length = out.size(dim)
        if length != whole.size(dim):
            missing = length * axis.size - whole.size(dim)
            shape = [*whole.shape[:dim], missing, *whole.shape[dim + 1 :]]
            whole = torch.cat([whole, whole.new_zeros(shape)], dim).narrow(dim, axis.rank * length, length)
    return whole


def _owner(name: str) -> str:
    return name.rpartition(".")[0] or name


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return f"{', '.join(map(repr, names[:_SHOWN]))}{more}"


def _drawn_like(zeros: torch.Tensor) -> torch.Tensor:
    """Return random numbers for a zero weight, the same on all ranks, scaled down by the number of inputs."""
    numbers = torch.Generator().manual_seed(zeros.numel())
    drawn = torch.randn(zeros.shape, generator=numbers, dtype=torch.float32, device="cpu")
    inputs = zeros.numel() / len(zeros) if zeros.dim() else 1.0
    drawn *= 0.3 / max(inputs, 1.0) ** 0.5
    return drawn.to(zeros)


def _whole_of(got: Any, wanted: Any, axis: Axis) -> Any:
    """Concatenate the ranks' parts of an output, if ``got`` is a part (``Head(gathers=False)``)."""
    if not (isinstance(got, torch.Tensor) and isinstance(wanted, torch.Tensor) and got.dim() == wanted.dim()):
        return got
    cut = [dim for dim in range(got.dim()) if got.size(dim) < wanted.size(dim) <= axis.size * got.size(dim)]
    if got.shape == wanted.shape or len(cut) != 1:
        return got
    return torch.cat(axis.all_gather(got), cut[0]).narrow(cut[0], 0, wanted.size(cut[0]))


def _distance(got: Any, wanted: Any) -> float:
    """Return the distance of a value from the whole model's, in units of the rounding tolerance."""
    if not (isinstance(got, torch.Tensor) and isinstance(wanted, torch.Tensor) and got.is_floating_point()):
        return 0.0
    if got.shape != wanted.shape:
        return float("inf")
    if not wanted.numel() or not bool(wanted.isfinite().all()):
        return 0.0
    if not bool(got.isfinite().all()):
        return float("inf")
    epsilon = _epsilon(got)
    far, scale = float((got.double() - wanted.double()).abs().max()), float(wanted.double().abs().max())
    allowed: float = scale * epsilon**_TRUSTED_DIGITS
    return far / max(allowed, float(torch.finfo(torch.float64).tiny))


def _epsilon(x: torch.Tensor) -> float:
    """Return the relative precision of numbers like ``x``; products may have been computed in TF32."""
    epsilon = float(torch.finfo(x.dtype).eps)
    is_coarse = x.is_cuda and torch.get_float32_matmul_precision() != "highest"
    return max(epsilon, 2.0**-11) if is_coarse else epsilon
