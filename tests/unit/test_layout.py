"""Parameters in chunks: alignment, order, no lost and no shared element."""

from __future__ import annotations

import dataclasses
from math import prod

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gemini.chunk.chunk import BLOCK_NUMEL
from gemini.chunk.layout import CHUNK_ALIGN_BYTES, TENSOR_ALIGN_BYTES, ChunkLayout
from gemini.comm.peers import CUT_NUMEL
from gemini.errors import ConfigError

ITEMSIZES = [1, 2, 4, 8]
NUMELS = st.lists(st.integers(0, 9000), max_size=40)


def named(numels: list[int]) -> list[tuple[str, tuple[int, ...]]]:
    return [(f"p{i}", (numel,)) for i, numel in enumerate(numels)]


@given(NUMELS, st.integers(1, 6000), st.sampled_from(ITEMSIZES), st.sampled_from([TENSOR_ALIGN_BYTES, 256]))
def test_every_tensor_is_aligned_and_every_chunk_is_pages_in_all_wider_kinds(
    numels: list[int], chunk_numel: int, itemsize: int, align_bytes: int
) -> None:
    layout = ChunkLayout.build(named(numels), chunk_numel, itemsize=itemsize, align_bytes=align_bytes)
    for wider in (size for size in ITEMSIZES if size >= itemsize):
        assert all(slot.offset * wider % align_bytes == 0 for slot in layout.slots)
        assert all(numel * wider % CHUNK_ALIGN_BYTES == 0 for numel in layout.chunk_numels)


@given(NUMELS, st.integers(1, 6000), st.sampled_from(ITEMSIZES))
def test_slots_lie_in_their_chunk_one_after_the_other(
    numels: list[int], chunk_numel: int, itemsize: int
) -> None:
    layout = ChunkLayout.build(named(numels), chunk_numel, itemsize=itemsize)
    assert [slot.numel for slot in layout.slots] == numels
    ends = [0] * layout.num_chunks
    for slot in layout.slots:
        assert slot.offset >= ends[slot.chunk]
        ends[slot.chunk] = slot.offset + max(slot.numel, 1)
    assert all(end <= numel for end, numel in zip(ends, layout.chunk_numels, strict=True))


@given(NUMELS, st.integers(1, 6000), st.sampled_from(ITEMSIZES))
def test_each_chunk_is_a_continuous_run_and_as_full_as_the_order_allows(
    numels: list[int], chunk_numel: int, itemsize: int
) -> None:
    layout = ChunkLayout.build(named(numels), chunk_numel, itemsize=itemsize)
    assert [slot.chunk for slot in layout.slots] == sorted(slot.chunk for slot in layout.slots)
    assert {slot.chunk for slot in layout.slots} == set(range(layout.num_chunks))
    unit = TENSOR_ALIGN_BYTES // itemsize
    for last, following in zip(layout.slots, layout.slots[1:], strict=False):
        if last.chunk != following.chunk and max(last.numel, following.numel) <= layout.chunk_numel:
            next_offset = -(-(last.offset + max(last.numel, 1)) // unit) * unit
            if next_offset % CUT_NUMEL + max(following.numel, 1) > CUT_NUMEL:
                next_offset = -(-next_offset // BLOCK_NUMEL) * BLOCK_NUMEL
            assert next_offset + max(following.numel, 1) > layout.chunk_numel


@given(NUMELS, st.integers(1, 6000), st.sampled_from(ITEMSIZES))
def test_no_cut_goes_through_a_block_and_small_tensors_pay_nothing_for_that(
    numels: list[int], chunk_numel: int, itemsize: int
) -> None:
    layout = ChunkLayout.build(named(numels), chunk_numel, itemsize=itemsize)
    for slot in layout.slots:
        cuts = range(-(-(slot.offset + 1) // CUT_NUMEL) * CUT_NUMEL, slot.offset + slot.numel, CUT_NUMEL)
        assert all((cut - slot.offset) % BLOCK_NUMEL == 0 for cut in cuts)
    packed = ChunkLayout.build(named([64] * 96), 2**20, itemsize=itemsize)
    assert packed.slots[-1].offset == 95 * 64


@given(NUMELS, st.integers(1, 6000), st.sampled_from(ITEMSIZES))
def test_only_ends_of_runs_are_smaller_and_only_single_large_tensors_larger(
    numels: list[int], chunk_numel: int, itemsize: int
) -> None:
    layout = ChunkLayout.build(named(numels), chunk_numel, itemsize=itemsize)
    page = CHUNK_ALIGN_BYTES // itemsize
    for chunk, numel in enumerate(layout.chunk_numels):
        slots = layout.slots_of(chunk)
        used = slots[-1].offset + max(slots[-1].numel, 1)
        run_ends = chunk + 1 == layout.num_chunks or layout.slots_of(chunk + 1)[0].numel > layout.chunk_numel
        if numel > layout.chunk_numel:
            assert len(slots) == 1
        if run_ends or numel > layout.chunk_numel:
            assert 0 <= numel - used < page
        else:
            assert numel == layout.chunk_numel


@given(NUMELS, st.integers(1, 6000))
def test_used_and_wasted_are_all_there_is(numels: list[int], chunk_numel: int) -> None:
    layout = ChunkLayout.build(named(numels), chunk_numel, itemsize=4)
    assert layout.used_numel == sum(numels)
    assert layout.used_numel + layout.wasted_numel == sum(layout.chunk_numels)


def test_the_execution_order_comes_first_and_the_rest_keeps_its_order() -> None:
    layout = ChunkLayout.build(named([1, 2, 3, 4]), 1024, itemsize=4, order=["p2", "p0", "p2"])
    assert [slot.name for slot in layout.slots] == ["p2", "p0", "p1", "p3"]


def test_a_tensor_as_large_as_the_chunk_is_no_large_tensor_and_ends_no_run() -> None:
    assert ChunkLayout.build(named([10, 2048]), 2048, itemsize=4).chunk_numels == (2048, 2048)
    assert ChunkLayout.build(named([10, 2049]), 2048, itemsize=4).chunk_numels == (1024, 3072)


def test_a_larger_tensor_stands_alone_between_its_neighbours() -> None:
    layout = ChunkLayout.build(named([1024, 1025, 1]), 1024, itemsize=4)
    assert layout.chunk_numels == (1024, 2048, 1024)
    assert [layout.chunk_of(f"p{i}") for i in range(3)] == [0, 1, 2]


@pytest.mark.parametrize(
    "tensor",
    [
        torch.zeros(4, 6).t(),
        torch.zeros(2, 3, 4, 5).to(memory_format=torch.channels_last),
        torch.zeros(3, 1, 5).permute(2, 1, 0),
        torch.zeros(()),
        torch.zeros(0, 3),
        torch.empty(7, 3, device="meta").t(),
    ],
)
def test_a_dense_stride_is_kept_and_the_view_covers_exactly_the_slot(tensor: torch.Tensor) -> None:
    layout = ChunkLayout.build([("p", tensor)], 4096, itemsize=4)
    slot = layout.slot("p")
    assert slot.shape == tuple(tensor.shape)
    assert slot.stride == tensor.stride()
    covered = torch.arange(4096).as_strided(slot.shape, slot.stride, slot.offset)
    assert sorted(covered.flatten().tolist()) == list(range(slot.numel))


@pytest.mark.parametrize(
    "tensor",
    [
        torch.zeros(3, 1).expand(3, 4),
        torch.zeros(8, 8)[:, ::2],
        torch.zeros(8, 8)[:, :3],
        torch.zeros(4, 4).diagonal(),
    ],
)
def test_a_stride_with_holes_or_overlap_becomes_contiguous(tensor: torch.Tensor) -> None:
    slot = ChunkLayout.build([("p", tensor)], 4096, itemsize=4).slot("p")
    assert slot.stride == tensor.contiguous().stride()
    assert slot.numel == prod(tensor.shape)


def test_signatures_are_equal_exactly_for_equal_layouts() -> None:
    layout = ChunkLayout.build(named([10, 20, 3000]), 1024, itemsize=4)
    assert layout.signature() == ChunkLayout.build(named([10, 20, 3000]), 1024, itemsize=4).signature()
    others = [
        ChunkLayout.build(named([10, 21, 3000]), 1024, itemsize=4),
        ChunkLayout.build(named([10, 20, 3000]), 4096, itemsize=4),
        ChunkLayout.build(named([10, 20, 3000]), 1024, itemsize=4, order=["p1"]),
    ]
    assert len({layout.signature(), *(other.signature() for other in others)}) == 4


def test_a_layout_cannot_be_changed() -> None:
    layout = ChunkLayout.build(named([10]), 1024, itemsize=4)
    with pytest.raises(dataclasses.FrozenInstanceError):
        layout.chunk_numel = 1  # type: ignore[misc]
    with pytest.raises(dataclasses.FrozenInstanceError):
        layout.slots[0].offset = 1  # type: ignore[misc]


def test_no_parameters_make_no_chunks() -> None:
    layout = ChunkLayout.build([], 1024, itemsize=4)
    assert (layout.slots, layout.chunk_numels, layout.wasted_numel) == ((), (), 0)


TIED = torch.zeros(3)


@pytest.mark.parametrize(
    ("tensors", "options", "named_thing"),
    [
        ([("a", (1,)), ("a", (2,))], {}, "'a'"),
        ([("a", TIED), ("b", TIED)], {}, "tied"),
        ([("a", (1,))], {"order": ["gone"]}, "'gone'"),
        ([("a", (1,))], {"itemsize": 3}, "3"),
        ([("a", (1,))], {"chunk_numel": 0}, "0"),
        ([("a", (-1,))], {}, "'a'"),
        ([("a", torch.zeros(2, 2).to_sparse())], {}, "'a'"),
        ([("a", torch.nn.LazyLinear(3).weight)], {}, "lazy"),
    ],
)
def test_what_cannot_be_placed_is_refused_by_name(tensors: list, options: dict, named_thing: str) -> None:
    with pytest.raises(ConfigError, match=named_thing):
        ChunkLayout.build(tensors, **{"chunk_numel": 1024, "itemsize": 4, **options})
