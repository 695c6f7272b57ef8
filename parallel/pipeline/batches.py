"""Cutting a batch into micro-batches, handing them to a model, and the loss of each."""

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

ENDED = object()  # given instead of a batch where the iterator has ended
_SAMPLED_NUMEL = 4096  # of a tensor of floating-point numbers
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # the integers of as many bytes


def cut_batch(batch: Any, count: int | None = None, size: int | None = None) -> list[Any]:
    """Return ``count`` micro-batches of ``batch``, or those of ``size`` samples: each of its tensors is cut
    along the first dimension; what is no tensor is in all of them. Neither: the batch is one.

    Raises:
        ConfigError: it has no tensors, or of other numbers of samples, or they do not divide.
    """
    batch = _plain(batch)
    tensors = [value for value in tree_flatten(batch)[0] if isinstance(value, torch.Tensor) and value.dim()]
    samples = {len(tensor) for tensor in tensors}
    if len(samples) != 1:
        raise ConfigError(
            f"a batch is cut along the first dimension of its tensors, and these have {sorted(samples)} "
            "samples; give one number of samples, in tensors, dicts, lists or tuples of them"
        )
    (number,) = samples
    if count is None:
        count = number // size if size is not None and size > 0 else 1
    if count < 1 or number % count or (size is not None and number != count * size):
        raise ConfigError(
            f"a batch of {number} samples cannot be cut into "
            + (f"micro-batches of {size}" if size is not None else f"{count} equal micro-batches")
            + f"; numbers that do are {[n for n in range(1, number + 1) if number % n == 0]}"
        )
    return [tree_map(partial(_piece, index=index, count=count), batch) for index in range(count)]


def _plain(batch: Any) -> Any:
    """Return ``batch`` with dicts instead of other mappings, as tokenizers return them."""
    if isinstance(batch, (tuple, list)) and not hasattr(batch, "_fields"):
        return type(batch)(map(_plain, batch))
    return dict(batch) if isinstance(batch, Mapping) else batch


def _piece(value: Any, index: int, count: int) -> Any:
    if isinstance(value, torch.Tensor) and value.dim():
        return value.chunk(count)[index]
    return value


def call_arguments(batch: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return what a model is called with: the batch or, of several (inputs and targets), the first; a
    mapping's items are keywords."""
    inputs = batch[0] if isinstance(batch, (tuple, list)) else batch
    if isinstance(inputs, Mapping):
        return (), dict(inputs)
    return (inputs,), {}


def form_of(batch: Any) -> str:
    """Return what batches have in common between whose stages tensors of the same shapes go."""
    return str([(tuple(t.shape), t.dtype) for t in _tensors(batch)])


def kind_of(batch: Any, *, exact: bool = False) -> str:
    """Return what batches have in common that a model takes in the same way, as far as what it is called with
    says it. There are few kinds, whatever else comes with a batch; ``exact``: other texts and numbers, which
    may name a task, are another one."""
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
    """Return a digest of what is in a batch, which ranks that share a model compare: integers whole; of other
    numbers the sum of the bits of each sample, and some numbers in regular distances."""
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
    # Some numbers alone can all be of one column. The sums see any number, and which sample it is of.
    sums = _sums_of_bits(flat.contiguous(), len(value) if value.dim() else 1)
    some = flat[:: flat.numel() // _SAMPLED_NUMEL | 1]
    return (tuple(value.shape), str(value.dtype), _crc(sums), _crc(some))


def _sums_of_bits(flat: torch.Tensor, samples: int) -> torch.Tensor:
    """Return of each sample the sum of its bits, as the widest integers that divide it: torch sums those of 8
    bytes far faster. Which they are must not depend on where a rank's memory starts."""
    if flat.storage_offset() * flat.itemsize % max(_BITS):
        flat = flat.clone()
    width = max(width for width in _BITS if flat.nbytes // samples % width == 0)
    return flat.view(_BITS[width]).view(samples, -1).sum(1)


def _crc(flat: torch.Tensor) -> int:
    return zlib.crc32(flat.contiguous().cpu().view(torch.uint8).numpy().data)


def refuse_different(content: Sequence[int], what: str) -> None:
    """Raise ConfigError where ranks that share a model were given other batches; ``content`` is that of each
    rank, ``what`` they are along."""
    others = [rank for rank, each in enumerate(content) if each != content[0]]
    if others:
        raise different_batches([0], others, what)


def different_batches(some: Sequence[int], others: Sequence[int], what: str) -> ConfigError:
    """Return what to raise where ranks ``others`` were given other batches than ``some``."""
    return ConfigError(
        f"ranks {list(some)} and {list(others)} ({what}) have parts of one model and were given batches of "
        "different contents: ranks along pp, sp and tp take the same batches, in the same order; divide the "
        "data over dp alone, by plugin.prepare_dataloader(dataset, batch_size) or by "
        "DistributedSampler(dataset, num_replicas=plugin.data_ranks.size, rank=plugin.data_ranks.number), "
        "and draw augmentations from one seed"
    )


Criterion = Callable[[Any, Any], torch.Tensor]


def loss_of(criterion: Criterion, output: Any, batch: Any) -> torch.Tensor:
    """Return the loss of ``batch``, for which the model has returned ``output``; fp32 of one in 16 bits.

    Raises:
        ConfigError: it is not one number, or leads to nothing that trains.
    """
    loss = criterion(output, batch)
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
        raise ConfigError(f"the criterion returned {_described(loss)}; it is to return one number")
    is_led_to = any(each.requires_grad for each in _tensors_in(output))
    if torch.is_grad_enabled() and is_led_to and not loss.requires_grad:
        raise ConfigError("the criterion returned a loss without a gradient: it has left autograd (detach())")
    return loss.float() if loss.dtype in (torch.float16, torch.bfloat16) else loss


def without_weight(output: Any, loss: torch.Tensor) -> torch.Tensor:
    """Return a loss whose gradients are zero instead of one that counts nothing: that of no tokens is
    NaN, and so is nothing times it."""
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
