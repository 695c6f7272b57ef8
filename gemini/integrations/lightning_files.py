"""The files of a Lightning checkpoint that are ours: weights, a dict for hooks, optimizer states."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NoReturn

from torch import nn

from gemini.checkpoint import CheckpointReader
from gemini.checkpoint.directory import identity_of
from gemini.errors import CheckpointError, ConfigError
from gemini.model.weights import LazyState

FOLDER = "gemini"
REST = "lightning.ckpt"
_NAME = "gemini_checkpoint"  # the one in the folder that belongs to the rest
_SAVE = "gemini_save"  # its save
_WEIGHTS = "gemini_weights"  # stands for a dict of the weights in the folder: what is different in it


class Streamed(dict[str, Any]):
    """Stands for the states of an optimizer, which go to files and are in no dict."""

    def _refuse(self, *_args: Any, **_options: Any) -> NoReturn:
        raise ConfigError(
            "the optimizer's states of a managed module are streamed to files, and checkpoint"
            "['optimizer_states'] has none of them; a hook reads them with "
            "trainer.optimizers[0].state_dict(), and gives what it changes to load_state_dict() of that, "
            "before saving"
        )

    __getitem__ = __setitem__ = __delitem__ = __contains__ = __iter__ = _refuse
    get = items = keys = values = pop = popitem = setdefault = update = copy = _refuse


def packed(checkpoint: dict[str, Any], saved: Path) -> dict[str, Any]:
    """Return what is to be in the file beside ``saved``: of dicts of weights what hooks have changed."""

    def pack(state: LazyState) -> dict[str, Any]:
        return {_WEIGHTS: True, "removed": state.removed, "changed": state.changed}

    rest = replaced(checkpoint, LazyState, pack)
    return {**replaced(rest, Streamed, lambda _: {}), _NAME: saved.name, _SAVE: identity_of(saved)}


def saved_with(checkpoint: dict[str, Any], path: Path) -> Path:
    """Return the checkpoint of weights and states that the file in directory ``path`` belongs to;
    ``checkpoint`` is what the file holds. Raises CheckpointError."""
    name, save = checkpoint.pop(_NAME, None), checkpoint.pop(_SAVE, None)
    if not isinstance(name, str) or Path(name).name != name:
        raise CheckpointError(f"{path / REST} names no checkpoint in {path / FOLDER}")
    saved = path / FOLDER / name
    if not saved.is_dir():
        raise CheckpointError(
            f"{path / REST} belongs to {saved}, which is not there; copy all of a checkpoint"
        )
    if save is not None and identity_of(saved) != save:
        raise CheckpointError(
            f"{path / REST} belongs to another save than {saved}; copy all of a checkpoint, from one save"
        )
    return saved


def unpacked(checkpoint: dict[str, Any], reader: CheckpointReader, module: nn.Module) -> dict[str, Any]:
    """Return what hooks are to see of a file: dicts of weights whose values ``reader`` reads."""
    aliases = reader.manifest["aliases"]
    extra = reader.objects()["extra_states"]
    there = reader.weights.keys() | aliases.keys() | extra.keys()
    own = [name for name in module.state_dict(keep_vars=True) if name in there]
    names = [*own, *sorted(there - set(own))]

    def read(name: str) -> Any:
        return extra[name] if name in extra else reader.weight(aliases.get(name, name))

    def unpack(value: dict[str, Any]) -> Any:
        if _WEIGHTS not in value:
            return None
        state = LazyState(names, read)
        for name in value["removed"]:
            state.pop_unread(name)
        state.update(value["changed"])
        return state

    found = replaced(checkpoint, dict, unpack)
    if found.get("state_dict") == {}:  # as the first files of this kind have it
        found["state_dict"] = LazyState(names, read)
    found["optimizer_states"] = [Streamed() for _ in found.get("optimizer_states", ())]
    return dict(found)


def replaced(value: Any, kind: type[Any], by: Callable[[Any], Any]) -> Any:
    """Return ``value`` with what is a ``kind`` in its dicts and lists exchanged for what ``by`` returns of
    it; None keeps it."""
    if isinstance(value, kind):
        other = by(value)
        if other is not None:
            return other
    if type(value) is dict:
        return {key: replaced(each, kind, by) for key, each in value.items()}
    if type(value) in (list, tuple):
        return type(value)(replaced(each, kind, by) for each in value)
    return value


def holds(value: Any, kind: type[Any]) -> bool:
    """Say whether a ``kind`` is in the dicts and lists of ``value``."""
    if isinstance(value, kind):
        return True
    parts: Iterable[Any] = ()
    if type(value) is dict:
        parts = value.values()
    elif type(value) in (list, tuple):
        parts = value
    return any(holds(each, kind) for each in parts)
