"""Layouts and their conversion: the documents' table, least cost, and the values that come out."""

from __future__ import annotations

import itertools
import math
import random

import pytest
import torch

from gemini.errors import ConfigError
from gemini.memstats.collectives import KINDS, CollectiveSpeed, CollectiveSpeeds, Figure
from gemini.planner.operators.conversions import (
    Converter,
    Links,
    OperatorLayout,
    convert_parts,
    coordinates,
    greedy_path,
    one_step,
    part_of,
)

SIZES = (2, 4)


def layout(text: str) -> OperatorLayout:
    return OperatorLayout.parse(text)


def random_layout(draw: random.Random, ndim: int, num_axes: int, *, partial: bool) -> OperatorLayout:
    dims: list[tuple[int, ...]] = [()] * ndim
    summed = []
    for axis in draw.sample(range(num_axes), num_axes):
        where = draw.randrange(-2 if partial else -1, ndim)
        if where >= 0:
            dims[where] = (*dims[where], axis)
        elif where == -2:
            summed.append(axis)
    return OperatorLayout(tuple(dims), tuple(sorted(summed)))


def random_links(draw: random.Random) -> Links:
    sizes = tuple(draw.choice((2, 3, 4)) for _ in range(draw.choice((1, 2, 3))))
    speeds = tuple(
        CollectiveSpeeds(
            tuple(
                CollectiveSpeed(kind, size, Figure(draw.uniform(0, 1e-3)), Figure(10 ** draw.uniform(6, 10)))
                for kind in KINDS
            )
        )
        for size in sizes
    )
    return Links(sizes, speeds)


TABLE = {
    "S01RR": {"S0RR", "S0RS1", "S0S1R"},
    "S0RR": {"RRR", "S0S1R", "S0RS1", "RS0R", "RRS0"},
    "RS0R": {"RRR", "RS01R", "S1S0R", "RS0S1", "S0RR", "RRS0"},
}


@pytest.mark.parametrize("source", TABLE)
def test_one_step_makes_the_layouts_of_the_documents(source: str) -> None:
    found = one_step(layout(source), SIZES, source=layout("S01RR"))
    assert {str(each) for each in found} == TABLE[source]


def test_the_greedy_path_is_that_of_the_documents() -> None:
    path = greedy_path(layout("S01RR"), layout("RS01R"), SIZES)
    assert [str(made) for _, made in path] == ["S0RR", "RS0R", "RS01R"]
    assert [step.kind for step, _ in path] == ["all_gather", "all_to_all", "shard"]


@pytest.mark.parametrize("text", ["S01RR", "R", "S0S1R", "()", "RR+P0", "RS1+P02"])
def test_text_is_read_as_it_is_written(text: str) -> None:
    assert str(layout(text)) == text


@pytest.mark.parametrize("text", ["S0S0R", "S", "X0", "S0R+P0", "r"])
def test_text_of_no_layout_is_refused(text: str) -> None:
    with pytest.raises(ConfigError):
        layout(text)


def least_seconds(
    source: OperatorLayout, target: OperatorLayout, shape: tuple[int, ...], links: Links
) -> float:
    """Relax all layouts until nothing changes, without a queue and without paths."""
    best = {source: 0.0}
    changed = True
    while changed:
        changed = False
        for at, seconds in list(best.items()):
            nbytes = 4 * math.prod(at.local_shape(shape, links.sizes))
            for made, step in one_step(at, links.sizes, shape).items():
                total = seconds + links.seconds(step, nbytes)
                if total < best.get(made, math.inf) - 1e-15:
                    best[made], changed = total, True
    return best.get(target, math.inf)


@pytest.mark.parametrize("seed", range(20))
def test_the_cheapest_path_is_that_of_an_independent_search(seed: int) -> None:
    draw = random.Random(seed)
    links = random_links(draw)
    ndim = draw.choice((1, 2, 3))
    shape = tuple(144 * draw.choice((1, 4)) for _ in range(ndim))
    source = random_layout(draw, ndim, len(links.sizes), partial=True)
    target = random_layout(draw, ndim, len(links.sizes), partial=False)
    path = Converter(links).path(source, target, shape, 4)
    assert path is not None
    assert path.seconds == pytest.approx(least_seconds(source, target, shape, links), rel=1e-12)
    greedy, at = 0.0, source
    for step, made in greedy_path(source, target, links.sizes, shape):
        greedy += links.seconds(step, 4 * math.prod(at.local_shape(shape, links.sizes)))
        at = made
    assert at == target
    assert path.seconds <= greedy * (1 + 1e-12)


def parts_of(tensor: torch.Tensor, into: OperatorLayout, sizes: tuple[int, ...]) -> list[torch.Tensor]:
    """Return what each rank has; along axes of partial sums, summands that are all different."""
    counts = [sizes[axis] for axis in into.partial]
    draw = torch.Generator().manual_seed(1)
    summands = torch.randint(-8, 8, (*counts, *tensor.shape), generator=draw).double()
    flat = summands.view(-1, *tensor.shape)
    flat[-1] = tensor - flat[:-1].sum(0)
    return [
        part_of(summands[tuple(place[axis] for axis in into.partial)], into, sizes, place)
        for place in coordinates(sizes)
    ]


@pytest.mark.parametrize("seed", range(20))
def test_a_path_gives_every_rank_its_part_of_the_target(seed: int) -> None:
    draw = random.Random(100 + seed)
    links = random_links(draw)
    shape = (48, 144)
    source = random_layout(draw, 2, len(links.sizes), partial=True)
    target = random_layout(draw, 2, len(links.sizes), partial=False)
    tensor = torch.arange(float(math.prod(shape)), dtype=torch.float64).view(shape)
    path = Converter(links).path(source, target, shape, 8)
    if not target.fits(shape, links.sizes) or not source.fits(shape, links.sizes):
        return
    assert path is not None
    parts = convert_parts(parts_of(tensor, source, links.sizes), [s for s, _ in path.steps], links.sizes)
    for part, place in zip(parts, coordinates(links.sizes), strict=True):
        assert torch.equal(part, part_of(tensor, target, links.sizes, place))


def test_a_copy_becomes_summands_where_a_target_has_some() -> None:
    links = random_links(random.Random(3))
    target = OperatorLayout(((), ()), (0,))
    path = Converter(links).path(layout("RR"), target, (8, 8), 4)
    assert path is not None
    assert path.seconds == 0
    tensor = torch.ones(8, 8)
    parts = convert_parts([tensor] * math.prod(links.sizes), [step for step, _ in path.steps], links.sizes)
    along = [each for each, place in zip(parts, coordinates(links.sizes), strict=True) if not any(place[1:])]
    assert torch.equal(torch.stack(along).sum(0), tensor)


def test_paths_are_searched_once() -> None:
    converter = Converter(random_links(random.Random(5)))
    searches = []
    search = converter._paths_from
    converter._paths_from = lambda *key: searches.append(key) or search(*key)  # type: ignore[method-assign, func-returns-value]
    for target in ("RS0", "S0R", "RR"):
        converter.path(layout("S0R"), layout(target), (48, 48), 4)
    assert len(searches) == 1


def test_parts_are_equal_or_the_layout_is_none() -> None:
    for made in one_step(layout("RR"), (2, 4), (6, 4)):
        assert made.fits((6, 4), (2, 4))
    names = {str(each) for each in one_step(layout("RR"), (2, 4), (6, 4))}
    assert names == {"S0R", "RS0", "RS1"}


def test_every_pair_of_layouts_without_sums_is_connected() -> None:
    converter = Converter(Links((2, 2), (_even(),)))
    every = [
        OperatorLayout(
            tuple(tuple(a for a, d in zip((0, 1), where, strict=True) if d == dim) for dim in range(2))
        )
        for where in itertools.product((-1, 0, 1), repeat=2)
    ]
    for source, target in itertools.product(every, every):
        assert converter.path(source, target, (8, 8), 4) is not None


def _even() -> CollectiveSpeeds:
    return CollectiveSpeeds(tuple(CollectiveSpeed(kind, 2, Figure(1e-5), Figure(1e9)) for kind in KINDS))
