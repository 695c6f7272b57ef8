"""The tensors of a model as sources to write, and the tensors of a checkpoint in any format as a mapping.

Also finds tied tensors and the extra state of modules.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from gemini.checkpoint import contents, plain_data
from gemini.checkpoint.directory import complete_checkpoints, latest
from gemini.checkpoint.sealed_file import reading
from gemini.checkpoint.tensor_file import hold_the_same, values_differ
from gemini.errors import CheckpointError, InputError, in_words
from gemini.model.ddp import GeminiDDP
from gemini.parallel.booster.checkpoint.tensor_source import TensorSource, copied_source, whole_source
from gemini.parallel.booster.checkpoint.zero import master_sources
from gemini.parallel.booster.data_parallel import DataParallel, ShardedData, SingleProcess
from gemini.parallel.zero import LowLevelZeroModel, LowLevelZeroOptimizer
from gemini.runtime import ManagedParameter
from gemini.runtime.adopt import read_values
from gemini.runtime.storage.model_storage import slot_of
from gemini.system.files import open_regular, parse_json
from gemini.system.input_files import MAX_INDEX_BYTES, InputDirectory, files_of

Names = dict[torch.Tensor, str]
# Keys in a file's metadata. The other keys are names of tied tensors, which never begin with "gemini.".
OWN_METADATA = "gemini."
EXTRA_STATE = OWN_METADATA + "extra_state"


@dataclass(frozen=True)
class ModelContents:
    """The contents of a model's files. ``aliases`` maps the further names of tied tensors to the stored name;
    ``extra`` holds the results of ``get_extra_state`` methods.
    """

    sources: list[TensorSource]
    aliases: dict[str, str]
    extra: dict[str, Any]

    def metadata(self) -> dict[str, str]:
        """Return the metadata for the header of a file."""
        extra = plain_data.encode(self.extra, "a module's extra state")
        return {**self.aliases, **({EXTRA_STATE: json.dumps(extra)} if self.extra else {})}


def extra_in(metadata: Mapping[str, str]) -> dict[str, Any]:
    """Return the extra states in a file's header, by name. Raises CheckpointError if they are damaged."""
    text = metadata.get(EXTRA_STATE)
    return {} if text is None else dict(plain_data.decode(parse_json(text)))


def unwrap(model: nn.Module) -> nn.Module:
    """Return the module inside a boosted model; any other module unchanged."""
    if isinstance(model, (GeminiDDP, SingleProcess, DataParallel, LowLevelZeroModel, ShardedData)):
        inner: nn.Module = model.module
        return inner
    return model


def parameter_names(model: nn.Module) -> Names:
    """Return the name of every parameter of a model, boosted or not; the first name of a tied one."""
    return {param: name for name, param in unwrap(model).named_parameters()}


def model_contents(model: nn.Module, optimizer: torch.optim.Optimizer | None) -> ModelContents:
    """Return the contents to save of a model, boosted or not. Runs pending updates.

    ``optimizer`` is the one boosted with it: it may have fp32 masters of the model's weights.
    """
    if isinstance(model, GeminiDDP):
        return _managed_contents(model)
    state = unwrap(model).state_dict(keep_vars=True)
    tensors = {name: value for name, value in state.items() if isinstance(value, torch.Tensor)}
    aliases = tied_names(tensors)
    masters = {}
    if isinstance(optimizer, LowLevelZeroOptimizer):
        masters = {source.spec.name: source for source in master_sources(optimizer, parameter_names(model))}
    sources = [
        masters.get(name) or copied_source(name, value)
        for name, value in tensors.items()
        if name not in aliases
    ]
    extra = {name: value for name, value in state.items() if name not in tensors}
    return ModelContents(sources, aliases, extra)


def _managed_contents(model: GeminiDDP) -> ModelContents:
    model._gemini.manager.lock.refuse_all()
    model._gemini.storage.mixture.refuse("save_model")
    model._gemini.manager.run_pending()
    model._gemini.manager.recover()  # an operator that raised may have left chunks pinned
    state = model.module.state_dict(keep_vars=True)  # the model's current tensors, replaced layers included
    tensors = {name: value for name, value in state.items() if isinstance(value, torch.Tensor)}
    aliases = tied_names(tensors)
    sources = [_source(model, name, value) for name, value in tensors.items() if name not in aliases]
    extra = {name: value for name, value in state.items() if name not in tensors}
    return ModelContents(sources, aliases, extra)


def _source(model: GeminiDDP, name: str, value: torch.Tensor) -> TensorSource:
    """Return the source of a managed model's tensor: the fp32 master if it has one. All ranks must run it."""
    if not isinstance(value, ManagedParameter):
        return copied_source(name, value)
    slot = slot_of(value)
    read = partial(read_values, slot, model._gemini.manager)
    return whole_source(name, contents.weight_dtype(slot), tuple(slot.param_view.shape), read)


def tied_names(tensors: dict[str, torch.Tensor]) -> dict[str, str]:
    """Return the further names of tensors that occur in ``tensors`` more than once: name -> first name."""
    first: dict[torch.Tensor, str] = {}
    for name, tensor in tensors.items():
        first.setdefault(tensor, name)
    return {name: first[tensor] for name, tensor in tensors.items() if first[tensor] != name}


def config_file(module: nn.Module) -> dict[str, str]:
    """Return ``config.json`` of a transformers model; ``from_pretrained`` needs it to read the weights. Empty
    for other models.
    """
    to_json = getattr(getattr(module, "config", None), "to_json_string", None)
    text = to_json() if callable(to_json) else None
    return {"config.json": text} if isinstance(text, str) else {}


_ZIP = b"PK"  # begins a file of torch.save
_PICKLE = b"\x80"  # begins a file of torch.save before 1.6
_SINGLE = ("model.safetensors", "optimizer.safetensors", "pytorch_model.bin")


class TensorFiles(Mapping[str, torch.Tensor]):
    """An open checkpoint. Its tensors are valid until it is closed, and must not be written to.

    ``checkpoint`` is a file or a directory; see :meth:`Booster.load_model` for the formats.

    Raises:
        CheckpointError: there is none, this user may not read it, it is damaged, or it holds anything but
            tensors.
    """

    def __init__(self, checkpoint: str | os.PathLike[str]) -> None:
        self.metadata: dict[str, str] = {}
        self._checkpoint = checkpoint
        self._where: dict[str, Path] = {}
        self._open: dict[Path, Any] = {}
        self._stack = ExitStack()
        with reading(Path(checkpoint)):
            files = self._files_of(Path(checkpoint))
        for path, names in files.items():
            held = self._names(path)
            if names is not None and not names <= held:
                lost = sorted(names - held)
                raise CheckpointError(f"{path} is damaged: it lacks {lost[0]!r}, which its index lists")
            self._where.update(dict.fromkeys(held if names is None else names, path))

    def __getitem__(self, name: str) -> torch.Tensor:
        path = self._where[name]
        file = self._open[path]
        try:
            tensor = file[name] if isinstance(file, dict) else file.get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"cannot read {name!r} from {path}: {error}") from error
        assert isinstance(tensor, torch.Tensor)
        return tensor

    def first_of(self, names: Iterable[str]) -> str | None:
        """Return the first of the names of one tied tensor that the files have; None if they have none.

        Raises:
            CheckpointError: they have several, with different values.
        """
        held = [name for name in names if name in self._where]
        for name in held[1:]:
            one, other = self[held[0]], self[name]
            if one.shape == other.shape and not hold_the_same(one, other):
                raise values_differ(self._checkpoint, held[0], name)
        return held[0] if held else None

    def __iter__(self) -> Iterator[str]:
        return iter(self._where)

    def __len__(self) -> int:
        return len(self._where)

    def __enter__(self) -> TensorFiles:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._open.clear()
        self._stack.close()

    def _files_of(self, checkpoint: Path) -> dict[Path, set[str] | None]:
        """Return the files of a checkpoint, each with the wanted names; None means all its names."""
        if checkpoint.exists() and not checkpoint.is_dir():
            return {checkpoint: None}
        if not checkpoint.is_dir():
            raise CheckpointError(f"there is no checkpoint at {checkpoint}; check the path")
        index = _index_of(checkpoint)
        if index is None and complete_checkpoints(checkpoint):  # a directory of gemini.checkpoint
            index = _index_of(latest(checkpoint))
        if index is not None:
            files, self.metadata = _indexed_files(index)
            return files
        directory = InputDirectory(checkpoint)
        for name in _SINGLE:
            if name in directory:
                return {directory.file(name): None}
        raise CheckpointError(
            f"{checkpoint} holds no complete checkpoint: it has no index (*.safetensors.index.json), and "
            f"none of {', '.join(_SINGLE)}"
        )

    def _names(self, path: Path) -> set[str]:
        """Open a file and return the names of its tensors."""
        with reading(path), os.fdopen(open_regular(path), "rb") as file:
            begin = file.read(2)
        try:
            if begin == _ZIP or begin[:1] == _PICKLE:
                self._open[path] = _load_pickled(path, begin == _ZIP)
                return set(self._open[path])
            opened = self._stack.enter_context(safe_open(path, framework="pt"))
        except (SafetensorError, OSError, MemoryError) as error:  # mapping a file may exceed ulimit -v
            raise CheckpointError(f"cannot read {path}: {error}") from error
        self._open[path] = opened
        self.metadata.update(opened.metadata() or {})
        return set(opened.keys())


def _load_pickled(path: Path, is_zip: bool) -> dict[str, torch.Tensor]:
    """Return the state dict in a file of ``torch.save``, without running any code in it."""
    try:
        state = torch.load(path, map_location="cpu", mmap=is_zip, weights_only=True)
    except OSError:
        raise
    except Exception as error:  # unpickling raises many classes of exceptions
        raise CheckpointError(f"cannot read {path}: {in_words(error)}") from error
    tensors = isinstance(state, dict) and all(isinstance(value, torch.Tensor) for value in state.values())
    if not tensors:
        raise CheckpointError(f"{path} holds more than a state dict of tensors; save only the state dict")
    return dict(state)


def _index_of(checkpoint: Path) -> Path | None:
    """Return the index file in a directory; None if it has none."""
    indexes = sorted(checkpoint.glob("*.safetensors.index.json")) or sorted(
        checkpoint.glob("*.bin.index.json")
    )
    if len(indexes) > 1:
        names = ", ".join(path.name for path in indexes)
        raise CheckpointError(
            f"{checkpoint} holds several checkpoints ({names}); keep each in its own directory"
        )
    return indexes[0] if indexes else None


def _indexed_files(index: Path) -> tuple[dict[Path, set[str] | None], dict[str, str]]:
    """Return the files that an index names, with the names of their tensors, and its text metadata."""
    files: dict[Path, set[str] | None] = {}
    directory = InputDirectory(index.parent)
    document = directory.json(index.name, MAX_INDEX_BYTES)
    said = document.get("metadata", {})
    if not isinstance(said, dict):
        raise InputError(f"{index} is damaged: its metadata is not an object with keys")
    metadata = {key: value for key, value in said.items() if isinstance(value, str)}
    for name, file in files_of(document, directory, index.name).items():
        wanted = files.setdefault(index.parent / file, set())
        assert wanted is not None
        wanted.add(name)
    for path in files:
        directory.check(path.name)
    return files, metadata
