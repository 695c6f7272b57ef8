"""Encodes Python data as JSON without losing types: the keys, tuples and small tensors of optimizer and
scheduler states.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from gemini.errors import CheckpointError, in_words
from gemini.system.config import format_bytes

_TYPE = "type"
_MAX_TENSOR_BYTES = 2**24  # larger ones belong in a buffer, which is saved as a tensor
_PLAIN = (bool, int, float, str, type(None))


def encode(value: object, where: str) -> Any:
    """Return JSON data for ``value``: numbers, text, None, lists, tuples, dicts with plain keys, Counters,
    small tensors.

    Raises:
        CheckpointError: it contains something else; ``where`` names the value in the message.
    """
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, _PLAIN):
        return value
    if isinstance(value, list):
        return [encode(item, where) for item in value]
    if isinstance(value, tuple):
        return {_TYPE: "tuple", "items": [encode(item, where) for item in value]}
    if isinstance(value, Mapping) and all(isinstance(key, _PLAIN) for key in value):
        kind = "counter" if isinstance(value, Counter) else "dict"
        return {_TYPE: kind, "items": [[key, encode(item, where)] for key, item in value.items()]}
    if isinstance(value, torch.Tensor) and value.nbytes <= _MAX_TENSOR_BYTES:
        plain = value.detach().cpu().contiguous()
        raw = plain.reshape(-1).view(torch.uint8).numpy().tobytes() if plain.numel() else b""
        return {
            _TYPE: "tensor",
            "dtype": str(plain.dtype).removeprefix("torch."),
            "shape": list(plain.shape),
            "hex": raw.hex(),
        }
    raise CheckpointError(
        f"{where} holds a {type(value).__name__}, which a checkpoint cannot keep; it keeps numbers, text, "
        f"None, lists, "
        f"tuples, dicts and tensors of at most {format_bytes(_MAX_TENSOR_BYTES)}"
    )


def decode(data: Any) -> Any:
    """Return the value that :func:`encode` was given. Raises CheckpointError for data that it
    never returns.
    """
    if isinstance(data, _PLAIN):
        return data
    try:
        if isinstance(data, list):
            return [decode(item) for item in data]
        return _DECODERS[data[_TYPE]](data)
    # RuntimeError: from torch, or RecursionError for data nested too deeply.
    except (KeyError, TypeError, ValueError, RuntimeError, AttributeError, OverflowError) as error:
        raise CheckpointError(f"damaged data in a checkpoint: {in_words(error)}") from error


def _tensor(data: dict[str, Any]) -> torch.Tensor:
    dtype = getattr(torch, data["dtype"])
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"{data['dtype']} is no dtype")
    raw = bytearray.fromhex(data["hex"])
    if not raw:
        if 0 not in data["shape"]:
            raise ValueError(f"a tensor of shape {data['shape']!r:.200} has no values")
        return torch.empty(data["shape"], dtype=dtype, device="cpu")
    return torch.frombuffer(raw, dtype=dtype).reshape(data["shape"])


def _pairs(data: dict[str, Any]) -> dict[Any, Any]:
    return {key: decode(item) for key, item in data["items"]}


_DECODERS = {
    "tuple": lambda data: tuple(decode(item) for item in data["items"]),
    "dict": _pairs,
    "counter": lambda data: Counter(_pairs(data)),
    "tensor": _tensor,
}
