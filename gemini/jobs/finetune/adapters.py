"""The adapters of a run: their PEFT config, and checks that the model has the layers that they are put on."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, cast

from torch import nn

from gemini.errors import ConfigError, GeminiError, in_words
from gemini.integrations.adapters import AdapterError, Adapters
from gemini.integrations.quantized_loading import QuantizedOutline, stored_dtype
from gemini.integrations.transformers_loading import keep_types, meta_model_of, tie
from gemini.jobs.finetune.config import ALL_LINEAR, NO_TARGETS, FineTuneConfig, names_of
from gemini.system.config import did_you_mean

_MOST_PARTS = 3  # longer dotted names are compared with full names only

_LAYERS, _ARRAYS = "--lora-targets", "--lora-target-parameters"
_WAYS_OUT = {  # kind of target of an option, and the remedy if the model has no target of that name
    _LAYERS: ("layer", f"name existing layers, or {ALL_LINEAR}"),
    _ARRAYS: ("parameter", "name an existing array, such as mlp.experts.down_proj in a mixture of experts"),
}


def adapter_of(config: FineTuneConfig) -> Any:
    """Return the PEFT config of the adapters to train; None if all weights train.

    Raises:
        ConfigError: peft is not installed.
    """
    if not config.lora:
        return None
    peft = require_peft()
    names = names_of(config.lora_targets)
    layers: str | list[str] = [] if names == [NO_TARGETS] else names
    return peft.LoraConfig(
        r=config.lora,
        lora_alpha=config.alpha,
        use_dora=config.dora,
        use_rslora=config.rslora,
        lora_dropout=config.lora_dropout,
        target_modules=ALL_LINEAR if names == [ALL_LINEAR] else layers,
        target_parameters=names_of(config.lora_target_parameters) or None,
        task_type="CAUSAL_LM",
    )


def require_peft() -> Any:
    """Import and return the package peft. Raises ConfigError if it is not installed."""
    try:
        import peft
    except ImportError as error:
        raise ConfigError(
            f"--lora needs the package peft: pip install 'gemini-runtime[hf]' ({error})"
        ) from error
    return peft


def adapted(config: FineTuneConfig) -> nn.Module:
    """Return the model on ``meta`` with its adapters. No weight is read.

    Raises:
        ConfigError: a layer or array named for the adapters is missing.
    """
    model = meta_model_of(Path(config.model), "AutoModelForCausalLM")
    keep_types(model)
    tie(model, frozenset())
    if not config.lora:
        return cast(nn.Module, model)
    adapter = adapter_of(config)
    _refuse_unknown_targets(adapter, model)
    with adapter_errors(config):
        return Adapters.of(adapter).put_on(model)


def adapts_experts(module: nn.Module) -> bool:
    """Return whether PEFT has put adapters on arrays of experts in ``module``. For some mixtures, PEFT
    includes the experts in "all linear layers", because they were layers in earlier versions."""
    return any(getattr(each, "num_experts", 1) > 1 for each in module.modules() if hasattr(each, "lora_A"))


def _refuse_unknown_targets(adapter: Any, model: nn.Module) -> None:
    layers, arrays = adapter.target_modules or (), adapter.target_parameters or ()
    modules = [name for name, _ in model.named_modules()]
    params = [name for name, _ in model.named_parameters()]
    _refuse_unknown(_LAYERS, () if isinstance(layers, str) else sorted(layers), modules, params)
    _refuse_unknown(_ARRAYS, arrays, params, modules)


def _refuse_unknown(option: str, names: Iterable[str], known: list[str], others: list[str]) -> None:
    """Raise ConfigError for the first of ``names`` that is not the end of any ``known`` name.

    PEFT matches names in the same way, but silently ignores missing ones as long as it finds any. ``others``:
    the names that the other of the two options takes.
    """
    (what, way_out), other = _WAYS_OUT[option], _ARRAYS if option == _LAYERS else _LAYERS
    for name in names:
        if _is_end(name, known):
            continue
        if _is_end(name, others):
            raise ConfigError(
                f"{option} {name}: the model has no {what} of this name, but a {_WAYS_OUT[other][0]}; "
                f"give it to {other}"
            )
        count = name.count(".") + 1
        ends = {".".join(each.split(".")[-count:]) for each in known} if count <= _MOST_PARTS else set(known)
        raise ConfigError(
            f"{option} {name}: the model has no {what} of this name{did_you_mean(name, ends)}; {way_out}"
        )


def _is_end(name: str, known: Iterable[str]) -> bool:
    return any(each == name or each.endswith(f".{name}") for each in known)


def adapting(adapter: Any, quantization: Any, directory: Path) -> Callable[[nn.Module], nn.Module]:
    """Return a function that quantizes the weights of a model on ``meta`` and puts adapters on it, as loading
    from ``directory`` would.

    Args:
        adapter: a PEFT config; None: no adapters.
        quantization: a transformers config; None: the weights are not quantized.

    The function raises ConfigError if a layer or array named for the adapters is missing, or if PEFT puts
    adapters on arrays of experts.
    """
    outline = None
    if quantization is not None:
        outline = QuantizedOutline(quantization, stored_dtype(directory))

    def change(module: nn.Module) -> nn.Module:
        with outline.put_on(module) if outline is not None else nullcontext():
            if adapter is None:
                return module
            import peft

            _refuse_unknown_targets(adapter, module)
            adapted: nn.Module = peft.get_peft_model(module, adapter)
        if adapts_experts(adapted):
            raise ConfigError(
                "there is no plan for adapters on expert arrays: it would count the sums of all experts, and "
                "a pass computes those of a few at a time; gemini finetune measures its first step instead. "
                "To plan adapters on other layers, name them with --lora-targets, such as q_proj,v_proj"
            )
        return adapted

    return change


@contextmanager
def adapter_errors(config: FineTuneConfig) -> Iterator[None]:
    """Convert PEFT's errors about adapter targets to ConfigError."""
    try:
        yield
    except AdapterError as error:
        raise _unfit(config, error.__cause__ or error) from error
    except ValueError as error:
        if not config.lora or isinstance(error, GeminiError):
            raise
        raise _unfit(config, error) from error


def _unfit(config: FineTuneConfig, cause: BaseException) -> ConfigError:
    said = in_words(cause).rstrip(".")
    if config.dora and "dora" in said.lower():
        return ConfigError(f"--dora: {said}; leave it out: LoRA supports any linear layer")
    if config.lora_dropout and "dropout" in said.lower():
        return ConfigError(
            f"--lora-dropout: {said}: expert arrays do not support dropout, and for some mixtures of "
            f"experts {ALL_LINEAR} includes them; leave it out, or name layers with --lora-targets, "
            "such as q_proj,v_proj"
        )
    options = f"--lora-targets {config.lora_targets}"
    if config.lora_target_parameters:
        options += f" --lora-target-parameters {config.lora_target_parameters}"
    return ConfigError(
        f"{options}: {said}; name linear layers of the model, such as q_proj,v_proj, or {ALL_LINEAR}"
    )
