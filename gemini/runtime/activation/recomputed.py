"""Blocks that compute their activations again in every backward pass, as a plan or a program names them.

Which blocks of one process are worth it, :mod:`gemini.runtime.activation.recompute` chooses by itself.
"""

from __future__ import annotations

import inspect
import types
import weakref
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from gemini.errors import ConfigError
from gemini.runtime.activation.repeatable import CannotRepeat, Digest, digest_of
from gemini.runtime.intercept.compiled import is_compiled


class RecomputedBlock:
    """Stands in for the ``forward`` of a module: backward runs it again, with the same random numbers.

    Its first call finds out whether the module changes itself, so that a second run would be another one.
    """

    def __init__(self, name: str, module: nn.Module) -> None:
        self.name = name
        self.__signature__ = inspect.signature(module.forward)
        self._module = weakref.ref(module)  # which holds this
        self._is_judged = False
        module.forward = self

    @property
    def module(self) -> nn.Module:
        """The module whose forward this is."""
        module = self._module()
        assert module is not None
        return module

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's own forward; where autograd saves for backward, have it saved what the call was
        given alone.

        Raises:
            ConfigError: the module writes to its buffers or attributes.
        """
        module = self.module
        forward = partial(type(module).forward, module)
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        before = None if self._is_judged else _digest(module)
        out = checkpoint(forward, *args, use_reentrant=False, **kwargs)
        self._is_judged = True
        if before is not None and _digest(module) != before:
            raise ConfigError(
                f"block {self.name!r} cannot be computed again in backward: its forward pass changes its "
                "attributes or buffers (running statistics, a counter), and would do so twice; leave it out "
                "of recompute="
            )
        return out

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        # Copies and pickles of the module have the forward of its class.
        return getattr, (self.module, "forward")


def recompute_blocks(model: nn.Module, names: Iterable[str]) -> None:
    """Have the modules ``names`` of ``model`` compute their activations again in backward.

    Models of transformers build no caches of keys from then on: a second run would add to them.

    Raises:
        ConfigError: as :func:`refuse_unfit_blocks`; nothing was changed.
    """
    names = tuple(names)
    refuse_unfit_blocks(model, names)
    for name in names:
        RecomputedBlock(name, model.get_submodule(name))
    for module in model.modules() if names else ():
        config = getattr(module, "config", None)
        if getattr(config, "use_cache", False):
            config.use_cache = False  # type: ignore[union-attr]


def refuse_unfit_blocks(model: nn.Module, names: Iterable[str]) -> None:
    """Raise ConfigError where one of ``names`` is of no module of ``model`` that can be computed again."""
    names, modules = tuple(names), dict(model.named_modules())
    for name in names:
        if name not in modules or not name:
            raise ConfigError(
                f"recompute names {name!r:.200}, and the model has no such block; name them as "
                "model.named_modules() does"
            )
        outer = next((each for each in names if name.startswith(f"{each}.")), None)
        if outer is not None or names.count(name) > 1:
            raise ConfigError(
                f"recompute names {name!r} {f'and {outer!r} around it' if outer else 'twice'}; what is "
                "computed again is named once"
            )
        module = modules[name]
        is_function = isinstance(inspect.getattr_static(type(module), "forward", None), types.FunctionType)
        if not is_function or type(module).forward is nn.Module.forward:
            raise ConfigError(f"recompute names {name!r}, and {type(module).__name__} has no forward to run")
        if "forward" in vars(module) or isinstance(module, torch.jit.ScriptModule) or is_compiled(module):
            raise ConfigError(
                f"recompute names {name!r}, and something else has its forward already (torch.compile, a "
                "hook of another library, recomputation); leave one of them out"
            )


def _digest(module: nn.Module) -> Digest | None:
    """Return what a module has besides parameters; None where it cannot be looked at."""
    try:
        return digest_of(module)
    except CannotRepeat:
        return None
