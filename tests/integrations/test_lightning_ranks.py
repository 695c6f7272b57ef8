"""Over ranks GeminiStrategy trains as Lightning's DDPStrategy does; clipping and files are those of all."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("lightning", reason="only the extra 'test' brings it")

sys.path.insert(0, str(Path(__file__).parents[1] / "parallel"))

from lightning_runs import run
from processes import close_workers, run_on_ranks


@pytest.fixture(autouse=True, scope="module")
def _workers_end() -> Any:
    yield
    close_workers()


def _on_ranks(directory: str) -> list[Any]:
    """Train by either strategy, then with clipping, in one go and after resuming; return all results."""
    rank = torch.distributed.get_rank()
    said = {"LOCAL_RANK": str(rank), "NODE_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29556"}
    os.environ.update(said)
    path = Path(directory)
    options: dict[str, Any] = {"devices": 2, "gemini": {"device_bytes": "200KiB"}}
    try:
        results = [run(path, managed=managed, ordinary="ddp", **options) for managed in (False, True)]
        options |= {"gradient_clip_val": 0.1, "accumulate_grad_batches": 2}
        results.append(run(path, managed=True, **options))
        first, _, _ = run(path, managed=True, **options, max_epochs=1)
        first.save_checkpoint(path / "run.ckpt")
        results.append(run(path, managed=True, **options, resume=path / "run.ckpt"))
    finally:
        for name in said:
            del os.environ[name]
    return [(figures, whole(module)) for _, module, figures in results]


def whole(module: Any) -> dict[str, torch.Tensor]:
    handle = vars(module).get("_gemini", module)
    return {name: value.clone() for name, value in handle.state_dict().items()}


def test_weights_are_those_of_ddp_and_resuming_is_as_not_stopping(tmp_path: Path) -> None:
    ranks = run_on_ranks(_on_ranks, 2, str(tmp_path), timeout=170.0)
    for ddp, ours, clipped, resumed in ranks:
        assert ours[0] == ddp[0]
        assert_equal(ours[1], ddp[1])
        assert resumed[0] == clipped[0][-len(resumed[0]) :]
        assert_equal(resumed[1], clipped[1])
        assert clipped[0] != ours[0]
    assert_equal(ranks[0][2][1], ranks[1][2][1])


def assert_equal(got: dict[str, torch.Tensor], want: dict[str, torch.Tensor]) -> None:
    assert got.keys() == want.keys()
    assert all(torch.equal(value, want[name]) for name, value in got.items())
