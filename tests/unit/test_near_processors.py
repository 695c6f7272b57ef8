"""What the runtime does on the CPU for a GPU, it does on the processors near that GPU."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from gpu_harness import SMALL_CHUNKS, GpuModel, network, optimizer_of, simulated, train

from gemini import _C, ManagedModel
from gemini.optim import managed_groups

ALLOWED = sorted(os.sched_getaffinity(0))

pytestmark = pytest.mark.skipif(len(ALLOWED) < 2, reason="one processor: there is none to choose")


def _threads_on(processors: set[int]) -> int:
    """Return how many threads of this process may run on ``processors`` and nowhere else."""
    count = 0
    for task in Path("/proc/self/task").iterdir():
        try:
            count += os.sched_getaffinity(int(task.name)) == processors
        except ProcessLookupError:
            continue  # it has just ended
    return count


def _trained(near: tuple[int, ...], **options: Any) -> list[float]:
    gpu = simulated(processors=near)
    blocks = {"device_bytes": 14 * gpu.block_bytes, "non_model_bytes": 0, **SMALL_CHUNKS}
    with GpuModel(network(), device=gpu, **blocks, **options) as model:
        ratio = None if "disk_dir" in options else 0.0
        losses = train(model, optimizer_of(model, gpu_margin_mem_ratio=ratio), gpu.torch_device)
        if near and "disk_dir" in options:
            assert _threads_on(set(near)) == 2  # one of each direction
        return losses


def test_the_cpu_updates_states_near_their_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    where: list[tuple[int, ...]] = []
    step = _C.adam_step

    def noted(*managed_groups: Any, **options: Any) -> bool:
        where.append(tuple(options["processors"]))
        return step(*managed_groups, **options)

    host_bytes = 64 * 2**16
    want = _trained((), host_bytes=host_bytes)
    monkeypatch.setattr(_C, "adam_step", noted)
    assert _trained((ALLOWED[-1],), host_bytes=host_bytes) == want
    assert set(where) >= {(ALLOWED[-1],)}
    assert sorted(os.sched_getaffinity(0)) == ALLOWED


def test_transfers_to_disk_run_near_their_gpu(tmp_path: Path) -> None:
    disk = {"host_bytes": 0, "disk_dir": tmp_path}
    assert _trained((ALLOWED[-1],), **disk) == _trained((), **disk)
    assert sorted(os.sched_getaffinity(0)) == ALLOWED


@pytest.mark.parametrize(
    ("ranks", "threads", "warns"), [(1, 1, True), (1, 2, False), (len(ALLOWED), 1, False)]
)
def test_one_thread_where_ranks_have_processors_for_more_is_told(
    ranks: int, threads: int, warns: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    sharding = SimpleNamespace(peers=SimpleNamespace(ranks_on_this_host=ranks))
    device = SimpleNamespace(processors=tuple(ALLOWED))
    parts = SimpleNamespace(manager=SimpleNamespace(sharding=sharding), device=device)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    managed_groups._warn_of_one_thread(cast(ManagedModel, parts))
    assert [f"OMP_NUM_THREADS={len(ALLOWED)}" in each.getMessage() for each in caplog.records] == [
        True
    ] * warns
