"""How a batch of a data loader becomes the calls of a model and of its criterion."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.utils._pytree import tree_map

from gemini.errors import ConfigError


def split_batch(batch: Any) -> tuple[Any, Any]:
    """Return data and label. Of a list or tuple the first member is data and the second the label; if there
    are more, all of them but the first are. Anything else is data, without a label (None)."""
    if not isinstance(batch, (list, tuple)):
        return batch, None
    if not batch:
        raise ConfigError("the data loader gave an empty batch: it must give (data, label), or data")
    if len(batch) == 2:
        return batch[0], batch[1]
    return batch[0], tuple(batch[1:]) or None


def move_to(value: Any, device: torch.device) -> Any:
    """Return ``value`` with all tensors in it on ``device``; a tensor that is there already is not copied."""
    if isinstance(value, torch.Tensor):
        return value.to(device, non_blocking=True)
    return tree_map(lambda leaf: leaf.to(device, non_blocking=True) if _is_tensor(leaf) else leaf, value)


def call_model(model: Callable[..., Any], data: Any) -> Any:
    """Call a model: the items of a mapping are keywords, the members of a list or tuple arguments."""
    if isinstance(data, Mapping):
        return model(**data)
    if isinstance(data, (list, tuple)):
        return model(*data)
    return model(data)


def call_criterion(criterion: Callable[..., Any], output: Any, label: Any) -> Any:
    """Call a criterion with what a model returned, a tuple of it as arguments, and the label: none where it
    is None, else as :func:`call_model` does. If both are mappings all of it is keywords."""
    arguments = output if isinstance(output, (list, tuple)) else (output,)
    if label is None:
        return criterion(*arguments)
    if isinstance(label, Mapping):
        return criterion(**output, **label) if isinstance(output, Mapping) else criterion(*arguments, **label)
    if isinstance(label, (list, tuple)):
        return criterion(*arguments, *label)
    return criterion(*arguments, label)


def num_samples(*values: Any) -> int:
    """Return the length of the first tensor found in ``values``, which is how many samples a batch has; 0
    where there is none."""
    for value in values:
        inside = value
        if isinstance(value, Mapping):
            inside = list(value.values())
        if isinstance(inside, (list, tuple)):
            found = num_samples(*inside)
            if found:
                return found
        if isinstance(inside, torch.Tensor) and inside.dim():
            return len(inside)
    return 0


def _is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor)
