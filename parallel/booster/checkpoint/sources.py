"""What the files of a model hold: its tensors as streams, which are tied, and what else it wants kept."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from gemini.checkpoint import contents, plain_data
from gemini.model.ddp import GeminiDDP
from gemini.parallel.booster.checkpoint.tensor_source import TensorSource, copied_source, whole_source
from gemini.parallel.booster.checkpoint.zero import master_sources
from gemini.parallel.booster.data_parallel import DataParallel, SingleProcess
from gemini.parallel.booster.sharded_data import ShardedData
from gemini.parallel.zero import LowLevelZeroModel, LowLevelZeroOptimizer
from gemini.runtime import ManagedParameter, read_values
from gemini.runtime.storage.model_storage import slot_of

Names = dict[torch.Tensor, str]
# In the metadata of a file, next to the further names of tied tensors, which are no dotted "gemini." names.
OWN_METADATA = "gemini."
EXTRA_STATE = OWN_METADATA + "extra_state"


@dataclass(frozen=True)
class ModelContents:
    """``aliases`` maps the further names of tied tensors to the name that is stored; ``extra`` is what
    ``get_extra_state`` methods add."""

    sources: list[TensorSource]
    aliases: dict[str, str]
    extra: dict[str, Any]

    def metadata(self) -> dict[str, str]:
        """Return what the header of a file says besides the tensors."""
        extra = plain_data.encode(self.extra, "a module's extra state")
        return {**self.aliases, **({EXTRA_STATE: json.dumps(extra)} if self.extra else {})}


def unwrap(model: nn.Module) -> nn.Module:
    """Return the module inside a boosted model; one that is not boosted is returned as it is."""
    if isinstance(model, (GeminiDDP, SingleProcess, DataParallel, LowLevelZeroModel, ShardedData)):
        inner: nn.Module = model.module
        return inner
    return model


def parameter_names(model: nn.Module) -> Names:
    """Return the name of every parameter of a model, boosted or not; of a tied one, the first."""
    return {param: name for name, param in unwrap(model).named_parameters()}


def model_contents(model: nn.Module, optimizer: torch.optim.Optimizer | None) -> ModelContents:
    """Return what to save of a model, boosted or not. Runs what is pending of an update.

    ``optimizer`` is the one boosted with it: it may have fp32 weights behind the model's.
    """
    if isinstance(model, GeminiDDP):
        return _managed_contents(model)
    state = unwrap(model).state_dict(keep_vars=True)
    tensors = {name: value for name, value in state.items() if isinstance(value, torch.Tensor)}
    aliases = tied_names(tensors)
    masters = {}
    if isinstance(optimizer, LowLevelZeroOptimizer):
        masters = {source.spec.name: source for source in master_sources(optimizer, parameter_names(model))}
    sources = [
        masters.get(name) or copied_source(name, value)
        for name, value in tensors.items()
        if name not in aliases
    ]
    extra = {name: value for name, value in state.items() if name not in tensors}
    return ModelContents(sources, aliases, extra)


def _managed_contents(model: GeminiDDP) -> ModelContents:
    model._gemini.manager.lock.refuse_all()
    model._gemini.storage.mixture.refuse("save_model")
    model._gemini.manager.run_pending()
    model._gemini.manager.recover()  # an operator that raised may have left chunks pinned
    state = model.module.state_dict(keep_vars=True)  # of what the model has now, replaced layers included
    tensors = {name: value for name, value in state.items() if isinstance(value, torch.Tensor)}
    aliases = tied_names(tensors)
    sources = [_source(model, name, value) for name, value in tensors.items() if name not in aliases]
    extra = {name: value for name, value in state.items() if name not in tensors}
    return ModelContents(sources, aliases, extra)


def _source(model: GeminiDDP, name: str, value: torch.Tensor) -> TensorSource:
    """Return the source of a tensor of a managed model: of a weight its fp32 master if it has one. All ranks
    must run it."""
    if not isinstance(value, ManagedParameter):
        return copied_source(name, value)
    slot = slot_of(value)
    read = partial(read_values, slot, model._gemini.manager)
    return whole_source(name, contents.weight_dtype(slot), tuple(slot.param_view.shape), read)


def tied_names(tensors: dict[str, torch.Tensor]) -> dict[str, str]:
    """Return the further names of tensors that are in ``tensors`` more than once, each with the first."""
    first: dict[torch.Tensor, str] = {}
    for name, tensor in tensors.items():
        first.setdefault(tensor, name)
    return {name: first[tensor] for name, tensor in tensors.items() if first[tensor] != name}


def config_file(module: nn.Module) -> dict[str, str]:
    """Return ``config.json`` of a transformers model, without which ``from_pretrained`` cannot read its
    weights; nothing for other models."""
    to_json = getattr(getattr(module, "config", None), "to_json_string", None)
    text = to_json() if callable(to_json) else None
    return {"config.json": text} if isinstance(text, str) else {}
