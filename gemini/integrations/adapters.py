"""PEFT adapters on a model that is loaded straight into chunks.

Chunks are laid out once, so adapters are there before the weights are; their first values may follow from the
weights (DoRA, PiSSA), so they come after them. They are put on twice: on ``meta``, for the layout, and once
more when the model is loaded, for the values.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from gemini.errors import ConfigError, in_words
from gemini.integrations.model_directory import check_adapters
from gemini.runtime import ManagedParameter, init_on
from gemini.system.input_files import errors_of


class AdapterError(ConfigError):
    """Adapters that PEFT cannot put on a model; the cause says why."""


class Adapters:
    """What PEFT puts on a model: ``outer`` is the model with it, from :meth:`put_on` on."""

    outer: nn.Module

    def __init__(self, peft: Any, config: Any, directory: str | None) -> None:
        """``directory``: where the adapters are saved, None: they are new ones of ``config``."""
        self._peft = peft
        self._config = config
        self._directory = directory
        self._model: nn.Module | None = None
        self._plain: _Tree | None = None
        self._adapted: _Tree | None = None

    @classmethod
    def of(cls, adapter: Any) -> Adapters:
        """Return those of a PEFT config, or of a directory that PEFT has saved.

        Raises:
            ConfigError: peft is not installed, or ``adapter`` is neither.
        """
        try:
            import peft  # type: ignore[import-not-found, unused-ignore]
        except ImportError as error:
            raise ConfigError(
                f"adapters need the package peft: pip install 'gemini-runtime[hf]' ({error})"
            ) from error
        if isinstance(adapter, peft.PeftConfig):
            if adapter.is_prompt_learning:
                raise ConfigError(
                    f"a {type(adapter).__name__} learns inputs, not weights; load the model and give "
                    "get_peft_model() of it to gemini.manage()"
                )
            return cls(peft, adapter, None)
        if not isinstance(adapter, (str, os.PathLike)):
            raise ConfigError(f"adapter is a {type(adapter).__name__}; give a PEFT config or a directory")
        directory = os.fspath(adapter)
        if os.path.lexists(directory):
            check_adapters(Path(directory))
        with errors_of(f"PEFT cannot read the adapters of {directory}"):
            config = peft.PeftConfig.from_pretrained(directory)
            config.inference_mode = False
        return cls(peft, config, directory)

    @property
    def base(self) -> str:
        """The model that saved adapters are for.

        Raises:
            ConfigError: they do not say.
        """
        base = self._config.base_model_name_or_path
        if not base:
            raise ConfigError(
                f"{self._directory} does not name the model that its adapters are for; give the model's "
                "directory, and this one as adapter="
            )
        return str(base)

    def put_on(self, model: nn.Module, *, quantized: bool = False) -> nn.Module:
        """Put adapters on ``model``, which is on ``meta``, without a random number drawn; return
        :attr:`outer`. ``quantized``: weights of the right layout, with any values, stand in ``model``; then
        DoRA copies them, and its adapters have memory."""
        self._model = model
        self._plain = _Tree(model)
        config = copy.deepcopy(self._config)
        start = getattr(config, "init_lora_weights", True)
        if not isinstance(start, bool):  # a way that computes with weights
            config.init_lora_weights = True
        # On meta, whatever rank a config asks for: what there is no room for is refused with the budgets.
        has_memory = quantized and getattr(config, "use_dora", False)
        with torch.random.fork_rng(devices=[]), init_on("cpu" if has_memory else "meta"):
            try:
                self.outer = self._peft.get_peft_model(model, config)
            except Exception as error:  # of as many classes as PEFT has kinds of adapters
                raise AdapterError(f"PEFT cannot put adapters on the model: {in_words(error)}") from error
        if not isinstance(start, bool):
            config.init_lora_weights = start
        self._adapted = _Tree(model)
        return self.outer

    def applied_to(self, model: nn.Module) -> nn.Module:
        """Put adapters with values on ``model``, which has its weights; return the model with them. Raises
        AdapterError."""
        try:
            return self._applied(model)
        except Exception as error:  # of as many classes as PEFT has kinds of adapters
            raise AdapterError(f"PEFT cannot put adapters on the model: {in_words(error)}") from error

    def _applied(self, model: nn.Module) -> nn.Module:
        outer: nn.Module
        if self._directory is None:
            outer = self._peft.get_peft_model(model, copy.deepcopy(self._config))
        else:
            outer = self._peft.PeftModel.from_pretrained(model, self._directory, is_trainable=True)
        return outer

    def take_off(self) -> None:
        """Have the model without adapters, as transformers loads it. A parameter is in either the same."""
        if self._plain is not None:
            self._plain.restore()

    def give_values(self, write: Callable[[nn.Parameter, torch.Tensor], None]) -> None:
        """Put the adapters on again, with their values: those that PEFT gives them on a model that has its
        weights. ``write`` one of a managed parameter.

        Raises:
            ConfigError: PEFT makes other parameters of a model with weights than of one without.
        """
        assert self._adapted is not None
        assert self._model is not None
        second = self._applied(self._model)
        params, buffers = dict(second.named_parameters()), dict(second.named_buffers())
        self._adapted.restore()
        own = dict(self.outer.named_parameters())
        if own.keys() != params.keys():
            names = sorted(own.keys() ^ params.keys())
            raise ConfigError(f"PEFT makes {names[0]!r} only where the model has, or has not, its weights")
        for name, param in params.items():
            if not isinstance(param, ManagedParameter):
                write(own[name], param.detach())
        for name, buffer in list(self.outer.named_buffers()):
            if buffer.is_meta:
                owner, _, key = name.rpartition(".")
                setattr(self.outer.get_submodule(owner), key, buffers[name])


def with_saved_adapters(model: Any, directory: Path) -> Any:
    """Return a model that answers, with saved adapters, which stay in ordinary memory.

    Raises:
        ConfigError: peft is not installed, or the adapters are damaged or of another model.
    """
    check_adapters(directory)
    try:
        import peft
    except ImportError as error:
        raise ConfigError(
            f"adapters need the package peft: pip install 'gemini-runtime[hf]' ({error})"
        ) from error
    with errors_of(f"PEFT cannot put the adapters of {directory} on the model"):
        return peft.PeftModel.from_pretrained(model, str(directory), local_files_only=True).eval()


class _Tree:
    """Which modules a model consists of, and what the outermost one is told, to be had again."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._children = [(owner, dict(owner._modules)) for owner in model.modules()]
        self._attributes = dict(vars(model))

    def restore(self) -> None:
        """Make the model what it was."""
        for owner, children in self._children:
            owner._modules.clear()
            owner._modules.update(children)
        added = vars(self._model).keys() - self._attributes.keys()
        for name in added:
            del vars(self._model)[name]
        if "peft_config" in self._attributes:
            self._model.peft_config = self._attributes["peft_config"]
