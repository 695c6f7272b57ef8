"""Merges PEFT adapters into the weights that they were trained on, one tensor at a time.

PEFT's own layers compute: they are put on the base on ``meta``; one layer at a time gets its values, is
merged and is emptied again. The result is therefore that of PEFT's ``merge_and_unload()``, bit for bit, for a
base that is loaded with the types of its files.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from gemini.errors import ConfigError, InputError
from gemini.integrations.adapters import Adapters
from gemini.integrations.model_directory import ADAPTER_CONFIG, MAX_CONFIG_BYTES
from gemini.integrations.safetensors_files import SafetensorsFiles, StoredTensor
from gemini.integrations.transformers_loading import meta_model_of
from gemini.jobs.after_training.array_merge import (
    ArrayMerging,
    ArrayPart,
    adapter_type,
    places_in_files,
    values_for,
)
from gemini.jobs.after_training.model_copy import (
    CARD,
    Copied,
    copy_documents,
    copy_weights,
    published,
    read_config,
    refuse_existing,
    refuse_quantized,
)
from gemini.jobs.run.model_card import merged_card
from gemini.system.input_files import InputDirectory, errors_of

WEIGHTS = "adapter_model.safetensors"
_NAME = "default"  # PEFT's default name of an adapter
_OUTER = "base_model.model."  # prefix of names in the files of adapters
_OTHERWISE = "use PEFT's merge_and_unload(), which merges in memory"
# Values of init_lora_weights that do not change the weights of the base.
_STARTS = (True, False, "gaussian", "orthogonal", "eva")
_OTHERS = (
    "trainable_token_indices",
    "megatron_config",
    "loftq_config",
    "layer_replication",
    "arrow_config",
    "use_bdlora",
    "alora_invocation_tokens",
)


@dataclass(frozen=True)
class Merged:
    """The result of a merge. Of the tensors in ``copied``, adapters changed ``num_merged``, and
    ``num_replaced`` come from the adapters' files (``modules_to_save``)."""

    copied: Copied
    num_merged: int
    num_replaced: int


def merge(base: Path, adapter: Path, target: Path) -> Merged:
    """Write the model in ``base``, with the adapters in ``adapter`` merged in, to the directory ``target``.

    Raises:
        ConfigError: the adapters are for another base or of an unsupported kind, a file is damaged, or
            ``target`` exists. Nothing was written.
        IoError: ``target`` cannot be written.
    """
    refuse_existing(target)
    refuse_quantized(read_config(base), base)
    with SafetensorsFiles.of_directory(base) as files, _adapter_files(adapter) as own:
        merging = Merging(base, adapter, files, own)
        with published(target, "write the merged model") as made:
            made.mkdir()
            copy_documents(base, made, tokenizer_of=adapter)
            (made / CARD).write_text(merged_card(base, adapter), encoding="utf-8")
            copied = copy_weights(files, made, dtype_of=lambda each: each.dtype, values_of=merging.values)
    changed = merging.layers.keys() | merging.arrays.keys()
    return Merged(copied, len(changed), len(merging.replaced.keys() - changed))


@contextmanager
def _adapter_files(adapter: Path) -> Iterator[SafetensorsFiles]:
    directory = InputDirectory(adapter)
    if ADAPTER_CONFIG not in directory:
        raise ConfigError(f"{adapter} has no {ADAPTER_CONFIG}; give the directory of the adapters")
    _refuse_other_kinds(directory.json(ADAPTER_CONFIG, MAX_CONFIG_BYTES), adapter)
    if WEIGHTS not in directory:
        raise ConfigError(
            f"{adapter} has no {WEIGHTS}; save the adapters with save_pretrained(), which writes safetensors"
        )
    with SafetensorsFiles([directory.file(WEIGHTS)]) as files:
        yield files


def _refuse_other_kinds(fields: Mapping[str, Any], adapter: Path) -> None:
    """Raise ConfigError for adapters that are not simply an addition to each layer."""
    kind, start = fields.get("peft_type"), fields.get("init_lora_weights", True)
    if kind != "LORA":
        raise ConfigError(
            f"{adapter} holds adapters of type {kind!r:.50}; gemini merges only LORA. {_OTHERWISE}"
        )
    if not isinstance(start, (bool, str)) or start not in _STARTS:
        raise ConfigError(
            f"{adapter} has init_lora_weights {start!r:.50}, which changes the weights of the base as well; "
            "save them with path_initial_model_for_weight_conversion (PEFT), which makes plain adapters"
        )
    for name in _OTHERS:
        if fields.get(name):
            raise ConfigError(f"{adapter} has {name}, which gemini cannot merge. {_OTHERWISE}")


def _names_in_files(model: Any, files: SafetensorsFiles) -> dict[str, str]:
    """Return the name in the files for each of the model's parameters. Names in files may lack the model's
    prefix, or have an additional one."""
    prefix = f"{getattr(model, 'base_model_prefix', '')}."
    found = {}
    for name, _ in model.named_parameters():
        for held in (name, name.removeprefix(prefix), prefix + name):
            if held in files:
                found[name] = held
                break
    return found


class Merging:
    """Determines which tensors of a base change, and computes their new values. All keys are names in the
    base's files.

    Attributes:
        layers: PEFT's layer of each merged tensor.
        arrays: the parts of expert arrays in each merged tensor.
        replaced: the adapter's tensor for each replaced tensor.

    Raises:
        ConfigError: the adapters do not fit the base, or are of an unsupported kind.
    """

    def __init__(self, base: Path, adapter: Path, files: SafetensorsFiles, own: SafetensorsFiles) -> None:
        self.layers: dict[str, Any] = {}
        self.arrays: dict[str, list[ArrayPart]] = {}
        self.replaced: dict[str, StoredTensor] = {}
        self._adapter, self._files = adapter, files
        adapters = Adapters.of(str(adapter))
        model = meta_model_of(base)
        self._ties = set(getattr(model, "all_tied_weights_keys", {}).items())
        self._names = _names_in_files(model, files)
        self._own_names = {param: name for name, param in model.named_parameters()}
        outer = adapters.put_on(model)
        self._stored = self._match(outer, own)
        self._merging = ArrayMerging(adapter, _NAME, lambda param: self._stored[param].read())
        self._find_layers(outer)
        self._find_arrays(outer, model, base)

    def values(self, stored: StoredTensor) -> torch.Tensor:
        """Return the new values of a tensor of the base. Raises InputError if they are not finite."""
        layer, parts = self.layers.get(stored.name), self.arrays.get(stored.name)
        if layer is None and parts is None:
            return self._unmerged(stored)
        if layer is not None:
            values = self._merged(layer)[stored.name.rpartition(".")[2]]
        else:
            values = self._unmerged(stored)
            self._merging.add(values, parts or ())
        if not bool(values.isfinite().all()):
            raise InputError(
                f"merging the adapters in {self._adapter} gives values that are not finite; train "
                "them again, or give another checkpoint of them"
            )
        return values

    def _unmerged(self, stored: StoredTensor) -> torch.Tensor:
        replaced = self.replaced.get(stored.name)
        return stored.read() if replaced is None else replaced.read().to(stored.dtype)

    def _match(self, outer: nn.Module, own: SafetensorsFiles) -> dict[torch.Tensor, StoredTensor]:
        """Return the adapter's tensor for each parameter of PEFT's layers, and fill :attr:`replaced`."""
        import peft

        params = outer.state_dict(keep_vars=True)
        wanted = peft.get_peft_model_state_dict(outer, state_dict=params, save_embedding_layers=False)
        missing = sorted(wanted.keys() - own.keys())
        if missing:
            raise self._unfit(
                f"for this base its {ADAPTER_CONFIG} needs {len(missing)} tensors that its file "
                f"lacks, such as {missing[0]!r}"
            )
        found: dict[torch.Tensor, StoredTensor] = {}
        paths = {param: name for name, param in params.items()}
        for name, stored in own.items():
            param = wanted.get(name, params.get(name))
            if param is None or param not in paths:
                raise self._unfit(f"the base has no layer for its {name!r}")
            if tuple(param.shape) != stored.shape:
                raise self._unfit(
                    f"its {name!r} has shape {list(stored.shape)}, but the base needs {list(param.shape)}"
                )
            found[param] = stored
            path = paths[param].removeprefix(_OUTER)
            if f".modules_to_save.{_NAME}." in path:
                self._replace(path.replace(f".modules_to_save.{_NAME}.", "."), stored)
            elif name not in wanted:  # an embedding, which PEFT saves together with its adapters
                self._replace(path.replace(".base_layer.", "."), stored)
        return found

    def _replace(self, name: str, stored: StoredTensor) -> None:
        self.replaced[self._name_in_files(name)] = stored

    def _find_layers(self, outer: nn.Module) -> None:
        """Fill :attr:`layers`."""
        from peft.tuners.lora.layer import Embedding, Linear, LoraLayer, ParamWrapper, _ConvNd

        for path, layer in outer.named_modules():
            if not isinstance(layer, LoraLayer) or isinstance(layer, ParamWrapper):
                continue
            if not isinstance(layer, (Linear, Embedding, _ConvNd)):
                raise ConfigError(
                    f"{self._adapter}: {path} is a {type(layer).__name__} of PEFT, which gemini "
                    f"cannot merge; {_OTHERWISE}"
                )
            self._refuse_unknown_values(path, layer)
            kinds = ["weight", *(["bias"] if layer.lora_bias.get(_NAME) else [])]
            for kind in kinds:
                self.layers[self._name_in_files(f"{path.removeprefix(_OUTER)}.{kind}")] = layer

    def _refuse_unknown_values(self, path: str, layer: Any) -> None:
        """Raise ConfigError if a PEFT layer has values that the adapter's file does not contain."""
        own = {*layer.parameters()} - {*layer.get_base_layer().parameters()}
        if not own <= self._stored.keys() or any(each.is_meta for each in layer.buffers()):
            raise ConfigError(
                f"{self._adapter}: {path} has values that are not in its file, so gemini cannot "
                f"merge it; {_OTHERWISE}"
            )

    def _find_arrays(self, outer: nn.Module, model: nn.Module, base: Path) -> None:
        """Fill :attr:`arrays`."""
        from peft.tuners.lora.layer import ParamWrapper

        wrappers: dict[str, Any] = {}
        for path, layer in outer.named_modules():
            if isinstance(layer, ParamWrapper):
                wrapper: Any = layer
                self._refuse_unknown_values(path, wrapper)
                name = self._own_names[wrapper.get_param()]
                self._refuse_tied(name)
                wrappers[name] = wrapper
        places = places_in_files(model, base, wrappers.keys()) if wrappers else {}
        for name, layer in wrappers.items():
            if name not in places:
                raise ConfigError(
                    f"{self._adapter} changes {name!r}, which transformers computes from the files "
                    f"of the base (it casts or rearranges values). {_OTHERWISE}"
                )
            for piece in places[name]:
                self.arrays.setdefault(piece.stored.name, []).append(ArrayPart(layer, piece))

    def _refuse_tied(self, name: str) -> None:
        """Raise ConfigError for a parameter that is tied to another one."""
        tied = next((pair for pair in self._ties if name in pair), None)
        if tied is not None:
            raise ConfigError(
                f"{self._adapter} changes {name!r}, which is tied in the base ({' = '.join(tied)}); "
                f"merging would split it into two tensors. {_OTHERWISE}"
            )

    def _name_in_files(self, name: str) -> str:
        """Return the name of a parameter in the base's files. Raises ConfigError if the files do not have it
        or the parameter is tied."""
        self._refuse_tied(name)
        if name not in self._names:
            raise self._unfit(f"the files of the base have no {name!r}")
        return self._names[name]

    def _unfit(self, why: str) -> InputError:
        return InputError(
            f"the adapters in {self._adapter} do not fit this base: {why}; give the base that their "
            f"{ADAPTER_CONFIG} names"
        )

    def _merged(self, layer: Any) -> dict[str, torch.Tensor]:
        """Return the parameters of a layer after PEFT has merged it. The layer has no values before and after
        the call."""
        inner = layer.get_base_layer()
        values: dict[torch.Tensor, torch.Tensor] = {}
        for param in inner.parameters(recurse=False):
            values[param] = self._unmerged(self._files[self._names[self._own_names[param]]])
        kept = adapter_type(values[inner.weight].dtype)
        own = [param for param in layer.parameters() if param in self._stored and param not in values]
        values |= {param: self._stored[param].read().to(kept) for param in own}
        try:
            with (
                values_for(layer, values),
                errors_of(f"PEFT cannot merge the adapters of {self._adapter}"),
                torch.no_grad(),
            ):
                layer.merge(adapter_names=[_NAME])
                return {key: param.detach() for key, param in inner._parameters.items() if param is not None}
        finally:
            layer.merged_adapters.clear()
