"""Loads this rank's part of a transformers model directly into chunks.

transformers loads a whole model that never gets values: each value that it assigns to a module is cut, and
the part is written to the chunk of a second model with this rank's shapes. So names, conversions, ties and
initial values of missing weights are transformers' own, and only one whole tensor at a time is in memory.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from gemini.errors import ConfigError
from gemini.integrations.model_directory import check_model
from gemini.integrations.safetensors_files import SafetensorsFiles
from gemini.integrations.transformers_loading import (
    before_loading,
    is_quantized,
    keep_types,
    names_apart,
    natural_order,
    one_at_a_time,
    tie,
)
from gemini.model.in_place import Opened, manage_without_values
from gemini.parallel.mesh import Axis
from gemini.parallel.partition import Cut
from gemini.parallel.tensor.parallelize import cut_without_values
from gemini.parallel.tensor.region import Region
from gemini.runtime.build import Built
from gemini.runtime.growth import Filling
from gemini.runtime.storage.model_storage import ManagedSlot, slot_of
from gemini.system.input_files import errors_of


def load_part(directory: Path, axis: Axis, **options: Any) -> tuple[nn.Module, Region]:
    """Return this rank's part of the causal language model in ``directory``, managed separately with
    ``options`` of :func:`gemini.manage`, and the region that its cut layers share. It is for inference only.
    Collective over ``axis``.

    Raises:
        OutOfBudgetError: the part cannot fit the budgets.
        ConfigError: the model cannot be cut, here or on another rank, or the directory has none.
        InputError: a file is damaged.
    """
    import transformers

    check_model(directory)
    if is_quantized(str(directory), {}):
        raise ConfigError(
            f"{directory} is quantized, and such weights are not cut over ranks; use one process"
        )
    loading = _PartLoading(axis, options)
    try:
        with before_loading(loading.load), one_at_a_time(), errors_of(f"{directory} cannot be loaded"):
            take: Any = loading.take
            hook = register_module_parameter_registration_hook(take)
            try:
                whole = transformers.AutoModelForCausalLM.from_pretrained(
                    str(directory), local_files_only=True, trust_remote_code=False
                )
            finally:
                hook.remove()
        return loading.finish(whole)
    except BaseException:
        loading.close()
        raise


class _PartLoading:
    """One call of transformers' ``from_pretrained``."""

    def __init__(self, axis: Axis, options: dict[str, Any]) -> None:
        self._axis, self._options = axis, options
        # id of a parameter of the whole model -> the slot for its values, and its cut.
        self._targets: dict[int, tuple[ManagedSlot, Cut | None]] = {}
        self._names: dict[str, tuple[ManagedSlot, Cut | None]] = {}
        self._made: tuple[Opened, Built, Filling, Region] | None = None

    def load(
        self, original: Callable[..., Any], model: Any, state: Any, files: Any, *rest: Any, **options: Any
    ) -> Any:
        """Replaces ``_load_pretrained_model``: the model is built and its files are known."""
        if self._made is not None:
            raise ConfigError(f"loading loads another model, a {type(model).__name__}, which is not cut")
        if not files or not all(str(file).endswith(".safetensors") for file in files):
            raise ConfigError("a model over ranks is read from safetensors; save it with save_pretrained()")
        keep_types(model)
        with SafetensorsFiles([Path(file) for file in files]) as stored:
            tie(model, frozenset(names_apart(model, stored)))
            self._make_part(model)
            stored.expect(sorted(stored, key=natural_order))
            return original(model, dict(stored), files, *rest, **options)

    def _make_part(self, whole: nn.Module) -> None:
        part = copy.deepcopy(whole).requires_grad_(False)
        region, cuts = cut_without_values(part, self._axis)
        own = {name: cuts.get(id(param)) for name, param in part.named_parameters()}
        opened, built = manage_without_values(part, "load_part()", optimizer_rule="none", **self._options)
        self._made = opened, built, Filling(built.storage, built.manager), region
        self._names = {name: (slot_of(param), own[name]) for name, param in part.named_parameters()}
        self._targets = {id(param): self._names[name] for name, param in whole.named_parameters()}

    def take(self, module: nn.Module, name: str, param: nn.Parameter | None) -> nn.Parameter | None:
        """Parameter registration hook: write the value of a parameter into its chunk."""
        before = module._parameters.get(name)
        if before is None or param is None or id(before) not in self._targets or id(param) in self._targets:
            return None
        if not getattr(param, "_is_hf_initialized", False):
            return None  # transformers will initialize it later
        self._write(self._targets[id(before)], param)
        before._is_hf_initialized = True  # type: ignore[attr-defined]
        return before

    def _write(self, target: tuple[ManagedSlot, Cut | None], values: torch.Tensor) -> None:
        assert self._made is not None
        slot, cut = target
        with torch.no_grad():
            plain = values.detach()
            self._made[2].write(slot, plain if cut is None else cut.part(plain, self._axis.rank))

    def finish(self, whole: Any) -> tuple[nn.Module, Region]:
        """Initialize weights that the files lack, with rank 0's values on all ranks, and copy buffers; return
        the part.
        """
        if self._made is None:
            raise ConfigError(f"{type(whole).__name__} did not load as a model of transformers does")
        opened, built, filling, region = self._made
        for name, param in whole.named_parameters():
            if id(param) not in self._targets:
                values = param.detach().contiguous()
                self._axis.broadcast(values)
                self._write(self._names[name], values)
        filling.finish()
        part: Any = opened.module
        for name, buffer in whole.named_buffers():
            owner, _, key = name.rpartition(".")
            part.get_submodule(owner)._buffers[key] = buffer
        part.generation_config = getattr(whole, "generation_config", None)
        opened.finish(built)
        part.eval()
        return part, region

    def close(self) -> None:
        """Release everything that was made."""
        if self._made is not None:
            self._made[1].manager.close(run_pending=False)
