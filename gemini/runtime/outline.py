"""Outline: what a layout of chunks is drawn from, with nothing of the values. It outlives the parameters."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import nn

from gemini.runtime.adopt import check_apart, unique_parameters
from gemini.runtime.config import GeminiConfig
from gemini.runtime.gemini_mgr import GeminiManager
from gemini.runtime.intercept.compiled import is_compiled
from gemini.runtime.intercept.precision import compute_types


@dataclass(frozen=True)
class Outline:
    """The parameters of a module by name, in initialization order, as tensors on ``meta``.

    ``types``: what each computes in. ``trainable``: which were not frozen. ``operators``: submodules and the
    parameters that the operator of each takes at once.
    """

    params: Mapping[str, torch.Tensor]
    types: Mapping[str, torch.dtype]
    trainable: frozenset[str]
    operators: tuple[tuple[str, tuple[str, ...]], ...]

    @classmethod
    def of(cls, module: nn.Module, config: GeminiConfig, manager: GeminiManager | None = None) -> Outline:
        """Return the outline of a module that is not managed yet; of one that ``manager`` manages, of what it
        does not, but with all operators.

        Raises:
            ConfigError: a parameter cannot be managed.
        """
        params = list(unique_parameters(module, manager))
        check_apart(params)
        # What keep_fp32 names may have left the module since.
        types = compute_types(module, config.precision, config.keep_fp32, strict=manager is None)
        return cls(
            {
                name: torch.empty_strided(param.shape, param.stride(), dtype=param.dtype, device="meta")
                for name, param in params
            },
            {name: types[id(param)] for name, param in params},
            frozenset(name for name, param in params if param.requires_grad),
            tuple(_operators(module)),
        )


def _operators(module: nn.Module) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Yield submodules whose operator is known, and the parameters that it takes at once.

    Known are torch's own layers: an operator takes the parameters that its submodule holds directly;
    attention takes its output projection's too; and what is compiled, which takes all. What other submodules
    do with theirs shows only when they run.
    """
    names = {id(param): name for name, param in module.named_parameters()}
    for name, owner in module.named_modules():
        home = type(owner).__module__
        whole = is_compiled(owner)
        if not whole and (not home.startswith("torch.nn.modules.") or home == nn.ParameterList.__module__):
            continue
        used = owner.parameters(recurse=whole or isinstance(owner, nn.MultiheadAttention))
        found = tuple(names[id(param)] for param in used)
        if found:
            yield name or type(owner).__name__, found
