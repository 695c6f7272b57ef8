"""``gemini bench gpu --only peers``: who is compared, and by what."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from bench_gpu_harness import figures, in_process

from gemini_bench import gpu_offloaders, gpu_peers
from gemini_bench.gpu_device import SIMULATED
from gemini_bench.session import Session, WorkerRun
from gemini_bench.watch import Ending, WatchedRun


@pytest.mark.parametrize(("ours", "nbytes", "met"), [(1.0, 100, True), (1.01, 101, False)])
def test_ours_is_judged_by_each_peer_that_is_here(ours: float, nbytes: int, met: bool) -> None:
    peer = {"absent": None, "step_seconds": [1.0], "host_bytes": 100}
    found = dict.fromkeys(gpu_offloaders.OFFLOADERS, peer) | {gpu_offloaders.TORCHAO: {"absent": "not here"}}
    mine = {"absent": None, "step_seconds": [ours], "host_bytes": nbytes, "num_parameters": 1}
    table = figures(gpu_peers.rows({gpu_peers.OURS: mine, **found}))
    for name in (gpu_offloaders.FSDP2, gpu_offloaders.DEEPSPEED):
        assert table[f"step, ours / {name}"].met is met
        assert table[f"host memory, ours / {name}"].met is met
    assert table["step, ours / torchao: not measured, not here"].met is None


def test_a_peer_that_fails_says_so_and_the_others_go_on(tmp_path: Path) -> None:
    def failing(task: str, options: dict[str, Any], **watch: Any) -> WorkerRun:
        if options["name"] == gpu_offloaders.FSDP2:
            return WorkerRun(None, WatchedRun(Ending.FAILED, 1, 0.1, 0, "", "Traceback\nRuntimeError: no"))
        return in_process(task, options, **watch)

    result = gpu_peers.run(Session(tmp_path, quick=True, run=failing), SIMULATED)
    assert any(row.what.endswith("it failed: RuntimeError: no") for row in result.rows)
    assert f"step, {gpu_peers.OURS}" in figures(result.rows)


def test_a_peer_that_computes_something_else_is_not_compared_and_the_others_are(tmp_path: Path) -> None:
    ours = {
        "model": {},
        "num_parameters": 1,
        "losses": [1.0],
        "step_seconds": [1.0],
        "host_bytes": 1,
        "absent": None,
    }
    other, *agreeing = gpu_peers.OFFLOADERS

    def trained(_task: str, options: dict[str, Any], **_watch: Any) -> WorkerRun:
        found = {**ours, "losses": [2.0]} if options["name"] == other else ours
        return WorkerRun(found, WatchedRun(Ending.FINISHED, 0, 0.1, 0, "", ""))

    result = gpu_peers.run(Session(tmp_path, quick=True, run=trained), SIMULATED)
    steps = [row for row in result.rows if row.what.startswith(f"step, {gpu_peers.OURS} /")]
    assert [row.what for row in steps if row.met is None] == [steps[0].what]
    assert "the losses of" in steps[0].what
    assert len(steps) == 1 + len(agreeing)
