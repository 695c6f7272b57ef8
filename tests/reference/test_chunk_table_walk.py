"""Long random walks of the same machine: they reach states that hypothesis' short examples seldom do."""

from __future__ import annotations

import random

import pytest
from test_chunk_table import TableMachine

NUM_STEPS = 150


def picks(random_: random.Random, at_least: int = 0) -> list[int]:
    return [random_.randint(0, 11) for _ in range(random_.randint(at_least, 3))]


def take_step(machine: TableMachine, random_: random.Random) -> None:
    """Call one of the machine's rules, with arguments that keep most accesses possible."""
    flip = random_.random() < 0.5
    which = random_.randint(0, 11)
    uses = [(picks(random_, 1)[:2], random_.random() < 0.5) for _ in range(random_.randint(0, 6))]
    reserve = [random_.choice([0, 0, 0, 1, 2, 5]) for _ in range(40)]
    rules = [
        lambda: len(machine.open) < 2 and machine.access_either(picks(random_), traced=flip),
        lambda: machine.open and machine.ensure(which=which),
        lambda: machine.open and machine.progress(which=which, order=random_),
        lambda: machine.open and machine.release(which=which, dirty=flip),
        lambda: machine.model.flights and machine.end_one(which=which, succeeded=flip),
        lambda: machine.model.flights and machine.end_one(which=which, succeeded=True),
        lambda: machine.run_operators(uses=uses, order=random_, num_prefetch=which % 4),
        lambda: machine.run_operators(uses=uses, order=random_, num_prefetch=2),
        lambda: machine.prefetch(max_in_flight=which % 4),
        lambda: machine.free(picks=picks(random_, 1)),
        machine.take_all_off_device,
        machine.next_step,
        lambda: machine.plan_the_recorded_step(reserve=reserve),
        lambda: machine.set_limit(nbytes=which),
    ]
    rare = [lambda: machine.release_all(dirty=flip), machine.plan_nothing]
    random_.choice(rare if random_.random() < 0.03 else rules)()


@pytest.mark.parametrize("seed", range(12))
def test_random_walks_agree_with_the_reference_model(seed: int) -> None:
    random_ = random.Random(seed)
    for _ in range(15):
        machine = TableMachine()
        machine.build(
            device=random_.randint(4, 10),
            host=random_.randint(0, 8),
            disk=random_.choice([0, 4, 24, 24]),
            sizes=[random_.randint(1, 3) for _ in range(random_.randint(3, 6))],
            split=random_.randint(0, 2),
        )
        for _ in range(NUM_STEPS):
            take_step(machine, random_)
            machine.books_agree()
            machine.step_agrees()
