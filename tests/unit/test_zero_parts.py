"""The parts of ZeRO that only compute: shares, rounds, the order of uses."""

from __future__ import annotations

from itertools import pairwise

import pytest

from gemini.comm.peers import Share
from gemini.errors import StateError
from gemini.sharding.gathered_chunks import NEVER, UseOrder
from gemini.sharding.rounds import WANTS, Ending, decode, encode, from_bits, refuse_difference, to_bits


@pytest.mark.parametrize("size", [2, 3, 7])
@pytest.mark.parametrize("numel", [1, 2047, 2048, 4097, 1_000_003])
def test_shares_cover_a_chunk_in_equal_parts(size: int, numel: int) -> None:
    whole = Share(0, size).whole_numel(numel)
    ranges = [Share(rank, size).range_of(whole) for rank in range(size)]
    assert numel <= whole < numel + size * 2048
    assert ranges[0][0] == 0
    assert ranges[-1][1] == whole
    assert all(before[1] == after[0] for before, after in pairwise(ranges))
    assert {(stop - start) for start, stop in ranges} == {whole // size}
    assert all(start % 2048 == 0 for start, _ in ranges)
    assert Share(0, size).whole_numel(whole) == whole


@pytest.mark.parametrize("size", [0, 1, 61, 62, 63, 124, 200])
def test_sets_survive_being_written_as_signed_integers(size: int) -> None:
    for members in ([], list(range(size)), list(range(0, size, 3)), list(range(max(0, size - 1), size))):
        words = to_bits(members, size)
        assert len(words) == len(to_bits([], size))
        assert all(0 <= word < 2**63 for word in words)
        assert from_bits(words) == members


def test_round_gathers_what_anybody_wants_once_and_first_wants_first() -> None:
    said = decode([encode(wants, [], 9) for wants in ([5, 3], [3, 7], [5])])
    assert said.wants == ((5, 3), (3, 7), (5,))
    assert said.gathers(range(3)) == [(3, [0, 1]), (5, [0, 2]), (7, [1])]
    assert said.gathers([1, 2]) == [(3, [0]), (5, [1]), (7, [0])]
    owners = {3: [0, 2], 5: [1], 7: [0, 1]}  # who has no part of a chunk asks for another one of that number
    assert said.gathers(range(3), owners.__getitem__) == [(3, [0]), (7, [1])]


def test_round_exchanges_what_every_rank_has_complete() -> None:
    said = decode([encode([], complete, 70) for complete in ([0, 65, 69], [65, 69, 3], [69, 65])])
    assert said.complete == (65, 69)


def test_round_is_the_last_when_every_rank_is_done() -> None:
    def all_done(*endings: Ending) -> bool:
        return decode([encode([], [], 1, ending=ending) for ending in endings]).all_done

    for ending in (Ending.COMPLETE, Ending.DISCARDED):
        assert all_done(ending, ending)
        assert not all_done(ending, Ending.NONE)


def test_rounds_refuse_ranks_that_give_up_what_others_use() -> None:
    endings = (Ending.COMPLETE, Ending.NONE, Ending.DISCARDED)
    with pytest.raises(
        StateError, match=r"ranks \[2\] give gradients up .* that ranks \[0\] are about to use"
    ):
        decode([encode([], [], 1, ending=ending) for ending in endings])


def test_rounds_refuse_ranks_in_different_steps() -> None:
    with pytest.raises(StateError, match=r"different steps, \[4, 4, 5\] by rank"):
        decode([encode([1], [], 1, step=step) for step in (4, 4, 5)])


def test_ranks_may_differ_where_one_gives_its_gradients_up() -> None:
    wants = encode([1], [], 3)
    with pytest.raises(StateError, match="ranks \\[1\\] run other operators"):
        refuse_difference([wants, encode([2], [], 3)])
    refuse_difference([wants, encode([], [], 3, ending=Ending.DISCARDED)])


def test_messages_of_all_ranks_are_equally_long() -> None:
    lengths = {len(encode(list(range(n)), list(range(n)), 100)) for n in range(WANTS + 1)}
    assert len(lengths) == 1


def _iterate(order: UseOrder, chunks: list[int]) -> None:
    order.begin()
    for chunk in chunks:
        order.note(chunk)
    order.end()


def test_nothing_is_foretold_before_the_first_iteration_has_ended() -> None:
    order = UseOrder()
    order.begin()
    order.note(4)
    assert order.next_use(4) == NEVER
    assert list(order.upcoming()) == []


def test_iteration_is_foretold_from_the_one_before() -> None:
    order = UseOrder()
    _iterate(order, [0, 1, 2, 1, 0])
    assert [order.next_use(chunk) for chunk in (0, 1, 2, 9)] == [0, 1, 2, NEVER]
    order.note(0)
    order.note(1)
    assert list(order.upcoming()) == [2, 1, 0]
    assert [order.next_use(chunk) for chunk in (0, 1, 2)] == [2, 1, 0]
    for chunk in (2, 1, 0):
        order.note(chunk)
    assert list(order.upcoming()) == []
    assert order.next_use(0) == NEVER


def test_skipped_and_unknown_uses_do_not_stop_the_foretelling() -> None:
    order = UseOrder()
    _iterate(order, [0, 1, 2, 3])
    order.note(2)  # 0 and 1 are left out
    assert list(order.upcoming()) == [3]
    order.note(9)
    assert order.next_use(3) == 0
    order.end()
    assert list(order.upcoming()) == [2, 9]


def test_iteration_without_uses_keeps_what_was_foretold() -> None:
    order = UseOrder()
    _iterate(order, [1, 0])
    _iterate(order, [])
    assert list(order.upcoming()) == [1, 0]


def test_what_is_forgotten_is_foretold_again_after_the_next_iteration() -> None:
    order, other = UseOrder(), UseOrder()
    _iterate(order, [0, 1, 2])
    assert order.digest != other.digest
    _iterate(other, [0, 1, 2])
    assert order.digest == other.digest
    order.forget()
    assert (order.digest, list(order.upcoming())) == (UseOrder().digest, [])
    _iterate(order, [2, 1])
    assert list(order.upcoming()) == [2, 1]


def test_round_says_whether_all_foretell_the_same() -> None:
    assert decode([encode([], [], 1, prediction_digest=7)] * 3).same_predictions
    assert not decode(
        [encode([], [], 1, prediction_digest=foretold) for foretold in (7, 7, 8)]
    ).same_predictions
