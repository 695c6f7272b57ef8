"""StatesByParam: the states of a cut optimizer, found by the model's parameters, too."""

from __future__ import annotations

import sys
from collections.abc import Iterator, MutableMapping
from typing import Any

import torch

from gemini.errors import ConfigError
from gemini.parallel.zero.shards import ParamShard

_HELPER = "torch.distributed.checkpoint.state_dict"


class StatesByParam(MutableMapping[Any, Any]):
    """The states of the wrapped optimizer, whose keys are this rank's parts of the masters.

    ``state[param]`` of a parameter of the model is the state of this rank's part, in a new dict: tensors are
    the optimizer's own, in the parameter's shape where the part is all of it. Of an empty part it is empty.
    """

    def __init__(self, states: MutableMapping[Any, Any], shards: list[ParamShard]) -> None:
        self._states = states
        self._shards = {shard.param: shard for shard in shards}

    def __getitem__(self, key: Any) -> Any:
        shard = self._shards.get(key)
        if shard is None or shard.master is key:
            return self._states[key]
        if shard.master is None:
            return {}
        state = self._states.get(shard.master) or {}
        return {name: _in_shape(value, shard) for name, value in state.items()}

    def __setitem__(self, key: Any, value: Any) -> None:
        self._states[self._own(key)] = value

    def __delitem__(self, key: Any) -> None:
        del self._states[self._own(key)]

    def __contains__(self, key: object) -> bool:
        return self._own(key) in self._states

    def __iter__(self) -> Iterator[Any]:
        return iter(self._states)

    def __len__(self) -> int:
        return len(self._states)

    def __bool__(self) -> bool:
        # The first thing that the helper looks at; what it would go on to do ends in a KeyError.
        if sys._getframe(1).f_globals.get("__name__") == _HELPER:
            raise ConfigError(
                f"{_HELPER} looks for the model's parameters in the groups of the optimizer, where a "
                "LowLevelZeroOptimizer has this rank's parts of them; save and load optimizer.state_dict(), "
                "whole and in the wrapped optimizer's format, or its state_shards(), by rank, as they are"
            )
        return len(self) > 0

    def _own(self, key: Any) -> Any:
        shard = self._shards.get(key)
        return key if shard is None else shard.master


def _in_shape(value: Any, shard: ParamShard) -> Any:
    whole = isinstance(value, torch.Tensor) and value.shape == (shard.numel,) and shard.master is not None
    return value.view(shard.shape) if whole and shard.stop - shard.start == shard.numel else value
