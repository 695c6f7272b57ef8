"""The result of converting another library's configuration: our options, and a verdict on each of its
keys."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from gemini.errors import ConfigError
from gemini.system.config import did_you_mean

TAKEN = "taken"
NOT_NEEDED = "not needed"
NOT_SUPPORTED = "not supported"

AUTO = "auto"  # placeholder that transformers' Trainer or Accelerate fills in
_NOTHING = object()
Path = tuple[str, ...]
_ALIKE = 0.85  # similarity from which an unknown key counts as a mistyped one


class Target(Enum):
    """The program that a configuration belongs to."""

    LOOP = "loop"
    TRAINER = "trainer"
    ACCELERATE = "accelerate"


# ------------------------------------------------------------------------------- tables of keys
@dataclass(frozen=True)
class Kind:
    """The permitted values of a key: their types, their range, and how to write one in a program."""

    types: tuple[type, ...]
    least: float = -math.inf
    most: float = math.inf
    text: Callable[[Any], str] = repr


NUMBER = Kind((float,), least=0)
WHOLE = Kind((int,), least=1)
FLAG = Kind((bool,))
ROUNDED = Kind((float,), least=0, text=lambda value: f"{int(value)}")

Sentence = str | Mapping[Target, str]


@dataclass(frozen=True)
class Key:
    """One key of a configuration, or a section with everything below it.

    Attributes:
        options: our option for the value, as ``GROUP.NAME``, one for each target or one for all. Without an
            option for the target, the key is not taken.
        off: values that have no effect.
        filled: the option of TrainingArguments that the Trainer fills in for "auto".
    """

    path: str
    says: Sentence = ""
    verdict: str = NOT_SUPPORTED
    kind: Kind | None = None
    options: str | Mapping[Target, str] = ""
    off: tuple[Any, ...] = ()
    filled: str = ""

    def option(self, target: Target) -> str:
        """Return ``GROUP.NAME`` of the option that takes the value, or ""."""
        return self.options if isinstance(self.options, str) else self.options.get(target, "")

    def sentence(self, target: Target) -> str:
        """Return the explanation for the user. ``{GROUP}`` is replaced by the call that has these options."""
        text = self.says if isinstance(self.says, str) else self.says.get(target, "")
        for group, names in _GROUPS.items():
            text = text.replace(f"{{{group}}}", names[target])
        return text


def each(loop: str = "", trainer: str = "", accelerate: str = "") -> dict[Target, str]:
    """Return a text for each target."""
    return {Target.LOOP: loop, Target.TRAINER: trainer, Target.ACCELERATE: accelerate}


_GROUPS: dict[str, dict[Target, str]] = {
    "model": each("GeminiDDP", "gemini={...}", "gemini={...}"),
    "managed": each("GeminiOptimizer", "gemini_optimizer={...}", "gemini_optimizer={...}"),
    "arguments": each(trainer="TrainingArguments"),
    "accelerator": each(accelerate="GeminiAccelerator"),
    "handle": each("model", "trainer.handle", "gemini.handle_of(model)"),
}
_LOOP = {
    "accumulation": "the loop makes one update for {text} batches",
    "max_norm": "the loop calls accelerator.clip_grad_norm_() with {text}",
    "batch": "your script makes the loader: give it batches of {text}",
    "checkpointing": "model.gradient_checkpointing_enable()",
}


def quoted(text: str) -> str:
    """Return a text of the file as a Python literal."""
    return f'"{text}"' if re.fullmatch(r"[\w/. -]*", text, re.ASCII) else repr(text)


# --------------------------------------------------------------------------------- the document
class Document:
    """The values of a configuration by path, such as ``"zero_optimization.stage"``.

    ``names`` maps the path of a key to its path in the user's file, if they differ. Errors and reports use
    the latter.
    """

    def __init__(self, values: Any, source: str, names: Mapping[Path, Path] | None = None) -> None:
        if not isinstance(values, dict):
            raise ConfigError(f"{source} holds a {type(values).__name__}, not an object with keys")
        self.source = source
        self._values = values
        self._names = dict(names or {})
        self.asked: set[Path] = set()  # the paths of all keys that were looked up

    def name(self, path: str | Path) -> str:
        """Return the path of a key in the user's file."""
        parts = _parts(path)
        for count in range(len(parts), 0, -1):
            if parts[:count] in self._names:
                return ".".join((*self._names[parts[:count]], *parts[count:]))
        return ".".join(parts)

    def has(self, path: str) -> bool:
        """Return whether the file has the key, with any value."""
        return self._find(path) is not _NOTHING

    def section(self, path: str) -> dict[str, Any]:
        """Return the keys of a section; empty if the file does not have it. Raises ConfigError if the value
        is not a section."""
        found = self._find(path)
        if found is _NOTHING or found is None:
            return {}
        if not isinstance(found, dict):
            raise ConfigError(
                f"{self.source}: {self.name(path)} is a {type(found).__name__}, not an object with keys"
            )
        return found

    def take(self, path: str, types: tuple[type, ...], default: Any = None) -> Any:
        """Return the value of a key; ``"auto"`` is returned unchanged. Raises ConfigError if it has another
        type."""
        self.asked.add(_parts(path))
        section, _, key = path.rpartition(".")
        value = (self.section(section) if section else self._values).get(key)
        if value is None:
            return default
        if value == AUTO and isinstance(value, str):
            return AUTO
        if float in types and type(value) in (int, float, str):  # "1e-5" is a text in YAML
            value = self._number(path, value)
        if (isinstance(value, bool) and bool not in types) or not isinstance(value, types):
            names = " or ".join(sorted({each.__name__ for each in types}))
            raise ConfigError(f"{self.source}: {self.name(path)} is {value!r:.100}; it needs type {names}")
        return value

    def take_as(self, path: str, kind: Kind, default: Any = None) -> Any:
        """Return the value of a key as :meth:`take` does. Raises ConfigError also if it is out of range."""
        value = self.take(path, kind.types, default)
        if type(value) in (int, float) and not kind.least <= value <= kind.most:
            wanted = (
                f"{kind.least:g} or more" if kind.most == math.inf else f"{kind.least:g} to {kind.most:g}"
            )
            raise ConfigError(f"{self.source}: {self.name(path)} is {value!r}; it must be {wanted}")
        return value

    def is_on(self, path: str) -> bool:
        """Return whether a section has ``"enabled": true``, or ``"auto"``, which may become true."""
        return self.take(f"{path}.enabled", (bool,), False) in (True, AUTO)

    def leaves(self) -> Iterator[tuple[Path, Any]]:
        """Return each key without keys below it, with its value, in the order of the file."""
        return _leaves(self._values, ())

    def _find(self, path: str) -> Any:
        found: Any = self._values
        for part in _parts(path):
            if not isinstance(found, dict) or part not in found:
                return _NOTHING
            found = found[part]
        return found

    def _number(self, path: str, value: Any) -> float:
        try:
            number = float(value)
        except (ValueError, OverflowError):
            number = math.nan
        if not math.isfinite(number):
            raise ConfigError(f"{self.source}: {self.name(path)} is {value!r:.100}; it must be a number")
        return number


def _parts(path: str | Path) -> Path:
    return tuple(path.split(".")) if isinstance(path, str) else path


def _leaves(values: Any, above: Path) -> Iterator[tuple[Path, Any]]:
    if isinstance(values, dict) and values:
        for key, value in values.items():
            yield from _leaves(value, (*above, str(key)))
    elif isinstance(values, list) and any(isinstance(value, dict) for value in values):
        for number, value in enumerate(values):
            yield from _leaves(value, (*above, f"{number}"))
    elif above:
        yield above, values


# ------------------------------------------------------------------------------------ the result
@dataclass(frozen=True)
class Schedule:
    """The learning rate of each update, as a factor of the optimizer's rate, as Python source lines.

    ``settings`` are names with their values. ``share`` and ``momentum`` are bodies of functions that use
    them; their argument ``update`` is the number of updates before.
    """

    settings: tuple[tuple[str, str], ...]
    share: tuple[str, ...]
    height: tuple[str, ...] = ()  # body of the cycle function that the other two call
    momentum: tuple[str, ...] = ()


@dataclass
class Conversion:
    """Our options by group, each as the text of its value, and the verdict on each key.

    Groups: ``model`` (of manage()), ``managed`` (of GeminiOptimizer), ``optimizer``, ``arguments`` (of
    TrainingArguments), ``accelerator`` and ``loop`` (``accumulation``, ``max_norm``, ``batch``).
    """

    source: str
    target: Target
    groups: dict[str, dict[str, str]] = field(default_factory=dict)
    optimizer_class: str = "gemini.HybridAdam"
    schedule: Schedule | None = None
    notes: list[str] = field(default_factory=list)  # comments above the program
    keys: list[tuple[str, str, str]] = field(default_factory=list)  # key, verdict, sentence
    said: dict[Path, tuple[str, str]] = field(default_factory=dict)

    def of(self, group: str) -> dict[str, str]:
        """Return the options of a group."""
        return self.groups.setdefault(group, {})

    def drive(self, optimizer_class: str) -> None:
        """Set the class of the optimizer."""
        self.optimizer_class = optimizer_class

    def follow(self, schedule: Schedule) -> None:
        """Set the learning rate schedule."""
        self.schedule = schedule

    def say(self, path: str, verdict: str, text: str) -> None:
        """Set the verdict on a key, or on all keys of a section."""
        self.said[_parts(path)] = (verdict, text)

    def put(self, option: str, text: str) -> str:
        """Set an option, ``GROUP.NAME``, and return its description for the user."""
        group, _, name = option.partition(".")
        self.of(group)[name] = text
        if group == "loop":
            return _LOOP[name].replace("{text}", text)
        call = self.optimizer_class if group == "optimizer" else _GROUPS[group][self.target]
        return f"{name}={text} of {call}"

    def take(self, document: Document, key: Key) -> None:
        """Convert a key of a table, if the file has it and it has no verdict yet."""
        if key.kind is None or _parts(key.path) in self.said:
            return
        value = document.take_as(key.path, key.kind)
        if value is None:
            return
        option, sentence = key.option(self.target), key.sentence(self.target)
        if value == AUTO and isinstance(value, str):
            self.say(key.path, *auto(self.target, key.filled))
        elif option and value not in key.off:
            words = self.put(option, key.kind.text(value))
            self.say(key.path, TAKEN, f"{words}; {sentence}" if sentence else words)


_AUTO_HERE = each(
    loop='only a Trainer fills in "auto"; write the number, or convert with --for trainer',
    accelerate='only DeepSpeed\'s plugin fills in "auto"; write the number',
)


def auto(target: Target, filled: str) -> tuple[str, str]:
    """Return the verdict on a key with ``"auto"``. ``filled`` names the options of TrainingArguments that
    replace it."""
    if target is not Target.TRAINER:
        return NOT_SUPPORTED, _AUTO_HERE[target]
    if not filled:
        return NOT_SUPPORTED, 'the Trainer does not fill in this "auto"; write the number'
    return TAKEN, f"{filled} of TrainingArguments, as for DeepSpeed"


def refuse_unknown(document: Document, path: str, kind: str, deepspeeds: Iterable[str], module: Any) -> None:
    """Raise ConfigError if ``kind``, the value at ``path``, is neither in ``deepspeeds`` nor a class of
    torch's ``module``."""
    known = [*deepspeeds, *(name for name, each in vars(module).items() if isinstance(each, type))]
    if kind not in known:
        raise ConfigError(
            f"{document.source}: {document.name(path)} is {kind!r:.100}, which is in neither "
            f"DeepSpeed nor {module.__name__}{did_you_mean(kind, known)}; correct the name"
        )


def report(found: Conversion, document: Document, table: Mapping[str, Key], switched: frozenset[str]) -> None:
    """Give each key of the file its verdict: an earlier one, or that of its row, or of the nearest section
    above it. ``switched``: sections that have no effect without ``"enabled": true``."""
    rows = {_parts(path): row for path, row in table.items()}
    for path, value in document.leaves():
        found.keys.append((document.name(path), *_verdict(found, document, path, value, (rows, switched))))


def _verdict(
    found: Conversion,
    document: Document,
    path: Path,
    value: Any,
    tables: tuple[dict[Path, Key], frozenset[str]],
) -> tuple[str, str]:
    rows, switched = tables
    if path in found.said:
        return found.said[path]
    if path[0] in switched and not document.is_on(path[0]):
        return NOT_NEEDED, f'{path[0]} is disabled: it has no "enabled": true'
    for count in range(len(path), 0, -1):
        above = path[:count]
        if above in found.said:
            return found.said[above]
        if above in rows:
            return _of_row(rows[above], found.target, value, is_itself=count == len(path))
    known = {".".join(each) for each in (*rows, *document.asked)}
    guess = did_you_mean(".".join(path), known, cutoff=_ALIKE)
    if guess:
        return NOT_SUPPORTED, f"unknown key{guess}; if so, correct it and convert again"
    return NOT_SUPPORTED, "unknown key; look for an option of GeminiDDP or GeminiOptimizer"


def _of_row(row: Key, target: Target, value: Any, *, is_itself: bool) -> tuple[str, str]:
    if is_itself and (value in (None, False, {}, []) or value in row.off) and row.verdict == NOT_SUPPORTED:
        return NOT_NEEDED, "this value changes nothing"
    return row.verdict, row.sentence(target)
