"""Tiles: every element of a tensor is some rank's, and counts once, whatever the grid and the shape."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gemini import ConfigError
from gemini.parallel import Layout
from gemini.parallel.tensor.grid import Grid, Places, Tile, places_of

GRIDS = [
    Layout(tp=3),
    Layout(tp=9, mode="2d"),
    Layout(tp=12, mode="2.5d", depth=3),
    Layout(tp=8, mode="3d"),
]


@st.composite
def tiles(draw: st.DrawFn) -> Tile:
    places = places_of(draw(st.sampled_from(GRIDS)))
    names = draw(st.permutations(places.names))
    dims = draw(st.integers(1, 3))
    ends = sorted(draw(st.lists(st.integers(0, len(names)), min_size=dims, max_size=dims)))
    cuts = tuple(tuple(names[start:stop]) for start, stop in itertools.pairwise([0, *ends]))
    shape = tuple(draw(st.lists(st.integers(1, 9), min_size=dims, max_size=dims)))
    transposed = dims == 2 and draw(st.booleans())
    return Tile(places, shape, cuts, draw(st.integers(1, 3)), transposed)


@settings(max_examples=200, deadline=None)
@given(tiles())
def test_parts_are_the_whole_again_and_each_element_counts_once(tile: Tile) -> None:
    whole = torch.arange(1.0, torch.Size(tile.shape).numel() + 1).view(tile.shape)
    parts = [tile.part(whole, rank) for rank in range(tile.places.count)]
    assert {tuple(part.shape) for part in parts} == {tile.part_shape}
    assert torch.equal(tile.whole(parts), whole)
    counted = torch.cat([part.flatten() for rank, part in enumerate(parts) if tile.counts_on(rank)])
    assert torch.equal(counted[counted != 0].sort().values, whole.flatten())


def test_ranks_differ_in_the_coordinates_of_their_axis_alone() -> None:
    places = Places(("dep", "col", "row"), (2, 2, 2))
    assert places.others(5, ("col",)) == [5, 7]
    assert places.others(5, ("dep", "row")) == [0, 1, 4, 5]
    assert [places.index(rank, ("dep", "col")) for rank in range(8)] == [0, 0, 1, 1, 2, 2, 3, 3]
    assert [places.index(rank, ("row", "dep")) for rank in range(8)] == [0, 2, 0, 2, 1, 3, 1, 3]


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(ConfigError, match="mode '2d' does not work over 3 processes"):
        places_of(Layout(tp=3, mode="2d"))
    with pytest.raises(ConfigError, match=r"this tile cuts a tensor of \(4,\), but got one of \(5,\)"):
        Tile(places_of(GRIDS[0]), (4,), (("tp",),)).part(torch.ones(5), 0)
    assert torch.equal(Grid(None).own_part(torch.ones(3, 2)), torch.ones(3, 2))
