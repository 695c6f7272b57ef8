"""Styles: how a layer of a given kind is cut. Plans refer to them by name (plan.py)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import nn

from gemini.errors import ConfigError
from gemini.parallel.mesh import Axis
from gemini.parallel.partition import Cut
from gemini.parallel.tensor.layers import (
    AlibiAttention,
    Attention,
    ColumnLayer,
    ExpertsLayer,
    GatheredColumnLayer,
    GatheredEmbedding,
    InnerRowLayer,
    LocalColumnLayer,
    RowLayer,
    SharedKeysLayer,
    StateSpaceLayer,
    TransposedRowLayer,
    VocabularyEmbedding,
    become,
)
from gemini.parallel.tensor.region import Region, sum_of


class Style(Protocol):
    """Cuts the parameters of a module over ``size`` ranks, and makes the module work with the parts."""

    def cuts(self, module: nn.Module, size: int) -> dict[str, Cut]:
        """Return the cuts of the module's parameters, by name; parameters that stay whole are left out.
        Changes nothing.

        Raises:
            ConfigError: ``size`` ranks cannot share this module.
        """
        ...

    def apply(self, module: nn.Module, region: Region, cuts: Mapping[str, Cut]) -> None:
        """Make ``module`` compute with this rank's parts of its parameters, which were cut by ``cuts``."""
        ...


@dataclass(frozen=True)
class Column:
    """Cut a Linear or Conv1D by its outputs.

    Attributes:
        sections: the number of projections of equal sizes in the weight (3 for query, key and value).
        unit: the number of outputs that stay together (those of a head).
        repeats: a unit may be on several ranks, which use it for different heads (key heads that several
            query heads share).
        square: the number of sections is outputs / inputs.
    """

    sections: int = 1
    unit: int = 1
    repeats: bool = False
    square: bool = False

    def as_sections(self, module: nn.Module) -> Column:
        """Return this style with the number of sections of ``module``."""
        if not self.square:
            return self
        weight, out = _linear_weight(module), _out_dim(module)
        return replace(self, square=False, sections=max(1, weight.shape[out] // weight.shape[1 - out]))

    def cuts(self, module: nn.Module, size: int) -> dict[str, Cut]:
        weight, out = _linear_weight(module), _out_dim(module)
        sections = self.as_sections(module).sections
        if weight.shape[out] % (sections * self.unit):
            raise ConfigError(
                f"{weight.shape[out]} outputs are not {sections} projections side by side in units of "
                f"{self.unit}"
            )
        units = weight.shape[out] // (sections * self.unit)
        if self.repeats and units < size and size % units == 0:
            return _column_cuts(module, units, sections, copies=size // units)
        if units % size:
            raise ConfigError(
                f"{weight.shape[out]} outputs in {sections} x {units} units of {self.unit} are not divisible "
                f"by {size} ranks; {_fitting(units)}"
            )
        return _column_cuts(module, size, sections)

    def apply(self, module: nn.Module, region: Region, cuts: Mapping[str, Cut]) -> None:
        become(module, ColumnLayer, region)
        cut = cuts["weight"]
        _set_features(module, "out_features" if _is_linear(module) else "nf", cut.count)
        if cut.copies > 1:
            for key in cuts:
                sum_gradient(module.get_parameter(key), region.axis.neighbours(cut.copies))


@dataclass(frozen=True)
class Row:
    """Cut a Linear or Conv1D by its inputs, which a column layer has cut. ``splits_input=True``: they are
    whole and are split here; None: either.
    """

    splits_input: bool | None = False
    unit: int = 1

    def cuts(self, module: nn.Module, size: int) -> dict[str, Cut]:
        weight = _linear_weight(module)
        dim = 1 - _out_dim(module)
        units = weight.shape[dim] // self.unit
        if units % size:
            raise ConfigError(
                f"{weight.shape[dim]} inputs are not divisible by {size} ranks; {_fitting(units)}"
            )
        return {"weight": Cut(tuple(weight.shape), dim, size)}

    def apply(self, module: nn.Module, region: Region, cuts: Mapping[str, Cut]) -> None:
        linear = _is_linear(module)
        become(module, RowLayer if linear else TransposedRowLayer, region, splits_input=self.splits_input)
        _set_features(module, "in_features" if linear else "nx", region.axis.size)


@dataclass(frozen=True)
class Head:
    """Cut a Linear or Conv1D by any number of outputs. The output is gathered on all ranks, or without
    ``gathers`` stays this rank's part, for :func:`vocabulary_cross_entropy`.
    """

    gathers: bool = True

    def cuts(self, module: nn.Module, size: int) -> dict[str, Cut]:
        _linear_weight(module)
        return _column_cuts(module, size, 1)

    def apply(self, module: nn.Module, region: Region, cuts: Mapping[str, Cut]) -> None:
        if not _is_linear(module):
            module.nf = cuts["weight"].piece_numel  # type: ignore[assignment]
        if self.gathers:
            whole = cuts["weight"].shape[_out_dim(module)]
            become(module, GatheredColumnLayer, region, whole_features=whole)
        else:
            become(module, LocalColumnLayer, region)


@dataclass(frozen=True)
class Vocabulary:
    """Cut an Embedding by any number of rows."""

    def cuts(self, module: nn.Module, size: int) -> dict[str, Cut]:
        weight = _embedding_weight(module)
        return {"weight": Cut(tuple(weight.shape), 0, size)}

    def apply(self, module: nn.Module, region: Region, cuts: Mapping[str, Cut]) -> None:
        become(module, VocabularyEmbedding, region)


@dataclass(frozen=True)
class EmbeddingColumns:
    """Cut an Embedding by its columns. They are for this rank's part of the following computation (for
    example a bias of each head), or with ``gathers`` gathered.
    """

    gathers: bool = False

    def cuts(self, module: nn.Module, size: int) -> dict[str, Cut]:
        weight = _embedding_weight(module)
        if weight.shape[1] % size:
            raise ConfigError(
                f"{weight.shape[1]} columns are not divisible by {size} ranks; {_fitting(weight.shape[1])}"
            )
        return {"weight": Cut(tuple(weight.shape), 1, size)}

    def apply(self, module: nn.Module, region: Region, cuts: Mapping[str, Cut]) -> None:
        _set_features(module, "embedding_dim", region.axis.size)
        if self.gathers:
            become(module, GatheredEmbedding, region)


@dataclass(frozen=True)
class TorchAttention:
    """Cut ``nn.MultiheadAttention`` by its heads, including its output projection."""

    def cuts(self, module: nn.Module, size: int) -> dict[str, Cut]:
        if not isinstance(module, nn.MultiheadAttention):
            raise ConfigError(f"it is a {type(module).__name__}, but the style is for nn.MultiheadAttention")
        if module.in_proj_weight is None or module.bias_k is not None or module.add_zero_attn:
            raise ConfigError("attention with kdim, vdim, add_bias_kv or add_zero_attn cannot be cut")
        if module.num_heads % size:
            raise ConfigError(
                f"{module.num_heads} heads are not divisible by {size} ranks; {_fitting(module.num_heads)}"
            )
        found = {"in_proj_weight": Cut(tuple(module.in_proj_weight.shape), 0, size, 3)}
        if module.in_proj_bias is not None:
            found["in_proj_bias"] = Cut(tuple(module.in_proj_bias.shape), 0, size, 3)
        behind = Row().cuts(module.out_proj, size)
        return found | {f"out_proj.{key}": cut for key, cut in behind.items()}

    def apply(self, module: nn.Module, region: Region, cuts: Mapping[str, Cut]) -> None:
        # _qkv_same_embed_dim=False keeps torch's fused kernel for whole layers from using the weights.
        assert isinstance(module, nn.MultiheadAttention)
        Row().apply(module.out_proj, region, {})
        heads = module.num_heads // region.axis.size
        become(module, Attention, region, num_heads=heads, _qkv_same_embed_dim=False)


@dataclass(frozen=True)
class SharedKeys:
    """A Linear to query heads, then one key head and one value head that all query heads share, each with
    ``unit`` features. Its parameters stay whole; a rank computes its own query heads and both shared heads,
    and the gradients are summed.
    """

    unit: int = 1

    def cuts(self, module: nn.Module, size: int) -> dict[str, Cut]:
        heads = _linear_weight(module).shape[0] // self.unit - 2
        if heads % size:
            raise ConfigError(f"{heads} query heads are not divisible by {size} ranks; {_fitting(heads)}")
        return {}

    def apply(self, module: nn.Module, region: Region, cuts: Mapping[str, Cut]) -> None:
        become(module, SharedKeysLayer, region, shared_features=2 * self.unit)
        PartialGradient().apply(module, region, cuts)


@dataclass(frozen=True)
class InnerRow:
    """Cut a Linear by its inputs, as a column layer did. Each rank uses the output for its own part."""

    def cuts(self, module: nn.Module, size: int) -> dict[str, Cut]:
        return Row().cuts(module, size)

    def apply(self, module: nn.Module, region: Region, cuts: Mapping[str, Cut]) -> None:
        become(module, InnerRowLayer, region)
        _set_features(module, "in_features", region.axis.size)


@dataclass(frozen=True)
class Channels:
    """Cut the parameters of a module by their first dimension, the channels that the module around it
    computes with: a Linear, a depthwise Conv1d, or any module that holds parameters of channels.
    """

    def cuts(self, module: nn.Module, size: int) -> dict[str, Cut]:
        if isinstance(module, nn.Conv1d) and not module.groups == module.in_channels == module.out_channels:
            raise ConfigError("a Conv1d that mixes channels cannot be cut by its channels")
        found = {}
        for key, param in module.named_parameters(recurse=False):
            if param.shape[0] % size:
                raise ConfigError(
                    f"{param.shape[0]} channels of {key} are not divisible by {size} ranks; "
                    f"{_fitting(param.shape[0])}"
                )
            found[key] = Cut(tuple(param.shape), 0, size)
        return found

    def apply(self, module: nn.Module, region: Region, cuts: Mapping[str, Cut]) -> None:
        for name in ("in_channels", "out_channels", "groups", "out_features"):
            _set_features(module, name, region.axis.size)


@dataclass(frozen=True)
class StateSpace(Channels):
    """Cut a selective state space (transformers' Mamba): the parameters of its channels. Its children have
    their own styles.
    """

    def apply(self, module: nn.Module, region: Region, cuts: Mapping[str, Cut]) -> None:
        become(module, StateSpaceLayer, region)


@dataclass(frozen=True)
class AlibiHeads:
    """Attention of transformers' BLOOM and Falcon: take this rank's heads of the bias that the model makes
    for all heads. The projections have their own styles.
    """

    def cuts(self, module: nn.Module, size: int) -> dict[str, Cut]:
        if getattr(module, "slow_but_exact", False) and getattr(module, "pretraining_tp", 1) > 1:
            raise ConfigError(
                "slow_but_exact multiplies slices of the whole weight, but each rank has only a part; build "
                "the model with slow_but_exact=False"
            )
        return {}

    def apply(self, module: nn.Module, region: Region, cuts: Mapping[str, Cut]) -> None:
        become(module, AlibiAttention, region)


@dataclass(frozen=True)
class PerHead:
    """Cut parameters by their first dimension, which counts heads; each row is used only for its own head.
    ``repeats`` as in :class:`Column`.
    """

    repeats: bool = False

    def cuts(self, module: nn.Module, size: int) -> dict[str, Cut]:
        found = {}
        for name, param in module.named_parameters():
            heads = param.shape[0]
            copies = size // heads if self.repeats and heads < size and size % heads == 0 else 1
            if heads % (size // copies):
                raise ConfigError(f"{heads} heads are not divisible by {size} ranks; {_fitting(heads)}")
            found[name] = Cut(tuple(param.shape), 0, size // copies, copies=copies)
        return found

    def apply(self, module: nn.Module, region: Region, cuts: Mapping[str, Cut]) -> None:
        for name, cut in cuts.items():
            if cut.copies > 1:
                sum_gradient(module.get_parameter(name), region.axis.neighbours(cut.copies))


@dataclass(frozen=True)
class InsideExperts:
    """Experts with a fused gate and up projection, ``gate_up_proj`` of [experts, 2 x width, inputs], and
    ``down_proj`` of [experts, outputs, width]. Each expert is cut by its width, as a column and a row layer.
    """

    def cuts(self, module: nn.Module, size: int) -> dict[str, Cut]:
        found = dict(module.named_parameters())
        up, down = found.pop("gate_up_proj", None), found.pop("down_proj", None)
        if up is None or down is None or found or up.dim() != 3 or up.shape[1] != 2 * down.shape[-1]:
            raise ConfigError(
                f"{type(module).__name__} cannot be cut: it must have only gate_up_proj and down_proj, with "
                "the width of an expert in their second and last dimension; name the layers to cut, without "
                "this one"
            )
        width = down.shape[2]
        if width % size:
            raise ConfigError(
                f"experts of width {width} are not divisible by {size} ranks; {_fitting(width)}"
            )
        return {
            "gate_up_proj": Cut(tuple(up.shape), 1, size, sections=2),
            "down_proj": Cut(tuple(down.shape), 2, size),
        }

    def apply(self, module: nn.Module, region: Region, cuts: Mapping[str, Cut]) -> None:
        become(module, ExpertsLayer, region)


@dataclass(frozen=True)
class PartialGradient:
    """Sum the gradients of parameters that are whole on all ranks but used for this rank's part."""

    def cuts(self, module: nn.Module, size: int) -> dict[str, Cut]:
        return {}

    def apply(self, module: nn.Module, region: Region, cuts: Mapping[str, Cut]) -> None:
        for param in module.parameters():
            sum_gradient(param, region.axis)


def sum_gradient(param: nn.Parameter, axis: Axis) -> None:
    """Sum the gradient of ``param`` over the ranks; for a frozen one, when it is trained later."""
    trains = param.requires_grad
    param.requires_grad_(True).register_hook(_Summed(axis))
    param.requires_grad_(trains)


class _Summed:
    """Parameter hook that sums the gradient over the ranks before autograd accumulates it."""

    def __init__(self, axis: Axis) -> None:
        self._axis = axis

    def __call__(self, grad: torch.Tensor) -> torch.Tensor:
        return sum_of(grad, self._axis)

    def __deepcopy__(self, _memo: object) -> _Summed:
        return self


def _is_linear(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear)


def _out_dim(module: nn.Module) -> int:
    return 0 if _is_linear(module) else 1


def _linear_weight(module: nn.Module) -> torch.Tensor:
    """Return the weight of a Linear (out, in), or of transformers' Conv1D (in, out)."""
    weight = getattr(module, "weight", None)
    is_conv1d = type(module).__name__ == "Conv1D" and hasattr(module, "nf")
    if not isinstance(weight, torch.Tensor) or not (_is_linear(module) or is_conv1d):
        raise ConfigError(f"it is a {type(module).__name__}, but the style is for nn.Linear or Conv1D")
    return weight


def _embedding_weight(module: nn.Module) -> torch.Tensor:
    if not isinstance(module, nn.Embedding):
        raise ConfigError(f"it is a {type(module).__name__}, but the style is for nn.Embedding")
    if module.max_norm is not None or module.sparse or module.scale_grad_by_freq:
        raise ConfigError("an embedding with max_norm, sparse or scale_grad_by_freq cannot be cut")
    return module.weight


def _column_cuts(module: nn.Module, count: int, sections: int, copies: int = 1) -> dict[str, Cut]:
    weight = _linear_weight(module)
    found = {"weight": Cut(tuple(weight.shape), _out_dim(module), count, sections, copies)}
    bias = getattr(module, "bias", None)
    if bias is not None:
        found["bias"] = Cut(tuple(bias.shape), 0, count, sections, copies)
    return found


def _set_features(module: nn.Module, name: str, size: int) -> None:
    if hasattr(module, name):
        setattr(module, name, getattr(module, name) // size)


def _fitting(units: int) -> str:
    """Return the divisors of ``units``, as text."""
    return "possible sizes: " + ", ".join(str(n) for n in range(1, units + 1) if units % n == 0)
