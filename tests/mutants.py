"""Documents changed at random, for what reads files of others.

``GEMINI_FUZZ_MUTANTS`` and ``GEMINI_FUZZ_SEED`` ask for more mutants, and others.
"""

from __future__ import annotations

import copy
import os
import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from gemini.errors import CheckpointError

MUTANTS = int(os.environ.get("GEMINI_FUZZ_MUTANTS", "1600"))
SEED = int(os.environ.get("GEMINI_FUZZ_SEED", "0"))
_STRANGE = [
    None, True, False, -1, 0, 1, 7, 2**31, 2**63, 2**64, 10**400, 0.5, -0.0, float("nan"), float("inf"),
    "", "x", "../x", "/etc/passwd", ".", "\0", "\ud800", "__metadata__",
    "model-00001-of-00001.safetensors", "model.safetensors.index.json",
    [], {}, [[]], [0], [1, 2, 3, 4], {"a": 1}, {"type": "tuple", "items": [1]}, {"type": "tensor"},
    {"type": "tensor", "dtype": "float32", "shape": [2**40], "hex": ""}, "F64", "I32", "BOOL", "F8_E4M3",
]  # fmt: skip


def places(document: Any) -> list[tuple[Any, Any]]:
    """Return every place in a document: what holds it, and its key there."""
    found: list[tuple[Any, Any]] = []
    keys = list(document) if isinstance(document, dict) else range(len(document))
    for key in keys:
        found.append((document, key))
        if isinstance(document[key], (dict, list)):
            found += places(document[key])
    return found


def mutate(document: Any, chance: random.Random) -> None:
    """Change a document in one place."""
    all_places = places(document)
    # Mostly one at random, sometimes one of the few that are not in a long list.
    holder, key = chance.choice(all_places)
    if chance.random() < 0.5:
        holder, key = chance.choice(
            [place for place in all_places if isinstance(place[0], dict)] or all_places
        )
    other, there = chance.choice(all_places)
    how = chance.randrange(7)
    if how == 0:
        del holder[key]
    elif how == 1:
        holder[key] = copy.deepcopy(chance.choice(_STRANGE))
    elif how == 2 and type(holder[key]) is int:
        holder[key] += chance.choice([-1, 1, 4, -4, 2**20])
    elif how == 3:
        holder[key] = copy.deepcopy(other[there])
    elif how == 4:
        one, two = copy.deepcopy(holder[key]), copy.deepcopy(other[there])
        holder[key] = two
        other[there] = one
    elif isinstance(holder, list):
        holder.insert(chance.randrange(len(holder) + 1), copy.deepcopy(holder[key]))
    else:
        name = chance.choice(
            [value for value in _STRANGE if isinstance(value, str)] + [str(k) for k in holder]
        )
        holder[name] = holder.pop(key) if how == 5 else copy.deepcopy(holder[key])


def replace(file: Path, chance: random.Random) -> None:
    """Have something else in a file's place, or other bytes in it."""
    content = bytearray(file.read_bytes())
    how = chance.randrange(6)
    if how < 3:
        file.unlink()
        if how == 0:
            os.mkfifo(file)
        elif how == 1:
            file.symlink_to("/dev/zero")
        return
    if how == 3:
        del content[chance.randrange(len(content)) :]
    elif how == 4:
        content += bytes(chance.randrange(1, 9))
    else:
        content[chance.randrange(min(len(content), 200))] ^= 1 << chance.randrange(8)
    file.write_bytes(content)


@contextmanager
def nothing_raw() -> Iterator[list[CheckpointError]]:
    """Collect the error of this library."""
    refused: list[CheckpointError] = []
    try:
        yield refused
    except CheckpointError as error:
        str(error).encode()
        refused.append(error)
