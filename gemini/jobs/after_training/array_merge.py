"""Merges PEFT adapters on arrays of experts (``target_parameters``), a few experts at a time.

A model's files may have an array as one tensor, or the matrices of each expert as separate tensors.
transformers assembles the model from tensors that are never read, which shows the bytes of the array that
each stored tensor provides. For each stored tensor, PEFT's own layer then merges the experts in it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from gemini.integrations.safetensors_files import SafetensorsFiles
from gemini.integrations.stored_weights import Piece, UnreadTensor
from gemini.integrations.transformers_loading import before_loading, one_at_a_time
from gemini.system.input_files import errors_of

_SHORT = (torch.float16, torch.bfloat16)
# PEFT computes a single expert differently from several, which may change the rounding.
_LEAST_EXPERTS = 2
_RUN_BYTES = 2**24  # experts merged at a time; PEFT's temporaries take several times as much
_ARRAYS_AT_ONCE = 4  # cached factors: files interleave the matrices of several arrays by expert

Factors = tuple[torch.Tensor, torch.Tensor]


class ArrayPart(NamedTuple):
    """The part of an array that a stored tensor provides. ``layer``: PEFT's layer of the array."""

    layer: Any
    piece: Piece


def adapter_type(base: torch.dtype) -> torch.dtype:
    """Return the type with which PEFT loads adapters: the base's type, but fp32 for 16-bit types."""
    return torch.float32 if base in _SHORT else base


@contextmanager
def values_for(layer: nn.Module, values: Mapping[torch.Tensor, torch.Tensor]) -> Iterator[None]:
    """Context manager that replaces meta parameters in ``layer`` with ``values``."""
    given: list[tuple[nn.Module, str, nn.Parameter]] = []
    try:
        for owner in layer.modules():
            for key, param in list(owner._parameters.items()):
                if param is not None and param in values:
                    given.append((owner, key, param))
                    owner._parameters[key] = nn.Parameter(values[param], requires_grad=False)
        yield
    finally:
        for owner, key, param in given:
            owner._parameters[key] = param


def places_in_files(model: Any, base: Path, names: Container[str]) -> dict[str, Sequence[Piece]]:
    """Return the bytes in the files of ``base`` that provide each of the parameters ``names``. Parameters
    that transformers computes from stored tensors (for example by a cast) are left out.

    Raises:
        ConfigError: transformers cannot assemble the model.
    """
    found: dict[str, Sequence[Piece]] = {}

    def load(
        original: Callable[..., Any], built: Any, state: Any, files: Any, *rest: Any, **more: Any
    ) -> Any:
        own = {id(param): name for name, param in built.named_parameters()}

        def note(module: nn.Module, key: str, param: Any) -> nn.Parameter | None:
            before = module._parameters.get(key)
            if before is None or id(before) not in own or not getattr(param, "_is_hf_initialized", False):
                return None
            if isinstance(param, UnreadTensor) and own[id(before)] in names:
                found[own[id(before)]] = param.pieces
            before._is_hf_initialized = True  # type: ignore[attr-defined]
            return before

        noted: Any = note
        with SafetensorsFiles([Path(file) for file in files]) as stored:
            stored.reads.hand_out(UnreadTensor)
            hook = register_module_parameter_registration_hook(noted)
            try:
                return original(built, dict(stored), files, *rest, **more)
            finally:
                hook.remove()

    refused = errors_of(f"transformers cannot build the model of {base}")
    with refused, before_loading(load), one_at_a_time():
        type(model).from_pretrained(base, dtype="auto", local_files_only=True)
    return found


class ArrayMerging:
    """Merges adapters into parts of arrays. ``read`` returns the adapter's tensor for a parameter."""

    def __init__(self, adapter: Path, name: str, read: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """``adapter``: the directory, for messages; ``name``: name of the adapter in PEFT's layers."""
        self._adapter = adapter
        self._name = name
        self._read = read
        self._factors = lru_cache(maxsize=_ARRAYS_AT_ONCE)(self._read_factors)

    def add(self, values: torch.Tensor, parts: Iterable[ArrayPart]) -> None:
        """Add the adapters' changes to ``values``, the contents of a stored tensor with these ``parts``.

        Raises:
            ConfigError: PEFT cannot merge them.
        """
        flat, itemsize = values.view(-1), values.itemsize
        for layer, piece in parts:
            first = piece.offset // itemsize
            own = flat[first : first + piece.nbytes // itemsize]
            self._add(layer, own, piece.begin // itemsize)

    def _add(self, layer: Any, own: torch.Tensor, begin: int) -> None:
        """Add the adapters' changes to ``own``: the elements of the array of ``layer`` from ``begin`` on."""
        shape = tuple(layer.get_param().shape)
        experts = layer.num_experts
        row = math.prod(shape) // experts
        for asked, used in _runs(begin // row, -(-(begin + len(own)) // row), experts, row * own.itemsize):
            rows = own.new_zeros(len(used) * row)
            low, high = max(begin, asked.start * row), min(begin + len(own), asked.stop * row)
            place = rows[low - used.start * row : high - used.start * row]
            place.copy_(own[low - begin : high - begin])
            self._merge(layer, rows.view(shape if experts == 1 else (len(used), *shape[1:])), used)
            own[low - begin : high - begin] = place

    def _merge(self, layer: Any, rows: torch.Tensor, used: range) -> None:
        """Let PEFT merge the experts ``used`` into ``rows``, in place."""
        experts, rank = layer.num_experts, layer.r[self._name]
        left, right = self._factors(layer, adapter_type(rows.dtype))
        down = left[used.start * rank : used.stop * rank]
        up = right.view(len(right), rank, experts)[:, :, used.start : used.stop].reshape(len(right), -1)
        of_left, of_right = layer.lora_A[self._name].weight, layer.lora_B[self._name].weight
        vars(layer).update(num_experts=len(used))
        try:
            with (
                values_for(layer, {layer.get_param(): rows, of_left: down, of_right: up}),
                errors_of(f"PEFT cannot merge the adapters of {self._adapter}"),
                torch.no_grad(),
            ):
                layer.merge(adapter_names=[self._name])
        finally:
            vars(layer).update(num_experts=experts)
            layer.merged_adapters.clear()

    def _read_factors(self, layer: Any, dtype: torch.dtype) -> Factors:
        """Return the low-rank matrices of all experts: (experts * rank, in) and (out, rank * experts)."""
        factors = (layer.lora_A[self._name].weight, layer.lora_B[self._name].weight)
        left, right = (self._read(param).to(dtype) for param in factors)
        return left, right


def _runs(first: int, end: int, experts: int, row_bytes: int) -> Iterator[tuple[range, range]]:
    """Yield runs of experts from ``first`` to ``end``, each with an enclosing run of at least
    :data:`_LEAST_EXPERTS` experts (or all, if there are fewer)."""
    most = max(_LEAST_EXPERTS, _RUN_BYTES // max(1, row_bytes))
    for start in range(first, end, most):
        stop = min(start + most, end)
        begin = min(start, max(0, experts - _LEAST_EXPERTS))
        yield range(start, stop), range(begin, max(stop, min(begin + _LEAST_EXPERTS, experts)))
