"""apply_specs and GeminiDDP: cut a model by the specs of its ColoParameters."""

from __future__ import annotations

from typing import Any

from torch import nn

from gemini.errors import ConfigError
from gemini.model.ddp import GeminiDDP as ManagedDDP
from gemini.parallel.colo.tensor import ColoParameter, ComputePattern, ProcessGroup, ShardSpec, forget, record
from gemini.parallel.partition import Partition
from gemini.parallel.tensor.parallelize import parallelize
from gemini.parallel.tensor.styles import Column, EmbeddingColumns, Head, Row, Style, Vocabulary

_WAY_OUT = "set ReplicaSpec() for it"


def apply_specs(model: nn.Module) -> Partition:
    """Cut ``model``, in place, by the specs of its ColoParameters, which become ordinary parameters. Return
    the partition. Collective.

    A Linear, or transformers' Conv1D, is cut by its outputs, together with its bias, or by its inputs; an
    Embedding by its columns or rows. Outputs are gathered unless ``set_output_replicate(False)``.

    Raises:
        ConfigError: no style cuts a parameter in that way, or groups differ. Nothing was changed.
    """
    records = [param for param in model.parameters() if isinstance(param, ColoParameter)]
    group = _common_group(model)
    names = dict(model.named_parameters(remove_duplicate=False))
    if group is None or group.mesh is None or group.tp_world_size() == 1:
        for param in records:
            forget(param)
        return Partition(None, names)
    plan: dict[str, Style | str] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        style = _style_of(name, module)
        if style is not None:
            plan[name] = style
    kept = [(param, param.process_group, param.recorded_spec, param.compute_spec) for param in records]
    for param in records:
        forget(param)
    try:
        return parallelize(model, group.mesh, plan)
    except BaseException:
        for param, own_group, spec, compute in kept:
            record(param, own_group, spec, compute)
        raise


class GeminiDDP(ManagedDDP):
    """:class:`gemini.GeminiDDP` of a model that is first cut by the specs of its ColoParameters, over the
    processes of their group. ``partition`` is the result of :func:`apply_specs`.
    """

    def __init__(self, module: nn.Module, **options: Any) -> None:
        """``options`` as for gemini.GeminiDDP. Raises as it, and as :func:`apply_specs`."""
        group = _common_group(module)
        partition = apply_specs(module)
        if group is not None and group.mesh is not None:
            options = {"process_group": group.mesh["dp"], "model_ranks": partition.model_ranks} | options
        super().__init__(module, **options)
        self.partition = partition


def _common_group(model: nn.Module) -> ProcessGroup | None:
    """Return the group of all parameters, the one with several processes if there is any."""
    found: dict[str, ProcessGroup] = {}
    for param in model.parameters():
        if isinstance(param, ColoParameter):
            found.setdefault(str(param.process_group), param.process_group)
    shared = {key: group for key, group in found.items() if group.tp_world_size() > 1}
    if len(shared) > 1:
        raise ConfigError(
            f"parameters of one model lie over {' and '.join(shared)}; give all of them the same group"
        )
    return next(iter((shared or found).values()), None)


def _style_of(name: str, module: nn.Module) -> Style | None:
    """Return the style that cuts a module's own parameters by their specs; None if they stay whole."""
    params = {
        key: param
        for key, param in module.named_parameters(recurse=False)
        if isinstance(param, ColoParameter) and isinstance(param.dist_spec, ShardSpec)
    }
    if not params:
        return None
    said = ", ".join(f"{key} {param.dist_spec}" for key, param in params.items())
    what = f"{name or 'the model itself'}, a {type(module).__name__} with {said}"
    for param in params.values():
        if param.compute_spec is not None and param.compute_spec.compute_pattern is not ComputePattern.TP1D:
            raise ConfigError(
                f"{what}: {param.compute_spec.compute_pattern} works only for layers of "
                "gemini.parallel.tensor.nn; use those, or ComputePattern.TP1D"
            )
    weight = params.get("weight")
    if weight is None:
        raise ConfigError(f"{what}: a layer is cut by its weight, but the weight is whole; {_WAY_OUT}")
    dim = weight.dist_spec.dim % weight.dim() if isinstance(weight.dist_spec, ShardSpec) else 0
    gathers = weight.compute_spec is None or weight.compute_spec.output_replicate
    if isinstance(module, nn.Embedding):
        return EmbeddingColumns(gathers=gathers) if dim == 1 else Vocabulary()
    is_conv1d = type(module).__name__ == "Conv1D" and hasattr(module, "nf")
    if not isinstance(module, nn.Linear) and not is_conv1d:
        raise ConfigError(f"{what}: only Linear, transformers' Conv1D and Embedding can be cut; {_WAY_OUT}")
    by_outputs = dim == (1 if is_conv1d else 0)
    has_bias = getattr(module, "bias", None) is not None
    if has_bias and ("bias" in params) != by_outputs:
        raise ConfigError(
            f"{what}: the weight is cut by its {'outputs' if by_outputs else 'inputs'}, so the bias must be "
            f"{'cut, too' if by_outputs else 'whole'}"
        )
    if by_outputs:
        return Head() if gathers else Column()
    return Row(splits_input=None)
