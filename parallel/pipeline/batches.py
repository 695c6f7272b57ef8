"""Cut a batch into micro-batches, pass them to a model, and compute the loss of each."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map

from gemini.comm.peers import digest_of
from gemini.errors import ConfigError

ENDED = object()  # passed instead of a batch when the iterator has ended
_SAMPLED_NUMEL = 4096  # sampled elements of a floating-point tensor
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # integer dtypes by size in bytes


def cut_batch(batch: Any, count: int | None = None, size: int | None = None) -> list[Any]:
    """Return ``count`` micro-batches of ``batch``, or micro-batches of ``size`` samples. Tensors are cut
    along the first dimension; other values are in every micro-batch. With neither, the batch is one
    micro-batch.

    Raises:
        ConfigError: the batch has no tensors, their numbers of samples differ, or cannot be divided.
    """
    batch = _plain(batch)
    tensors = [value for value in tree_flatten(batch)[0] if isinstance(value, torch.Tensor) and value.dim()]
    samples = {len(tensor) for tensor in tensors}
    if len(samples) != 1:
        raise ConfigError(
            f"a batch is cut along the first dimension of its tensors, but these have {sorted(samples)} "
            "samples; give all of them the same number of samples, in tensors, dicts, lists or tuples"
        )
    (number,) = samples
    if count is None:
        count = number // size if size is not None and size > 0 else 1
    if count < 1 or number % count or (size is not None and number != count * size):
        raise ConfigError(
            f"a batch of {number} samples cannot be cut into "
            + (f"micro-batches of {size}" if size is not None else f"{count} equal micro-batches")
            + f"; it can be cut into {[n for n in range(1, number + 1) if number % n == 0]} micro-batches"
        )
    return [tree_map(partial(_piece, index=index, count=count), batch) for index in range(count)]


def _plain(batch: Any) -> Any:
    """Convert other mappings in ``batch`` to dicts: tokenizers return such mappings."""
    if isinstance(batch, (tuple, list)) and not hasattr(batch, "_fields"):
        return type(batch)(map(_plain, batch))
    return dict(batch) if isinstance(batch, Mapping) else batch


def _piece(value: Any, index: int, count: int) -> Any:
    if isinstance(value, torch.Tensor) and value.dim():
        return value.chunk(count)[index]
    return value


def call_arguments(batch: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments for the model: the batch or, if it is a tuple or list (inputs, targets), the first
    item. The items of a mapping are keywords.
    """
    inputs = batch[0] if isinstance(batch, (tuple, list)) else batch
    if isinstance(inputs, Mapping):
        return (), dict(inputs)
    return (inputs,), {}


def form_of(batch: Any) -> str:
    """Return a key of a batch: for batches with equal keys, tensors between stages have equal shapes."""
    return str([(tuple(t.shape), t.dtype) for t in _tensors(batch)])


def kind_of(batch: Any, *, exact: bool = False) -> str:
    """Return a key of a batch: a model handles batches with equal keys in the same way, judging by its
    arguments.

    There are few keys, whatever else is in a batch. ``exact``: texts and numbers, which may name a task, are
    part of the key.
    """
    args, kwargs = call_arguments(batch)
    named = [*enumerate(args), *kwargs.items()]
    return str([(name, _kind(value, exact)) for name, value in named])


def _kind(value: Any, exact: bool) -> object:
    if isinstance(value, torch.Tensor):
        return value.dim(), value.dtype
    if exact and isinstance(value, (str, int, float)):
        return value
    return value if isinstance(value, (bool, type(None))) else type(value).__name__


def _tensors(batch: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors of a batch, in the order of pytree."""
    if isinstance(batch, torch.Tensor):
        yield batch
    elif type(batch) in (tuple, list, dict):
        for value in batch.values() if type(batch) is dict else batch:
            yield from _tensors(value)
    else:
        yield from (value for value in tree_flatten(batch)[0] if isinstance(value, torch.Tensor))


def contents_of(batch: Any) -> int:
    """Return a digest of the contents of a batch, for ranks that share a model to compare. It covers all
    integers; of floating-point tensors the sum of the bits of each sample, and elements at regular distances.
    """
    return digest_of(str([_content(value) for value in tree_flatten(_plain(batch))[0]]))


def _content(value: Any) -> object:
    if not isinstance(value, torch.Tensor):
        return value if isinstance(value, (bool, int, float, str, type(None))) else type(value).__name__
    if value.is_meta or value.layout is not torch.strided or not value.numel():
        return (tuple(value.shape), str(value.dtype))
    flat = value.detach().resolve_conj().resolve_neg().reshape(-1)
    if not (flat.is_floating_point() or flat.is_complex()):
        return (tuple(value.shape), str(value.dtype), _crc(flat))
    if flat.is_complex():
        flat = torch.view_as_real(flat).reshape(-1)
    # Sampled elements alone could all be from one column. The sums cover every element, by sample.
    sums = _sums_of_bits(flat.contiguous(), len(value) if value.dim() else 1)
    some = flat[:: flat.numel() // _SAMPLED_NUMEL | 1]
    return (tuple(value.shape), str(value.dtype), _crc(sums), _crc(some))


def _sums_of_bits(flat: torch.Tensor, samples: int) -> torch.Tensor:
    """Return the sum of the bits of each sample, taken as the widest integers that divide it: torch sums
    8-byte integers much faster. The result must not depend on the alignment of the memory, which differs by
    rank.
    """
    if flat.storage_offset() * flat.itemsize % max(_BITS):
        flat = flat.clone()
    width = max(width for width in _BITS if flat.nbytes // samples % width == 0)
    return flat.view(_BITS[width]).view(samples, -1).sum(1)


def _crc(flat: torch.Tensor) -> int:
    return zlib.crc32(flat.contiguous().cpu().view(torch.uint8).numpy().data)


def refuse_different(content: Sequence[int], what: str) -> None:
    """Raise ConfigError if ranks that share a model got different batches. ``content`` has the digest of each
    rank, ``what`` names their axis.
    """
    others = [rank for rank, each in enumerate(content) if each != content[0]]
    if others:
        raise different_batches([0], others, what)


def different_batches(some: Sequence[int], others: Sequence[int], what: str) -> ConfigError:
    """Return the error for ranks ``others`` with other batches than ``some``."""
    return ConfigError(
        f"ranks {list(some)} and {list(others)} ({what}) hold parts of one model but got batches of "
        "different contents: ranks along pp, sp and tp take the same batches, in the same order; divide the "
        "data over dp only, with plugin.prepare_dataloader(dataset, batch_size) or "
        "DistributedSampler(dataset, num_replicas=plugin.data_ranks.size, rank=plugin.data_ranks.number), "
        "and use one seed for augmentations"
    )


Criterion = Callable[[Any, Any], torch.Tensor]


def loss_of(criterion: Criterion, output: Any, batch: Any) -> torch.Tensor:
    """Return the loss of ``batch`` for the model's ``output``; a 16-bit loss is converted to fp32.

    Raises:
        ConfigError: it is not one number, or has no gradient though the output has.
    """
    loss = criterion(output, batch)
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
        raise ConfigError(f"the criterion returned {_described(loss)}; it must return one number")
    is_led_to = any(each.requires_grad for each in _tensors_in(output))
    if torch.is_grad_enabled() and is_led_to and not loss.requires_grad:
        raise ConfigError(
            "the criterion returned a loss without a gradient: something in it detached the loss from "
            "autograd, for example detach()"
        )
    return loss.float() if loss.dtype in (torch.float16, torch.bfloat16) else loss


def without_weight(output: Any, loss: torch.Tensor) -> torch.Tensor:
    """Return a zero loss with zero gradients, to replace the loss of an empty micro-batch: that is NaN, and
    so is zero times it.
    """
    tensors = (each for each in _tensors_in(output) if not isinstance(each, FakeTensor))
    leaves = [each for each in tensors if each.dim() and each.is_floating_point()]
    found = [each.float().sum() for each in leaves if each.requires_grad]
    return torch.stack(found).sum() * 0 if found else loss


def _tensors_in(output: Any) -> list[torch.Tensor]:
    return [each for each in tree_leaves(output) if isinstance(each, torch.Tensor)]


def _described(value: object) -> str:
    return (
        f"a tensor of {tuple(value.shape)}"
        if isinstance(value, torch.Tensor)
        else f"a {type(value).__name__}"
    )
