"""Leaving each parameter of a model this rank's part of it, with the values of one process."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import nn

from gemini.errors import ConfigError
from gemini.parallel.mesh import Axis
from gemini.parallel.partition import Cut, Partition
from gemini.runtime.storage.initialize import Initialization, children_first


@torch.no_grad()
def cut_parameters(model: nn.Module, axis: Axis, cuts: Mapping[int, Cut], partition: Partition) -> None:
    """Give all ranks the first one's parameters and buffers, and leave of those with ``cuts``, by their
    identity, this rank's part. A model on ``meta`` is initialized, a submodule at a time.

    Raises:
        ConfigError: nothing gives a weight on ``meta`` its values.
    """
    cutting = _Cutting(model, axis, cuts, partition)
    for name, owner in list(children_first(model)):
        with cutting.whole_again(owner):
            cutting.initialization.run(name, owner)
        for param in owner.parameters(recurse=False):
            cutting.cut(param)
    unset = cutting.initialization.unset
    if unset:
        raise ConfigError(
            f"{len(unset)} weights that were built on 'meta' have no values (first: {unset[0]!r}): no "
            "reset_parameters() or _init_weights() gives them any; build the model on 'cpu'"
        )
    for buffer in model.buffers():
        axis.broadcast(buffer)


class _Cutting:
    """What has been cut so far."""

    def __init__(self, model: nn.Module, axis: Axis, cuts: Mapping[int, Cut], partition: Partition) -> None:
        self.initialization = Initialization(model)
        self._axis, self._cuts, self._partition = axis, cuts, partition
        self._done: set[int] = set()
        self._on_meta = any(param.is_meta for param in model.parameters())

    def cut(self, param: nn.Parameter) -> None:
        """Take over the first rank's values, once, and leave this rank's part."""
        if id(param) not in self._done:
            self._done.add(id(param))
            self._take(param, param.data)

    def _take(self, param: nn.Parameter, values: torch.Tensor) -> None:
        self._axis.broadcast(values)
        cut = self._cuts.get(id(param))
        if cut is None:
            param.data = values
        else:
            param.data = cut.part(values, self._axis.rank)
            self._partition.note(param, cut)

    @contextmanager
    def whole_again(self, owner: nn.Module) -> Iterator[None]:
        """Let the initialization of ``owner`` find whole parameters in the place of those that are cut: where
        it draws those of its children again, as that of GPT-2 does, they become the new ones, and tied ones
        that it draws with its own keep theirs.

        Memory that is not written to takes no room.
        """
        if not self._on_meta:
            yield
            return
        others: dict[int, nn.Parameter] = {}
        places: list[tuple[nn.Module, str, nn.Parameter]] = []
        for module in owner.modules():
            for key, param in module._parameters.items():
                if param is not None and id(param) in self._done:
                    cut = self._cuts.get(id(param))
                    shape = param.shape if cut is None else cut.shape
                    whole = torch.empty(shape, dtype=param.dtype, device="cpu")
                    others.setdefault(id(param), nn.Parameter(whole, requires_grad=param.requires_grad))
                    places.append((module, key, param))
        for module, key, param in places:
            module._parameters[key] = others[id(param)]
        versions = {key: other._version for key, other in others.items()}
        try:
            yield
        finally:
            for module, key, param in places:
                module._parameters[key] = param
        own = {id(param) for param in owner.parameters(recurse=False)}
        for param in {id(param): param for _, _, param in places}.values():
            if others[id(param)]._version != versions[id(param)] and id(param) not in own:
                self._take(param, others[id(param)].data)
