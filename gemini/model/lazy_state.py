"""A state dict for programs that look at a few of its values, or take some out, before it is saved."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from typing import Any

import torch

_UNREAD = object()


class LazyState(dict[str, Any]):
    """A dict whose values are read when they are asked for, and kept from then on. It knows which names were
    taken out, and which values were put in or changed in place.

    ``read(name)`` returns a value. Pickles and copies are of ordinary dicts, with all values.
    """

    # Those of dict would hand out what stands for values that were not read yet.
    keys = MutableMapping.keys  # type: ignore[assignment]
    items = MutableMapping.items  # type: ignore[assignment]
    values = MutableMapping.values  # type: ignore[assignment]
    get = MutableMapping.get  # type: ignore[assignment]
    pop = MutableMapping.pop
    popitem = MutableMapping.popitem
    setdefault = MutableMapping.setdefault
    update = MutableMapping.update
    clear = MutableMapping.clear
    __eq__ = MutableMapping.__eq__
    __hash__ = None

    def __init__(
        self, names: Iterable[str], read: Callable[[str], Any], metadata: Mapping[str, Any] | None = None
    ) -> None:
        """``metadata``: what torch keeps with a state dict."""
        self._metadata = metadata
        dict.__init__(self, dict.fromkeys(names, _UNREAD))
        self._names = tuple(dict.keys(self))
        self._read = read
        self._versions: dict[str, int] = {}  # of values as they were read

    def __getitem__(self, name: str) -> Any:
        value = dict.__getitem__(self, name)
        if value is _UNREAD:
            value = self._read(name)
            dict.__setitem__(self, name, value)
            self._versions[name] = value._version if isinstance(value, torch.Tensor) else 0
        return value

    def __setitem__(self, name: str, value: Any) -> None:
        self._versions.pop(name, None)
        dict.__setitem__(self, name, value)

    def __delitem__(self, name: str) -> None:
        self._versions.pop(name, None)
        dict.__delitem__(self, name)

    def __iter__(self) -> Iterator[str]:
        return dict.__iter__(self)

    def __len__(self) -> int:
        return dict.__len__(self)

    def __contains__(self, name: object) -> bool:
        return dict.__contains__(self, name)

    def __or__(self, other: Any) -> Any:
        return {**self, **other}

    def __ror__(self, other: Any) -> Any:
        return {**other, **self}

    def __ior__(self, other: Any) -> Any:
        self.update(other)
        return self

    def __repr__(self) -> str:
        return f"LazyState({list(self)!r})"

    def __reduce_ex__(self, _protocol: Any) -> Any:
        return OrderedDict, (), None, None, iter(self.items())  # what a state dict is, and torch.load allows

    def copy(self) -> dict[str, Any]:
        """Return an ordinary dict with all values."""
        return dict(self.items())

    @property
    def removed(self) -> list[str]:
        """The names that were taken out."""
        return [name for name in self._names if name not in self]

    @property
    def changed(self) -> dict[str, Any]:
        """The values that were put in, or changed in place."""
        return {name: value for name, value in dict.items(self) if self._is_changed(name, value)}

    @property
    def is_as_read(self) -> bool:
        """Whether nothing was taken out, put in or changed."""
        return not self.removed and not self.changed

    def _is_changed(self, name: str, value: Any) -> bool:
        if value is _UNREAD:
            return False
        version = value._version if isinstance(value, torch.Tensor) else 0
        return self._versions.get(name) != version

    def pop_unread(self, name: str) -> None:
        """Take a name out for good, where it is there: it does not count as removed from what it was."""
        if name in self:
            del self[name]

    def peek(self, name: str) -> Any:
        """Return a value without keeping it."""
        value = dict.__getitem__(self, name)
        return self._read(name) if value is _UNREAD else value


class Peeking(Mapping[str, Any]):
    """A LazyState to be read once: values are not kept."""

    def __init__(self, state: LazyState) -> None:
        self._state = state

    def __getitem__(self, name: str) -> Any:
        return self._state.peek(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._state)

    def __len__(self) -> int:
        return len(self._state)
