"""Chooses the dtypes of parameters and buffers in chunks, and casts operands that have another dtype.

Under mixed precision parameters compute in 16 bits, except for those that stay in fp32. Buffers keep their
dtype: they hold frequencies, statistics and counts, which 16 bits spoil. Quantized weights are bytes. See
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

BYTES = torch.uint8  # dtype of quantized weights in chunks
# Classes of quantized weights with memory of their own, which are not wrappers around plain tensors.
FOUR_BITS, EIGHT_BITS = "bitsandbytes.nn.modules.Params4bit", "bitsandbytes.nn.modules.Int8Params"
# Distributed wrappers, which other packages manage.
_DISTRIBUTED = ("DTensor", "ColoParameter", "AsyncCollectiveTensor")
# Dtypes that may meet in computing; not those of quantized weights.
_COMPUTED = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
# Attributes of transformers models that name the modules to keep in fp32.
_LISTS_OF_FP32 = ("_keep_in_fp32_modules", "_keep_in_fp32_modules_strict")


def is_quantized(param: torch.Tensor) -> bool:
    """Say whether an unmanaged parameter has a class for quantized values that chunks can hold."""
    kind = type(param)
    if kind is nn.Parameter or kind.__name__ in _DISTRIBUTED:
        return False
    return class_name(kind) in (FOUR_BITS, EIGHT_BITS) or is_traceable_wrapper_subclass(param)


def class_name(kind: type) -> str:
    """Return the qualified name of a class, with its module."""
    return f"{kind.__module__}.{kind.__qualname__}"


def compute_types(
    module: nn.Module, precision: torch.dtype | None, keep_fp32: Sequence[str], *, strict: bool = True
) -> dict[int, torch.dtype]:
    """Return the dtype of each parameter in its chunk, by the parameter's id.

    Raises:
        ConfigError: with ``strict``, a name in ``keep_fp32`` matches no parameter and no module with
            parameters.
    """
    params = list(module.parameters())
    if precision is None:
        if keep_fp32:
            raise ConfigError(
                "keep_fp32 needs mixed_precision: without it parameters keep their dtype; leave keep_fp32 out"
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
    """Return the ids of the parameters that the user or the model names for fp32."""
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
    """Return the ids of the parameters that have ``pattern`` as one or several whole components of their
    names; ``*`` matches anything."""
    parts = re.escape(pattern).replace(r"\*", ".*")
    within = re.compile(rf"(^|\.){parts}($|\.)")
    named = module.named_parameters(remove_duplicate=False)
    return {id(param) for name, param in named if within.search(name)}


def _computes_in_fp32(name: str, owner: nn.Module) -> bool:
    """Say whether a submodule computes in fp32 in any case: batch norm, because its operator takes parameters
    and statistics of one dtype; and modules with an fp32 ``dtype`` or ``compute_dtype`` attribute (routers of
    experts, which cast their parameters in forward; quantized layers of bitsandbytes, which cast their
    bias)."""
    if isinstance(owner, _NormBase) and not isinstance(owner, _InstanceNorm):
        return owner.running_mean is not None and owner.running_mean.dtype == torch.float32
    return bool(name) and torch.float32 in (vars(owner).get("dtype"), vars(owner).get("compute_dtype"))


def place_buffers(module: nn.Module, device: torch.device | None, *, casts: bool) -> None:
    """Move the buffers of a module and its submodules to ``device`` (None: keep their device). With
    ``casts``, buffers that torch derives from a parameter get its dtype, and so do weights that PEFT holds as
    buffers. A buffer that fits already stays."""
    derived = dict((*_derived_buffers(module), *_weights_of_adapters(module))) if casts else {}
    for owner in module.modules():
        for name, buffer in list(owner.named_buffers(recurse=False)):
            placed = buffer.to(device)
            if placed.is_floating_point():
                placed = placed.to(derived.get((id(owner), name), placed.dtype))
            if placed is not buffer:
                setattr(owner, name, placed)


def _derived_buffers(module: nn.Module) -> Iterator[tuple[tuple[int, str], torch.dtype]]:
    """Yield (owner id, name) and dtype for buffers that operators use together with the parameter from which
    they are computed: singular vectors of spectral norm, bases of orthogonal parametrizations."""
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
    """Yield (owner id, name) and dtype for buffers that are untrained weights of PEFT adapters, such as
    VeRA's shared random projections. The dtype is that of the trained parameters beside them."""
    for layer in module.modules():
        trained = [getattr(layer, name, None) for name in getattr(layer, "adapter_layer_names", ())]
        params = [param for part in trained if isinstance(part, nn.Module) for param in part.parameters()]
        for part in layer.children() if params else ():
            if type(part).__module__ == "peft.tuners._buffer_dict":
                for name, _ in part.named_buffers(recurse=False):
                    yield (id(part), name), params[0].dtype


def run_in_one_dtype(
    func: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    operands: Sequence[torch.Tensor],
    refusal: RuntimeError,
) -> Any:
    """Run an operator that torch refused again, with its other operands cast to the dtype of ``operands``,
    the managed ones. Values computed from fp32 buffers may meet 16-bit parameters, and the other way round.

    Raises:
        RuntimeError: ``refusal``, if it is not about dtypes, or if a cast operand is written to.
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
