"""``save_pretrained`` for managed weights that torchao has quantized.

torchao takes its weights apart by class and copies their inner tensors. So it gets meta tensors, for the
names and metadata of the files. The inner tensors are then copied one after another: to a file of the DISK
tier if there is one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from gemini.offload.mapped_tensors import MappedTensors
from gemini.runtime.intercept.quantized import leaves_of
from gemini.runtime.intercept.quantized_operators import QuantizedParameter
from gemini.runtime.intercept.tensors import plain_copy

_TORCHAO = "torchao"


def flatten_managed(model: nn.Module) -> None:
    """Replace the torchao quantizer of ``model``, from transformers, by one that takes managed
    weights apart.
    """
    quantizer: Any = getattr(model, "hf_quantizer", None)
    if quantizer is None or isinstance(quantizer, _Flattening):
        return
    method = quantizer.quantization_config.quant_method
    if getattr(method, "value", method) == _TORCHAO:
        kind = type(quantizer)
        mixed: Any = type(kind.__name__, (_Flattening, kind), {"__module__": kind.__module__})
        made: Any = mixed.__new__(mixed)
        vars(made).update(vars(quantizer))
        model.hf_quantizer = made


class _Flattening:
    """Mixin for the class of a quantizer."""

    def get_state_dict_and_metadata(self, model: nn.Module) -> tuple[Any, Any]:
        """Return the tensors of the files by name, and the metadata."""
        flatten: Any = super().get_state_dict_and_metadata  # type: ignore[misc]
        state = model.state_dict()
        if not any(isinstance(value, QuantizedParameter) for value in state.values()):
            return flatten(model)  # type: ignore[no-any-return]
        outlines = {name: _outline(value) for name, value in state.items()}
        _, metadata = flatten(_holding(outlines))
        place = _place_for([value for value in state.values() if isinstance(value, QuantizedParameter)])
        tensors: dict[str, Any] = {}
        for name, value in state.items():
            names, _ = flatten(_holding({name: outlines[name]}))
            parts = [value]
            if isinstance(value, QuantizedParameter):
                parts = [_copied(leaf, place) for leaf in leaves_of(value)]
            tensors.update(zip(names, parts, strict=True))
        return tensors, metadata

    def __reduce_ex__(self, protocol: Any) -> Any:
        plain: Any = type(self).__bases__[1]  # pickle the plain class: other programs lack the mixed one
        taken = plain.__new__(plain)
        vars(taken).update(vars(self))
        return taken.__reduce_ex__(protocol)


def _outline(value: torch.Tensor) -> torch.Tensor:
    if not isinstance(value, QuantizedParameter):
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
    rebuild = value._form.rebuild
    assert rebuild is not None
    return rebuild([torch.empty(each.shape, dtype=each.dtype, device="meta") for each in value._form.inner])


def _place_for(weights: Sequence[QuantizedParameter]) -> MappedTensors | None:
    """Return a file for the inner tensors of these weights; None to use memory."""
    manager: Any = weights[0]._ref.manager
    directory = manager.chunks.budgets.disk_dir
    if directory is None:
        return None
    inner = [each for weight in weights for each in weight._form.inner]
    return MappedTensors(directory, sum(each.nbytes for each in inner), len(inner))


def _copied(leaf: torch.Tensor, place: MappedTensors | None) -> torch.Tensor:
    plain = plain_copy(leaf).cpu()
    return plain if place is None else place.copy(plain)


def _holding(state: Mapping[str, torch.Tensor]) -> Any:
    """Return an object with a ``state_dict`` method, which is all that the quantizer uses of a model."""
    return SimpleNamespace(state_dict=lambda: dict(state))
