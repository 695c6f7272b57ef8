"""ParallelMode: the kinds of process groups."""

from __future__ import annotations

from enum import Enum

from gemini.errors import ConfigError


class ParallelMode(Enum):
    """A kind of process groups. A program's own kind is a text, or a member of another Enum of texts."""

    GLOBAL = "global"
    DATA = "data"
    PIPELINE = "pipe"
    TENSOR = "tensor"
    SEQUENCE = "sequence"
    PARALLEL_1D = "1d"
    PARALLEL_2D_ROW = "2d_row"
    PARALLEL_2D_COL = "2d_col"
    PARALLEL_2P5D_ROW = "2p5d_row"
    PARALLEL_2P5D_COL = "2p5d_col"
    PARALLEL_2P5D_DEP = "2p5d_dep"
    PARALLEL_3D_INPUT = "3d_input"
    PARALLEL_3D_WEIGHT = "3d_weight"
    PARALLEL_3D_OUTPUT = "3d_output"


AXES = {
    ParallelMode.DATA: "dp",
    ParallelMode.PIPELINE: "pp",
    ParallelMode.SEQUENCE: "sp",
    ParallelMode.TENSOR: "tp",
}

# The mode of tensor parallelism, and the grid coordinate in which the ranks of a group differ.
COORDINATES = {
    ParallelMode.PARALLEL_1D: ("1d", "tp"),
    ParallelMode.PARALLEL_2D_ROW: ("2d", "row"),
    ParallelMode.PARALLEL_2D_COL: ("2d", "col"),
    ParallelMode.PARALLEL_2P5D_ROW: ("2.5d", "row"),
    ParallelMode.PARALLEL_2P5D_COL: ("2.5d", "col"),
    ParallelMode.PARALLEL_2P5D_DEP: ("2.5d", "dep"),
    ParallelMode.PARALLEL_3D_INPUT: ("3d", "input"),
    ParallelMode.PARALLEL_3D_WEIGHT: ("3d", "weight"),
    ParallelMode.PARALLEL_3D_OUTPUT: ("3d", "output"),
}


def key_of(mode: Enum | str) -> str:
    """Return the text for a kind of groups."""
    key = mode.value if isinstance(mode, Enum) else mode
    if not isinstance(key, str):
        raise ConfigError(
            f"{mode!r} is no kind of groups; pass a ParallelMode, or the name of your own groups"
        )
    return key
