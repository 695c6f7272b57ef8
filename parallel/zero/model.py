"""The model side of low-level ZeRO: what it computes in."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import distributed as dist
from torch import nn

from gemini.errors import ConfigError
from gemini.runtime.nested import cast_floating, map_tensors
from gemini.state_as_part import NamedAsWrapped

from .collectives import Collectives
from .optimizer import LowLevelZeroOptimizer


class LowLevelZeroModel(NamedAsWrapped):
    """Run ``module`` in the precision of its optimizer.

    Floating-point buffers, and parameters that the optimizer has not cast, get ``dtype`` here, in place. The
    optimizer is made first: its masters come from the original weights. State dicts are the module's own.

    Args:
        dtype: ``None`` casts nothing.
        cast_inputs: whether floating-point inputs get ``dtype`` too.
        stage: what ``zero_optim_wrapper`` makes of its optimizer.
    """

    def __init__(
        self,
        module: nn.Module,
        dtype: torch.dtype | None = None,
        *,
        cast_inputs: bool = True,
        stage: int = 1,
    ) -> None:
        super().__init__()
        self.module = module
        self.stage = stage
        self._input_dtype = dtype if cast_inputs else None
        if dtype is not None:
            _cast_rest(module, dtype)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module."""
        dtype = self._input_dtype
        if dtype is not None:
            args, kwargs = map_tensors((args, kwargs), lambda tensor: cast_floating(tensor, dtype))
        return self.module(*args, **kwargs)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Return the module's state, in the model's precision; fp32 weights are the optimizer's."""
        return self.module.state_dict(*args, **kwargs)

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        """Load the module's state. Then call the optimizer's ``update_master_params``, or load its state.

        Raises:
            ConfigError: with ``assign=True``: the optimizer would go on with the old parameters.
        """
        if assign:
            raise ConfigError(
                "load_state_dict(assign=True) would replace parameters that are cut; use assign=False"
            )
        return self.module.load_state_dict(state_dict, strict=strict)


def spread_rest(
    module: nn.Module, optimizer: LowLevelZeroOptimizer | None, group: dist.ProcessGroup | None
) -> None:
    """Give all ranks of ``group`` the first one's buffers, and parameters that no optimizer has spread."""
    done = set() if optimizer is None else {shard.param for shard in optimizer.sharded.shards}
    for tensor in (*module.buffers(), *(param for param in module.parameters() if param not in done)):
        Collectives(group, tensor.device).spread(tensor)


def _cast_rest(module: nn.Module, dtype: torch.dtype) -> None:
    for param in module.parameters():
        if param.is_floating_point() and param.dtype != dtype:
            param.data = param.data.to(dtype)
    for owner in module.modules():
        for name, buffer in list(owner.named_buffers(recurse=False)):
            setattr(owner, name, cast_floating(buffer, dtype))
