"""The chunk-size search against trying every size with the real layout."""

from __future__ import annotations

import logging

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gemini.chunk.layout import ChunkLayout, SearchResult, search_chunk_size
from gemini.errors import ConfigError

KIB_AS_MB = 2**-10  # the arguments ending in _mb count 2**20 bytes


def layout_of(numels: list[int], chunk_numel: int, itemsize: int) -> ChunkLayout:
    return ChunkLayout.build(
        ((str(i), (numel,)) for i, numel in enumerate(numels)), chunk_numel, itemsize=itemsize
    )


RUNS = st.tuples(
    st.integers(0, 30000) | st.sampled_from([0, 5, 32, 64, 1024, 2048]), st.sampled_from([1, 1, 9, 70])
)


@given(
    st.lists(RUNS, min_size=1, max_size=20).map(
        lambda runs: [numel for numel, count in runs for _ in range(count)]
    ),
    st.integers(1, 64),
    st.integers(0, 64),
    st.sampled_from([300, 1024, 1500]),
    st.sampled_from([1, 2, 4]),
)
def test_the_result_wastes_least_of_all_candidates_and_is_the_smallest_such(
    numels: list[int], min_kib: int, range_kib: int, step: int, itemsize: int
) -> None:
    found = search_chunk_size(
        numels,
        search_range_mb=range_kib * KIB_AS_MB,
        min_chunk_size_mb=min_kib * KIB_AS_MB,
        hidden_dim=step,
        itemsize=itemsize,
    )
    page = 4096 // itemsize
    smallest = -(-min_kib * 1024 // 4096) * page
    largest = smallest + range_kib * 1024 // 4096 * page
    whole = layout_of(numels, 10**9, itemsize)
    sizes = range(smallest, largest + 1, step) if whole.chunk_numels[0] > smallest else whole.chunk_numels
    layouts = [layout_of(numels, size, itemsize) for size in sizes]
    best = min(layouts, key=lambda layout: (layout.wasted_numel, layout.chunk_numel))
    assert (found.wasted_numel, found.chunk_numel) == (best.wasted_numel, best.chunk_numel)
    assert found.used_numel == sum(numels)


@given(
    st.lists(st.integers(1, 30000), min_size=1, max_size=30),
    st.integers(4096, 200_000),
    st.sampled_from([1, 2, 4]),
)
def test_no_chunk_exceeds_the_cap_unless_a_tensor_does(numels: list[int], cap: int, itemsize: int) -> None:
    options = {"search_range_mb": 64 * KIB_AS_MB, "min_chunk_size_mb": 64 * KIB_AS_MB, "itemsize": itemsize}
    found = search_chunk_size(numels, max_chunk_bytes=cap, **options)
    assert found.chunk_numel * itemsize <= cap
    layout = layout_of(numels, found.chunk_numel, itemsize)
    for chunk, numel in enumerate(layout.chunk_numels):
        assert numel * itemsize <= cap or layout.slots_of(chunk)[0].numel > found.chunk_numel


def test_a_cap_above_the_range_changes_nothing() -> None:
    numels = [3_000_000, 5_000_000, 700_000] * 10
    free, capped = search_chunk_size(numels), search_chunk_size(numels, max_chunk_bytes=2**30)
    assert (free.chunk_numel, free.wasted_numel) == (capped.chunk_numel, capped.wasted_numel)


def test_a_small_model_becomes_one_chunk_of_its_own_size() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(100, 30), torch.nn.Linear(30, 7))
    found = search_chunk_size(model)
    layout = ChunkLayout.build(model.named_parameters(), found.chunk_numel, itemsize=4)
    assert layout.chunk_numels == (4096,)
    assert found.wasted_numel == layout.wasted_numel == 4096 - found.used_numel


def test_tied_weights_of_a_module_count_once() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(8, 8, bias=False), torch.nn.Linear(8, 8, bias=False))
    model[1].weight = model[0].weight
    assert search_chunk_size(model).used_numel == 64


def test_tensors_and_their_numbers_of_elements_are_the_same_question() -> None:
    tensors = [torch.empty(size, device="meta") for size in (5_000_000, 4_000_000, 9_000_000)]
    by_tensor, by_number = search_chunk_size(tensors), search_chunk_size([t.numel() for t in tensors])
    assert (by_tensor.chunk_numel, by_tensor.wasted_numel) == (by_number.chunk_numel, by_number.wasted_numel)


def test_nothing_to_place_wastes_nothing() -> None:
    assert search_chunk_size([]).wasted_numel == 0


def test_the_three_lines_of_the_seeds_are_exact() -> None:
    result = SearchResult(
        chunk_numel=1, wasted_numel=int(0.75 * 2**20), used_numel=124_439_808, seconds=0.2712
    )
    assert result.lines() == (
        "searching chunk configuration is completed in 0.27 s.",
        "used number: 118.68 MB, wasted number: 0.75 MB",
        "total wasted percentage is 0.63%",
    )


@pytest.mark.parametrize("verbose", [True, False])
def test_verbose_logs_the_lines_and_nothing_is_printed(
    verbose: bool, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    with caplog.at_level(logging.INFO, logger="gemini.chunk.layout"):
        result = search_chunk_size([100], verbose=verbose)
    assert caplog.messages == (list(result.lines()) if verbose else [])
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("options", "named_thing"),
    [
        ({"min_chunk_size_mb": 0}, "min_chunk_size_mb is 0"),
        ({"search_range_mb": -1}, "search_range_mb is -1"),
        ({"hidden_dim": 0, "min_chunk_size_mb": KIB_AS_MB}, "hidden_dim is 0"),
        ({"itemsize": 3}, "itemsize is 3"),
        ({"max_chunk_bytes": 4095}, "4,095"),
    ],
)
def test_sizes_that_allow_no_chunk_are_refused(options: dict, named_thing: str) -> None:
    with pytest.raises(ConfigError, match=named_thing):
        search_chunk_size([100_000], **options)
