"""Containers (lists, dicts and objects) into which modules put tensors besides their outputs: those in a
model, and those in context variables during a forward pass.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from contextvars import copy_context
from types import FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map

from gemini.errors import ConfigError

# (module name, attribute, then keys: (index, length) in a list, the name for an attribute of an object)
Path = tuple[Any, ...]
_OF_MODULES = frozenset(nn.Module().__dict__) | {"named_parameters"}
_COLLECTIONS = (list, dict, deque)
CONTEXT = "context variables"  # the first item of paths into context variables
_NO_PROGRAMS = ("builtins", "torch", "gemini")
_PLAIN_TYPES = frozenset((int, float, str, bool, type(None)))  # contain no tensors; checked first for speed
_NO_OBJECTS = (torch.Tensor, nn.Module, type, FunctionType, MethodType, ModuleType)


def attributes_of(value: Any) -> MutableMapping[Any, Any] | None:
    """Return the writable members of a dict, or of an object of the user's program; else None. Objects of
    this library, such as the handle of a managed model, are left out: they hold nothing of a forward pass.
    """
    if isinstance(value, dict):
        return value
    if isinstance(value, _NO_OBJECTS) or type(value).__module__.partition(".")[0] in _NO_PROGRAMS:
        return None
    found = getattr(value, "__dict__", None)
    return found if isinstance(found, dict) else None


def tensor_paths(
    value: Any, path: Path, seen: set[int], depth: int = 5, *, once: bool = True
) -> Iterator[tuple[Path, torch.Tensor]]:
    """Yield the tensors in the attributes of a module, and in containers there, ``once`` or at all places."""
    if isinstance(value, torch.Tensor):
        if id(value) not in seen:
            yield path, value
            if once:
                seen.add(id(value))
        return
    if depth == 0 or (len(path) > 1 and id(value) in seen):
        return
    members: list[tuple[Any, Any]] = []
    if isinstance(value, (list, deque)):
        members = [((index, len(value)), member) for index, member in enumerate(value)]
    elif (attributes := attributes_of(value)) is not None:
        own = _OF_MODULES if len(path) == 1 else frozenset()
        members = [(k, v) for k, v in attributes.items() if isinstance(k, (str, int)) and k not in own]
    if members:
        seen.add(id(value))
    for key, member in members:
        if type(member) not in _PLAIN_TYPES:
            yield from tensor_paths(member, (*path, key), seen, depth - 1, once=once)


def look_up(attributes: Mapping[str, Any], path: Path) -> Any:
    """Return the value at ``path``; ``attributes`` are those of the module. None if there is none, or a list
    on the path has another length.
    """
    value: Any = attributes
    for key in path[1:]:
        if isinstance(key, (tuple, list)):
            index, length = key
            if not isinstance(value, (list, deque)) or len(value) != length:
                return None
            value = value[index]
        else:
            members = attributes_of(value)
            if members is None or key not in members:
                return None
            value = members[key]
    return value


def put(attributes: MutableMapping[str, Any], path: Path, tensor: torch.Tensor) -> None:
    """Store ``tensor`` where :func:`look_up` finds it."""
    owner, last = look_up(attributes, path[:-1]), path[-1]
    if isinstance(last, (tuple, list)):
        owner[last[0]] = tensor
    else:
        members = attributes_of(owner)
        assert members is not None
        members[last] = tensor


def worded(path: Path) -> str:
    """Return a path as code would write it."""
    owner, key, *others = path
    inner = "".join(f"[{k[0]}]" if isinstance(k, (tuple, list)) else f"[{k!r}]" for k in others)
    return f"the attribute {key!r}{inner} of {owner or 'the model'!r}"


def left_in(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield the attributes of a module that a forward pass may have set to computed values."""
    for key, value in module.__dict__.items():
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if key not in _OF_MODULES and (is_number or isinstance(value, (torch.Tensor, list, tuple, dict))):
            yield key, value


# Types with reliable equality, for detecting changes.
_PLAIN = (int, float, str, bool, type(None))


def plain_values(modules: Iterable[nn.Module]) -> dict[tuple[int, str], tuple[Any, Any]]:
    """Return plain values in the classes of ``modules`` and their submodules, and in the globals of their
    files, where forward passes may count calls. Maps each place to its owner and value.
    """
    spaces: dict[int, tuple[Any, Mapping[str, Any]]] = {}
    for kind in {type(inner) for module in modules for inner in module.modules()}:
        for owner in kind.__mro__:
            if _is_of_torch(owner):
                continue
            spaces[id(owner)] = (owner, vars(owner))
            names = getattr(vars(owner).get("forward"), "__globals__", None)
            if isinstance(names, dict):
                spaces[id(names)] = (names, names)
    return {
        (key, name): (owner, value)
        for key, (owner, members) in spaces.items()
        for name, value in members.items()
        if isinstance(value, _PLAIN) and not name.startswith("__")
    }


def restore_plain_values(
    modules: Iterable[nn.Module], before: Mapping[tuple[int, str], tuple[Any, Any]]
) -> None:
    """Restore the values that :func:`plain_values` returned ``before``."""
    now = plain_values(modules)
    for key, (owner, value) in before.items():
        if key not in now or now[key][1] != value:
            if isinstance(owner, dict):
                owner[key[1]] = value
            else:
                setattr(owner, key[1], value)


# -- in context variables ------------------------------------------------------------------------------------


def containers_in_context() -> dict[tuple[str, str], Any]:
    """Return the containers in context variables, by variable name. Hooks of blocks collect further outputs
    of the model there, for example those of transformers.

    Raises:
        ConfigError: two variables with the same name hold tensors; stages find tensors by this name.
    """
    found: dict[tuple[str, str], Any] = {}
    for variable, value in copy_context().items():
        if not isinstance(value, _COLLECTIONS) and attributes_of(value) is None:
            continue
        key = (CONTEXT, variable.name)
        both = [each for each in (found.get(key), value) if each is not None and _has_tensors(each)]
        if len(both) > 1:
            raise ConfigError(
                f"two context variables are named {variable.name!r} and hold tensors, but stages find these "
                "tensors by name; give the variables different names, or train without pp"
            )
        found[key] = both[0] if both else value
    return found


def _has_tensors(value: Any) -> bool:
    return any(True for _ in tensor_paths(value, ("", ""), set()))


def nested_in(value: Any, depth: int = 4) -> Iterator[Any]:
    """Yield a container and those nested in it."""
    is_list = isinstance(value, (list, deque))
    if depth == 0 or (not is_list and attributes_of(value) is None):
        return
    yield value
    for member in members_of(value).values():
        yield from nested_in(member, depth - 1)


# -- pairs of containers in a model and in its outline ----------------------------------------------------


def containers_in(model: nn.Module) -> dict[tuple[str, str], Any]:
    """Return the containers in attributes of the modules of ``model``, by their names."""
    return {
        (name, key): value
        for name, module in model.named_modules()
        for key, value in module.__dict__.items()
        if key not in _OF_MODULES and (isinstance(value, (list, deque)) or attributes_of(value) is not None)
    }


def containers_named_in(module: nn.Module) -> dict[tuple[str, str], Any]:
    """Return the containers outside of ``module`` that its submodules use. They are in their classes; in
    globals of their files that their methods, and functions called there, name; in enclosing functions; and
    in modules that their hooks name. Lists that other hooks fill are left out: they belong to a program that
    observes the model.
    """
    found: dict[tuple[str, str], Any] = {}
    seen: set[int] = set()
    for inner in module.modules():
        kinds = [kind for kind in type(inner).__mro__ if not _is_of_torch(kind)]
        for kind in kinds:
            where = f"{kind.__module__}.{kind.__qualname__}"
            for key, value in vars(kind).items():
                if type(value) in _COLLECTIONS and not key.startswith("__"):
                    found[where, key] = value
                elif isinstance(value, FunctionType):
                    _add_named_by(value, where, found, seen)
        for hook in (*inner._forward_hooks.values(), *inner._forward_pre_hooks.values()):
            function = getattr(hook, "__func__", hook)
            for value in _around(function).values() if isinstance(function, FunctionType) else ():
                if isinstance(value, nn.Module) and not _is_of_torch(function):
                    where = f"{type(value).__module__}.{type(value).__qualname__}"
                    held = value.__dict__.items()
                    found |= {
                        (where, k): v for k, v in held if type(v) in _COLLECTIONS and k not in _OF_MODULES
                    }
    return found


def _add_named_by(
    function: FunctionType, where: str, found: dict[tuple[str, str], Any], seen: set[int]
) -> None:
    if id(function) in seen:
        return
    seen.add(id(function))
    named = {name: function.__globals__.get(name) for name in function.__code__.co_names}
    for name, value in {**named, **_around(function)}.items():
        if type(value) in _COLLECTIONS:
            found[where, name] = value
        elif isinstance(value, FunctionType) and value.__module__ == function.__module__:
            _add_named_by(value, where, found, seen)


def _around(function: FunctionType) -> dict[str, Any]:
    """Return the variables of enclosing functions that ``function`` reads."""
    cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    return {name: cell.cell_contents for name, cell in cells if _is_filled(cell)}


def _is_of_torch(value: Any) -> bool:
    return str(value.__module__).partition(".")[0] in ("torch", "builtins", "gemini", "parallel")


def _is_filled(cell: Any) -> bool:
    try:
        return cell.cell_contents is not cell
    except ValueError:
        return False


def pairs_of(here: nn.Module, there: nn.Module) -> list[tuple[Any, Any]]:
    """Return pairs of containers in attributes of modules: those in ``here`` and in the copy ``there``."""
    copies = dict(there.named_modules())
    found: list[tuple[Any, Any]] = []
    seen: set[int] = set()
    for name, module in here.named_modules():
        other = copies.get(name)
        for key, value in module.__dict__.items() if other is not None else ():
            if key not in _OF_MODULES:
                _pair(value, other.__dict__.get(key), found, seen)
    return found


def _pair(value: Any, other: Any, found: list[tuple[Any, Any]], seen: set[int], depth: int = 4) -> None:
    is_list = isinstance(value, (list, deque))
    members = None if is_list else attributes_of(value)
    if (not is_list and members is None) or value is other or type(value) is not type(other):
        return
    if id(value) in seen or depth == 0:
        return
    seen.add(id(value))
    found.append((value, other))
    if members is not None:
        others = attributes_of(other) or {}
        for key, member in members.items():
            if key in others:
                _pair(member, others[key], found, seen, depth - 1)
    elif len(value) == len(other):
        for index, member in enumerate(value):
            _pair(member, other[index], found, seen, depth - 1)


def collections_in(value: Any) -> Iterator[Any]:
    """Yield the lists and dicts among the arguments of a call."""
    if isinstance(value, (list, tuple, dict)):
        if not isinstance(value, tuple):
            yield value
        for member in value.values() if isinstance(value, dict) else value:
            yield from collections_in(member)


def replace_tensors(value: Any, new: Callable[[Any], Any]) -> Any:
    """Replace the tensors in ``value``. Lists and dicts are changed in place: other code may hold them."""
    if type(value) is list:
        value[:] = [replace_tensors(member, new) for member in value]
        return value
    if type(value) is dict:
        for key, member in value.items():
            value[key] = replace_tensors(member, new)
        return value
    if type(value) is tuple:
        return tuple(replace_tensors(member, new) for member in value)
    return new(value) if isinstance(value, torch.Tensor) else tree_map(new, value)


class SharedContents:
    """Containers paired with their copies in an outline, which have tensors on ``meta``. A run of the outline
    starts with the contents of the originals; afterwards its changes are applied to them. A global is its own
    copy.
    """

    def __init__(self, pairs: Iterable[tuple[Any, Any]], on_meta: Callable[[Any], Any]) -> None:
        self._pairs = list({id(here): (here, there) for here, there in pairs}.values())
        self._there = {id(here): there for here, there in self._pairs}
        self._here = {id(there): here for here, there in self._pairs}
        # By the id of a tensor on meta: the tensor, its version, and its original.
        self._originals: dict[int, tuple[torch.Tensor, int, Any]] = {}
        self._on_meta = on_meta
        for here, there in self._pairs:
            _fill(there, {key: self._in(value) for key, value in members_of(here).items()})
        self._before = [members_of(there) for _, there in self._pairs]

    def _in(self, value: Any) -> Any:
        if isinstance(value, tuple):
            return _each(self._in, value)
        if not isinstance(value, torch.Tensor):
            return self._there.get(id(value), value)
        copy = self._on_meta(value)
        self._originals[id(copy)] = (copy, copy._version, value)
        return copy

    def note(self, values: Iterable[Any], copies: Iterable[Any]) -> None:
        """Also detect writes to ``copies`` of further ``values``."""
        for value, copy in zip(values, copies, strict=True):
            if isinstance(value, torch.Tensor):
                self._originals.setdefault(id(copy), (copy, copy._version, value))

    def begin_again(self) -> None:
        """Undo the changes of a failed run."""
        for (_, there), before in zip(self._pairs, self._before, strict=True):
            _fill(there, before)

    def apply_changes(self, new: Callable[[torch.Tensor], Any], mark: Callable[[Any], None]) -> bool:
        """Apply the changes of the run to the originals: store ``new(tensor)`` for new tensors, and call
        ``mark`` for the originals of tensors that it wrote to. Return whether there were changes.
        """
        has_changed = False
        for copy, version, value in self._originals.values():
            if copy._version != version:
                mark(value)
                has_changed = True
        for (here, there), before in zip(self._pairs, self._before, strict=True):
            now = members_of(there)
            is_same = now.keys() == before.keys() and all(now[key] is before[key] for key in now)
            if is_same and here is not there:
                continue
            has_changed = has_changed or not is_same
            _fill(here, {key: self._out(value, new) for key, value in now.items()})
        return has_changed

    def _out(self, value: Any, new: Callable[[torch.Tensor], Any]) -> Any:
        if id(value) in self._originals:
            return self._originals[id(value)][2]
        if id(value) in self._here:
            return self._here[id(value)]
        if isinstance(value, tuple):
            return _each(lambda member: self._out(member, new), value)
        return tree_map(lambda each: new(each) if isinstance(each, torch.Tensor) else each, value)


def _each(new: Callable[[Any], Any], value: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return a tuple of the class of ``value`` with ``new(member)`` for each member."""
    members = [new(member) for member in value]
    return type(value)(*members) if hasattr(value, "_fields") else tuple(members)


def members_of(value: Any) -> dict[Any, Any]:
    """Return the members of a container, by index, key or name."""
    if isinstance(value, (list, deque)):
        return dict(enumerate(value))
    return dict(attributes_of(value) or {})


def _fill(value: Any, members: Mapping[Any, Any]) -> None:
    if isinstance(value, (list, deque)):
        value.clear()
        value.extend(members.values())
    elif (attributes := attributes_of(value)) is not None:
        attributes.clear()
        attributes.update(members)
