"""The chunk table's rates of use are those of the reference that the policies were compared with."""

from __future__ import annotations

import random

import pytest

from gemini import _C
from gemini.errors import StateError
from gemini_bench.use_rate import UseRate

SIZES = (8, 5)


def table_with_choices() -> tuple[_C.ChunkTable, list[list[int]]]:
    table = _C.ChunkTable(1000, 0, 0)
    choices = [[table.add_chunk(1) for _ in range(size)] for size in SIZES]
    for chunks in choices:
        for chunk in chunks:
            table.add_tensor(chunk)  # of the same number
        table.add_choice([[chunk] for chunk in chunks])
    moments = [[chunks[0]] for chunks in choices]
    table.set_schedule(_C.Schedule(moments, [0] * len(moments), table.num_chunks()))
    return table, choices


@pytest.mark.parametrize("seed", range(4))
def test_expected_uses_are_those_of_the_reference_number_for_number(seed: int) -> None:
    table, choices = table_with_choices()
    reference = UseRate(SIZES)
    draw = random.Random(seed)
    weights = [[1 / (1 + expert) ** (seed / 2) for expert in range(size)] for size in SIZES]
    for number in range(300):
        table.begin_step()
        for choice, chunks in enumerate(choices):
            if seed == 3 and number % 50 == 0:
                draw.shuffle(weights[choice])  # other favourites
            used = set(draw.choices(range(len(chunks)), weights[choice], k=2))
            for expert in used:  # an operator each: they are one moment
                table.access([chunks[expert]])
                table.release([chunks[expert]], False)
            reference.note(choice, used)
        assert table.moment() == len(choices)
        table.begin_step()
        for choice, chunks in enumerate(choices):
            found = [table.moments_passed_by(chunk) for chunk in chunks]
            assert found == [
                reference.score(choice, expert, 0, len(choices)) for expert in range(len(chunks))
            ]


def test_a_chunk_of_no_choice_passes_no_moment_by() -> None:
    table, _ = table_with_choices()
    assert table.moments_passed_by(table.add_chunk(1)) == 0


def test_a_certain_choice_is_expected_whole_at_its_next_moment() -> None:
    table, choices = table_with_choices()
    block = table.add_chunk(1)
    table.add_choice([[block], [table.add_chunk(1)]], certain=True)
    assert table.moments_passed_by(block) == 0
    assert table.moments_passed_by(choices[0][0]) > 0  # of the others only as far as they were used


def test_a_chunk_is_in_one_choice_at_most() -> None:
    table, choices = table_with_choices()
    with pytest.raises(StateError, match="is in a choice already"):
        table.add_choice([[choices[0][0]], [table.add_chunk(1)]])
    with pytest.raises(StateError, match="no chunk"):
        table.add_choice([[10**6]])
