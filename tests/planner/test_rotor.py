"""Rotor's schedules are the best of all that keep what they store, fit their budget, and get no slower with
a larger one."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from math import comb

import pytest

from gemini.planner.rotor import Act, Chain, ChainBlock, Item, Rotor, Schedule, blocks_of, replay


def drawn(seed: int, count: int, scale: int = 1) -> Chain:
    draw = random.Random(seed)
    blocks = []
    for _ in range(count):
        output = draw.randint(1, 4) * scale
        kept = output + draw.randint(0, 6) * scale
        extra, behind = draw.randint(0, 3) * scale, draw.randint(0, 4) * scale
        blocks.append(
            ChainBlock(
                draw.randint(1, 9), draw.randint(1, 9), output, kept, extra, behind, draw.choice((None, 0))
            )
        )
    return Chain(tuple(blocks), draw.randint(0, 4) * scale)


@cache
def every_order(first: int, last: int) -> tuple[tuple[Item, ...], ...]:
    """Return all persistent schedules of some blocks, whatever they take."""
    if last - first == 1:
        return ((first,),)
    found: list[tuple[Item, ...]] = [(first, *rest) for rest in every_order(first + 1, last)]
    for cut in range(first + 1, last):
        found += [(group, *rest) for group in every_order(first, cut) for rest in every_order(cut, last)]
    return tuple(found)


def exhaustive(chain: Chain) -> list[tuple[int, float]]:
    """Return bytes and seconds of all persistent schedules, as a replay counts them."""
    orders = every_order(0, len(chain.blocks))
    replays = (replay(chain, list(Schedule(each, 0.0, 0).actions())) for each in orders)
    return sorted((nbytes, seconds) for seconds, nbytes in replays)


def chains() -> Iterator[Chain]:
    for seed in range(60):
        yield drawn(seed, 1 + seed % 6, 1 if seed % 2 else 1_000_003)


def test_it_finds_what_an_exhaustive_search_finds_and_nothing_where_that_finds_nothing() -> None:
    for chain in chains():
        every, rotor = exhaustive(chain), Rotor(chain)
        assert rotor.least_bytes() == every[0][0]
        assert rotor.schedule(every[0][0] - 1) is None
        for budget in sorted({nbytes for nbytes, _ in every}):
            found = rotor.schedule(budget)
            assert found is not None
            assert found.seconds == min(seconds for nbytes, seconds in every if nbytes <= budget)


def test_a_replay_takes_what_was_said_and_no_more_than_the_budget() -> None:
    for chain in (*chains(), drawn(1, 24), drawn(2, 40, 12_345)):
        rotor = Rotor(chain, slots=64)
        least = rotor.least_bytes()
        for budget in range(least, 6 * least, max(1, least // 3)):
            found = rotor.schedule(budget)
            assert found is not None
            seconds, nbytes = replay(chain, list(found.actions()))
            assert seconds == pytest.approx(found.seconds)
            assert nbytes <= found.needed_bytes <= budget


def test_a_larger_budget_is_never_slower() -> None:
    for chain in (*chains(), drawn(3, 30, 77_777)):
        rotor = Rotor(chain, slots=32)
        least = rotor.least_bytes()
        times = [rotor.schedule(least + step * least // 7) for step in range(60)]
        seconds = [each.seconds for each in times if each is not None]
        assert len(seconds) == 60
        assert seconds == sorted(seconds, reverse=True)


@pytest.mark.parametrize("checkpoints", range(1, 6))
def test_equal_blocks_with_room_for_checkpoints_alone_run_as_often_as_the_binomials_say(
    checkpoints: int,
) -> None:
    # Griewank and Walther: with c checkpoints l steps take r l - C(c + r, r - 1) more forward passes than the
    # one before each backward, r the least number with C(c + r, c) >= l.
    tape = 100
    for length in range(1, 16):
        block = ChainBlock(1, 0, 1, tape)
        repeats = next(r for r in range(length + 1) if comb(checkpoints + r, checkpoints) >= length)
        wanted = repeats * length - (comb(checkpoints + repeats, repeats - 1) if repeats else 0)
        # Beside the checkpoints: the input of the block that runs, what it keeps, and a gradient.
        found = Rotor(Chain((block,) * length, 1)).schedule(checkpoints + tape + 2)
        assert found is not None
        assert found.seconds == wanted + length


def test_with_room_for_everything_nothing_runs_twice() -> None:
    chain = drawn(5, 12)
    found = Rotor(chain).schedule(10**6)
    assert found is not None
    assert found.items == tuple(range(12))
    assert [act for act, _ in found.actions()] == [Act.KEEP] * 12 + [Act.BACKWARD] * 12


def test_a_replay_refuses_what_cannot_run() -> None:
    chain = drawn(0, 2)
    with pytest.raises(ValueError, match="input is not there"):
        replay(chain, [(Act.KEEP, 1)])
    with pytest.raises(ValueError, match="what it needs is not there"):
        replay(chain, [(Act.CHECKPOINT, 0), (Act.KEEP, 1), (Act.BACKWARD, 0)])
    with pytest.raises(ValueError, match="block 1 has no backward pass"):
        replay(chain, [(Act.KEEP, 0), (Act.KEEP, 1)])


def left_and_most(chain: Chain, items: tuple[Item, ...]) -> tuple[int, int]:
    """Return what forward leaves of a micro-batch, and the most that it takes alone, both without input."""
    blocks, before, most, left = chain.blocks, 0, 0, 0
    for item in items:
        own = blocks_of(item)
        if isinstance(item, int):
            block = blocks[item]
            behind = block.output_bytes + block.kept_bytes + block.backward_extra
            most = max(most, left + block.keeping_bytes, left + behind)
            left += block.kept_bytes
            continue
        given = 0
        for at in own:
            most = max(most, left + given + blocks[at].output_bytes + blocks[at].extra)
            given = blocks[at].output_bytes
        inner = Chain(blocks[own[0] : own[-1] + 1])
        shifted = _shifted(item, own[0])
        most = max(most, left + replay(inner, list(Schedule(shifted, 0.0, 0).actions()))[1])
        left += given
    return left, max(most, before)


def _shifted(items: tuple[Item, ...], by: int) -> tuple[Item, ...]:
    return tuple(each - by if isinstance(each, int) else _shifted(each, by) for each in items)


@pytest.mark.parametrize("others", [0, 1, 3, 7])
def test_a_stage_with_several_micro_batches_keeps_within_its_budget(others: int) -> None:
    fitted = 0
    for seed in range(7):
        chain = drawn(seed, 5)
        rotor = Rotor(chain)
        total = sum(block.kept_bytes for block in chain.blocks)
        whole = (others + 1) * (chain.input_bytes + total) + 20
        for budget in range(whole // 6, whole, max(1, whole // 9)):
            found = rotor.spread(budget, others)
            if found is None:
                continue
            fitted += 1
            left, most = left_and_most(chain, found.items)
            assert (others + 1) * chain.input_bytes + others * left + most <= budget
            assert sorted(at for item in found.items for at in blocks_of(item)) == list(range(5))
        best = rotor.spread(2 * whole, others)
        assert best is not None
        assert best.items == tuple(range(5))
    assert fitted > 20


def test_several_micro_batches_in_little_room_share_one_input_for_a_group() -> None:
    # Six blocks, eight micro-batches: an input for every block has no room, one for two blocks has, and costs
    # no more forward passes.
    block = ChainBlock(1.0, 2.0, 10, 40, 0, 0)
    rotor = Rotor(Chain((block,) * 6, 10))
    every_input = 8 * 70 + 50
    found = rotor.spread(every_input - 60, 7)
    assert found is not None
    assert found.seconds <= 6 * 4.0
    assert max(len(blocks_of(item)) for item in found.items) > 1
    one = replace(block, kept_bytes=10)
    kept = Rotor(Chain((one,) * 6, 10)).spread(every_input, 7)
    assert kept is not None
    assert kept.seconds == 6 * 3.0
