"""Describes the contents of a checkpoint and whether it is complete, as plain data."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from gemini.checkpoint.contents import part_file
from gemini.checkpoint.loading import CheckpointReader
from gemini.checkpoint.sealed_file import DamagedError, UnreadableError
from gemini.errors import CheckpointError
from gemini.system import rng


def describe(checkpoint: Path) -> dict[str, Any]:
    """Return a description of a checkpoint; ``damage`` says why it cannot be read, or is None. The values of
    tensors are not checked. Raises UnreadableError.
    """
    try:
        with CheckpointReader(checkpoint) as reader:
            return _described(reader)
    except UnreadableError:
        raise
    except DamagedError as error:
        return {"path": str(checkpoint), "damage": str(error)}


def verdict(checkpoint: Path) -> dict[str, Any]:
    """Read every byte of a checkpoint. ``damage`` names the first file that differs from what was written, or
    is None. Raises UnreadableError.
    """
    try:
        with CheckpointReader(checkpoint) as reader:
            reader.verify()
            reader.objects()
            ranks = reader.manifest["ranks"]
            for rank in range(ranks):
                _check_generators(reader, rank, ranks)
            return {"path": str(checkpoint), "damage": None, "bytes": _size(reader)}
    except UnreadableError:
        raise
    except DamagedError as error:
        return {"path": str(checkpoint), "damage": str(error), "bytes": None}


def _check_generators(reader: CheckpointReader, rank: int, ranks: int) -> None:
    """Raise DamagedError if loading would refuse the saved generator states."""
    document = reader.rng(rank, ranks)
    try:
        rng.parse(document)
    except CheckpointError as error:
        raise DamagedError(f"{reader.path / part_file(rank, ranks)} is damaged: {error}") from error


def _described(reader: CheckpointReader) -> dict[str, Any]:
    manifest = reader.manifest
    shapes = [entry["shape"] for entry in manifest["parameters"].values()]
    groups = zip(reader.objects()["param_groups"], manifest["group_members"], strict=True)
    return {
        "path": str(reader.path),
        "damage": None,
        "format": manifest["format"],
        "step": manifest["step"],
        "ranks": manifest["ranks"],
        "bytes": _size(reader),
        "files": len(manifest["files"]),
        "num_parameters": sum(math.prod(shape) for shape in shapes),
        "num_tensors": len(shapes),
        "num_states": len(manifest["optimizer_steps"]),
        "num_buffers": len(manifest["buffers"]),
        "aliases": manifest["aliases"],
        "param_groups": [
            {**{key: value for key, value in group.items() if _is_plain(value)}, "num_tensors": len(members)}
            for group, members in groups
        ],
        "loss_scale": manifest["loss_scale"],
        "scheduler": manifest["scheduler"],
        "extra": manifest["extra"],
    }


def _size(reader: CheckpointReader) -> int:
    return sum(num_bytes for num_bytes, _ in reader.manifest["files"].values())


def _is_plain(value: object) -> bool:
    return isinstance(value, (bool, int, float, str, list, tuple)) or value is None
