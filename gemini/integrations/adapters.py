"""PEFT adapters on a model that is loaded directly into chunks.

Chunks are laid out once, so the adapters must exist before the weights are read. But their initial values may
depend on the weights (DoRA, PiSSA). So adapters are applied twice: on ``meta`` for the layout, and again
after loading for their values.
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
    """PEFT cannot apply adapters to a model; the cause says why."""


class Adapters:
    """The adapters for one model. ``outer``: the model with adapters, set by :meth:`put_on`."""

    outer: nn.Module

    def __init__(self, peft: Any, config: Any, directory: str | None) -> None:
        """``directory``: of saved adapters; None: make new ones from ``config``."""
        self._peft = peft
        self._config = config
        self._directory = directory
        self._model: nn.Module | None = None
        self._plain: _Tree | None = None
        self._adapted: _Tree | None = None

    @classmethod
    def of(cls, adapter: Any) -> Adapters:
        """Return the adapters of a PEFT config, or of a directory that PEFT saved.

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
                    f"a {type(adapter).__name__} trains inputs, not weights; load the model and give "
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
        """The name of the model that saved adapters belong to.

        Raises:
            ConfigError: the adapters do not name one.
        """
        base = self._config.base_model_name_or_path
        if not base:
            raise ConfigError(
                f"{self._directory} does not name the model that its adapters are for; give the model's "
                "directory, and this one as adapter="
            )
        return str(base)

    def put_on(self, model: nn.Module, *, quantized: bool = False) -> nn.Module:
        """Apply adapters to ``model``, which is on ``meta``, without using random numbers; return
        :attr:`outer`.

        ``quantized``: ``model`` has quantized weights of the right layout, with arbitrary values. DoRA then
        copies them, so its adapters need memory.
        """
        self._model = model
        self._plain = _Tree(model)
        config = copy.deepcopy(self._config)
        start = getattr(config, "init_lora_weights", True)
        if not isinstance(start, bool):  # an initialization that computes with weights
            config.init_lora_weights = True
        # On meta any rank takes no memory; adapters that are too large are refused by the budgets later.
        has_memory = quantized and getattr(config, "use_dora", False)
        with torch.random.fork_rng(devices=[]), init_on("cpu" if has_memory else "meta"):
            try:
                self.outer = self._peft.get_peft_model(model, config)
            except Exception as error:  # PEFT may raise anything
                raise AdapterError(f"PEFT cannot put adapters on the model: {in_words(error)}") from error
        if not isinstance(start, bool):
            config.init_lora_weights = start
        self._adapted = _Tree(model)
        return self.outer

    def applied_to(self, model: nn.Module) -> nn.Module:
        """Apply adapters with values to ``model``, which has its weights; return the model with adapters.
        Raises AdapterError.
        """
        try:
            return self._applied(model)
        except Exception as error:  # PEFT may raise anything
            raise AdapterError(f"PEFT cannot put adapters on the model: {in_words(error)}") from error

    def _applied(self, model: nn.Module) -> nn.Module:
        outer: nn.Module
        if self._directory is None:
            outer = self._peft.get_peft_model(model, copy.deepcopy(self._config))
        else:
            outer = self._peft.PeftModel.from_pretrained(model, self._directory, is_trainable=True)
        return outer

    def take_off(self) -> None:
        """Restore the model without adapters, so that transformers can load it. Its parameters are shared by
        both structures.
        """
        if self._plain is not None:
            self._plain.restore()

    def give_values(self, write: Callable[[nn.Parameter, torch.Tensor], None]) -> None:
        """Apply the adapters again, now that the model has its weights, and write the values that PEFT gives
        them.

        ``write(parameter, value)`` writes a managed parameter.

        Raises:
            ConfigError: PEFT makes other parameters for a model with weights than for one without.
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
    """Return an inference model with saved adapters, which stay in ordinary memory.

    Raises:
        ConfigError: peft is not installed, or the adapters are damaged or belong to another model.
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
    """A snapshot of a model's module structure and of its attributes, to be restored."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._children = [(owner, dict(owner._modules)) for owner in model.modules()]
        self._attributes = dict(vars(model))

    def restore(self) -> None:
        """Restore the snapshot."""
        for owner, children in self._children:
            owner._modules.clear()
            owner._modules.update(children)
        added = vars(self._model).keys() - self._attributes.keys()
        for name in added:
            del vars(self._model)[name]
        if "peft_config" in self._attributes:
            self._model.peft_config = self._attributes["peft_config"]
