"""Split a model into stages: a rank keeps its stages, and stand-ins replace the rest. Names do not change."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from gemini.errors import ConfigError
from gemini.parallel.families import Family, family_of
from gemini.parallel.pipeline.containers import containers_in, containers_named_in, pairs_of
from gemini.parallel.pipeline.layers import partition_balanced
from gemini.parallel.pipeline.placeholders import Placeholders
from gemini.parallel.pipeline.remote_modules import (
    LocalBlock,
    NextStageBlock,
    RemoteBlock,
    RemoteModule,
    meta_copy_of,
)
from gemini.parallel.pipeline.stage import Stage
from gemini.parallel.pipeline.stage_pass import StagePass
from gemini.parallel.pipeline.units import Units, block_bytes
from gemini.runtime.storage.initialization import Initialization, children_first

Split = str | Sequence[str]


@dataclass(frozen=True)
class StagedModel:
    """A model after :func:`split`, on this rank.

    Attributes:
        ranges: the blocks of each stage.
        stages: the stages of this rank.
        shared: the parameters that several stages have (tied), by first name, with these stages ascending.
        aliases: all names of a parameter, by the first.
        names: the names in the whole model's state dict.
    """

    module: nn.Module
    units: Units
    ranges: tuple[tuple[int, int], ...]
    stages: tuple[Stage, ...]
    shared: dict[str, tuple[int, ...]]
    aliases: dict[str, tuple[str, ...]]
    names: tuple[str, ...]

    @classmethod
    def undivided(cls, model: nn.Module) -> StagedModel:
        """Return a model as one stage."""
        stage = Stage(0, model, StagePass())
        names = tuple(model.state_dict(keep_vars=True))
        return cls(model, Units(("",), (), ()), ((0, 1),), (stage,), {}, aliases_in(model), names)

    def owner_of(self, names: Iterable[str]) -> int:
        """Return the stage that saves a parameter or buffer, under any of its ``names``: the first that has
        it. All stages have the buffers of modules around blocks; the last stage saves those, because only it
        runs all code that writes to them. Code before the blocks runs on every stage.
        """
        last = len(self.ranges) - 1
        for stage, (start, stop) in enumerate(self.ranges if last else ()):
            if any(_is_within(name, self.units.of_stage(start, stop)) for name in names):
                return stage
        return last

    def names_of(self, name: str) -> tuple[str, ...]:
        """Return all names of the parameter or buffer with this name, the first one first."""
        return next((names for names in self.aliases.values() if name in names), (name,))


def choose_ranges(
    model: nn.Module,
    units: Units,
    num_stages: int,
    split: Split = "bytes",
    costs: Sequence[float] | None = None,
) -> tuple[tuple[int, int], ...]:
    """Return the blocks ``[start, stop)`` of each stage.

    Args:
        split: ``"bytes"`` balances parameter bytes, ``"layers"`` the number of blocks; or the names of the
            first blocks of all stages except the first.
        costs: the cost of each block, in any unit, instead of ``split``.

    Raises:
        ConfigError: there are fewer blocks than stages, or the names do not match blocks.
    """
    count = len(units.blocks)
    if costs is not None and len(costs) != count:
        raise ConfigError(
            f"there are {len(costs)} costs, but the model has {count} blocks; give one for each"
        )
    if costs is None and not isinstance(split, str):
        starts = [0, *(units.blocks.index(name) for name in split if name in units.blocks)]
        if len(starts) != len(split) + 1 or len(starts) != num_stages or sorted(set(starts)) != starts:
            raise ConfigError(
                f"split={list(split)} does not fit {num_stages} stages; name the first blocks of all stages "
                f"but the first, {num_stages - 1} in ascending order, out of {count} from "
                f"{units.blocks[0]!r} to {units.blocks[-1]!r}"
            )
        return tuple(zip(starts, [*starts[1:], count], strict=True))
    if costs is None and split not in ("bytes", "layers"):
        raise ConfigError(f"split is {split!r}; give 'bytes', 'layers', names of blocks, or costs=")
    if costs is None:
        costs = block_bytes(model, units) if split == "bytes" else [1.0] * count
    return tuple(partition_balanced(costs, num_stages))


def split(
    model: nn.Module,
    units: Units,
    ranges: Sequence[tuple[int, int]],
    own: Iterable[int],
    outline: nn.Module | None = None,
) -> StagedModel:
    """Keep the stages ``own`` of ``model``, in place. Other stages' parameters are freed, and parameters on
    ``meta`` get the initial values that one process would draw.

    ``outline`` is that of the whole model, if its layers were cut since (tensor parallelism): stand-ins must
    not take part in collectives.

    Raises:
        ConfigError: the model skips layers at random, or a block refers to a module around the blocks.
    """
    family = family_of(model)
    _refuse_random_depth(model, units, family)
    own = tuple(sorted(own))
    outline = outline if outline is not None else meta_copy_of(model)
    names = tuple(model.state_dict(keep_vars=True))
    aliases = aliases_in(model)
    shared = _shared_parameters(aliases, units, ranges)
    every = frozenset().union(*(units.of_stage(*each) for each in ranges))
    kept = frozenset().union(*(units.of_stage(*ranges[stage]) for stage in own))
    _give_first_values(model, every - kept)
    stages: list[Stage] = []
    around = {name for name, _ in model.named_modules() if _holds_units(name, every)}
    _refuse_references(model, units.blocks, around)
    containers = containers_in(model) | containers_named_in(model)
    beside = _Beside(outline, containers, _pairs_by_unit(model, outline, every))
    placeholders, writers = Placeholders(), {}  # type: ignore[var-annotated]
    outside = StagePass(placeholders)
    for index in own:
        stage_pass, mirrored = StagePass(placeholders), []  # type: ignore[var-annotated]
        tree = _mirror(model, "", around, mirrored, stage_pass)
        stage_pass.containers = beside.containers
        _replace_remote(tree, units, ranges[index], beside, stage_pass)
        is_last = index == len(ranges) - 1
        _put_before(tree, units.blocks[slice(*ranges[index])], stage_pass, None if is_last else beside)
        _show_remote([here for here, _ in mirrored], stage_pass)
        stages.append(Stage(index, tree, stage_pass, mirrored, writers, stages, outside))
    for name in every - kept:
        _put(model, name, beside, outside, RemoteModule)
    for config in (getattr(module, "config", None) for module in model.modules()):
        if getattr(config, "use_cache", False):
            config.use_cache = False  # type: ignore[union-attr]  # a stage has only its own keys; none generates
    return StagedModel(model, units, tuple(ranges), tuple(stages), shared, aliases, names)


@dataclass(frozen=True)
class _Beside:
    """The material for stand-ins: the ``outline`` of the whole model, the containers in attributes of its
    modules, and those of each unit with their copies in the outline (``pairs``).
    """

    outline: nn.Module
    containers: dict[tuple[str, str], Any]
    pairs: dict[str, list[tuple[Any, Any]]]


def _pairs_by_unit(
    model: nn.Module, outline: nn.Module, units: Collection[str]
) -> dict[str, list[tuple[Any, Any]]]:
    modules, copies = dict(model.named_modules()), dict(outline.named_modules())
    return {
        name: pairs_of(modules[name], copies[name])
        + [(value, value) for value in containers_named_in(modules[name]).values()]
        for name in units
        if name in modules
    }


def _refuse_random_depth(model: nn.Module, units: Units, family: Family) -> None:
    """Raise ConfigError if a module around blocks skips some at random: each stage would draw for itself
    whether the next one begins.
    """
    for name, chance in family.random_depth.items():
        if _holds_units(name, units.blocks):
            own = name or type(model).__name__
            raise ConfigError(
                f"{own!r} skips layers at random in training (layerdrop = {chance}), and each stage of a "
                "pipeline would draw its own choice; set layerdrop (encoder_layerdrop and "
                "decoder_layerdrop) to 0 in the configuration before you build the model"
            )


def _refuse_references(model: nn.Module, blocks: Iterable[str], around: Collection[str]) -> None:
    """Raise ConfigError if a block holds a module around the blocks. Each stage runs its own copy of that
    module, so the block would not see what the model sets there.
    """
    owners = {id(model.get_submodule(name)): name for name in around}
    for block in blocks:
        for name, module in model.get_submodule(block).named_modules(prefix=block):
            for key, value in module.__dict__.items():
                held = (
                    value.values()
                    if type(value) is dict
                    else value
                    if type(value) in (list, tuple)
                    else [value]
                )
                targets = (each() if isinstance(each, weakref.ReferenceType) else each for each in held)
                owner = next((owners[id(each)] for each in targets if id(each) in owners), None)
                if owner is not None and key != "_modules":
                    what = repr(owner) if owner else "the model"
                    raise ConfigError(
                        f"{name!r} holds {what}, a module around the blocks, in its attribute {key!r}, but "
                        "each stage has its own copy of that module, with different values; pass blocks "
                        "what they need as arguments, or train without pp"
                    )


def _holds_units(name: str, units: Collection[str]) -> bool:
    return not name or any(unit.startswith(f"{name}.") for unit in units)


def _is_within(name: str, units: Collection[str]) -> bool:
    """Return whether a parameter or module is one of ``units`` or inside one."""
    parts = name.split(".")
    return any(".".join(parts[:count]) in units for count in range(1, len(parts) + 1))


def _mirror(
    module: nn.Module,
    name: str,
    around: Collection[str],
    mirrored: list[tuple[nn.Module, nn.Module]],
    stage_pass: StagePass,
) -> nn.Module:
    """Return a copy of the modules around units, which shares the units and everything else."""
    mirror = copy.copy(module)
    mirror._modules = dict(module._modules)
    mirror._parameters = dict(module._parameters)
    mirrored.append((mirror, module))
    stage_pass.holders[name] = mirror
    for key, child in module._modules.items():
        full = f"{name}.{key}".lstrip(".")
        if child is not None and full in around:
            mirror._modules[key] = _mirror(child, full, around, mirrored, stage_pass)
    return mirror


def _replace_remote(
    tree: nn.Module, units: Units, blocks: tuple[int, int], beside: _Beside, stage_pass: StagePass
) -> None:
    start, stop = blocks
    have = units.of_stage(start, stop)
    for name in (*units.blocks, *units.beside):
        if name in have:
            continue
        kind: type[RemoteModule] = RemoteBlock if name in units.blocks else RemoteModule
        if stop < len(units.blocks) and name == units.blocks[stop]:
            kind = NextStageBlock
        _put(tree, name, beside, stage_pass, kind)


def _put_before(
    tree: nn.Module, blocks: Sequence[str], stage_pass: StagePass, beside: _Beside | None
) -> None:
    """Wrap each block of the stage in a :class:`LocalBlock`. ``beside``: the material for stand-ins on later
    stages, None if there are none.
    """
    for name in blocks:
        around, _, key = name.rpartition(".")
        owner = tree.get_submodule(around)
        block = owner._modules[key]
        assert block is not None
        elsewhere = None
        if beside is not None:
            outline = beside.outline.get_submodule(name)
            elsewhere = RemoteBlock(name, outline, stage_pass, beside.pairs.get(name, ()))
        is_last = name == blocks[-1]
        owner._modules[key] = LocalBlock(name, block, stage_pass, is_last=is_last, elsewhere=elsewhere)


def _put(
    tree: nn.Module, name: str, beside: _Beside, stage_pass: StagePass, kind: type[RemoteModule]
) -> None:
    """Replace a module, or a parameter of a module around blocks, by a stand-in."""
    around, _, key = name.rpartition(".")
    owner = tree.get_submodule(around)
    if key in owner._modules:
        outline = beside.outline.get_submodule(name)
        owner._modules[key] = kind(name, outline, stage_pass, beside.pairs.get(name, ()))
        return
    param = owner._parameters.pop(key)
    assert param is not None
    placeholder = stage_pass.placeholders.like(param, torch.device("cpu"))
    owner.__dict__[key] = placeholder  # not a buffer: it must be in no state dict
    stage_pass.own_parameters.append((owner, key, placeholder))


def _show_remote(mirrors: Sequence[nn.Module], stage_pass: StagePass) -> None:
    """Make ``named_parameters()`` of ``mirrors`` list placeholders last during a pass: models read the dtype
    and the device of the first parameter.
    """

    def named_parameters(here: nn.Module, *args: Any, **kwargs: Any) -> Iterator[Any]:
        found = nn.Module.named_parameters(here, *args, **kwargs)
        yield from (
            sorted(found, key=lambda each: stage_pass.placeholders.stands_for(each[1]))
            if stage_pass.runs
            else found
        )

    for here in mirrors:
        here.__dict__["named_parameters"] = partial(named_parameters, here)


def aliases_in(model: nn.Module) -> dict[str, tuple[str, ...]]:
    """Return all names of each parameter, by its first name."""
    found: dict[int, list[str]] = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        found.setdefault(id(param), []).append(name)
    return {names[0]: tuple(names) for names in found.values()}


def _shared_parameters(
    aliases: dict[str, tuple[str, ...]], units: Units, ranges: Sequence[tuple[int, int]]
) -> dict[str, tuple[int, ...]]:
    """Return the parameters that several stages have, by first name, with these stages."""
    have = [units.of_stage(*blocks) for blocks in ranges]
    stages = {
        first: tuple(stage for stage, own in enumerate(have) if any(_is_within(name, own) for name in names))
        for first, names in aliases.items()
    }
    return {first: found for first, found in stages.items() if len(found) > 1}


def _give_first_values(model: nn.Module, absent: Collection[str]) -> None:
    """Initialize parameters on ``meta`` in the order of one process, and free those of ``absent`` units.

    Raises:
        ConfigError: no initialization gives a weight its values.
    """
    if not any(param.is_meta for param in model.parameters()):
        return
    initialization = Initialization(model)
    kept = {id(p) for n, p in model.named_parameters(remove_duplicate=False) if not _is_within(n, absent)}
    for name, owner in list(children_first(model)):
        initialization.run(name, owner)
        if name in absent:
            for param in owner.parameters():
                if id(param) not in kept:
                    # Modules around it may draw it again. Memory that is never written takes no physical
                    # memory.
                    param.data = torch.empty_like(param)
    if initialization.unset:
        raise ConfigError(
            f"{len(initialization.unset)} weights that were built on 'meta' have no values (first: "
            f"{initialization.unset[0]!r}), because no reset_parameters() or _init_weights() sets them; "
            "build the model on 'cpu'"
        )
