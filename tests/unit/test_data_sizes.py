"""What a model's chunks take before anything is allocated: alone, and over ranks."""

from __future__ import annotations

import pytest
import torch

from gemini.chunk.chunk import StateSpec
from gemini.chunk.layout import ChunkLayout
from gemini.comm.peers import Share
from gemini.runtime.storage.data_sizes import (
    DataSizes,
    GroupPlan,
    GroupSpec,
    Kept,
    Needs,
    data_sizes,
    plan_groups,
)

_NUMEL = 8192
_PIECE = 2048  # elements: masters and states are in pieces of 8 KiB
_KIB = 1024
_ONE_STATE = (StateSpec("exp_avg"),)


def plan_of_halves(share: Share | None) -> GroupPlan:
    """Return the plan of one bf16 parameter with masters, 16 KiB alone."""
    layout = ChunkLayout.build([("weight", torch.empty(_NUMEL))], _NUMEL, itemsize=2)
    (plan,) = plan_groups([GroupSpec(layout, torch.bfloat16, True, True)], _PIECE, share)
    return plan


@pytest.mark.parametrize(
    ("needs", "kib"),
    [
        (Needs(), dict(total=16, working=16, largest=16)),
        (Needs(masters=True), dict(total=16 + 32, working=16 + 8, largest=16)),
        (Needs(True, True), dict(total=16 + 16 + 32, working=16 + 16 + 8, largest=16)),
        (Needs(True, True, Kept(_ONE_STATE)), dict(total=32 + 64, working=32 + 8 + 8, largest=16)),
        (Needs(True, True, Kept(_ONE_STATE, True)), dict(total=32 + 64, working=32 + 64, largest=16)),
    ],
)
def test_alone_parameters_and_gradients_are_kept_with_what_belongs_to_them(
    needs: Needs, kib: dict[str, int]
) -> None:
    found = data_sizes([(plan_of_halves(None), needs)])
    assert found == DataSizes(**{name: size * _KIB for name, size in kib.items()})


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(
    ("needs", "kib"),
    [
        (Needs(), dict(total=8, working=8, largest=16)),
        (Needs(masters=True), dict(total=8 + 16, working=8 + 8, largest=16)),
        # A gradient is summed in fp32: 32 KiB while it is whole, of which a rank keeps half.
        (Needs(True, True), dict(total=8 + 16 + 16, working=8 + 16 + 8, largest=32, largest_gradient=32)),
        (
            Needs(True, True, Kept(_ONE_STATE)),
            dict(total=24 + 32, working=24 + 8 + 8, largest=32, largest_gradient=32),
        ),
        (
            Needs(True, True, Kept(_ONE_STATE, True)),  # the values, the gradient and the state, in fp32
            dict(total=24 + 32, working=24 + 32, largest=32, largest_gradient=32, room=3 * 32),
        ),
    ],
)
def test_over_ranks_shards_are_kept_and_what_is_whole_at_times_is_counted_apart(
    rank: int, needs: Needs, kib: dict[str, int]
) -> None:
    found = data_sizes([(plan_of_halves(Share(rank, 2)), needs)])
    sizes = {**kib, "windows": 16, "largest_window": 16}
    assert found == DataSizes(**{name: size * _KIB for name, size in sizes.items()})


def test_chunks_are_kept_together_and_updated_one_after_the_other() -> None:
    needs = Needs(True, True, Kept(_ONE_STATE))
    plan = plan_of_halves(Share(0, 2))
    one, three = data_sizes([(plan, needs)]), data_sizes([(plan, needs)] * 3)
    assert (three.total, three.windows) == (3 * one.total, 3 * one.windows)
    assert (three.working, three.largest) == (one.working, one.largest)
    assert three.largest_gradient == one.largest_gradient
