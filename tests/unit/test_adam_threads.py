"""Who shares an update: the threads that torch computes with, where there are any."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from gemini.optim import CPUAdam

TESTS = Path(__file__).parent.parent
NUMEL = 3_000_000

_PROGRAM = f"""
import os, sys, time
sys.path.insert(0, {str(TESTS)!r})
import torch
from gemini.optim import CPUAdam

torch.set_num_threads(2)
param = torch.ones({NUMEL}, requires_grad=True)
param.grad = torch.ones({NUMEL})
optimizer = CPUAdam([param])

def seconds():
    # Of every thread of this process that computes: in nanoseconds.
    return {{
        task: int(open(f"/proc/self/task/{{task}}/schedstat").read().split()[0])
        for task in os.listdir("/proc/self/task")
    }}
"""


def run(program: str) -> str:
    """Return what a program prints that has a parameter and its optimizer, on two threads."""
    done = subprocess.run(
        [sys.executable, "-c", _PROGRAM + program], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def started() -> tuple[torch.Tensor, CPUAdam]:
    """Return a parameter and its optimizer, after one step."""
    param = torch.linspace(-1, 1, NUMEL).requires_grad_()
    param.grad = torch.linspace(2, -1, NUMEL)
    optimizer = CPUAdam([param], weight_decay=0.1)
    optimizer.step()
    return param.detach(), optimizer


def updated() -> torch.Tensor:
    """Return a parameter after two steps."""
    param, optimizer = started()
    optimizer.step()
    return param


@pytest.fixture
def two_threads() -> object:
    """Have torch use two threads during a test."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def in_a_child(work: Callable[[], bool]) -> bool:
    """Return what ``work`` does in a forked child; False for any exception or crash there."""
    child = os.fork()
    if child == 0:
        code = 1
        signal.alarm(60)  # instead of waiting for ever
        try:
            code = 0 if work() else 1
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_torchs_threads_do_the_work() -> None:
    program = """
optimizer.step()
param.detach().exp()
time.sleep(0.3)  # they are asleep
before = seconds()
for _ in range(20):
    optimizer.step()
after = seconds()
print(after.keys() == before.keys(), sum(after[task] - before[task] > 10**6 for task in before))
"""
    assert run(program) == "True 2"


def test_where_the_system_refuses_threads_the_update_is_made_all_the_same() -> None:
    program = """
import errno, refused_calls
try:
    refused_calls.refuse(refused_calls.NEW_THREAD, errno.EAGAIN)
except OSError:
    print("0.999")
else:
    optimizer.step()
    print(f"{param[-1].item():.3f}")
"""
    assert run(program) == "0.999"


@pytest.mark.usefixtures("two_threads")
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_forked_child_updates_with_the_same_bits() -> None:
    want = updated().numpy()
    param, optimizer = started()

    def step() -> bool:  # with nothing of torch that takes several threads: it would wait for them for ever
        optimizer.step()
        return bool((param.numpy() == want).all())

    assert in_a_child(step)
    optimizer.step()
    assert (param.numpy() == want).all()


@pytest.mark.usefixtures("two_threads")
def test_threads_that_update_at_once_get_the_same_bits() -> None:
    want = updated()
    found: list[torch.Tensor] = []
    callers = [threading.Thread(target=lambda: found.append(updated())) for _ in range(3)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert [torch.equal(each, want) for each in found] == [True] * 3


def test_options_and_counts_that_change_between_steps_are_taken() -> None:
    def train(make: Callable[..., torch.optim.Optimizer]) -> list[torch.Tensor]:
        params = [torch.full((64,), 1.0 + i, requires_grad=True) for i in range(3)]
        optimizer = make([{"params": params[:2]}, {"params": params[2:], "weight_decay": 0.5}], lr=0.1)
        for step in range(6):
            for param in params:
                param.grad = torch.full((64,), 0.5 - step / 7)
            if step == 2:
                optimizer.param_groups[1]["lr"] = 0.3
            if step == 4:
                optimizer.state[params[1]]["step"].fill_(40)
            optimizer.step()
        assert [int(optimizer.state[param]["step"]) for param in params] == [6, 42, 6]
        return [param.detach() for param in params]

    want = train(lambda *given, **options: torch.optim.AdamW(*given, foreach=False, **options))
    # torch's groups have their own default of weight_decay.
    got = train(lambda *given, **options: CPUAdam(*given, weight_decay=0.01, **options))
    torch.testing.assert_close(got, want, rtol=1e-6, atol=0)
