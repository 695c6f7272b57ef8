"""Reads, checks and writes Galvatron's plan files, and converts them to and from plans of this project."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from gemini.errors import ConfigError, printable
from gemini.planner.spaces.layerwise import LayerwisePlan, Strategy
from gemini.system.durable import write_text
from gemini.system.files import read_regular
from gemini.system.parsing import SyntaxProblem, parse_json_input

_MAX_BYTES = 2**20
_MOST, _MOST_LAYERS = 2**31 - 1, 2**14
_LISTS = ("tp_sizes_enc", "tp_consecutive_flags", "dp_types_enc", "use_sp", "checkpoint", "cp_sizes_enc")
_FLAGS = ("tp_consecutive_flags", "dp_types_enc", "use_sp", "checkpoint", "vsp", "embed_sdp")  # 0 or 1
_SCHEDULES = {"gpipe": "gpipe", "pipedream_flush": "1f1b"}
_DP_TYPES = {"ddp": 0, "zero2": 2, "zero3": 3}  # as a ZeRO stage


@dataclass(frozen=True)
class GalvatronFile:
    """A plan in Galvatron's format, with its field names. Lists have an entry for each layer; None: the file
    does not have the field.

    ``dp_types_enc``: 1 is ZeRO 3, 0 is ``default_dp_type``. ``use_sp``: 1 cuts sequences (Ulysses), 0 cuts
    layers, both by ``tp_sizes_enc``. ``vtp``, ``vsp`` and ``embed_sdp`` are the same for embedding and head.

    Raises:
        ConfigError: a value is invalid, or lists differ in length.
    """

    pp_deg: int
    tp_sizes_enc: tuple[int, ...]
    tp_consecutive_flags: tuple[int, ...]
    dp_types_enc: tuple[int, ...]
    global_bsz: int
    chunks: int
    pipeline_type: str
    default_dp_type: str
    pp_division: tuple[int, ...] | None = None
    use_sp: tuple[int, ...] | None = None
    checkpoint: tuple[int, ...] | None = None
    cp_sizes_enc: tuple[int, ...] | None = None
    vtp: int | None = None
    vsp: int | None = None
    vcp: int | None = None
    embed_sdp: int | None = None

    def __post_init__(self) -> None:
        for each in fields(self):
            value = getattr(self, each.name)
            if value is None and each.default is None:
                continue
            _check(each.name, value)
        count = len(self.tp_sizes_enc)
        for name in _LISTS:
            own = getattr(self, name)
            if own is not None and len(own) != count:
                raise ConfigError(
                    f"{name} has {len(own)} entries, and tp_sizes_enc has {len(self.tp_sizes_enc)}"
                )
        division = self.pp_division
        if division is not None and (len(division) != self.pp_deg or sum(division) != len(self.tp_sizes_enc)):
            raise ConfigError(
                f"pp_division has {len(division)} stages with {sum(division)} layers, and there are "
                f"{self.pp_deg} (pp_deg) with {len(self.tp_sizes_enc)}"
            )
        if self.pp_deg > len(self.tp_sizes_enc):
            raise ConfigError(f"pp_deg is {self.pp_deg}, and there are {len(self.tp_sizes_enc)} layers")

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> GalvatronFile:
        """Return the plan in a file. Raises ConfigError if the file cannot be read or is not a plan."""
        where = printable(f"Galvatron's plan {os.fspath(path)}")
        try:
            document = parse_json_input(read_regular(Path(path), _MAX_BYTES), keys_once=True)
            return cls.from_json(document)
        except SyntaxProblem as problem:
            raise ConfigError(problem.of(where, "JSON")) from problem
        except ConfigError as error:
            raise ConfigError(f"{where}: {error}") from error
        except OSError as error:
            raise ConfigError(f"cannot read {where}: {error.strerror or error}") from error
        except ValueError as error:  # an invalid path, e.g. with a null byte
            raise ConfigError(f"cannot read {where}: {error}") from error

    @classmethod
    def from_json(cls, document: object) -> GalvatronFile:
        """Return the plan in Galvatron's JSON. Raises ConfigError if the document is not a valid plan."""
        if not isinstance(document, dict):
            raise ConfigError(f"it is {type(document).__name__} and no object with pp_deg, tp_sizes_enc, ...")
        names = {each.name: each for each in fields(cls)}
        if unknown := [name for name in document if name not in names]:
            raise ConfigError(f"it has the unknown field {printable(repr(unknown[0])[:60])}")
        if missing := [
            name for name, each in names.items() if name not in document and each.default is not None
        ]:
            raise ConfigError(f"{missing[0]} is missing")
        values: dict[str, Any] = {name: _read(name, value) for name, value in document.items()}
        return cls(**values)

    def to_json(self) -> dict[str, Any]:
        """Return the document that :meth:`from_json` reads: lists as text, without fields that are None."""
        values = ((each.name, getattr(self, each.name)) for each in fields(self))
        return {
            name: ",".join(map(str, value)) if isinstance(value, tuple) else value
            for name, value in values
            if value is not None
        }

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the file that :meth:`load` and Galvatron read. Raises IoError."""
        write_text(Path(path), json.dumps(self.to_json(), indent=4) + "\n", "write Galvatron's plan")

    def layerwise(self, ranks: int) -> LayerwisePlan:
        """Return the plan for a number of ranks, which the file does not contain.

        Raises:
            ConfigError: the ranks do not divide as the plan says, or the plan uses context parallelism.
        """
        if ranks < 1 or ranks % self.pp_deg:
            raise ConfigError(f"pp_deg {self.pp_deg} does not divide {ranks} ranks")
        if set(self.cp_sizes_enc or (1,)) | {self.vcp or 1} != {1}:
            raise ConfigError(
                "the plan has context parallelism (cp_sizes_enc, vcp), which there is none of here"
            )
        group, count = ranks // self.pp_deg, len(self.tp_sizes_enc)
        again, cut = self.checkpoint or (0,) * count, self.use_sp or (0,) * count
        layers = tuple(
            self._strategy(group, size, sp, sharded, bool(each))
            for size, sp, sharded, each in zip(self.tp_sizes_enc, cut, self.dp_types_enc, again, strict=True)
        )
        # Files without vtp come from older versions: embedding and head are whole, or cut like the layers.
        size = self.vtp or (self.tp_sizes_enc[0] if len(set(self.tp_sizes_enc)) == 1 else 1)
        sharded = self.embed_sdp if self.embed_sdp is not None else min(self.dp_types_enc)
        outside = self._strategy(
            group, size, self.vsp or (min(cut) if self.vsp is None else 0), sharded, False
        )
        schedule, both = _SCHEDULES[self.pipeline_type], (outside, outside)
        return LayerwisePlan(self.global_bsz, self.chunks, layers, both, self._division(), schedule)

    def _division(self) -> tuple[int, ...]:
        if self.pp_division is not None:
            return self.pp_division
        each = len(self.tp_sizes_enc) // self.pp_deg
        return (*[each] * (self.pp_deg - 1), len(self.tp_sizes_enc) - each * (self.pp_deg - 1))

    def _strategy(self, group: int, size: int, sp: int, sharded: int, recompute: bool) -> Strategy:
        if group % size:
            raise ConfigError(f"tp {size} does not divide the {group} ranks of a stage")
        zero = 3 if sharded else _DP_TYPES[self.default_dp_type]
        cut = (1, size) if sp else (size, 1)
        return Strategy(*cut, group // size, zero if group // size * cut[1] > 1 else 0, recompute)

    def not_runnable(self, ranks: int) -> tuple[str, ...]:
        """Return the changes that the plan needs to run here; empty if it runs. Raises the errors of
        :meth:`layerwise`."""
        reasons = self.layerwise(ranks).not_uniform()
        sizes = zip(self.tp_sizes_enc, self.tp_consecutive_flags, strict=True)
        if any(size > 1 and not flag for size, flag in sizes):
            reasons += ("tp must be over neighbours (tp_consecutive_flags 1)",)
        return reasons


def exported(plan: LayerwisePlan) -> GalvatronFile:
    """Return a plan in Galvatron's format.

    Raises:
        ConfigError: the plan has ZeRO 1, two kinds of data parallelism besides ZeRO 3, tp with sp, or stages
            with different numbers of ranks.
    """
    every, outside = (*plan.strategies, *plan.outside), plan.outside[0]
    if plan.outside[1] != outside:
        raise ConfigError("Galvatron has one strategy for embedding and head, and the plan has two")
    plain = {each.zero for each in every if each.zero != 3 and each.copies > 1}
    if 1 in plain or len(plain) > 1:
        raise ConfigError(
            f"Galvatron has one kind of data parallelism beside ZeRO 3, ZeRO 0 or 2, and the plan has "
            f"{', '.join(f'ZeRO {each}' for each in sorted(plain))}"
        )
    if any(each.tp > 1 and each.sp > 1 for each in every):
        raise ConfigError("Galvatron cuts either a layer or its sequences, and the plan has tp with sp")
    if len({each.ranks for each in every}) > 1:
        raise ConfigError("Galvatron has stages of equal numbers of ranks, and the plan has others")
    default = {0: "ddp", 2: "zero2"}[plain.pop()] if plain else "zero2"
    names = {own: name for name, own in _SCHEDULES.items()}
    return GalvatronFile(
        plan.pp,
        tuple(each.tp * each.sp for each in plan.strategies),
        (1,) * len(plan.strategies),
        tuple(int(each.zero == 3) for each in plan.strategies),
        plan.batch,
        plan.chunks,
        names[plan.schedule],
        default,
        plan.division,
        tuple(int(each.sp > 1) for each in plan.strategies),
        tuple(int(each.recompute) for each in plan.strategies),
        vtp=outside.tp * outside.sp,
        vsp=int(outside.sp > 1),
        embed_sdp=int(outside.zero == 3),
    )


def _read(name: str, value: object) -> object:
    """Convert a JSON value to the type of its field."""
    if name not in (*_LISTS, "pp_division"):
        return value
    if not isinstance(value, str):
        raise ConfigError(f"{name} is {type(value).__name__}; it must be text such as '1,1,2'")
    parts = value.split(",", _MOST_LAYERS)
    if len(parts) > _MOST_LAYERS:
        raise ConfigError(f"{name} has more than {_MOST_LAYERS} entries")
    for each in parts:
        if not each.isascii() or not each.isdecimal() or len(each) > 10 or str(int(each)) != each:
            raise ConfigError(
                f"{name} has {printable(repr(each[:20]))} between its commas; give whole numbers"
            )
    return tuple(int(each) for each in parts)


_CHOICES: Mapping[str, tuple[str, ...]] = {
    "pipeline_type": tuple(_SCHEDULES),
    "default_dp_type": tuple(_DP_TYPES),
}


def _check(name: str, value: object) -> None:
    """Raise ConfigError if a field cannot have this value."""
    if name in _CHOICES:
        if not isinstance(value, str) or value not in _CHOICES[name]:
            said = printable(repr(value)[:40])
            raise ConfigError(f"{name} is {said}; it must be one of {', '.join(_CHOICES[name])}")
        return
    is_list = name in (*_LISTS, "pp_division")
    if is_list and (not isinstance(value, tuple) or not value or len(value) > _MOST_LAYERS):
        raise ConfigError(f"{name} must have an entry for each of 1 to {_MOST_LAYERS} layers")
    least, most = (0, 1) if name in _FLAGS else (1, _MOST)
    for each in value if isinstance(value, tuple) else (value,):
        if type(each) is not int or not least <= each <= most:
            said = printable(repr(each)[:40])
            raise ConfigError(f"{name} has {said}; it must be a whole number from {least} to {most}")
