"""Cut a model over the ranks of tensor parallelism. Each parameter keeps this rank's part of it, with the
values that one process would have.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn

from gemini.errors import ConfigError
from gemini.parallel.families import GROUPS
from gemini.parallel.layout import Layout
from gemini.parallel.mesh import Axis, Mesh
from gemini.parallel.partition import Cut, Partition, refuse_quantized
from gemini.parallel.tensor.agreement import FirstGradients, WholeOutline
from gemini.parallel.tensor.layers import Attention, ColumnLayer, CutLayer
from gemini.parallel.tensor.loss import install_parts_loss, refuse_unknown_loss
from gemini.parallel.tensor.plan import Resolved, resolve
from gemini.parallel.tensor.region import Region, share_generators
from gemini.parallel.tensor.sequence import cut_sequence, find_blocks
from gemini.parallel.tensor.styles import Style
from gemini.runtime.storage.initialization import Initialization, children_first
from gemini.system.device import first_device
from gemini.system.pages import release_file_pages


@torch.no_grad()
def cut_parameters(model: nn.Module, axis: Axis, cuts: Mapping[int, Cut], partition: Partition) -> None:
    """Broadcast the first rank's parameters and buffers, and keep this rank's part of each parameter in
    ``cuts`` (by identity). A model on ``meta`` is initialized one submodule at a time. Collective.

    Raises:
        ConfigError: a weight on ``meta`` gets no values from any initialization.
    """
    cutting = _Cutting(model, axis, cuts, partition)
    for name, owner in list(children_first(model)):
        with cutting.whole_again(owner):
            cutting.initialization.run(name, owner)
        for param in owner.parameters(recurse=False):
            cutting.cut(param)
    unset = cutting.initialization.unset
    if unset:
        raise ConfigError(
            f"{len(unset)} weights that were built on 'meta' have no values (first: {unset[0]!r}), because "
            "no reset_parameters() or _init_weights() sets them; build the model on 'cpu'"
        )
    for buffer in model.buffers():
        axis.broadcast(buffer)


class _Cutting:
    """The state of cutting a model."""

    def __init__(self, model: nn.Module, axis: Axis, cuts: Mapping[int, Cut], partition: Partition) -> None:
        self.initialization = Initialization(model)
        self._axis, self._cuts, self._partition = axis, cuts, partition
        self._done: set[int] = set()
        self._on_meta = any(param.is_meta for param in model.parameters())

    def cut(self, param: nn.Parameter) -> None:
        """Broadcast the first rank's values of ``param``, once, and keep this rank's part."""
        if id(param) not in self._done:
            self._done.add(id(param))
            self._take(param, param.data)

    def _take(self, param: nn.Parameter, values: torch.Tensor) -> None:
        # New memory where values come from another rank: a mapped file is neither read nor copied there.
        whole = values if self._axis.rank == 0 else torch.empty_like(values)
        self._axis.broadcast(whole)
        cut = self._cuts.get(id(param))
        if cut is None:
            param.data = whole
        else:
            param.data = cut.part(whole, self._axis.rank)
            self._partition.note(param, cut)
            release_file_pages(values)

    @contextmanager
    def whole_again(self, owner: nn.Module) -> Iterator[None]:
        """Replace cut parameters by whole ones while ``owner`` is initialized. If its initialization draws
        those of its children again, as GPT-2's does, the new values are taken. Tied parameters that it draws
        as its own keep their values.

        Whole parameters that are not written take no physical memory.
        """
        if not self._on_meta:
            yield
            return
        others: dict[int, nn.Parameter] = {}
        places: list[tuple[nn.Module, str, nn.Parameter]] = []
        for module in owner.modules():
            for key, param in module._parameters.items():
                if param is not None and id(param) in self._done:
                    cut = self._cuts.get(id(param))
                    shape = param.shape if cut is None else cut.shape
                    whole = torch.empty(shape, dtype=param.dtype, device="cpu")
                    others.setdefault(id(param), nn.Parameter(whole, requires_grad=param.requires_grad))
                    places.append((module, key, param))
        for module, key, param in places:
            module._parameters[key] = others[id(param)]
        versions = {key: other._version for key, other in others.items()}
        try:
            yield
        finally:
            for module, key, param in places:
                module._parameters[key] = param
        own = {id(param) for param in owner.parameters(recurse=False)}
        for param in {id(param): param for _, _, param in places}.values():
            if others[id(param)]._version != versions[id(param)] and id(param) not in own:
                self._take(param, others[id(param)].data)


_Styled = tuple[nn.Module, Style, Mapping[str, Cut]]  # the cuts by name of the parameter in the module


def parallelize(
    model: nn.Module,
    mesh: Mesh,
    plan: str | Mapping[str, Style | str] = "auto",
    *,
    gather_logits: bool = True,
    sequence_norms: bool = False,
    whole_experts: bool = False,
    check: bool | None = None,
) -> Partition:
    """Cut ``model``, in place, over the axis ``tp`` of ``mesh``; return the partition of its parameters.

    Its modules and parameters keep their identity; each rank has plain parameters of local shapes. They get
    the first rank's values, and the random generators its states, so dropout masks outside cut layers are
    equal on all ranks. A model on ``meta`` gets the initial values of one process, one submodule at a time.
    Make the optimizer, or wrap the model in GeminiDDP, afterwards: ``GeminiDDP(model,
    process_group=mesh["dp"], model_ranks=partition.model_ranks)``.

    Args:
        plan: ``"auto"``, or styles by the names of modules (docs/parallel.md).
        gather_logits: False leaves each rank its part of the logits of a language model. This takes less
            memory, and the loss is computed by parts.
        sequence_norms: between sublayers each rank has its part of the sequence. Norms, dropout and residuals
            take 1 / size of the memory, with the same bytes sent. For LLaMA, Qwen3, GPT-2 and
            ``nn.TransformerEncoder``; the size must divide the sequence length.
        whole_experts: True leaves experts of a mixture whole under ``"auto"``, so that ranks of data
            parallelism can divide them.
        check: whether to run the first training batch through the whole model too, and compare outputs and
            gradients. This takes the memory of its weights and gradients once. None: check if the plan is not
            ``"auto"``, logits are gathered, and the model is not on ``meta``.

    Raises:
        ConfigError: the model cannot be cut this way, here or on another rank; nothing was changed. In the
            first forward pass: outputs or gradients differ from the whole model's. In the first backward
            pass:
            gradients of whole parameters differ between ranks.
    """
    _refuse_layout(mesh.layout)
    axis = mesh.axis("tp")
    names = dict(model.named_parameters(remove_duplicate=False))
    if axis is None:
        return Partition(None, names)
    ranks = axis
    work = ranks.together(
        lambda: planned(
            model,
            ranks.size,
            plan,
            gather_logits=gather_logits,
            sequence_norms=sequence_norms,
            whole_experts=whole_experts,
        )
    )
    partition = Partition(axis, names)
    if check is None:
        check = plan != "auto" and gather_logits and not any(param.is_meta for param in model.parameters())
    whole = WholeOutline(model) if check else None
    cut_parameters(model, axis, work.cuts, partition)
    region = apply_styles(model, axis, work)
    if not gather_logits:
        install_parts_loss(model, axis)
    if whole is not None:
        whole.watch(model, partition, region)
    FirstGradients(model, axis, partition)
    share_generators(axis, first_device(model.parameters()))
    return partition


@torch.no_grad()
def cut_without_values(model: nn.Module, axis: Axis) -> tuple[Region, dict[int, Cut]]:
    """Cut an inference-only ``model`` on ``meta`` as :func:`parallelize` does with ``"auto"``, without
    values: the caller must fill in the parts of the parameters. Return the region that its layers share, and
    the cuts by the identity of parameters. Raises ConfigError on all ranks if it cannot be cut.
    """
    work = axis.together(lambda: planned(model, axis.size, "auto"))
    for param in model.parameters():
        if id(param) in work.cuts:
            param.data = work.cuts[id(param)].part(param.data, axis.rank)
    region = apply_styles(model, axis, work)
    return region, work.cuts


def apply_styles(model: nn.Module, axis: Axis, work: Work) -> Region:
    """Convert the layers of ``model``, whose parameters are cut already, to compute with this rank's parts;
    return the region that they share.
    """
    region = Region(axis)
    for module, style, cuts in work.styles:
        style.apply(module, region, cuts)
    _note_places(model)
    _set_attributes(model, work.resolved, axis.size)
    if work.blocks:
        cut_sequence(work.blocks, region)
    model.register_forward_pre_hook(partial(_open, region))
    model.register_forward_hook(partial(_close, region), always_call=True)
    return region


def _note_places(model: nn.Module) -> None:
    """Number the modules, and tell cut layers which module they are in."""
    for number, parent in enumerate(model.modules()):
        if isinstance(parent, Attention):
            parent.place_in(number)
        for child in parent.children():
            if isinstance(child, ColumnLayer):
                child.place_in(number)


def _refuse_layout(layout: Layout) -> None:
    if layout.mode not in (None, "1d", "sequence"):
        raise ConfigError(
            f"{layout}: layers of unmodified models are cut only in mode '1d'; for {layout.mode} write the "
            "model with gemini.parallel.tensor.nn, or leave out mode"
        )


def _open(region: Region, model: nn.Module, *_: object) -> None:
    region.open(model)


def _close(region: Region, *_: object) -> None:
    region.close()


@dataclass(frozen=True)
class Work:
    """The work of cutting a model, after every rank has checked that it is possible. ``blocks`` are those
    between which each rank has its part of the sequence.
    """

    resolved: Resolved
    styles: list[_Styled]
    cuts: dict[int, Cut]  # by the identity of a parameter
    blocks: list[nn.Module]


def planned(
    model: nn.Module,
    size: int,
    plan: str | Mapping[str, Style | str],
    *,
    gather_logits: bool = True,
    sequence_norms: bool = False,
    whole_experts: bool = False,
) -> Work:
    """Return the work to cut ``model`` over ``size`` ranks; change nothing. Raises ConfigError."""
    blocks = find_blocks(model) if sequence_norms else []
    if any(isinstance(module, CutLayer) for module in model.modules()):
        raise ConfigError("the model is already cut; cut a new one")
    refuse_quantized(model)
    if not gather_logits:
        refuse_unknown_loss(model)
    resolved = resolve(model, plan, gather_logits=gather_logits, whole_experts=whole_experts)
    styles: dict[int, _Styled] = {}
    cuts: dict[int, Cut] = {}
    settings: dict[str, int] = {}  # by attention module: query heads per key head, on each rank
    for name, style in resolved.styles.items():
        module = model.get_submodule(name)
        if id(module) in styles:
            continue
        try:
            own = style.cuts(module, size)
            _add_cuts(cuts, module, own)
        except ConfigError as error:
            raise ConfigError(f"{name}: {error}") from None
        styles[id(module)] = (module, style, own)
        copies = max((cut.copies for cut in own.values()), default=1)
        place = resolved.around.get(name, name).rpartition(".")[0]
        around = model.get_submodule(place)
        if copies > 1 and hasattr(around, GROUPS):
            settings[place] = getattr(around, GROUPS) // copies
    _refuse_shared(model, cuts, list(styles.values()))
    for name, key in resolved.divided:
        value = getattr(model.get_submodule(name), key)
        if value % size:
            raise ConfigError(f"{name}.{key} is {value}, which is not divisible by {size} ranks")
    resolved.settings.extend((name, GROUPS, value) for name, value in settings.items())
    return Work(resolved, list(styles.values()), cuts, blocks)


def _add_cuts(cuts: dict[int, Cut], module: nn.Module, own: Mapping[str, Cut]) -> None:
    for key, cut in own.items():
        try:
            param = module.get_parameter(key)
        except AttributeError:
            raise ConfigError(
                f"its {key} is computed from other parameters (a parametrization, such as weight_norm or "
                "spectral_norm); leave the layer out of the plan, or remove it first "
                "(torch.nn.utils.parametrize.remove_parametrizations)"
            ) from None
        if type(param) is not nn.Parameter:
            raise ConfigError(f"its {key} is a {type(param).__name__}; cut the model before it is wrapped")
        if param.grad is not None:
            raise ConfigError(f"its {key} has a gradient; cut the model before it is trained")
        if cuts.setdefault(id(param), cut) != cut:
            raise ConfigError(f"its {key} is tied to a weight that is cut in another way")


def _refuse_shared(model: nn.Module, cuts: Mapping[int, Cut], styles: Sequence[_Styled]) -> None:
    """Raise ConfigError for a layer that stays whole although its weight is tied to a cut one."""
    covered = {id(part) for module, _, _ in styles for part in module.modules()}
    for name, module in model.named_modules():
        if id(module) in covered or next(module.children(), None) is not None:
            continue
        for key, param in module.named_parameters(recurse=False):
            if id(param) in cuts:
                raise ConfigError(
                    f"{name}.{key} is tied to a weight that is cut, but the plan leaves {name} whole"
                )


def _set_attributes(model: nn.Module, resolved: Resolved, size: int) -> None:
    seen: set[tuple[int, str]] = set()
    for name, key in resolved.divided:
        module = model.get_submodule(name)
        if (id(module), key) not in seen:
            seen.add((id(module), key))
            setattr(module, key, getattr(module, key) // size)
    for name, key, value in resolved.settings:
        setattr(model.get_submodule(name), key, value)
