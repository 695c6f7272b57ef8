"""What a model that was built of layers over a grid has on this rank."""

from __future__ import annotations

from torch import nn

from gemini.errors import ConfigError
from gemini.parallel.mesh import Axis
from gemini.parallel.partition import Partition
from gemini.parallel.tensor.nn.layer import GridLayer


def partition_of(model: nn.Module) -> Partition:
    """Return which parts of which tensors the parameters of ``model`` are; all ranks call this, before it is
    wrapped: ``GeminiDDP(model, process_group=mesh["dp"], model_ranks=partition_of(model).model_ranks)``.

    In mode 1d parameters of other layers are whole on all ranks, and the first one's values are taken.

    Raises:
        ConfigError: there are no such layers, those of several grids, or in the modes but 1d parameters of
            other layers, whose gradients would be those of this rank's part of the batch.
    """
    layers = [module for module in model.modules() if isinstance(module, GridLayer)]
    grids = list({id(layer.grid): layer.grid for layer in layers if layer.grid.every is not None}.values())
    if not layers or len(grids) > 1:
        raise ConfigError(
            f"{type(model).__name__} has layers of {len(grids)} grids; build it of "
            "gemini.parallel.tensor.nn within one `with over(mesh):`"
        )
    names = dict(model.named_parameters(remove_duplicate=False))
    if not grids:
        return Partition(None, names)
    every = grids[0].every
    assert every is not None
    partition = Partition(every, names)
    for layer in layers:
        for key, tile in layer.tiles.items():
            partition.note(layer.get_parameter(key), tile)
    others = {name: param for name, param in names.items() if partition.cut_of(param) is None}
    if others and grids[0].mode != "1d":
        raise ConfigError(
            f"{next(iter(others))!r} and {len(others) - 1} more parameters are of layers that know no ranks, "
            f"and in mode {grids[0].mode!r} a rank has a part of the batch: take Linear, LayerNorm, "
            "Embedding, PatchEmbedding or Classifier of gemini.parallel.tensor.nn for them"
        )
    _take_first(every, others, model)
    return partition


def partition_along(model: nn.Module, axis: Axis | None) -> Partition:
    """Return the same of a model that may have no such layers, whose parameters all ranks of ``axis`` then
    have whole: the first one's values are taken."""
    if any(isinstance(module, GridLayer) for module in model.modules()):
        return partition_of(model)
    names = dict(model.named_parameters(remove_duplicate=False))
    if axis is not None:
        _take_first(axis, names, model)
    return Partition(axis, names)


def _take_first(every: Axis, others: dict[str, nn.Parameter], model: nn.Module) -> None:
    """Give all ranks the first one's values of what is whole on each."""
    for param in {id(param): param for param in others.values()}.values():
        if not param.is_meta:
            every.broadcast(param.data)
    for buffer in model.buffers():
        if not buffer.is_meta:
            every.broadcast(buffer)
