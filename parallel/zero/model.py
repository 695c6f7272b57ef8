"""LowLevelZeroModel: casts a model and its inputs to the precision of its optimizer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import distributed as dist
from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from gemini.errors import ConfigError
from gemini.model.ddp import NamedAsWrapped
from gemini.parallel.zero.optimizer import LowLevelZeroOptimizer
from gemini.parallel.zero.replica_collectives import Collectives
from gemini.runtime.intercept.mixed_dtypes import SingleDtype, mixes_dtypes
from gemini.runtime.intercept.nested import cast_floating, map_tensors
from gemini.runtime.intercept.precision import compute_types, place_buffers


class LowLevelZeroModel(NamedAsWrapped):
    """Run ``module`` in the precision of its optimizer.

    Parameters that the optimizer has not cast get ``dtype`` here, in place, except those that stay in fp32;
    buffers keep their type (docs/notes/precision.md). Make the optimizer first: its masters must come from
    the original weights. State dicts are the module's own.

    Args:
        dtype: ``None`` casts nothing.
        keep_fp32: parameters that stay in fp32, or modules that contain them, by name or a part of it. Batch
            norm, and the modules that the model itself lists, need not be named. The optimizer must get its
            own list.
        cast_inputs: whether to cast floating-point inputs to ``dtype`` too.
        stage: the ZeRO stage that ``zero_optim_wrapper`` gives its optimizer.
    """

    def __init__(
        self,
        module: nn.Module,
        dtype: torch.dtype | None = None,
        *,
        keep_fp32: Iterable[str] = (),
        cast_inputs: bool = True,
        stage: int = 1,
    ) -> None:
        super().__init__()
        self.module = module
        self.stage = stage
        self._input_dtype = dtype if cast_inputs else None
        if dtype is not None:
            _cast_rest(module, dtype, tuple(keep_fp32))
        self._mixes_dtypes = dtype is not None and mixes_dtypes(module)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module."""
        return self.run(self.module, args, kwargs)

    def run(self, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run ``call``, a part of the module's forward pass, and return its result."""
        dtype = self._input_dtype
        if dtype is not None:
            args, kwargs = map_tensors((args, kwargs), lambda tensor: cast_floating(tensor, dtype))
        with SingleDtype() if self._mixes_dtypes else nullcontext():
            return call(*args, **kwargs)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Return the module's state in the model's precision; the optimizer holds the fp32 weights."""
        return self.module.state_dict(*args, **kwargs)

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        """Load the module's state. Afterwards call the optimizer's ``update_master_params``, or load its
        state.

        Raises:
            ConfigError: with ``assign=True``: the optimizer would keep the old parameters.
        """
        if assign:
            raise ConfigError(
                "load_state_dict(assign=True) would replace parameters that are cut; use assign=False"
            )
        return self.module.load_state_dict(state_dict, strict=strict)


def spread_rest(
    module: nn.Module,
    optimizer: LowLevelZeroOptimizer | None,
    group: dist.ProcessGroup | None,
    *,
    apart: Iterable[nn.Parameter] = (),
) -> None:
    """Broadcast the first rank's buffers to ``group``, and the parameters that no optimizer has broadcast.
    Those in ``apart`` are left out: they differ between ranks.
    """
    done = set(apart) | (set() if optimizer is None else {shard.param for shard in optimizer.sharded.shards})
    for tensor in (*module.buffers(), *(param for param in module.parameters() if param not in done)):
        Collectives(group, tensor.device).spread(tensor)


def kept_in_fp32(
    module: nn.Module, dtype: torch.dtype | None, keep_fp32: Sequence[str]
) -> list[nn.Parameter]:
    """Return the parameters that stay in fp32 when others get ``dtype``, chosen by the model and
    ``keep_fp32``. Raises ConfigError for a name that matches nothing.
    """
    dtype = None if dtype == torch.float32 else dtype
    types = compute_types(module, dtype, keep_fp32)
    if dtype is None:
        return []
    return [param for param in module.parameters() if types[id(param)] != dtype]


def _cast_rest(module: nn.Module, dtype: torch.dtype, keep_fp32: Sequence[str]) -> None:
    kept = {id(param) for param in kept_in_fp32(module, dtype, keep_fp32)}
    for param in module.parameters():
        if param.is_floating_point() and param.dtype != dtype and id(param) not in kept:
            param.data = param.data.to(dtype)
    place_buffers(module, None, casts=True)
    for owner in module.modules():
        # Its operator needs both in one type; the optimizer was not told to keep its parameters in fp32.
        if isinstance(owner, _NormBase) and owner.weight is not None:
            for name, buffer in list(owner.named_buffers(recurse=False)):
                setattr(owner, name, cast_floating(buffer, owner.weight.dtype))
