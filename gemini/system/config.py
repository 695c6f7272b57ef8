"""Parses user input: byte sizes (``512MiB``, ``1.5GB``, ``4096``) and keyword arguments."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable, Mapping
from decimal import Decimal
from difflib import get_close_matches
from typing import Any

from gemini.errors import ConfigError

MOST_BYTES = 2**62 - 1  # the largest accepted size
_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
_FACTORS = {unit.lower(): 1024**power for power, unit in enumerate(_UNITS)} | {
    unit.lower(): 1000**power for power, unit in enumerate(("B", "KB", "MB", "GB", "TB", "PB"))
}
_SIZE = re.compile(r"(?P<number>[0-9]+(?:\.[0-9]+)?)\s*(?P<unit>[a-z]*)", re.ASCII)


def parse_bytes(value: int | str | None, *, name: str = "size") -> int | None:
    """Return a number of bytes from an int or a string such as ``"64 KiB"``; None for None.

    Units are KiB, MiB, GiB, TiB, PiB (powers of 1024) and KB, MB, GB, TB, PB (powers of 1000), in any case;
    without a unit the number is bytes. Fractions of a byte are cut off, so that a budget never grows.
    ``name``: the argument's name for messages. Raises ConfigError for everything else.
    """
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, (int, str)):
        raise ConfigError(f"{name} is {value!r}; give a number of bytes or a string such as '512MiB'")
    if isinstance(value, int):
        if value < 0:
            raise ConfigError(f"{name} is {value}; a number of bytes cannot be negative")
        return _checked(value, name)
    match = _SIZE.fullmatch(value.strip().lower())
    factor = _FACTORS.get(match["unit"] or "b") if match else None
    if match is None or factor is None:
        raise ConfigError(
            f"{name} is {value!r:.200}; write it as '512MiB', '4GiB', '1.5GB' or plain bytes, not negative"
        )
    return _checked(int(Decimal(match["number"]) * factor), name)


def _checked(nbytes: int, name: str) -> int:
    if nbytes > MOST_BYTES:
        raise ConfigError(f"{name} is {min(nbytes, 10**99)} bytes; no machine has that much")
    return nbytes


def format_bytes(nbytes: int) -> str:
    """Return ``nbytes`` as text in powers of 1024: ``24.0 MiB``, ``512 B``."""
    if abs(nbytes) < 1024:
        return f"{nbytes} B"
    scaled = float(nbytes)
    for unit in _UNITS[1:]:
        scaled /= 1024
        if abs(round(scaled, 1)) < 1024:
            return f"{scaled:.1f} {unit}"
    return f"{scaled:.1f} {_UNITS[-1]}"


def format_enough(nbytes: int) -> str:
    """Return a size of at least ``nbytes`` for people to give as an option: rounded up by 1 % at most, as
    ``24.03MiB``, which :func:`parse_bytes` reads."""
    unit = max(0, min((max(nbytes, 1).bit_length() - 1) // 10, len(_UNITS) - 1))
    if unit == 0:
        return f"{nbytes}B"
    hundredths = -(-nbytes * 100 // 1024**unit)
    digits = f"{hundredths // 100}.{hundredths % 100:02}"
    return f"{digits.removesuffix('0')}{_UNITS[unit]}"


def keyword_names(owner: type) -> frozenset[str]:
    """Return the names of the arguments that ``owner`` accepts by keyword."""
    parameters = inspect.signature(owner).parameters.values()
    return frozenset(p.name for p in parameters if p.kind in (p.KEYWORD_ONLY, p.POSITIONAL_OR_KEYWORD))


def refuse_unknown(called: str, options: Mapping[str, Any], known: frozenset[str]) -> None:
    """Raise TypeError for an option that is not in ``known``; the message names the function ``called``."""
    unknown = sorted(options.keys() - known)
    if unknown:
        wrong = ", ".join(f"{name!r}{did_you_mean(name, known)}" for name in unknown)
        raise TypeError(f"{called} has no argument {wrong}; it has {', '.join(sorted(known))}")


_MOST_LETTERS = 100  # compared letters of a name: the comparison takes quadratic time


def did_you_mean(name: str, known: Iterable[str], *, cutoff: float = 0.6) -> str:
    """Return `` (did you mean X?)`` for the nearest of the ``known`` names, ignoring case; "" if none is as
    near as ``cutoff`` (1: the same letters).
    """
    by_letters = {each.lower(): each for each in known}
    near = get_close_matches(name[:_MOST_LETTERS].lower(), by_letters, 1, cutoff)
    return f" (did you mean {by_letters[near[0]]}?)" if near else ""
