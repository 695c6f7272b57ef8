"""``gemini.from_pretrained``: loads a model's weights directly into chunks on their tiers."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from gemini.checkpoint.tensor_file import values_differ
from gemini.errors import ConfigError, GeminiError, in_words
from gemini.integrations.model_directory import PretrainedError
from gemini.integrations.safetensors_files import SafetensorsFiles, StoredValues
from gemini.integrations.stored_weights import StoredWeights, UnreadTensor
from gemini.model.ddp import GeminiDDP
from gemini.model.in_place import manage_without_values
from gemini.model.weights import import_weights
from gemini.runtime import init_on
from gemini.runtime.config import GeminiConfig
from gemini.runtime.growth import Filling
from gemini.runtime.storage.initialization import initialize_buffers
from gemini.runtime.storage.model_storage import ManagedSlot
from gemini.system.config import did_you_mean, keyword_names

_MANAGED = keyword_names(GeminiDDP) - {"module", "experts"}
_OWN = frozenset(("auto_class", "dtype", "adapter", "trains"))
_REFUSED = {
    "device_map": "budgets say where the model lies (device_bytes, host_bytes, disk_dir)",
    "offload_folder": "disk_dir= is the directory of the DISK tier",
    "max_memory": "device_bytes= and host_bytes= are the budgets",
    "tp_plan": "parallelize() of gemini.parallel cuts a model over ranks",
    "gguf_file": "only safetensors and torch files are read; convert it first",
    "state_dict": "load_state_dict() of the managed model takes one",
}


def from_pretrained(
    path_or_config: str | os.PathLike[str] | Any,
    auto_class: Any = None,
    *,
    dtype: str | torch.dtype | None = None,
    adapter: Any = None,
    trains: bool = True,
    **options: Any,
) -> Any:
    """Build a model on ``meta``, manage it in place and read its weights directly into chunks. Beside the
    budgets this takes the memory of one tensor at a time, and that of the model's Python objects::

        model = gemini.from_pretrained("llama-7b", AutoModelForCausalLM, mixed_precision="bf16",
                                       device_bytes="20GiB", disk_dir="/mnt/nvme")
        optimizer = gemini.GeminiAdamOptimizer(model, lr=1e-5)

    transformers itself maps the names in files, ties weights, initializes missing ones and reports; the
    numbers are those of its own ``from_pretrained``. Collective: each rank keeps its part.

    Weights for the DISK tier stay in the directory's safetensors until something writes to them, such as the
    first step; frozen ones stay there. This holds on the CPU and in one process, for weights with the dtype
    of the files and without fp32 masters. If a file is changed in place meanwhile, reads raise IoError; if it
    is replaced or deleted, the old content is still read.

    Args:
        path_or_config: a directory from ``save_pretrained`` (safetensors, one file or shards), a name that
            transformers resolves, or a config: then weights are initialized by the model's own rules.
        auto_class: a class of transformers (``AutoModelForCausalLM``, ``LlamaForCausalLM``), its name, or
            ``None`` for the class that the config names. Any other callable is called without arguments and
            returns the module; then the directory's files must contain exactly its state, and transformers is
            not needed.
        dtype: of parameters outside chunks, as for ``from_pretrained``; ``None``: that of the files. The
            compute dtype is ``mixed_precision``.
        trains: False for a model for inference only: no parameter gets a gradient, and the directory's
            safetensors are the DISK tier. Unchanged weights are read from there whenever they come to DEVICE:
            nothing is copied, ``disk_dir`` is not needed, and the first pass reads each byte once, past the
            page cache. Only on the CPU and in one process; elsewhere they are copied.
        adapter: a PEFT config (``LoraConfig(...)``) for new adapters, or the directory of saved ones: the
            model itself is frozen, adapters train.
        options: those of :class:`gemini.GeminiDDP`; all others are passed to transformers
            (``attn_implementation``, ``ignore_mismatched_sizes``, ``trust_remote_code``), also a ``config``
            that is no :class:`GeminiConfig`. With
            ``quantization_config``, or for a directory of a quantized model, each weight goes into its chunk
            as soon as it is quantized. It is frozen, and does not stay in the directory.

    Returns:
        The module, managed as by :func:`gemini.manage`; :func:`gemini.handle_of` finds its handle.

    Raises:
        OutOfBudgetError: the model cannot fit the budgets.
        InputError: a file in a directory is damaged, not regular or outside of it, lacks a tensor of its
            index, or has one that the model lacks. It is also a CheckpointError, and an OSError, ValueError
            and RuntimeError where transformers raises one of these.
        CheckpointError: files have two names of one tied tensor, with different values, for a module that is
            not from transformers.
        OSError: there is no model of that name.
        TypeError: an unknown option.
        ConfigError: the directory does not exist, an option is invalid, or transformers (peft) is not
            installed.
    """
    for name, way_out in _REFUSED.items():
        if options.get(name) is not None:
            raise ConfigError(f"from_pretrained() takes no {name}: {way_out}")
    if not trains:
        if adapter is not None:
            raise ConfigError("from_pretrained(trains=False) takes no adapter: adapters train")
        options.setdefault("optimizer_rule", "none")
    managed = {name: value for name, value in options.items() if _is_ours(name, value)}
    others = {name: value for name, value in options.items() if name not in managed}
    if _is_other_callable(auto_class):
        if adapter is not None or dtype is not None or others:
            _refuse_misspelled(others)
            given = [*(["adapter"] if adapter is not None else []), *(["dtype"] if dtype else []), *others]
            raise ConfigError(
                f"{', '.join(given)} cannot be given for a callable: apply it where the module is built"
            )
        return _load_other(Path(path_or_config), auto_class, managed, trains=trains)
    from gemini.integrations.transformers_loading import load_pretrained

    try:
        return load_pretrained(path_or_config, auto_class, dtype, adapter, managed, others, trains=trains)
    except TypeError as error:
        # transformers accepts any option of the config, so only it knows which are unknown.
        refused = re.search(r"unexpected keyword argument '(\w+)'", str(error))
        if refused and refused[1] in others:
            _refuse_misspelled([refused[1]], error)
        raise


def _is_ours(name: str, value: Any) -> bool:
    """Return whether an option is GeminiDDP's. Both libraries have a ``config``."""
    return name in _MANAGED and (name != "config" or value is None or isinstance(value, GeminiConfig))


def _refuse_misspelled(names: Iterable[str], cause: Exception | None = None) -> None:
    """Raise TypeError for the first of ``names`` that resembles one of our options."""
    for name in names:
        if guess := did_you_mean(name, _MANAGED | _OWN):
            raise TypeError(f"from_pretrained() has no argument {name!r}{guess}") from cause


def _is_other_callable(auto_class: Any) -> bool:
    if auto_class is None or isinstance(auto_class, str) or hasattr(auto_class, "from_pretrained"):
        return False
    if not callable(auto_class):
        raise ConfigError(
            f"auto_class is {auto_class!r}; give a class of transformers, its name, or a callable that "
            "builds the module"
        )
    return True


def _load_other(
    directory: Path, build: Callable[[], nn.Module], options: dict[str, Any], *, trains: bool
) -> nn.Module:
    """Build, manage and load a module that is not from transformers."""
    with SafetensorsFiles.of_directory(directory) as files:
        with init_on("meta"):
            module = build()
        if not trains:
            module.requires_grad_(False)
        names = _other_names(module, files, directory)
        opened, built = manage_without_values(module, "from_pretrained()", reads_files=not trains, **options)
        try:
            initialize_buffers(module)
            values = _TiedValues(files, module, names)
            handle = opened.finish(built)
            filling = Filling(built.storage, built.manager)
            stored = StoredWeights.of(built, filling, files)
            if stored is None:
                files.expect(values.stored_names())

            def write(slot: ManagedSlot, value: torch.Tensor) -> None:
                if not isinstance(value, UnreadTensor):
                    filling.write(slot, value)
                elif stored is None or not stored.take(slot, value):
                    filling.write(slot, value.read())

            try:
                import_weights(handle, values, strict=True, fill=write)
            except RuntimeError as error:
                if isinstance(error, GeminiError):
                    raise
                raise PretrainedError(f"{directory} does not hold the module: {in_words(error)}") from error
            if stored is not None:
                stored.finish(module, filling.write)
            filling.finish()
            sharding = built.manager.sharding
            if sharding is not None:
                for buffer in module.buffers():
                    sharding.agree_on(buffer)
        except BaseException:
            built.manager.close(run_pending=False)
            raise
    return module


class _TiedValues(StoredValues):
    """The values in files that have a tied tensor under only one of its names."""

    def __init__(self, files: SafetensorsFiles, module: nn.Module, names: Mapping[str, str]) -> None:
        """``names``: for each further name of a tied tensor, its name in the files."""
        super().__init__(files)
        self._names = {name: name for name in files} | dict(names)
        self._wanted = list(module.state_dict(keep_vars=True))

    def stored_names(self) -> Iterable[str]:
        """Return the names in the files in the order in which the module loads them."""
        return dict.fromkeys(self._names[name] for name in self._wanted if name in self._names)

    def outline(self, name: str) -> torch.Tensor:
        """Return a meta tensor with the shape and dtype."""
        return super().outline(self._names[name])

    def __getitem__(self, name: str) -> torch.Tensor:
        return super().__getitem__(self._names[name])

    def __iter__(self) -> Any:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def _other_names(module: nn.Module, files: SafetensorsFiles, directory: Path) -> dict[str, str]:
    """Return for each further name of a tied tensor its first name in ``files``.

    Raises:
        CheckpointError: they have several of its names, with different values.
    """
    by_tensor: dict[int, list[str]] = {}
    for name, tensor in module.state_dict(keep_vars=True).items():
        by_tensor.setdefault(id(tensor), []).append(name)
    found: dict[str, str] = {}
    for names in by_tensor.values():
        first, *others = [name for name in names if name in files] or [""]
        for name in others:
            # A wrong shape is reported when the tensor is loaded.
            alike = files[first].shape != files[name].shape or files[first].holds_the_same_as(files[name])
            if not alike:
                raise values_differ(directory, first, name)
        if first:
            found |= {name: first for name in names if name not in files}
    return found
