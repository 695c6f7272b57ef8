"""Loads transformers models with transformers' own code, but into chunks.

transformers' ``from_pretrained`` builds the model on ``meta``, maps names in files to parameters, converts,
ties, initializes missing weights, and reports. All of that stays its own. Between building and loading the
parameters become managed; values that transformers assigns to a module are written to the chunks instead.
"""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from gemini.errors import ConfigError, GeminiError, in_words
from gemini.integrations.adapters import Adapters
from gemini.integrations.model_directory import (
    ADAPTER_CONFIG,
    CONFIG,
    MAX_CONFIG_BYTES,
    PretrainedError,
    check_model,
    is_model_class,
)
from gemini.integrations.quantized_loading import QuantizedWeights, loads_part_by_part
from gemini.integrations.quantized_saving import flatten_managed
from gemini.integrations.safetensors_files import SafetensorsFiles
from gemini.integrations.stored_weights import StoredWeights, UnreadTensor
from gemini.model.in_place import InPlace, Opened, manage, manage_without_values
from gemini.runtime import ManagedParameter, init_on
from gemini.runtime.adopt import Adopted, read_values
from gemini.runtime.build import Built
from gemini.runtime.growth import Filling
from gemini.runtime.storage.model_storage import ManagedSlot, slot_of
from gemini.system.input_files import InputDirectory, errors_of

_ONE_AT_A_TIME = "HF_DEACTIVATE_ASYNC_LOAD"  # transformers' switch: read tensors when they are needed
_QUANTIZED_BY = ("bitsandbytes", "torchao")
_PATCHED = threading.Lock()
_REFUSED_KEYWORD = re.compile(r"unexpected keyword argument '(\w+)'")


def load_pretrained(
    path_or_config: Any,
    auto_class: Any,
    dtype: str | torch.dtype | None,
    adapter: Any,
    options: dict[str, Any],
    others: dict[str, Any],
    *,
    trains: bool = True,
) -> Any:
    """Implements :func:`gemini.from_pretrained` for a transformers model. ``options``: GeminiDDP's.
    ``others``: transformers'.
    """
    transformers = _transformers()
    if dtype is not None:
        others = {**others, "dtype": dtype}
    adapters = Adapters.of(adapter) if adapter is not None else None
    if isinstance(path_or_config, transformers.PreTrainedConfig):
        if adapters is not None:
            raise ConfigError(
                "adapters go on a model with weights; give its directory, or get_peft_model() of the model "
                "to gemini.manage()"
            )
        model = _built(transformers, path_or_config, auto_class, others)
        manage(model.requires_grad_(trains), **options)
        return model
    path = os.fspath(path_or_config)
    if adapters is None and os.path.lexists(Path(path) / ADAPTER_CONFIG):
        adapters = Adapters.of(path)
        path = adapters.base
    _refuse_missing_directory(path)
    if os.path.lexists(path):
        check_model(Path(path, others.get("subfolder") or ""))
    loading = _Loading(options, adapters, trains=trains)
    others = {"trust_remote_code": False, **others}  # with None transformers asks on standard input
    try:
        chosen = _class_of(transformers, auto_class, path, others)
        if not _is_transformers(transformers, chosen) and not others["trust_remote_code"]:
            del others["trust_remote_code"]
        if is_quantized(path, others):
            others["device_map"] = "cpu"  # the default would be a GPU, if there is one
        return loading.run(lambda: chosen.from_pretrained(path, **others))
    except Exception as error:  # transformers may raise anything
        _explain(error, path, others)
        raise


def is_quantized(path: str, others: dict[str, Any]) -> bool:
    """Return whether transformers will load quantized weights.

    Raises:
        ConfigError: chunks do not support the quantization method.
    """
    asked = others.get("quantization_config")
    directory = Path(path, others.get("subfolder") or "")
    if asked is None and (directory / CONFIG).is_file():
        asked = InputDirectory(directory).json(CONFIG, MAX_CONFIG_BYTES).get("quantization_config")
    if asked is None:
        return False
    method = asked.get("quant_method") if isinstance(asked, dict) else getattr(asked, "quant_method", None)
    if str(getattr(method, "value", method)) not in _QUANTIZED_BY:
        raise ConfigError(
            f"{path} is quantized by {method!s:.80}, and chunks hold quantized weights of "
            f"{' and '.join(_QUANTIZED_BY)}; quantize the model by one of these, or give one that is not "
            "quantized"
        )
    return True


def _is_transformers(transformers: Any, chosen: Any) -> bool:
    """Return whether a class accepts the options of transformers' classes."""
    return str(getattr(chosen, "__module__", "")).startswith("transformers.") or is_model_class(
        transformers, chosen
    )


def _refuse_missing_directory(path: str) -> None:
    """Raise ConfigError if ``path`` can only be a directory and does not exist: transformers would look for a
    model of that name elsewhere.
    """
    is_path = path.startswith(("/", "./", "../", "~")) or path.rstrip("/").count("/") > 1
    if not is_path or Path(path).exists():
        return
    home = "Python does not expand ~, os.path.expanduser() does; " if path.startswith("~") else ""
    raise ConfigError(
        f"from_pretrained() finds no directory {path!r}; {home}give a directory in the format of "
        "save_pretrained() (hf download NAME --local-dir DIR makes one)"
    )


def _explain(error: Exception, path: str, others: dict[str, Any]) -> None:
    """Raise a better one-line error than transformers' own, if there is one."""
    if isinstance(error, (GeminiError, torch.OutOfMemoryError)):
        return
    refused = _REFUSED_KEYWORD.search(str(error)) if isinstance(error, TypeError) else None
    if refused and refused[1] in others:
        return
    if os.path.lexists(path):
        raise PretrainedError(f"transformers cannot load the model of {path}: {in_words(error)}") from error
    if isinstance(error, OSError) and error.errno is None:
        said = next(iter(str(error).splitlines()), type(error).__name__)
        raise PretrainedError(
            f"there is no directory {path!r} here, and transformers finds no model of that name: {said}"
        ) from error


def keep_types(model: Any) -> None:
    """Cast the parameters that ``model`` keeps in fp32, as loading would do later: on ``meta`` they still
    have the dtype of all others.
    """
    from transformers.core_model_loading import build_glob_alternation

    types: dict[str, torch.dtype] = model._get_dtype_plan(model.dtype)
    if not types:
        return
    kept, patterns, _ = build_glob_alternation(list(types))
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        found = kept.search(name)
        if found is not None and found.lastgroup is not None and tensor.is_floating_point():
            tensor.data = tensor.data.to(types[patterns[found.lastgroup]])


def _transformers() -> Any:
    try:
        import transformers
    except ImportError as error:
        raise ConfigError(
            "from_pretrained() of a transformers model needs the package: pip install 'gemini-runtime[hf]' "
            f"({error})"
        ) from error
    if not hasattr(transformers.PreTrainedModel, "_load_pretrained_model"):
        raise ConfigError(
            f"transformers {transformers.__version__} loads models in a way that is not known here; install "
            "one of version 5"
        )
    return transformers


def _class_of(transformers: Any, auto_class: Any, path: str, others: dict[str, Any]) -> Any:
    """Return the class to call ``from_pretrained`` on."""
    if auto_class is None:
        known = ("trust_remote_code", "revision", "cache_dir", "token", "subfolder", "local_files_only")
        config = transformers.AutoConfig.from_pretrained(
            path, **{name: others[name] for name in known if name in others}
        )
        return _class_named(transformers, config)
    if isinstance(auto_class, str):
        if not hasattr(transformers, auto_class):
            raise ConfigError(
                f"transformers {transformers.__version__} has no class {auto_class!r}; correct the name"
            )
        return getattr(transformers, auto_class)
    return auto_class


def _class_named(transformers: Any, config: Any) -> Any:
    for name in getattr(config, "architectures", None) or ():
        found = getattr(transformers, name, None)
        if is_model_class(transformers, found):
            return found
    return transformers.AutoModel


def _built(transformers: Any, config: Any, auto_class: Any, others: dict[str, Any]) -> nn.Module:
    """Return the model of a config, on ``meta``."""
    chosen = _class_named(transformers, config) if auto_class is None else auto_class
    chosen = _class_of(transformers, chosen, "", others)
    build = chosen.from_config if hasattr(chosen, "from_config") else chosen._from_config
    with init_on("meta"):
        model: nn.Module = build(config, **others)
    return model


def meta_model_of(path: Path, auto_class: str | None = None) -> Any:
    """Return the model of a directory on ``meta``: its modules and names, without weights.

    ``auto_class``: the name of a transformers class; None: the one that the config names.

    Raises:
        ConfigError: transformers is not installed, or has no model for the directory's config.
    """
    config = config_of(path)
    with errors_of(f"transformers cannot build the model of {path}"):
        return _built(_transformers(), config, auto_class, {})


def config_of(path: Path) -> Any:
    """Return the config of a directory.

    Raises:
        ConfigError: transformers is not installed, or does not know the config.
    """
    transformers = _transformers()
    check_model(path)
    with errors_of(f"transformers cannot read the config of {path}"):
        return transformers.AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=False)


class _Loading:
    """One call of transformers' ``from_pretrained``, on this thread."""

    def __init__(self, options: dict[str, Any], adapters: Adapters | None, *, trains: bool) -> None:
        self._options = options
        self._trains = trains
        self._stored: StoredWeights | None = None  # weights that stay in the files
        self._quantized: QuantizedWeights | None = None
        self._whole = False  # True: transformers loads the whole model, which is managed afterwards
        self._adapters = adapters
        self._opened: Opened | None = None
        self._built: Built | None = None
        self._filling: Filling | None = None
        self._written: set[str] = set()
        self._reusable: list[torch.Tensor] | None = None
        # id of a parameter that transformers makes because files lack it -> (it, the managed one replaced).
        self._fresh: dict[int, tuple[nn.Parameter, ManagedParameter]] = {}

    @property
    def has_begun(self) -> bool:
        """Whether the parameters are managed, so that values may have been read."""
        return self._built is not None

    def run(self, load: Callable[[], Any]) -> Any:
        """Call ``load``, which calls ``from_pretrained``; return its result, managed."""
        try:
            with before_loading(self._load), one_at_a_time():
                take: Any = self._take
                hook = register_module_parameter_registration_hook(take)
                try:
                    result = load()
                finally:
                    hook.remove()
            model = result[0] if isinstance(result, tuple) else result
            outer = self._finish(model)
        except BaseException:
            if self._built is not None:
                self._built.manager.close(run_pending=False)
            raise
        return (outer, *result[1:]) if isinstance(result, tuple) else outer

    def _load(
        self, original: Callable[..., Any], model: Any, state: Any, files: Any, *rest: Any, **options: Any
    ) -> Any:
        """Replaces ``_load_pretrained_model``: the model is built and its files are known."""
        if self._built is not None:
            raise ConfigError(
                f"loading {type(self._opened.module).__name__ if self._opened else 'the model'} loads "
                f"another model, a {type(model).__name__}; load each by itself"
            )
        quantizer = rest[0].hf_quantizer
        is_safe = bool(files) and all(str(file).endswith(".safetensors") for file in files)
        if quantizer is not None and not loads_part_by_part(quantizer, safetensors=is_safe):
            self._whole = True
            return original(model, state, files, *rest, **options)
        keep_types(model)
        if not is_safe:
            if quantizer is not None:
                self._quantized = QuantizedWeights.of(model, rest[0], None)
            self._begin(model, frozenset())
            return original(model, state, files, *rest, **options)
        with SafetensorsFiles([Path(file) for file in files]) as stored:
            if quantizer is not None:
                self._quantized = QuantizedWeights.of(model, rest[0], stored)
            built, filling = self._begin(model, frozenset(names_apart(model, stored)))
            self._reusable = stored.reads.reusable
            if quantizer is None:
                self._stored = StoredWeights.of(built, filling, stored)
            if self._stored is None:
                stored.expect(sorted(stored, key=natural_order))
                return original(model, dict(stored), files, *rest, **options)
            result = original(model, dict(stored), files, *rest, **options)
            self._stored.finish(model, filling.write)
            return result

    def _begin(self, model: Any, apart: frozenset[str]) -> tuple[Built, Filling]:
        """Tie weights, apply adapters, and make the parameters managed."""
        tie(model, apart)
        with self._quantized.standing_in() if self._quantized is not None else nullcontext():
            module: nn.Module = model
            if self._adapters is not None:
                module = self._adapters.put_on(model, quantized=self._quantized is not None)
            if not self._trains:
                module.requires_grad_(False)
            reads_files = not self._trains and self._quantized is None
            self._opened, self._built = manage_without_values(
                module, "from_pretrained()", reads_files=reads_files, **self._options
            )
            self._filling = Filling(self._built.storage, self._built.manager)
            if self._quantized is not None:
                self._quantized.await_values(module, self._built.storage)
            if self._adapters is not None:
                self._adapters.take_off()
        return self._built, self._filling

    def _take(self, module: nn.Module, name: str, param: nn.Parameter | None) -> nn.Parameter | None:
        """Parameter registration hook: write the value of a managed parameter into its chunk."""
        before = module._parameters.get(name)
        weights, filling = self._quantized, self._filling
        if weights is not None and filling is not None and weights.take(module, name, param, filling):
            return param
        if not isinstance(before, ManagedParameter) or isinstance(param, ManagedParameter):
            return None
        if param is None or self._built is None:
            return None
        if not getattr(param, "_is_hf_initialized", False):
            self._fresh[id(param)] = (param, before)
            return None
        self._write(before, param)
        is_read = not isinstance(param, UnreadTensor)
        if is_read and param.untyped_storage().nbytes() == param.nbytes and self._reusable is not None:
            self._reusable.append(param.data)  # reusable, although transformers keeps it until the next read
        before._is_hf_initialized = True  # type: ignore[attr-defined]
        return before

    def _write(self, target: ManagedParameter, values: torch.Tensor) -> None:
        assert self._built is not None
        assert self._filling is not None
        slot = slot_of(target)
        with torch.no_grad():
            if slot.name in self._written and not _are_equal(self._read(slot), values):
                raise ConfigError(
                    f"{slot.name!r} is tied by the config, and the files hold two different values for it: "
                    "give config.tie_word_embeddings=False"
                )
            plain = values.detach()
            if isinstance(plain, UnreadTensor):
                if self._stored is None or not self._stored.take(slot, plain):
                    self._filling.write(slot, plain.read())
            else:
                self._filling.write(slot, plain)
        self._written.add(slot.name)

    def _read(self, slot: ManagedSlot) -> torch.Tensor:
        assert self._built is not None
        if self._stored is not None and slot in self._stored:
            return self._stored.values_of(slot)
        return read_values(slot, self._built.manager)

    def _finish(self, model: Any) -> nn.Module:
        flatten_managed(model)
        if self._whole:
            return self._manage_whole(model)
        if self._built is None or self._opened is None or self._filling is None:
            raise ConfigError(
                f"{type(model).__name__}.from_pretrained did not load as a model of transformers does; build "
                "the module on 'meta' and give it to gemini.manage()"
            )
        self._write_initialized(model)
        late: Sequence[Adopted] = ()
        if self._quantized is not None:
            self._quantized.refuse_missing()
            late = self._quantized.adopted
        if self._adapters is not None:
            self._adapters.give_values(self._write_new)
        self._filling.finish()
        module = self._opened.module
        sharding = self._built.manager.sharding
        if sharding is not None:
            for buffer in module.buffers():
                sharding.agree_on(buffer)
        built = self._built._replace(adopted=[*self._built.adopted, *late])
        handle: InPlace = self._opened.finish(built)
        return handle.module

    def _manage_whole(self, model: nn.Module) -> nn.Module:
        """Manage a model that transformers has loaded, with its adapters."""
        module = model if self._adapters is None else self._adapters.applied_to(model)
        if not self._trains:
            module.requires_grad_(False)
        manage(module, **self._options)
        return module

    def _write_initialized(self, model: nn.Module) -> None:
        """Write the weights that transformers initialized, over ranks rank 0's, and put the managed
        parameters back in their places.
        """
        left = {id(param) for param in model.parameters()} & self._fresh.keys()  # the rest were tied since
        for key in sorted(left, key=list(self._fresh).index):  # over ranks in the same order
            self._write_new(self._fresh[key][1], self._fresh[key][0])
        for owner in model.modules():
            for name, held in owner._parameters.items():
                if held is not None and id(held) in left:
                    owner._parameters[name] = self._fresh[id(held)][1]

    def _write_new(self, target: nn.Parameter, values: torch.Tensor) -> None:
        assert self._built is not None
        assert self._filling is not None
        manager = self._built.manager
        with torch.no_grad():
            plain = values.detach()
            if manager.sharding is not None:
                manager.sharding.agree_on(plain)
            self._filling.write(slot_of(target), plain)


@contextmanager
def before_loading(stand_in: Callable[..., Any]) -> Iterator[None]:
    """Call ``stand_in(original, ...)`` instead of ``PreTrainedModel._load_pretrained_model`` on this thread
    within the block. transformers has no hook between building and loading.
    """
    import transformers

    owner: Any = transformers.PreTrainedModel
    thread = threading.get_ident()
    with _PATCHED:
        kept = owner.__dict__["_load_pretrained_model"]
        original = owner._load_pretrained_model

        def load(*args: Any, **options: Any) -> Any:
            if threading.get_ident() != thread:
                return original(*args, **options)
            return stand_in(original, *args, **options)

        owner._load_pretrained_model = staticmethod(load)
        try:
            yield
        finally:
            owner._load_pretrained_model = kept


@contextmanager
def one_at_a_time() -> Iterator[None]:
    """Make transformers read each tensor when it is needed instead of all in advance, within the block."""
    before = os.environ.get(_ONE_AT_A_TIME)
    os.environ[_ONE_AT_A_TIME] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[_ONE_AT_A_TIME]
        else:
            os.environ[_ONE_AT_A_TIME] = before


def natural_order(name: str) -> list[Any]:
    """Return a sort key for names in transformers' loading order: numbers compare by value, of any length."""
    parts = re.split(r"([0-9]+)", name)
    numbers = (part.lstrip("0") for part in parts[1::2])
    parts[1::2] = [(len(number), number) for number in numbers]
    return parts


def names_apart(model: Any, stored: SafetensorsFiles) -> Iterator[str]:
    """Yield the parameters that stay untied although the config ties them: the files have both, with
    different values. This is transformers' rule.
    """
    ties: dict[str, str] = getattr(model, "all_tied_weights_keys", {})
    held = _stored_as({*ties, *ties.values()}, stored)
    for target, source in ties.items():
        one, other = held.get(target), held.get(source)
        if one is None or other is None or one == other:
            continue
        first, second = stored[one], stored[other]
        same = first.shape == second.shape and _are_equal(first.read(), second.read())
        if not same:
            yield target


def _stored_as(names: set[str], stored: Iterable[str]) -> dict[str, str]:
    """Return the first name in files of each parameter; files may lack or add the prefix of a base model.

    One pass over the files' names, of which there may be a million.
    """
    ends: dict[str, list[str]] = {}  # shorter name -> the parameters that a file may have under it
    for name in names:
        for place in range(len(name)):
            if place == 0 or name[place - 1] == ".":
                ends.setdefault(name[place:], []).append(name)
    lengths = {len(name) for name in names}
    found: dict[str, str] = {}
    for held in stored:
        longer = (held[-each:] for each in lengths if held[-each - 1 : -each] == ".")
        for name in (*ends.get(held, ()), *(each for each in longer if each in names)):
            found.setdefault(name, held)
    return found


def tie(model: Any, apart: frozenset[str]) -> None:
    for target, source in getattr(model, "all_tied_weights_keys", {}).items():
        if target not in apart:
            parent, _, name = target.rpartition(".")
            owner = model.get_submodule(parent)
            setattr(owner, name, model.get_parameter_or_buffer(source))


def _are_equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.equal(one.to(other.dtype), other)
