"""A model of which a rank has a part does not pass for the whole: its state dict is refused, whoever asks."""

from __future__ import annotations

from typing import Any, NoReturn

from torch import nn

from gemini.errors import ConfigError
from gemini.parallel.partition import Partition
from gemini.parallel.pipeline.absent import Absent


def refuse_part_as_whole(
    boosted: nn.Module, module: nn.Module, partition: Partition, *, staged: bool
) -> None:
    """Have ``state_dict()`` of a boosted model, of the ``module`` in it, and of every module with a part of a
    tensor, or without layers that another stage has, raise ConfigError, and with it all that calls it, such
    as ``save_pretrained()``; and ``torch.save`` of both. ``state_dict(keep_vars=True)`` is for those who want
    the parts."""
    cut = {id(param) for param in module.parameters() if partition.cut_of(param) is not None}
    if not cut and not staged:
        return
    for part in {boosted, module, *module.modules()}:
        holds_part = any(id(param) in cut for param in part.parameters(recurse=False))
        if holds_part or part in (boosted, module) or isinstance(part, Absent):
            part.register_state_dict_pre_hook(_Refusal())
    for whole in (boosted, module):  # pickling comes to it first, before process groups in hooks and layers
        held = dict(vars(whole))
        vars(whole).clear()
        vars(whole).update({"_part_of_model": _Refusal(), **held})


class _Refusal:
    """The hook of a module that is part of a model. As such it is among what pickling the module writes."""

    def __call__(self, _module: nn.Module, _prefix: str, keep_vars: bool) -> None:
        """Raise ConfigError unless the parts themselves are wanted."""
        if not keep_vars:
            _refuse()

    def __reduce_ex__(self, _protocol: Any) -> NoReturn:
        """Raise ConfigError: the module is pickled, by ``torch.save(model)`` for example."""
        _refuse()

    def __deepcopy__(self, _memo: Any) -> _Refusal:
        """Return what a copy of the module has: it is the same part."""
        return self


def _refuse() -> NoReturn:
    raise ConfigError(
        "this rank has a part of the model, and state_dict(), save_pretrained() and torch.save would write "
        "it under the names of the whole; call booster.save_model(model, path) on all ranks, with shard=True "
        "for a directory that from_pretrained() reads, or state_dict(keep_vars=True) for the parts themselves"
    )
