"""Units: the blocks at which a model can be cut, and the modules that run before and behind them."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

from torch import nn

from gemini.errors import ConfigError
from gemini.parallel.families import family_of

_WAY_OUT = "name the modules that run one after another with blocks=['layer1', 'layer2', ...]"


@dataclass(frozen=True)
class Units:
    """The units of a model, by names of modules and parameters.

    Attributes:
        blocks: modules that run one after another, once each.
        front, behind: modules with weights, and parameters of modules around the blocks, that run before or
            behind all blocks.
        between: such modules and parameters that run between blocks, with the number of blocks before them
            (an encoder's last norm, a decoder's embedding).

    Everything else has no weights and runs in every stage.
    """

    blocks: tuple[str, ...]
    front: tuple[str, ...]
    behind: tuple[str, ...]
    between: tuple[tuple[str, int], ...] = ()

    @property
    def beside(self) -> tuple[str, ...]:
        """All units that are no blocks."""
        return (*self.front, *(name for name, _ in self.between), *self.behind)

    def of_stage(self, start: int, stop: int) -> frozenset[str]:
        """Return the names of the units in the stage of blocks ``[start, stop)``."""
        names = set(self.blocks[start:stop])
        if start == 0:
            names |= set(self.front)
        if stop == len(self.blocks):
            names |= set(self.behind)
        names |= {name for name, count in self.between if start < count <= stop}
        return frozenset(names)


def find_units(
    model: nn.Module,
    blocks: Sequence[str] | None = None,
    behind: Collection[str] = (),
    before: Collection[str] = (),
) -> Units:
    """Return the units of ``model``. Its blocks are the members of its longest list of modules (of an
    encoder's, then a decoder's), unless ``blocks`` names others.

    Whether a module runs before or behind the blocks is determined from where ``forward`` calls it, or else
    from the order of registration. ``behind`` names exceptions that run behind all blocks, ``before`` those
    that run before the blocks in the same module.

    Raises:
        ConfigError: there is no such list, or more than one; or a name does not exist.
    """
    chosen = tuple(blocks) if blocks is not None else _rows_of(model)
    known = {name for name, _ in model.named_modules()} | {name for name, _ in model.named_parameters()}
    missing = [name for name in (*chosen, *behind, *before) if name not in known]
    if missing:
        raise ConfigError(f"the model has no {missing[0]!r}; name modules as model.named_modules() does")
    if len(set(chosen)) != len(chosen) or not chosen:
        raise ConfigError(f"blocks are {list(chosen)}; name at least one, each only once")
    _refuse_repeated(model, chosen)
    around = {_parent(name, depth) for name in chosen for depth in range(name.count(".") + 1)}
    places: dict[str, int] = {}
    for name in sorted(around, key=lambda name: (name.count("."), name)):
        places |= _beside(model, name, chosen, around)
    unknown = [name for name in (*behind, *before) if name not in places]
    if unknown:
        said = "behind" if unknown[0] in behind else "before"
        raise ConfigError(f"{said} names {unknown[0]!r}, which is no module or parameter outside the blocks")
    places |= {name: _blocks_in(name[: name.rfind(".") + 1], chosen)[0] for name in before}
    places |= {name: len(chosen) for name in behind}
    front = tuple(name for name, count in places.items() if count == 0)
    rear = tuple(name for name, count in places.items() if count == len(chosen))
    between = tuple((name, count) for name, count in places.items() if 0 < count < len(chosen))
    return Units(chosen, front, rear, between)


def _refuse_repeated(model: nn.Module, blocks: Sequence[str]) -> None:
    """Raise ConfigError if a block occurs more than once in its list: it runs more than once."""
    for name in blocks:
        owner, _, key = name.rpartition(".")
        row = model.get_submodule(owner)._modules
        others = [each for each, module in row.items() if module is row.get(key) and each != key]
        if others and row.get(key) is not None:
            raise ConfigError(
                f"the block {name!r} is also {f'{owner}.{others[0]}'.lstrip('.')!r}, so it runs more than "
                "once, but stages run each block only once; make separate modules that share weights, or "
                "train without pp"
            )


def _parent(name: str, depth: int) -> str:
    """Return the first ``depth`` parts of a name."""
    return ".".join(name.split(".")[:depth])


def _blocks_in(prefix: str, blocks: Sequence[str]) -> list[int]:
    """Return the indices of the blocks with names that begin with ``prefix``."""
    return [index for index, block in enumerate(blocks) if block.startswith(prefix)]


def _beside(model: nn.Module, name: str, blocks: Sequence[str], around: Collection[str]) -> dict[str, int]:
    """Return the units beside blocks in a module around them, with the number of blocks before each."""
    owner, prefix = model.get_submodule(name), f"{name}." if name else ""
    own = _blocks_in(prefix, blocks)
    count = own[0]
    found = {prefix + key: count for key, _ in owner.named_parameters(recurse=False)}
    rows = [key for key, _ in owner.named_children() if prefix + key in around]
    calls_before = _order_of_calls(owner, rows[0]) if len(rows) == 1 else {}
    for key, child in owner.named_children():
        full = prefix + key
        if full in around or full in blocks:
            inside = (block == full or block.startswith(f"{full}.") for block in blocks)
            count = 1 + max(index for index, is_inside in enumerate(inside) if is_inside)
        elif child.state_dict():
            found[full] = {True: own[0], False: own[-1] + 1, None: count}[calls_before.get(key)]
    return found


def _order_of_calls(owner: nn.Module, row: str) -> dict[str, bool]:
    """Return for submodules whether the ``forward`` of ``owner`` calls them before (True) or behind (False)
    the only place where it runs ``row``, the submodule with all its blocks. Other submodules are left out.
    """
    calls: dict[str, list[_Call]] = {}
    for call in _calls_of(type(owner), "forward", row):
        calls.setdefault(call.name, []).append(call)
    if len(runs := calls.pop(row, [])) != 1:
        return {}
    before = {name for name, made in calls.items() if all(each.is_before(runs[0]) for each in made)}
    behind = {name for name, made in calls.items() if all(runs[0].is_before(each) for each in made)}
    return dict.fromkeys(before, True) | dict.fromkeys(behind, False)


@dataclass(frozen=True)
class _Call:
    """A call of the submodule ``name``. Its position is a list of line numbers: in ``forward``, in the method
    called there, and so on.
    """

    name: str
    first: tuple[int, ...]
    last: tuple[int, ...]

    def is_before(self, other: _Call) -> bool:
        """Return whether it ends before ``other`` begins. Calls on one line are unordered."""
        shared = min(len(self.last), len(other.first))
        return self.last[:shared] < other.first[:shared]


def _calls_of(
    kind: type, method: str, row: str, within: tuple[int, ...] = (), seen: tuple[str, ...] = ()
) -> Iterator[_Call]:
    """Yield the calls of submodules in a method of ``kind`` and in the methods that it calls. A loop over
    ``row``, or one that calls it, counts as one call.
    """
    try:
        source = ast.parse(textwrap.dedent(inspect.getsource(getattr(kind, method))))
    except (OSError, TypeError, SyntaxError):
        return
    function = source.body[0]
    is_method = isinstance(function, ast.FunctionDef) and function.args.args
    owner = function.args.args[0].arg if is_method else ""  # type: ignore[attr-defined]
    loops = [
        node
        for node in ast.walk(source)
        if isinstance(node, ast.For) and any(_of(owner, each) == row for each in ast.walk(node))
    ]
    for loop in loops:
        yield _Call(row, (*within, loop.lineno), (*within, loop.end_lineno or loop.lineno))
    in_loops = {id(node) for loop in loops for node in ast.walk(loop)}
    for node in ast.walk(source):
        name = _called(owner, node)
        if name is None or (name == row and id(node) in in_loops):
            continue
        place = (*within, node.lineno)  # type: ignore[attr-defined]
        if not inspect.isfunction(getattr(kind, name, None)):
            yield _Call(name, place, place)
        elif name not in seen:
            yield from _calls_of(kind, name, row, place, (*seen, name))


def _called(owner: str, node: ast.AST) -> str | None:
    """Return ``name`` of a call ``owner.name(...)`` or ``owner.name[...](...)``."""
    if not isinstance(node, ast.Call):
        return None
    return _of(owner, node.func.value if isinstance(node.func, ast.Subscript) else node.func)


def _of(owner: str, node: ast.AST) -> str | None:
    """Return ``name`` of ``owner.name``."""
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == owner:
        return node.attr
    return None


def _rows_of(model: nn.Module) -> tuple[str, ...]:
    """Return the blocks of ``model``: its longest list. For an encoder-decoder model of transformers with
    both halves, the longest list of each.
    """
    if not family_of(model).two_sequences:
        return _longest_list(model)
    halves = [_half_of(model, way) for way in ("get_encoder", "get_decoder")]
    if "" in halves or halves[0] == halves[1]:  # only one half, with the configuration of both
        return _longest_list(model)
    lists = [(half, _longest_list(model.get_submodule(half))) for half in halves]
    return tuple(f"{half}.{block}" for half, blocks in lists for block in blocks)


def _half_of(model: nn.Module, way: str) -> str:
    """Return the name of the module that a method of ``model`` returns; "" for none or the model itself."""
    try:
        half = getattr(model, way)()
    except (AttributeError, NotImplementedError):
        return ""
    return next((name for name, module in model.named_modules() if module is half), "")


def _longest_list(model: nn.Module) -> tuple[str, ...]:
    """Return the names of the members of the longest list of modules.

    Raises:
        ConfigError: there is none, or there are two.
    """
    lists = list(_lists(model, ""))
    if not lists:
        for name, module in model.named_modules():
            if isinstance(module, (nn.ModuleList, nn.Sequential)) and len(module) > 1:
                _refuse_repeated(model, [f"{name}.{key}".lstrip(".") for key in module._modules])
        raise ConfigError(
            f"{type(model).__name__} has no ModuleList or Sequential of at least two layers with weights, "
            f"between which it could be cut; {_WAY_OUT}"
        )
    longest = max(lists, key=lambda found: len(found[1]))
    others = [name for name, members in lists if len(members) == len(longest[1]) and name != longest[0]]
    if others:
        raise ConfigError(
            f"{type(model).__name__} has two lists of {len(longest[1])} layers, {longest[0]!r} and "
            f"{others[0]!r}, and it is unclear whether one runs after the other; {_WAY_OUT}"
        )
    return tuple(longest[1])


def _lists(module: nn.Module, prefix: str) -> Iterator[tuple[str, list[str]]]:
    """Yield the lists of modules that are in no other list, and the names of their members."""
    if isinstance(module, (nn.ModuleList, nn.Sequential)):
        members = [f"{prefix}.{key}".lstrip(".") for key, _ in module.named_children()]
        if sum(bool(child.state_dict()) for child in module.children()) > 1:
            yield prefix, members
            return
    for key, child in module.named_children():
        yield from _lists(child, f"{prefix}.{key}".lstrip("."))


def block_bytes(model: nn.Module, units: Units) -> list[float]:
    """Return the parameter bytes of each block. Bytes of other units are added to the block before them,
    those of the front to the first.
    """
    params = dict(model.named_parameters(remove_duplicate=False))

    def nbytes(unit: str) -> float:
        names = [name for name in params if name == unit or name.startswith(f"{unit}.")]
        return float(
            sum({id(params[n]): params[n].numel() * params[n].element_size() for n in names}.values())
        )

    found = [nbytes(name) for name in units.blocks]
    found[0] += sum(map(nbytes, units.front))
    found[-1] += sum(map(nbytes, units.behind))
    for name, count in units.between:
        found[count - 1] += nbytes(name)
    return found
