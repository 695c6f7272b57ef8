"""Builds a model without holding it whole: creates it on ``meta`` and initializes one submodule at a time."""

from __future__ import annotations

from collections.abc import Iterator, Set
from contextlib import contextmanager

import torch
from torch import nn

from gemini.errors import ConfigError
from gemini.runtime.intercept.tensors import ManagedParameter


@contextmanager
def init_on(device: str | torch.device = "meta", dtype: torch.dtype | None = None) -> Iterator[None]:
    """Create parameters on ``device`` with ``dtype`` (None: torch's default) inside the block.

    On ``"meta"`` a model costs no memory. Wrapping it in ``GeminiDDP`` then initializes it submodule by
    submodule, straight into chunks, by each submodule's ``reset_parameters()`` and, for models of
    transformers, their ``_init_weights()``. Weights that these do not set must be loaded or written before
    the model can be used.
    """
    before = torch.get_default_dtype()
    if dtype is not None:
        torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            yield
    finally:
        torch.set_default_dtype(before)


class Initialization:
    """Initializes submodules in the order of :func:`children_first`, right before their parameters are
    adopted.

    It calls ``reset_parameters()``, or torch's own ``_reset_parameters()``, and then
    ``_init_weights(submodule)`` of the enclosing model if it has one, as in transformers. ``unset``: names of
    parameters and buffers that none of these wrote to, or that are ``awaited`` from a load.
    """

    def __init__(self, module: nn.Module, awaited: Set[str] = frozenset()) -> None:
        self.unset: list[str] = []
        self._awaited = awaited
        self._module = module
        self._models = [
            (name, owner) for name, owner in module.named_modules() if hasattr(type(owner), "_init_weights")
        ]
        self._fresh: list[str] = []  # names of submodules that were on meta
        # By the buffer on meta, which may have two names.
        self._buffers: dict[torch.Tensor, torch.Tensor] = {}

    def run(self, name: str, owner: nn.Module) -> None:
        """Give a submodule real parameters and buffers with values; its children must have theirs already.

        Raises:
            ConfigError: a buffer has no value, and no state dict would contain it.
        """
        if _is_on_meta(owner):
            self._fresh.append(name)
            tied = self._materialize(owner)
            _call(owner, "reset_parameters", "_reset_parameters")
        elif any(fresh.startswith(f"{name}." if name else "") for fresh in self._fresh):
            tied = {}
            _call(owner, "_reset_parameters")  # nn.Transformer initializes its submodules
        else:
            return
        for around, model in reversed(self._models):
            if not around or name == around or name.startswith(f"{around}."):
                model._init_weights(owner)
                break
        owner._parameters.update(tied)
        if name in self._fresh:
            self._note_unset(name, owner)

    def _materialize(self, owner: nn.Module) -> dict[str, nn.Parameter | None]:
        """Replace tensors on meta by real ones, filled with a marker for "not written". Parameters that are
        tied to adopted ones are replaced temporarily, so that they keep their values; returns them by
        name."""
        tied: dict[str, nn.Parameter | None] = {}
        for key, param in list(owner.named_parameters(recurse=False)):
            if isinstance(param, ManagedParameter):
                tied[key] = param
                owner._parameters[key] = nn.Parameter(torch.empty_like(param, device="cpu"))
            elif param.is_meta:
                values = _unwritten(param)
                replace_parameter(
                    param, nn.Parameter(values, requires_grad=param.requires_grad), self._module
                )
        for key, buffer in list(owner.named_buffers(recurse=False, remove_duplicate=False)):
            if buffer.is_meta:
                if buffer not in self._buffers:
                    self._buffers[buffer] = _unwritten(buffer)
                setattr(owner, key, self._buffers[buffer])
        return tied

    def _note_unset(self, name: str, owner: nn.Module) -> None:
        held = {**owner._parameters, **owner._buffers}
        for key, value in held.items():
            full = f"{name}.{key}".lstrip(".")
            if value is None or isinstance(value, ManagedParameter):
                continue
            if full not in self._awaited and not is_unwritten(value):
                continue
            if key in owner._non_persistent_buffers_set:
                raise ConfigError(
                    f"buffer {full!r} of {type(owner).__name__} was built on 'meta', nothing gives it its "
                    "values and no state dict has them: set them in its reset_parameters(), or build the "
                    "model on 'cpu'"
                )
            self.unset.append(full)


@torch.no_grad()
def initialize_buffers(module: nn.Module) -> None:
    """Give the buffers of a module that are on ``meta`` their initial values, as :class:`Initialization`
    does; managed parameters are left alone. Raises ConfigError as :meth:`Initialization.run`."""
    initialization = Initialization(module)
    for name, owner in list(children_first(module)):
        if any(buffer.is_meta for buffer in owner.buffers(recurse=False)):
            initialization.run(name, owner)


def children_first(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield each submodule once, by its first name, in the order in which constructors end; torch initializes
    in this order."""
    seen: set[int] = set()

    def visit(name: str, owner: nn.Module) -> Iterator[tuple[str, nn.Module]]:
        if id(owner) in seen:
            return
        seen.add(id(owner))
        for key, child in owner.named_children():
            yield from visit(f"{name}.{key}" if name else key, child)
        yield name, owner

    return visit("", module)


def _call(owner: nn.Module, *names: str) -> None:
    """Call the first of these methods that ``owner`` has."""
    for name in names:
        method = getattr(owner, name, None)
        if callable(method):
            method()
            return


def _is_on_meta(owner: nn.Module) -> bool:
    """Say whether the submodule itself holds a parameter or buffer on ``meta``."""
    return any(p.is_meta for p in owner.parameters(recurse=False)) or any(
        b.is_meta for b in owner.buffers(recurse=False)
    )


def _unwritten(like: torch.Tensor) -> torch.Tensor:
    real = torch.empty_like(like, device="cpu", requires_grad=False)
    return real.data.fill_(torch.nan).data if real.is_floating_point() else real.data


def is_unwritten(value: torch.Tensor) -> bool:
    """Say whether a tensor that :class:`Initialization` created was never written to."""
    if value.is_floating_point():
        return value.numel() > 0 and bool(value.isnan().any())
    return value._version == 0 and value.numel() > 0


def replace_parameter(param: nn.Parameter, real: nn.Parameter, module: nn.Module) -> None:
    """Replace ``param`` with ``real``. ``param`` keeps its identity unless there are weak references to it
    (recurrent modules)."""
    try:
        torch.utils.swap_tensors(param, real)
    except RuntimeError:
        for owner in module.modules():
            for key, held in list(owner.named_parameters(recurse=False, remove_duplicate=False)):
                if held is param:
                    setattr(owner, key, real)
