"""A rank that waits in vain hears for whom, and why, soon."""

from __future__ import annotations

import ctypes
import logging
import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

import pytest
import torch
from processes import RanksFailed, run_on_ranks
from sharded_harness import WIDTH, Recipe, mlp, wrap
from torch import distributed as dist

from gemini import GeminiDDP, GeminiOptimizer, StateError
from gemini.comm.groups import new_group
from gemini.comm.heartbeats import PATIENCE_VARIABLE, Heartbeats, RankState, meet_at_start
from gemini.parallel import Layout, Mesh
from gemini.parallel.zero import LowLevelZeroOptimizer

PATIENCE = 2.0
SOON = 8 * PATIENCE  # on a machine that does other things too
BACKENDS = ["gloo", None]  # None: one for each kind of device, as where a program names none


def _set_patience(seconds: float) -> None:
    os.environ[PATIENCE_VARIABLE] = str(seconds)


def _step(model: GeminiDDP, optimizer: GeminiOptimizer) -> None:
    optimizer.backward(model(torch.ones(2, WIDTH)).square().mean())
    optimizer.step()


def _fewer_batches(model: GeminiDDP, optimizer: GeminiOptimizer, odd: bool) -> None:
    for _ in range(1 if odd else 2):
        _step(model, optimizer)


def _skipped_step(model: GeminiDDP, optimizer: GeminiOptimizer, odd: bool) -> None:
    for batch in range(2):
        optimizer.backward(model(torch.ones(2, WIDTH)).square().mean())
        if not (odd and batch == 1):
            optimizer.step()


def _raises(model: GeminiDDP, optimizer: GeminiOptimizer, odd: bool) -> None:
    _step(model, optimizer)
    if odd:
        raise ValueError("a bad batch")
    _step(model, optimizer)


LEAVING: dict[str, tuple[Callable[..., None], str]] = {
    "one batch fewer": (_fewer_batches, "closed the model"),
    "a skipped step": (_skipped_step, "closed the model"),
    "an exception": (_raises, "ended with ValueError: a bad batch"),
}


def _leave(way: str) -> tuple[str, float]:
    model, optimizer = wrap(mlp, Recipe())
    odd, message, begin = dist.get_rank() == 1, "", 0.0
    try:
        with model:
            begin = time.monotonic()
            LEAVING[way][0](model, optimizer, odd)
    except (StateError, ValueError) as error:
        message = str(error)
    return message, time.monotonic() - begin


@pytest.mark.parametrize("way", LEAVING)
def test_a_rank_that_leaves_is_named_at_once_with_what_it_did_last(way: str) -> None:
    (told, seconds), (other, _), *rest = run_on_ranks(_leave, 3, way)
    assert f"rank 1 will not come: it {LEAVING[way][1]}" in told
    assert "the last one" in told
    assert "drop_last" in told
    assert seconds < 30  # half of the patience
    assert other == ("a bad batch" if way == "an exception" else "")
    assert "rank 1" in rest[0][0]


def _leave_low_level(way: str, stage: int) -> tuple[str, float]:
    torch.manual_seed(0)
    model = torch.nn.Linear(WIDTH, WIDTH)
    optimizer = LowLevelZeroOptimizer(torch.optim.Adam(model.parameters()), stage=stage)
    odd, begin = dist.get_rank() == 1, time.monotonic()

    def step(*, updates: bool = True) -> None:
        optimizer.backward(model(torch.ones(2, WIDTH)).square().mean())
        if updates:
            optimizer.step()

    try:
        step()
        if odd and way == "an exception":
            raise ValueError("a bad batch")
        if not (odd and way == "one batch fewer"):
            step(updates=not (odd and way == "a skipped step"))
    except (StateError, ValueError) as error:
        return str(error), time.monotonic() - begin
    finally:
        if odd and way != "an exception":
            optimizer.close()
    return "", time.monotonic() - begin


@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize(
    ("way", "reason"),
    {
        "one batch fewer": "closed its optimizer",
        "a skipped step": "closed its optimizer",
        "an exception": "let go of its optimizer",
    }.items(),
)
def test_low_level_zero_names_a_rank_that_leaves(way: str, reason: str, stage: int) -> None:
    (told, seconds), _, _ = run_on_ranks(_leave_low_level, 3, way, stage)
    assert f"rank 1 will not come: it {reason}" in told
    assert "the last one" in told
    assert seconds < 30


def _go_apart_while_gradients_are_sent(way: str, stage: int) -> tuple[str, float]:
    """Rank 1 sends gradients while rank 0 updates: no agreement comes before either."""
    _set_patience(PATIENCE)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), torch.nn.Linear(WIDTH, 4))
    optimizer = LowLevelZeroOptimizer(
        torch.optim.Adam(model.parameters()), stage=stage, overlap_communication=True
    )
    odd = dist.get_rank() == 1

    def backward() -> None:
        optimizer.backward(model(torch.ones(2, WIDTH)).square().mean())

    backward()
    optimizer.step()
    begin = time.monotonic()
    try:
        backward()
        if odd and way == "one backward pass more":
            backward()
        if not (odd and way == "a skipped step"):
            optimizer.step()
        backward()
    except StateError as error:
        return str(error), time.monotonic() - begin
    return "", 0.0


@pytest.mark.parametrize(("way", "stage"), [("one backward pass more", 2), ("a skipped step", 1)])
def test_gradients_that_are_sent_early_meet_no_other_call_in_silence(way: str, stage: int) -> None:
    for message, seconds in run_on_ranks(_go_apart_while_gradients_are_sent, 2, way, stage):
        assert re.search(r"ranks \[[01]\] wait in something else than rank [01], for each other", message)
        assert "agrees with the others on: step" in message
        assert "agrees with the others on: reduces gradients (backward, step)" in message
        assert PATIENCE <= seconds < SOON


def _give_gradients_up_on_one_rank() -> str:
    torch.manual_seed(0)
    model = torch.nn.Linear(WIDTH, WIDTH)
    optimizer = LowLevelZeroOptimizer(torch.optim.Adam(model.parameters()), stage=1)
    try:
        for _ in range(2):
            optimizer.backward(model(torch.ones(2, WIDTH)).square().mean())
            if dist.get_rank() == 0:
                optimizer.zero_grad()
            else:
                optimizer.step()
    except StateError as error:
        return str(error)
    return ""


def test_low_level_zero_raises_on_all_ranks_where_they_make_different_calls() -> None:
    for message in run_on_ranks(_give_gradients_up_on_one_rank, 2):
        assert "rank 0: reduces gradients" in message
        assert "rank 1: step with" in message


@contextmanager
def _rank_1_stopped(told: list[str]) -> Iterator[None]:
    """Stop rank 1 at the beginning of the block until rank 0 has left it; ``told`` gets the error of a rank,
    which is raised again."""
    pids: list[Any] = [None, None]
    dist.all_gather_object(pids, os.getpid())
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    try:
        yield
    except StateError as error:
        told.append(str(error))
        raise
    finally:
        if dist.get_rank() == 0:
            os.kill(pids[1], signal.SIGCONT)


def _stop_low_level(call: str) -> tuple[str, float]:
    _set_patience(PATIENCE)
    model = torch.nn.Linear(WIDTH, WIDTH)
    optimizer = LowLevelZeroOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), stage=2)
    told, begin = [""], time.monotonic()

    def step() -> None:
        optimizer.backward(model(torch.ones(2, WIDTH)).square().mean())
        optimizer.step()

    step()
    with suppress(StateError), _rank_1_stopped(told):
        if call == "state_dict":
            optimizer.state_dict()
        else:
            step()
    return told[-1], time.monotonic() - begin


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("call", ["step", "state_dict"])
def test_low_level_zero_names_a_stopped_rank(call: str, backend: str | None) -> None:
    (message, seconds), _ = run_on_ranks(_stop_low_level, 2, call, backend=backend)
    assert "rank 1 has given no sign of life for" in message
    assert PATIENCE <= seconds < SOON


def _stop_along_an_axis() -> tuple[str, float]:
    _set_patience(PATIENCE)
    told, begin = [""], time.monotonic()
    with suppress(StateError), Mesh(Layout(tp=2)) as mesh:
        axis = mesh.axis("tp")
        assert axis is not None
        axis.all_reduce(torch.ones(4))
        with _rank_1_stopped(told):
            axis.all_reduce(torch.ones(4))
    return told[-1], time.monotonic() - begin


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_collective_of_an_axis_names_a_stopped_rank(backend: str | None) -> None:
    (message, seconds), _ = run_on_ranks(_stop_along_an_axis, 2, backend=backend)
    assert "rank 1 has given no sign of life for" in message
    assert PATIENCE <= seconds < SOON


def _evaluate_alone() -> tuple[str, float]:
    _set_patience(PATIENCE)
    model, optimizer = wrap(mlp, Recipe())
    message, begin = "", 0.0
    with model:
        _step(model, optimizer)
        begin = time.monotonic()
        if dist.get_rank() == 0:
            try:
                with torch.no_grad():
                    model(torch.ones(2, WIDTH))
            except StateError as error:
                message = str(error)
        dist.barrier()
    return message, time.monotonic() - begin


def test_ranks_that_wait_for_each_other_in_different_calls_hear_of_it() -> None:
    (message, seconds), _ = run_on_ranks(_evaluate_alone, 2)
    assert "ranks [1] wait in something else than rank 0" in message
    assert "in a collective of the program's own" in message
    assert "test_heartbeats.py" in message
    assert "in _evaluate_alone" in message
    assert seconds < SOON


def _told_of_waits() -> tuple[str, float]:
    _set_patience(PATIENCE)
    begin = time.monotonic()
    try:
        # A rank that hears of the wait leaves the mesh, which tells the others along all axes.
        with Mesh(Layout(pp=2, tp=2)) as mesh:
            some, every = mesh.axis("tp"), mesh.axis("pp", "dp", "sp", "tp")
            assert some is not None
            assert every is not None
            every.all_reduce(torch.ones(4))
            begin = time.monotonic()
            (some if dist.get_rank() == 0 else every).all_reduce(torch.ones(4))
    except StateError as error:
        told = str(error), time.monotonic() - begin
        _leave_together()
        return told
    return "", 0.0


def _leave_together() -> None:
    """Wait until all ranks are here: a rank that leaves earlier breaks the connections of the others. Not by
    ``store.wait``, which keeps the interpreter, so that the others would not hear why this one is here."""
    store = dist.distributed_c10d._get_default_store()
    store.set(f"here {dist.get_rank()}", "")
    ends = time.monotonic() + 60
    while not store.check([f"here {rank}" for rank in range(dist.get_world_size())]):
        assert time.monotonic() < ends, "another rank did not come"
        time.sleep(0.05)


def test_ranks_that_wait_for_each_other_along_different_axes_hear_of_it() -> None:
    told = run_on_ranks(_told_of_waits, 4)
    assert any("for each other" in message.partition("By rank")[0] for message, _ in told)
    for message, seconds in told:
        assert "for each other" in message or "will not come" in message, message
        assert seconds < SOON


def _wait_for_one_that_is_busy() -> float:
    """Have one rank compute for longer than the patience while all others wait for it, along other axes."""
    _set_patience(PATIENCE / 2)
    with Mesh(Layout(pp=2, tp=2)) as mesh:
        rows, columns = mesh.axis("tp"), mesh.axis("pp")
        assert rows is not None
        assert columns is not None
        total = torch.ones(1)
        if dist.get_rank() == 3:
            time.sleep(2 * PATIENCE)
        rows.all_reduce(total)
        columns.all_reduce(total)
    return float(total)


def test_a_rank_that_is_busy_keeps_others_waiting_along_other_axes() -> None:
    assert run_on_ranks(_wait_for_one_that_is_busy, 4) == [4.0] * 4


def _busy_for_long() -> list[float]:
    """Keep one rank busy elsewhere for longer than the patience."""
    _set_patience(PATIENCE / 2)
    model, optimizer = wrap(mlp, Recipe())
    with model:
        _step(model, optimizer)
        if dist.get_rank() == 1:
            time.sleep(2 * PATIENCE)  # what is to be waited for
        _step(model, optimizer)
    return []


def test_a_rank_that_is_busy_may_take_its_time() -> None:
    assert run_on_ranks(_busy_for_long, 2) == [[], []]


def _in_one_call(seconds: float) -> None:
    """Keep the interpreter's lock for a while: no thread of Python has its turn."""
    ctypes.PyDLL(None).usleep(int(seconds * 1e6))


def _busy_in_one_call() -> list[str]:
    """Keep one rank in a call for longer than the patience; return what the other one is told meanwhile."""
    _set_patience(PATIENCE)
    told = Told()
    logging.getLogger("gemini.comm.heartbeats").addHandler(told)
    model, optimizer = wrap(mlp, Recipe())
    with model:
        _step(model, optimizer)
        if dist.get_rank() == 1:
            _in_one_call(3 * PATIENCE)
        _step(model, optimizer)
    return told.messages


class Told(logging.Handler):
    """Keeps what is logged."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Keep the message."""
        self.messages.append(record.getMessage())


def test_a_rank_in_one_call_that_keeps_the_interpreter_is_waited_for_and_named() -> None:
    told, nothing = run_on_ranks(_busy_in_one_call, 2)
    assert nothing == []
    assert any(re.search(r"rank 0 waits .* busy in one call .*: rank 1 \(\d+ s\)", each) for each in told)


def _stop_in_one_call() -> tuple[str, float]:
    """Stop a rank that keeps its interpreter's lock: it answers no longer."""
    _set_patience(PATIENCE)
    model, optimizer = wrap(mlp, Recipe())
    pids: list[Any] = [None, None]
    dist.all_gather_object(pids, os.getpid())
    begin, message = 0.0, ""
    try:
        with model:
            _step(model, optimizer)
            begin = time.monotonic()
            if dist.get_rank() == 1:
                signal.raise_signal(signal.SIGSTOP)
                _in_one_call(0.1)
            _step(model, optimizer)
    except StateError as error:
        message = str(error)
    if dist.get_rank() == 0:
        os.kill(pids[1], signal.SIGCONT)
    return message, time.monotonic() - begin


def test_a_rank_that_is_stopped_answers_no_longer() -> None:
    (message, seconds), _ = run_on_ranks(_stop_in_one_call, 2)
    assert "rank 1 has given no sign of life for" in message
    assert PATIENCE <= seconds < SOON


def _stop() -> tuple[str, float]:
    _set_patience(PATIENCE)
    model, optimizer = wrap(mlp, Recipe())
    told, begin = [""], time.monotonic()
    with suppress(StateError), model:
        _step(model, optimizer)
        with _rank_1_stopped(told):
            _step(model, optimizer)
    return told[-1], time.monotonic() - begin


def test_a_stopped_rank_is_named_after_the_patience() -> None:
    (message, seconds), (other, _) = run_on_ranks(_stop, 2)
    assert "rank 1 has given no sign of life for" in message
    # What it did last is of a moment up to a second before it was stopped.
    assert re.search(r"rank 1 last \w+ .*at \S+.py:\d+ in ", message)
    assert PATIENCE <= seconds < SOON
    assert "rank 0" in other


def _die() -> None:
    _set_patience(5 * PATIENCE)
    model, optimizer = wrap(mlp, Recipe())
    with model:
        _step(model, optimizer)
        if dist.get_rank() == 1:
            os._exit(3)
        _step(model, optimizer)


def test_a_killed_rank_is_named() -> None:
    with pytest.raises(RanksFailed) as failed:
        run_on_ranks(_die, 2, timeout=40)
    assert "StateError: rank 1 has given no sign of life" in str(failed.value)


class _EndsAsTheWaitIsGivenUp:
    """A collective that is over only after its wait has run into its limit."""

    def __init__(self, error: str) -> None:
        self._error, self._waits = error, 0

    def wait(self, _limit: timedelta) -> None:
        self._waits += 1
        if self._waits == 1:
            raise RuntimeError("Operation timed out!")
        if self._error:
            raise RuntimeError(self._error)

    def is_completed(self) -> bool:
        return self._waits > 0


def _wait_for(error: str) -> None:
    assert dist.group.WORLD is not None
    heartbeats = Heartbeats(dist.HashStore(), 0, 1, dist.group.WORLD)
    heartbeats.wait(_EndsAsTheWaitIsGivenUp(error), "adds up", lambda: None)


def test_a_collective_that_ends_while_its_wait_is_given_up_has_not_failed() -> None:
    run_on_ranks(_wait_for, 1, "")
    with pytest.raises(RanksFailed, match="a wire was cut"):
        run_on_ranks(_wait_for, 1, "a wire was cut")


def _begin(is_late: bool) -> str:
    if dist.get_rank() and is_late:
        time.sleep(2 * PATIENCE)
        return ""
    _set_patience(PATIENCE)
    try:
        meet_at_start()
    except StateError as error:
        return str(error)
    return ""


def test_a_rank_that_is_gone_before_ranks_see_each_other_is_waited_for_as_long_as_the_patience() -> None:
    assert run_on_ranks(_begin, 2, False) == ["", ""]
    begun = time.monotonic()
    found = run_on_ranks(_begin, 2, True)
    assert "a rank has joined and is gone" in found[0]
    assert "Rank 1 failed" in found[0]
    assert time.monotonic() - begun < SOON


def _without_its_store() -> str:
    class Gone:
        def add(self, _key: str, _number: int) -> int:
            raise dist.DistNetworkError("Failed to recv")

    before, dist.PrefixStore = dist.PrefixStore, lambda *_: Gone()  # type: ignore[assignment, misc]
    try:
        new_group([0], None)
    except StateError as error:
        return str(error)
    finally:
        dist.PrefixStore = before  # type: ignore[misc]
    return ""


def test_a_store_that_went_with_its_rank_is_named() -> None:
    assert "the rank that hosts the store is gone" in run_on_ranks(_without_its_store, 1)[0]


def test_a_sign_says_what_a_rank_did_last() -> None:
    state = RankState(3, 7, "saves or loads", left="closed the model")
    assert str(state) == "closed the model after 7 calls together; the last one saves or loads"
