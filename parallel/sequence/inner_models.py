"""Models of transformers inside other modules: PEFT's, a value head, or a user's own.

The class of a model decides what it needs for parts of sequences: masks, positions and loss. A wrapper has
another class and passes its arguments on, so the inner model is examined.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, cast

from torch import nn

from gemini.errors import ConfigError
from gemini.parallel.transformers_model import pretrained_in
from gemini.system.subclassing import mix_in

_MIXES_TOKENS = (nn.RNNBase, nn.Conv1d, nn.MultiheadAttention)
AT_BLOCKS = "cut the sequence at the blocks (cut='blocks', or sp_cut='blocks' of HybridParallelPlugin)"
_WAY_OUT = f"give whole batches to all ranks and {AT_BLOCKS}, or leave sp_size at 1"

Call = tuple[tuple[Any, ...], dict[str, Any]]
Complete = Callable[[tuple[Any, ...], dict[str, Any]], Call]


def find_pretrained(model: nn.Module) -> Any:
    """Return the only transformers model in ``model``; None if it has none.

    Raises:
        ConfigError: there are several.
    """
    found = pretrained_in(model)
    if len(found) > 1:
        raise ConfigError(
            f"{type(model).__name__} has {len(found)} models of transformers ({', '.join(found)}), but a "
            f"batch can be cut for one model only; {_WAY_OUT}"
        )
    return next(iter(found.values()), None)


def has_own_wrapper(model: nn.Module, path: str) -> bool:
    """Return whether a module of the user's own is around the inner model at ``path``: its forward pass may
    compute anything from whole sequences. PEFT's modules pass the arguments of the inner model on.
    """
    names = path.split(".") if path else []
    around = (model.get_submodule(".".join(names[:depth])) for depth in range(len(names)))
    return not all(type(module).__module__.startswith("peft.") for module in around)


def refuse_unfit_wrapper(model: nn.Module, inner: nn.Module, *, cuts_blocks: bool) -> None:
    """Raise ConfigError if modules around ``inner`` compute with neighbouring tokens, or add tokens."""
    if model is inner:
        return
    name, own = type(model).__name__, {id(part) for part in inner.modules()}
    for path, module in model.named_modules():
        if id(module) not in own and isinstance(module, _MIXES_TOKENS) and not cuts_blocks:
            raise ConfigError(
                f"{name} mixes tokens outside its {type(inner).__name__}, in {path}; {_WAY_OUT}"
            )
    config = getattr(model, "active_peft_config", None)
    if not getattr(config, "is_prompt_learning", False):
        return
    if not cuts_blocks:
        raise ConfigError(
            f"{name} adds its own tokens before the sequence ({type(config).__name__}), and would add them "
            f"on each rank; use LoRA, {_WAY_OUT}"
        )
    if "PREFIX" in str(getattr(config, "peft_type", "")):
        raise ConfigError(
            f"{name} adds keys and values of its own to each attention ({type(config).__name__}), which "
            "sequence parallelism does not cut; use LoRA or prompt tuning, or leave sp_size at 1"
        )


class _Completed(nn.Module):
    """A model with a forward pass that completes its arguments, for every caller: PEFT calls ``forward``
    directly, without hooks.
    """

    sequence_completes: Complete

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model with completed arguments."""
        args, kwargs = self.sequence_completes(args, kwargs)
        return super().forward(*args, **kwargs)


def complete_calls(model: nn.Module, complete: Complete) -> None:
    """Make ``complete(args, kwargs)`` transform the arguments of the forward pass of ``model``."""
    mix_in(model, _Completed)
    cast(_Completed, model).sequence_completes = complete


def require_loss_of(inner: Any, model: nn.Module) -> None:
    """Make ``model``, which wraps ``inner``, refuse labels if ``inner`` does not compute their loss. Labels
    of a part were shifted before they were cut, and the wrapper would shift them again.
    """
    watch = _LossWatch(inner.loss_function)
    inner.loss_function = watch
    model.register_forward_pre_hook(watch.begin, with_kwargs=True)
    model.register_forward_hook(watch.end, with_kwargs=True)


class _LossWatch:
    """The loss function of a model of transformers; records whether it was called."""

    def __init__(self, loss: Callable[..., Any]) -> None:
        self._loss = loss
        self._was_called = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self._was_called = True
        return self._loss(*args, **kwargs)

    def begin(self, _model: nn.Module, _args: tuple[Any, ...], _kwargs: Mapping[str, Any]) -> None:
        """Forget the previous pass."""
        self._was_called = False

    def end(self, model: nn.Module, _args: tuple[Any, ...], kwargs: Mapping[str, Any], _out: Any) -> None:
        """Raise ConfigError if labels were given but another loss function was used."""
        if kwargs.get("labels") is not None and not self._was_called:
            raise ConfigError(
                f"{type(model).__name__} computes its own loss over the tokens of this rank only, from "
                "labels that SequenceParallel.cut has already shifted; leave labels out of its call and "
                "compute the loss from its logits with mean_loss, let the inner model compute the loss, or "
                f"{AT_BLOCKS}"
            )
