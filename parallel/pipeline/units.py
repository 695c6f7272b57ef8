"""Units: what a model is cut between, and which parts of it run before and behind."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

from torch import nn

from gemini.errors import ConfigError

_WAY_OUT = "say which modules run one after another with blocks=['layer1', 'layer2', ...]"


@dataclass(frozen=True)
class Units:
    """A model by names of its modules and parameters.

    ``blocks`` are called one after another, once each, every one with what the one before returned. What runs
    before them and behind them are ``front`` and ``behind``: submodules with weights, and parameters that a
    module around the blocks holds itself. Everything else has no weights and runs in every stage.
    """

    blocks: tuple[str, ...]
    front: tuple[str, ...]
    behind: tuple[str, ...]

    def of_stage(self, start: int, stop: int) -> frozenset[str]:
        """Return the names of what the stage of blocks ``[start, stop)`` has."""
        names = set(self.blocks[start:stop])
        if start == 0:
            names |= set(self.front)
        if stop == len(self.blocks):
            names |= set(self.behind)
        return frozenset(names)


def find_units(model: nn.Module, blocks: Sequence[str] | None = None, behind: Collection[str] = ()) -> Units:
    """Return the units of ``model``: members of its longest list of modules, unless ``blocks`` names others.

    What is registered before the blocks counts as running before them; ``behind`` names what is not so.

    Raises:
        ConfigError: there is no such list, or more than one; a name is of nothing.
    """
    chosen = tuple(blocks) if blocks is not None else _longest_list(model)
    known = {name for name, _ in model.named_modules()} | {name for name, _ in model.named_parameters()}
    missing = [name for name in (*chosen, *behind) if name not in known]
    if missing:
        raise ConfigError(f"the model has no {missing[0]!r}; name modules as model.named_modules() does")
    if len(set(chosen)) != len(chosen) or not chosen:
        raise ConfigError(f"blocks are {list(chosen)}; name one or more, each once")
    around = {_parent(name, depth) for name in chosen for depth in range(name.count(".") + 1)}
    front: list[str] = []
    rear: list[str] = []
    for name in sorted(around, key=lambda name: (name.count("."), name)):
        before, after = _beside(model, name, chosen, around)
        front += [each for each in before if each not in behind]
        rear += [each for each in before if each in behind] + after
    unknown = [name for name in behind if name not in rear]
    if unknown:
        raise ConfigError(f"behind names {unknown[0]!r}, which is no module or parameter beside the blocks")
    return Units(chosen, tuple(front), tuple(rear))


def _parent(name: str, depth: int) -> str:
    """Return the name of the module around ``name`` that is ``depth`` levels below the model."""
    return ".".join(name.split(".")[:depth])


def _beside(
    model: nn.Module, name: str, blocks: Sequence[str], around: Collection[str]
) -> tuple[list[str], list[str]]:
    """Return what with weights a module around the blocks has before and after them."""
    owner, prefix = model.get_submodule(name), f"{name}." if name else ""
    inside = [key for key, _ in owner.named_children() if prefix + key in around or prefix + key in blocks]
    keys = [key for key, child in owner.named_children() if key in inside or child.state_dict()]
    first, last = keys.index(inside[0]), keys.index(inside[-1])
    between = [key for key in keys[first:last] if key not in inside]
    if between:
        raise ConfigError(f"{prefix + between[0]!r} lies between blocks and is none: {_WAY_OUT}")
    own = [prefix + key for key, _ in owner.named_parameters(recurse=False)]
    return own + [prefix + key for key in keys[:first]], [prefix + key for key in keys[last + 1 :]]


def _longest_list(model: nn.Module) -> tuple[str, ...]:
    """Return the names of the members of the longest list of modules.

    Raises:
        ConfigError: there is none, or there are two.
    """
    lists = list(_lists(model, ""))
    if not lists:
        raise ConfigError(
            f"{type(model).__name__} has no ModuleList or Sequential of two layers with weights to be cut "
            f"between: {_WAY_OUT}"
        )
    longest = max(lists, key=lambda found: len(found[1]))
    others = [name for name, members in lists if len(members) == len(longest[1]) and name != longest[0]]
    if others:
        raise ConfigError(
            f"{type(model).__name__} has two lists of {len(longest[1])} layers, {longest[0]!r} and "
            f"{others[0]!r}, which need not run one after the other: {_WAY_OUT}"
        )
    return tuple(longest[1])


def _lists(module: nn.Module, prefix: str) -> Iterator[tuple[str, list[str]]]:
    """Yield the lists of modules that lie in no other one, and the names of their members."""
    if isinstance(module, (nn.ModuleList, nn.Sequential)):
        members = [f"{prefix}.{key}".lstrip(".") for key, _ in module.named_children()]
        if sum(bool(child.state_dict()) for child in module.children()) > 1:
            yield prefix, members
            return
    for key, child in module.named_children():
        yield from _lists(child, f"{prefix}.{key}".lstrip("."))


def block_bytes(model: nn.Module, units: Units) -> list[float]:
    """Return the bytes of the parameters of each block; those of what runs before and behind belong to the
    first and to the last."""
    params = dict(model.named_parameters(remove_duplicate=False))

    def nbytes(unit: str) -> float:
        names = [name for name in params if name == unit or name.startswith(f"{unit}.")]
        return float(
            sum({id(params[n]): params[n].numel() * params[n].element_size() for n in names}.values())
        )

    found = [nbytes(name) for name in units.blocks]
    found[0] += sum(map(nbytes, units.front))
    found[-1] += sum(map(nbytes, units.behind))
    return found
