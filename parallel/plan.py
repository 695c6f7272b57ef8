"""ParallelPlan: the settings for training a model over ranks and tiers, as a value and as a small JSON file.

A plan is data. The planner makes it, and ``HybridParallelPlugin(plan=...)`` runs it.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import reprlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, is_dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple, NoReturn, get_args, get_origin, get_type_hints

import torch
from torch import nn

from gemini import _C
from gemini.errors import ConfigError, printable
from gemini.parallel.layout import Layout
from gemini.parallel.pipeline.orders import ranks_of_stages
from gemini.parallel.plan_report import differences, explanation
from gemini.parallel.sequence.parallelize import METHODS
from gemini.runtime.activation.block_groups import Names, flat_names
from gemini.system.config import format_bytes, parse_bytes
from gemini.system.durable import write_text
from gemini.system.files import KEY, Format, read_regular
from gemini.system.parsing import SyntaxProblem, parse_json_input

FORMAT = Format("gemini-plan", 1)
DTYPES = ("fp32", "bf16", "fp16")
_MAX_BYTES = 2**22
_MOST_RANKS = 2**20
_MOST = 2**63 - 1  # the largest whole number in a file
_MOST_SECONDS = 1e12
_AXES = ("dp", "pp", "sp", "tp")
_HASH_DIGITS = 16
_MOST_GROUPS = 64  # levels of nesting
_ADAPTED = "base_model.model."  # how PEFT's names of a model's parameters begin
# Counts that are at least one.
_FROM_ONE = frozenset(("stages_per_rank", "num_microbatches", "microbatch_size"))


class _Checked:
    """A dataclass that checks its fields against their declared types: whole numbers and seconds are not
    negative, and text can be written to a file. Lists become tuples; whole numbers in float fields become
    floats.
    """

    def __post_init__(self) -> None:
        own: Any = type(self)
        for name, kind in _hints(own).items():
            object.__setattr__(self, name, _read(kind, getattr(self, name), name))


@dataclass(frozen=True)
class PlanBudgets(_Checked):
    """The budgets of each rank in bytes; ``device_bytes`` None: the memory that is free at wrapping."""

    device_bytes: int | None
    host_bytes: int = 0
    disk_bytes: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in _hints(PlanBudgets):
            parse_bytes(getattr(self, name), name=name)  # raises if no machine has so many bytes

    @property
    def lower_bytes(self) -> int:
        """The bytes of the tiers below DEVICE."""
        return self.host_bytes + self.disk_bytes


@dataclass(frozen=True)
class RankPrediction(_Checked):
    """The most bytes that a rank along ``pp`` holds in each tier and of each kind. Ranks along ``dp``, ``sp``
    and ``tp`` hold the same.
    """

    device_bytes: int
    host_bytes: int
    disk_bytes: int
    parameter_bytes: int
    gradient_bytes: int
    state_bytes: int
    activation_bytes: int


@dataclass(frozen=True)
class Prediction(_Checked):
    """The prediction for a step: its seconds, in total and by resource (``compute``, ``Adam``, ``bubble``,
    axes and links); the bytes that each rank along ``pp`` holds; and the bytes that a rank sends along each
    axis.
    """

    step_seconds: float
    seconds: dict[str, float]
    ranks: tuple[RankPrediction, ...]
    sent_bytes: dict[str, int]

    def of_rank(self, rank: int) -> dict[str, float]:
        """Return the predictions that ``stats()`` shows beside its measurements, for a rank along ``pp``."""
        return {"step_seconds": self.step_seconds, "device_bytes": self.ranks[rank].device_bytes}


@dataclass(frozen=True)
class RunnerUp(_Checked):
    """Other possible settings: the predicted seconds of a step, why they were not chosen, and the measured
    seconds if some steps were run.
    """

    settings: str
    step_seconds: float
    why: str
    measured_seconds: float | None = None


@dataclass(frozen=True)
class LeftOut(_Checked):
    """Settings that are impossible or were not examined, and why."""

    settings: str
    why: str


def _own_version() -> str:
    return str(_C.build_info()["version"])


@dataclass(frozen=True)
class ParallelPlan(_Checked):
    """The settings for training a model, their predicted cost, and the alternatives.

    Attributes:
        layout: the number of ranks of each kind; tensors are cut in mode 1d.
        begins: the first block of each stage except the first stage, by name.
        microbatch_size: in samples.
        recompute: the names of the blocks that recompute their activations in backward.
        groups: blocks that are recomputed in groups, which keep only the input of their first block: lists of
            names and of nested groups.
        budgets: the budgets of each rank.
        stage_budgets: the budgets of each rank along ``pp``, used instead of ``budgets`` if they differ.
        activation_offload: ``"auto"`` if activations may also be below DEVICE, as far as necessary, on ranks
            with such tiers.
        dtype: ``fp32`` (parameters keep their type), ``bf16`` or ``fp16``.
        model: the :func:`fingerprint` of the model.
        machine: the machine with the speeds that the planner used.
        version: the version of gemini-runtime that planned.
        measured_seconds: the seconds of a step, if some were run before the plan was chosen.

    Raises:
        ConfigError: a field has an impossible value, or fields contradict each other.
    """

    layout: Layout
    sp_mode: str
    schedule: str
    stages_per_rank: int
    num_microbatches: int
    microbatch_size: int
    begins: tuple[str, ...]
    zero_stage: int
    budgets: PlanBudgets
    recompute: tuple[str, ...]
    dtype: str
    predicted: Prediction
    runners_up: tuple[RunnerUp, ...]
    left_out: tuple[LeftOut, ...]
    model: str
    machine: str
    version: str = field(default_factory=_own_version)
    measured_seconds: float | None = None
    groups: tuple[Any, ...] | None = None
    stage_budgets: tuple[PlanBudgets, ...] | None = None
    activation_offload: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        sizes = {name: getattr(self.layout, name) for name in _AXES}
        if self.layout.world_size > _MOST_RANKS:
            raise ConfigError(f"layout has more than {_MOST_RANKS} ranks")
        if self.layout != Layout(**sizes):
            raise ConfigError(
                f"layout cuts tensors in mode {self.layout.mode!r}; a plan supports mode 1d only"
            )
        for name, choices in (
            ("sp_mode", METHODS),
            ("dtype", DTYPES),
            ("zero_stage", (0, 1, 2, 3)),
            ("activation_offload", (None, "auto")),
        ):
            if getattr(self, name) not in choices:
                said = ", ".join(map(str, choices))
                raise ConfigError(f"{name} is {_repr(getattr(self, name))}; it must be one of {said}")
        self._check_stages()
        for name, names in (("begins", self.begins), ("recompute", flat_names(self.recomputed))):
            if len(set(names)) != len(names):
                raise ConfigError(f"{name} names a block twice")
        if self.stage_budgets is not None and len(self.stage_budgets) != self.layout.pp:
            raise ConfigError(
                f"stage_budgets has {len(self.stage_budgets)} entries, but layout.pp is {self.layout.pp}"
            )
        if len(self.predicted.ranks) != self.layout.pp:
            raise ConfigError(
                f"predicted.ranks has {len(self.predicted.ranks)} entries, but layout.pp is {self.layout.pp}"
            )

    def _check_stages(self) -> None:
        pp, each = self.layout.pp, self.stages_per_rank
        if pp == 1 and each != 1:
            raise ConfigError(f"stages_per_rank is {each}, but layout.pp is 1, which makes one stage")
        if pp * each > _MOST_RANKS:
            raise ConfigError(f"there are more than {_MOST_RANKS} stages")
        ranks_of_stages(self.schedule, pp, 2 if self.schedule in ("zbv", "dualpipev") and pp == 1 else each)
        if len(self.begins) != pp * each - 1:
            raise ConfigError(
                f"begins has {len(self.begins)} names, but {pp * each} stages need {pp * each - 1}: the "
                "first stage begins with the first block"
            )

    @property
    def world_size(self) -> int:
        """The number of ranks that the plan is for."""
        return self.layout.world_size

    @property
    def recomputed(self) -> tuple[Names, ...]:
        """The blocks, and groups of blocks, that recompute their activations."""
        return (*self.recompute, *(self.groups or ()))

    def budgets_of(self, rank: int) -> PlanBudgets:
        """Return the budgets of a rank along ``pp``."""
        return self.budgets if self.stage_budgets is None else self.stage_budgets[rank]

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the file that :meth:`load` reads. Raises IoError; ConfigError for a plan too large for it."""
        text = json.dumps({KEY: str(FORMAT), **self.to_json()}, indent=2) + "\n"
        if len(text) > _MAX_BYTES:
            raise ConfigError(
                f"the plan takes {len(text):,} bytes, but a plan file has at most {format_bytes(_MAX_BYTES)}"
            )
        write_text(Path(path), text, "write the plan")

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> ParallelPlan:
        """Return the plan in a file.

        Raises:
            ConfigError: the file cannot be read, has another format or a newer release's, or contains no
                plan.
        """
        where = printable(f"the plan {os.fspath(path)}")
        try:
            document = parse_json_input(read_regular(Path(path), _MAX_BYTES), keys_once=True)
        except SyntaxProblem as problem:
            raise ConfigError(problem.of(where, "JSON")) from problem
        except OSError as error:
            raise ConfigError(f"cannot read {where}: {error.strerror or error}") from error
        except ValueError as error:  # an invalid path
            raise ConfigError(f"cannot read {where}: {error}") from error
        if not FORMAT.is_read(document):
            raise ConfigError(FORMAT.refusal(document, where))
        del document[KEY]
        try:
            plan = cls.from_json(document)
        except ConfigError as error:
            raise ConfigError(f"{where}: {error}{_newer(document.get('version'))}") from error
        return plan

    def to_json(self) -> dict[str, Any]:
        """Return the plan as a JSON-compatible dict, without the format entry."""
        document = asdict(self)
        document["layout"] = {name: getattr(self.layout, name) for name in _AXES}
        # Releases before 0.2 read plans without these keys.
        for name in ("groups", "stage_budgets", "activation_offload"):
            if document[name] is None:
                del document[name]
        return document

    @classmethod
    def from_json(cls, document: object) -> ParallelPlan:
        """Return the plan that :meth:`to_json` describes. Raises ConfigError for any other value."""
        plan: ParallelPlan = _made(cls, document)
        return plan

    def explain(self) -> str:
        """Return text with the settings and their reasons, the memory of each rank, the time by resource, the
        runners-up, and what was left out.
        """
        return explanation(self.to_json())

    def diff(self, other: ParallelPlan) -> str:
        """Return a line for each field with another value in ``other``; "" for equal plans."""
        return differences(self.to_json(), other.to_json())

    def check(self, model: nn.Module, world_size: int) -> None:
        """Raise ConfigError if the plan is for another model or another number of ranks. The message names
        each difference.
        """
        wrong = []
        if world_size != self.world_size:
            sizes = " x ".join(f"{name} {getattr(self.layout, name)}" for name in _AXES)
            wrong.append(f"it is for {self.world_size} ranks ({sizes}), but there are {world_size}")
        known = {name for name, _ in model.named_modules()}
        for name, what in (
            (self.begins, "stages begin with"),
            (flat_names(self.recomputed), "it recomputes"),
        ):
            if missing := [each for each in name if each not in known]:
                more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
                wrong.append(f"{what} {_repr(missing[0])}{more}, and the model has no such module")
        if fingerprint(model) != self.model:
            wrong.append(self._difference(model))
        if wrong:
            raise ConfigError(
                f"the plan does not fit: {'; '.join(wrong)}{_newer(self.version)}. Make a new plan for this "
                "model and these ranks, or run the plan with the model and ranks that it was made for"
            )

    def _difference(self, model: nn.Module) -> str:
        """Return how ``model`` differs from the one that the plan was made for, as far as trying shows it."""
        facts = list(_facts(model))
        plain = [fact for fact in map(_without_adapter, facts) if fact is not None]
        types = (None, torch.float32, torch.bfloat16, torch.float16)
        for base, dtype, all_train in itertools.product((facts, plain), types, (False, True)):
            tried = [
                fact._replace(dtype=dtype or fact.dtype, trains=all_train or fact.trains) for fact in base
            ]
            if _hash(tried) == self.model:
                return f"it is of the same model {_in_words(base, dtype, has_adapters=base is not facts)}"
        return (
            f"it is of a model with the fingerprint {_repr(self.model)}, and this one's is {_hash(facts)!r} "
            "(of the names, shapes, types and requires_grad of its parameters; adapters change them, and so "
            "does another type)"
        )

    def plugin_options(self) -> dict[str, Any]:
        """Return the same settings as keywords of HybridParallelPlugin, which passes some of them to
        GeminiDDP. The size of ``dp`` is no keyword: it follows from the number of processes.
        """
        options: dict[str, Any] = {f"{name}_size": getattr(self.layout, name) for name in ("tp", "pp", "sp")}
        options |= {
            "sp_mode": self.sp_mode,
            "zero_stage": self.zero_stage,
            "pp_style": self.schedule,
            "num_model_chunks": self.stages_per_rank,
            "num_microbatches": self.num_microbatches,
            "microbatch_size": self.microbatch_size,
            "split": self.begins or "bytes",
            "costs": None,
            "recompute": self.recomputed,
            "mixed_precision": None if self.dtype == "fp32" else self.dtype,
        }
        return options | self.budget_options()

    def budget_options(self, rank: int | None = None) -> dict[str, Any]:
        """Return the budgets and ``activation_offload`` as keywords of GeminiDDP. ``rank``: along ``pp``;
        None takes the common budgets. Empty below ZeRO 3, which has no chunks to place.
        """
        if self.zero_stage < 3:
            return {}
        own = self.budgets if rank is None else self.budgets_of(rank)
        options: dict[str, Any] = {name: nbytes for name, nbytes in asdict(own).items() if nbytes is not None}
        if self.activation_offload is not None:
            options["activation_offload"] = self.activation_offload if own.lower_bytes else False
        return options

    def managed_options(self, called: str) -> dict[str, Any]:
        """Return the same settings as keywords of :func:`gemini.manage`, which divides only the data. On one
        rank every ZeRO stage is the same, as nothing is divided.

        Args:
            called: the name of the caller's function, for the message.

        Raises:
            ConfigError: the plan needs more than ``called`` supports.
        """
        cut = [f"{name} {size}" for name in ("tp", "pp", "sp") if (size := getattr(self.layout, name)) > 1]
        cut += [f"ZeRO {self.zero_stage}"] if self.zero_stage < 3 and self.layout.dp > 1 else []
        if cut:
            raise ConfigError(
                f"{called} keeps whole models in chunks (ZeRO 3), but the plan says {', '.join(cut)}; run it "
                "with HybridParallelPlugin(plan=...)"
            )
        options = replace(self, zero_stage=3).budget_options()
        return {**options, "mixed_precision": None if self.dtype == "fp32" else self.dtype}

    def joined(self, options: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
        """Return the plan's ``options`` together with those ``given`` by the user.

        Raises:
            ConfigError: some given options contradict the plan; the message names each.
        """
        wrong = [
            f"{name}={_repr(given[name])} (the plan says {_repr(said)})"
            for name, said in options.items()
            if name in given and _plain(name, given[name]) != _plain(name, said)
        ]
        if wrong:
            raise ConfigError(
                f"{', '.join(wrong)}: a plan already sets these; leave them out, or leave out plan= and "
                "choose them yourself"
            )
        return {**options, **given}


def fingerprint(module: nn.Module) -> str:
    """Return a hash of the names, shapes, types and ``requires_grad`` of all parameters and of their ties. It
    is the same on every device, ``meta`` included, and does not depend on values.
    """
    return _hash(_facts(module))


class _Fact(NamedTuple):
    """What a fingerprint has of a parameter; ``first`` is the first name of a tied one."""

    name: str
    first: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    trains: bool


def _facts(module: nn.Module) -> Iterator[_Fact]:
    first: dict[int, str] = {}
    for name, param in module.named_parameters(remove_duplicate=False):
        known = first.setdefault(id(param), name)
        yield _Fact(name, known, tuple(param.shape), param.dtype, param.requires_grad)


def _hash(facts: Iterable[_Fact]) -> str:
    lines = (" ".join(map(str, fact)) for fact in facts)
    return hashlib.sha256("\n".join(lines).encode(errors="backslashreplace")).hexdigest()[:_HASH_DIGITS]


def _in_words(base: Sequence[_Fact], dtype: torch.dtype | None, *, has_adapters: bool) -> str:
    """Return how a model differs from one that was planned: its parameters without adapters are ``base``, and
    were in ``dtype`` (None: in the same types)."""
    said = []
    if has_adapters:
        said.append("without adapters, and this one has some (--lora)")
    if dtype is not None:
        here = sorted({str(fact.dtype).removeprefix("torch.") for fact in base})
        there = str(dtype).removeprefix("torch.")
        said.append(f"in {there}, and this one is in {', '.join(here)} (--dtype of gemini plan)")
    if not said:
        trained = sum(fact.trains for fact in base)
        said.append(f"with all parameters trained, and of this one {trained} of {len(base)} train")
    return "; and ".join(said)


def _without_adapter(fact: _Fact) -> _Fact | None:
    """Return what a parameter was before PEFT has put adapters on the model; None: one of those."""
    if ".lora_" in fact.name:
        return None
    if not fact.name.startswith(_ADAPTED):
        return fact
    name, first = (
        each.removeprefix(_ADAPTED).replace(".base_layer.", ".") for each in (fact.name, fact.first)
    )
    return fact._replace(name=name, first=first, trains=True)


def _plain(name: str, value: Any) -> Any:
    """Normalize the value of a keyword for comparison."""
    if name.endswith("_bytes"):
        return parse_bytes(value, name=name)
    if name == "mixed_precision":
        return {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: None, "fp32": None}.get(
            value, value
        )
    return tuple(value) if isinstance(value, (list, tuple)) else value


def _newer(version: object) -> str:
    """Return text to append to an error if ``version`` is newer than this release, else ""."""
    own = _own_version()
    if not isinstance(version, str) or _order(version) <= _order(own):
        return ""
    return f" (gemini-runtime {printable(version[:40])} wrote it, and this is {own})"


def _order(version: str) -> tuple[int, ...]:
    """Return the leading numbers of a version, as a sort key."""
    numbers = version.split("+")[0].split(".")[:4]
    return tuple(int(each[:9]) for each in numbers if each.isascii() and each.isdigit())


@cache
def _hints(kind: Any) -> dict[str, Any]:
    """Return the types of the fields of a dataclass."""
    hints = get_type_hints(kind)
    return {each.name: hints[each.name] for each in fields(kind)}


def _read(kind: Any, value: Any, where: str) -> Any:
    """Convert ``value`` to the type ``kind`` of the field ``where``. Raises ConfigError if it is invalid."""
    if is_dataclass(kind) and isinstance(kind, type):
        return value if isinstance(value, kind) else _inner(kind, value, where)
    if kind == tuple[Any, ...] | None:
        if isinstance(value, (list, tuple)):
            return tuple(_group(each, f"{where}[{index}]", 1) for index, each in enumerate(value))
        return None if value is None else _refuse(where, value, "a list")
    if kind == tuple[PlanBudgets, ...] | None:
        return None if value is None else _read(tuple[PlanBudgets, ...], value, where)
    if get_origin(kind) is tuple:
        if not isinstance(value, (list, tuple)):
            _refuse(where, value, "a list")
        inner = get_args(kind)[0]
        return tuple(_read(inner, each, f"{where}[{index}]") for index, each in enumerate(value))
    if get_origin(kind) is dict:
        if not isinstance(value, dict):
            _refuse(where, value, "an object")
        inner = get_args(kind)[1]
        return {_text(key, where): _read(inner, each, f"{where}.{key:.80}") for key, each in value.items()}
    if kind is str or (kind == str | None and value is not None):
        return _text(value, where)
    if kind is float or (kind == float | None and value is not None):
        if type(value) not in (int, float) or not 0 <= value <= _MOST_SECONDS:
            _refuse(where, value, f"a number from 0 to {_MOST_SECONDS:g}")
        return float(value)
    if value is None and kind is not int:
        return None
    least = int(where in _FROM_ONE)
    if type(value) is not int or not least <= value <= _MOST:
        _refuse(where, value, f"a whole number from {least} to 2**63 - 1")
    return value


def _group(value: object, where: str, depth: int) -> tuple[Names, ...]:
    """Return a group as nested tuples of names."""
    if not isinstance(value, (list, tuple)) or not value or depth > _MOST_GROUPS:
        _refuse(where, value, f"a list of names and of such lists, {_MOST_GROUPS} deep at most")
    return tuple(
        _text(each, f"{where}[{index}]")
        if not isinstance(each, (list, tuple))
        else _group(each, f"{where}[{index}]", depth + 1)
        for index, each in enumerate(value)
    )


def _inner(kind: Any, value: object, where: str) -> Any:
    try:
        return _made(kind, value)
    except ConfigError as error:
        said = str(error)
        raise ConfigError(f"{where}{': ' if said.startswith('it ') else '.'}{said}") from None


def _made(kind: Any, value: object) -> Any:
    """Return the dataclass that a JSON object describes. The object must have all fields, except those with
    the default None, and no other keys.
    """
    names = _AXES if kind is Layout else tuple(_hints(kind))
    if not isinstance(value, dict):
        raise ConfigError(f"it is {_repr(value)}, but must be an object with {', '.join(names)}")
    if unknown := [name for name in value if name not in names]:
        raise ConfigError(f"it has the unknown field {_repr(unknown[0])}; its fields are {', '.join(names)}")
    optional = [each.name for each in fields(kind) if each.default is None]
    if missing := [name for name in names if name not in value and name not in optional]:
        raise ConfigError(f"{missing[0]} is missing")
    if kind is Layout:
        for name in names:
            if type(value[name]) is not int or not 1 <= value[name] <= _MOST_RANKS:
                _refuse(name, value[name], f"a whole number from 1 to {_MOST_RANKS}")
    return kind(**value)


def _text(value: object, where: str) -> str:
    if not isinstance(value, str):
        _refuse(where, value, "text")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise ConfigError(f"{where} holds half of a surrogate pair, which is no character") from None
    return value


def _refuse(where: str, value: object, wanted: str) -> NoReturn:
    raise ConfigError(f"{printable(where)} is {_repr(value)}; it must be {wanted}")


def _repr(value: object) -> str:
    if type(value) is int and value.bit_length() > 128:
        return f"a number of {value.bit_length()} bits"
    return reprlib.repr(value)
