"""What check_fits accepts is never refused, however DEVICE, HOST and DISK share it."""

from __future__ import annotations

import random
from contextlib import suppress

import pytest

from gemini import _C
from gemini.errors import OutOfBudgetError
from gemini.placement.policies import ModelDataSize, TierCapacity, check_fits

NUM_STEPS = 12
DEVICE, HOST, DISK = _C.Tier.DEVICE, _C.Tier.HOST, _C.Tier.DISK


class Executor:
    """Does what the table says; transfers end in any order."""

    def __init__(self, table: _C.ChunkTable, random_: random.Random) -> None:
        self._table = table
        self._random = random_
        self._flights: list[int] = []

    def use(self, chunks: list[int], *, dirty: bool) -> None:
        """Use chunks, each of one tensor, to the end."""
        table = self._table
        self._note(table.access(chunks) or ())
        while not table.ready(chunks):
            if self._flights:
                table.complete(self._flights.pop(self._random.randrange(len(self._flights))))
            self._note(table.ensure(chunks))
        table.release(chunks, dirty)
        self._note(table.prefetch(self._random.randint(0, 3)))

    def _note(self, actions: tuple[_C.Action, ...]) -> None:
        self._table.check_invariants()
        self._flights += [action.id for action in actions if action.id]


def some_step(sizes: list[int], working_set: int, random_: random.Random) -> list[tuple[list[int], bool]]:
    """Return uses of chunks, each at most as large as the working set, and whether they are written."""
    uses = []
    for _ in range(random_.randint(10, 40)):
        wanted: list[int] = []
        for chunk in random_.sample(range(len(sizes)), len(sizes)):
            if sum(sizes[one] for one in wanted) + sizes[chunk] <= working_set and random_.random() < 0.7:
                wanted.append(chunk)
        uses.append((sorted(wanted), random_.random() < 0.5))
    return uses


def accepted(size: ModelDataSize, random_: random.Random) -> TierCapacity:
    """Return a HOST and a DISK of any size below that of the model, and the least DEVICE accepted
    with them."""
    host, disk = (random_.randint(0, size.total_bytes - 1) for _ in range(2))
    for device in range(size.working_set_bytes, size.total_bytes + 1):
        capacity = TierCapacity(device, host, disk, 0)
        with suppress(OutOfBudgetError):
            check_fits(size, capacity)
            return capacity
    raise AssertionError("everything on DEVICE is refused")


# Of 8000 seeds those where the last room is the place on DISK of what the same access evicts to HOST.
RARE = (256, 907, 3832, 5303, 5866, 7874)


@pytest.mark.parametrize("seed", [*range(200), *RARE])
def test_what_fits_by_its_bytes_is_never_refused(seed: int) -> None:
    random_ = random.Random(seed)
    sizes = [random_.randint(1, 4) for _ in range(random_.randint(4, 12))]
    working_set = random_.randint(max(sizes), min(3 * max(sizes), sum(sizes)))
    capacity = accepted(ModelDataSize(sum(sizes), working_set, max(sizes)), random_)
    table = _C.ChunkTable(capacity.device_bytes, capacity.host_bytes, capacity.disk_bytes)
    for nbytes in sizes:
        table.add_tensor(table.add_chunk(nbytes))
    executor = Executor(table, random_)
    for chunk in range(len(sizes)):
        executor.use([chunk], dirty=True)
    step = some_step(sizes, working_set, random_)
    for index in range(NUM_STEPS):
        table.begin_step()
        for wanted, dirty in step:
            executor.use(wanted, dirty=dirty)
        if index == NUM_STEPS // 2:
            table.set_schedule(_C.Schedule(table.record(), [], len(sizes)))
        table.end_step()
    for tier in (DEVICE, HOST, DISK):
        assert table.peak(tier) <= table.budget(tier)


@pytest.mark.parametrize("tiers", [(550, 600, 0), (550, 0, 600), (900, 300, 0), (600, 310, 300)])
def test_more_of_a_tier_is_never_refused(tiers: tuple[int, int, int]) -> None:
    size = ModelDataSize(total_bytes=1000, working_set_bytes=100, largest_chunk_bytes=50)
    check_fits(size, TierCapacity(*tiers, 0))
    for tier in range(3):
        for more in (1, 10, 49, 50, 51, 500):
            larger = list(tiers)
            larger[tier] += more
            check_fits(size, TierCapacity(*larger, 0))
