"""Which type parameters and buffers of a model have in chunks, and operands that have others.

Under mixed precision parameters compute in 16 bits except for those that stay in fp32; buffers keep their
type: they hold frequencies, statistics and counts, which 16 bits spoil. Quantized weights are bytes. See
docs/notes/precision.md and docs/notes/quantized.md.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.instancenorm import _InstanceNorm
from torch.nn.utils.parametrize import ParametrizationList
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from gemini.errors import ConfigError
from gemini.runtime.intercept.nested import map_tensors

BYTES = torch.uint8  # the type of quantized weights in chunks
# Classes of quantized weights over memory of their own, which are no wrappers around plain tensors.
FOUR_BITS, EIGHT_BITS = "bitsandbytes.nn.modules.Params4bit", "bitsandbytes.nn.modules.Int8Params"
# Wrappers over several processes, which other parts manage.
_DISTRIBUTED = ("DTensor", "ColoParameter", "AsyncCollectiveTensor")
# What computing in 16 bits meets; not the types of quantized weights.
_COMPUTED = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
# Where models of transformers name the parts that 16 bits spoil.
_LISTS_OF_FP32 = ("_keep_in_fp32_modules", "_keep_in_fp32_modules_strict")


def is_quantized(param: torch.Tensor) -> bool:
    """Say whether a parameter that is not managed has a class for quantized values that chunks can hold."""
    kind = type(param)
    if kind is nn.Parameter or kind.__name__ in _DISTRIBUTED:
        return False
    return class_name(kind) in (FOUR_BITS, EIGHT_BITS) or is_traceable_wrapper_subclass(param)


def class_name(kind: type) -> str:
    """Return the name of a class with that of its module."""
    return f"{kind.__module__}.{kind.__qualname__}"


def compute_types(
    module: nn.Module, precision: torch.dtype | None, keep_fp32: Sequence[str], *, strict: bool = True
) -> dict[int, torch.dtype]:
    """Return the type of each parameter in its chunk, by the parameter's id.

    Raises:
        ConfigError: ``strict``, and a name in ``keep_fp32`` is that of no parameter and no module with some.
    """
    params = list(module.parameters())
    if precision is None:
        if keep_fp32:
            raise ConfigError(
                "keep_fp32 is for mixed_precision: without it parameters keep their type; leave it out"
            )
        return {id(param): param.dtype for param in params}
    kept = _named(module, keep_fp32, strict=strict)
    for owner_name, owner in module.named_modules():
        if _computes_in_fp32(owner_name, owner):
            kept.update(id(param) for param in owner.parameters())
    return {
        id(param): torch.float32 if id(param) in kept and param.dtype != torch.float64 else precision
        for param in params
    }


def _named(module: nn.Module, keep_fp32: Sequence[str], *, strict: bool) -> set[int]:
    """Return the ids of parameters that the user, or the model itself, names."""
    kept: set[int] = set()
    for pattern in keep_fp32:
        found = _matching(module, pattern)
        if not found and strict:
            raise ConfigError(
                f"keep_fp32 names {pattern!r}, but no parameter and no module with parameters has that name "
                "as a part of its own; names are those of named_parameters() and named_modules()"
            )
        kept |= found
    for owner in module.modules():
        for attribute in _LISTS_OF_FP32:
            patterns = getattr(owner, attribute, None)
            if isinstance(patterns, (list, tuple, set, frozenset)):
                for pattern in patterns:
                    kept |= _matching(owner, str(pattern))
    return kept


def _matching(module: nn.Module, pattern: str) -> set[int]:
    """Return the ids of the parameters in whose names ``pattern`` is one whole part or several; ``*`` stands
    for anything."""
    parts = re.escape(pattern).replace(r"\*", ".*")
    within = re.compile(rf"(^|\.){parts}($|\.)")
    named = module.named_parameters(remove_duplicate=False)
    return {id(param) for name, param in named if within.search(name)}


def _computes_in_fp32(name: str, owner: nn.Module) -> bool:
    """Say whether a submodule is one that computes in fp32 whatever comes: batch norm, whose operator takes
    parameters and statistics of one type; and what says so itself (routers of experts, which cast their
    parameters in forward), or what it casts its bias to (quantized layers of bitsandbytes)."""
    if isinstance(owner, _NormBase) and not isinstance(owner, _InstanceNorm):
        return owner.running_mean is not None and owner.running_mean.dtype == torch.float32
    return bool(name) and torch.float32 in (vars(owner).get("dtype"), vars(owner).get("compute_dtype"))


def place_buffers(module: nn.Module, device: torch.device | None, *, casts: bool) -> None:
    """Replace the buffers of a module and its submodules by ones on ``device`` (None: where they are). With
    ``casts`` those that torch itself derives from a parameter get its type, and so do weights that PEFT holds
    as buffers. One that fits already stays."""
    derived = dict((*_derived_buffers(module), *_weights_of_adapters(module))) if casts else {}
    for owner in module.modules():
        for name, buffer in list(owner.named_buffers(recurse=False)):
            placed = buffer.to(device)
            if placed.is_floating_point():
                placed = placed.to(derived.get((id(owner), name), placed.dtype))
            if placed is not buffer:
                setattr(owner, name, placed)


def _derived_buffers(module: nn.Module) -> Iterator[tuple[tuple[int, str], torch.dtype]]:
    """Yield owner's id and name of the buffers that operators take together with the parameter they are
    computed from, and its type: singular vectors of spectral norm, bases of orthogonal parametrizations."""
    for owner in module.modules():
        if isinstance(owner, ParametrizationList):
            dtype = next(owner.parameters(recurse=False)).dtype
            for part in owner.children():
                if type(part).__module__ == "torch.nn.utils.parametrizations":
                    for name, _ in part.named_buffers(recurse=False):
                        yield (id(part), name), dtype
        for hook in owner._forward_pre_hooks.values():
            if isinstance(hook, SpectralNorm):
                dtype = getattr(owner, f"{hook.name}_orig").dtype
                for end in ("_u", "_v"):
                    yield (id(owner), hook.name + end), dtype


def _weights_of_adapters(module: nn.Module) -> Iterator[tuple[tuple[int, str], torch.dtype]]:
    """Yield owner's id and name of the buffers that adapters of PEFT have as weights that nobody trains, and
    the type of those beside them that are trained: random projections of VeRA, which layers share."""
    for layer in module.modules():
        trained = [getattr(layer, name, None) for name in getattr(layer, "adapter_layer_names", ())]
        params = [param for part in trained if isinstance(part, nn.Module) for param in part.parameters()]
        for part in layer.children() if params else ():
            if type(part).__module__ == "peft.tuners._buffer_dict":
                for name, _ in part.named_buffers(recurse=False):
                    yield (id(part), name), params[0].dtype


def run_in_one_type(
    func: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    operands: Sequence[torch.Tensor],
    refusal: RuntimeError,
) -> Any:
    """Run once more an operator that torch refused, with its other operands cast to the type of ``operands``,
    its managed ones: what comes of a buffer in fp32 meets parameters in 16 bits, and the other way round.

    Raises:
        RuntimeError: ``refusal``, where it is not about that, or what was cast is written to.
    """
    types = {operand.dtype for operand in operands}
    if len(types) != 1 or "type" not in str(refusal):
        raise refusal
    (dtype,) = types
    managed = {id(operand) for operand in operands}
    copies: list[torch.Tensor] = []

    def cast(tensor: torch.Tensor) -> torch.Tensor:
        other = tensor.dtype != dtype and tensor.dtype in _COMPUTED
        if not other or id(tensor) in managed:
            return tensor
        copies.append(tensor.to(dtype))
        return copies[-1]

    args, kwargs = map_tensors((args, kwargs), cast)
    if not copies:
        raise refusal
    versions = [copy._version for copy in copies]
    out = func(*args, **kwargs)
    if [copy._version for copy in copies] != versions:
        raise refusal
    return out
