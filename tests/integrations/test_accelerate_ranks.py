"""Over ranks GeminiAccelerator leaves ZeRO-3 alone, and Accelerate's own does no harm."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

accelerate = pytest.importorskip("accelerate", reason="the extra 'hf' is not installed")

sys.path.insert(0, str(Path(__file__).parents[1] / "parallel"))

from accelerate_runs import TIGHT, assert_equal, run  # noqa: E402
from processes import close_workers, run_on_ranks  # noqa: E402

from gemini.errors import ConfigError  # noqa: E402
from gemini.integrations.accelerate import GeminiAccelerator  # noqa: E402


@pytest.fixture(autouse=True, scope="module")
def _workers_end() -> Any:
    yield
    close_workers()


def _as_ranks(*runs: dict[str, Any]) -> list[Any]:
    """Make each run on this rank; return what it does, or what it raised."""
    rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
    said = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "MASTER_ADDR": "127.0.0.1"}
    os.environ.update({name: str(value) for name, value in said.items()}, MASTER_PORT="29555")
    results: list[Any] = []
    try:
        for options in runs:
            kind = GeminiAccelerator if options.pop("ours", False) else accelerate.Accelerator
            try:
                results.append(run(kind, **options))
            except ConfigError as error:
                results.append(str(error))
            accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
            accelerate.state.GradientState._reset_state()
    finally:
        for name in (*said, "MASTER_PORT"):
            del os.environ[name]
    return results


@pytest.mark.dear("ranks import accelerate and train twice")
@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_weights_are_those_of_distributed_data_parallel(precision: str) -> None:
    options = {"clip": None, "mixed_precision": precision}
    runs = [{"managed": False, **options}, {"managed": True, "ours": True, **options}]
    runs.append({**runs[1], "gemini": TIGHT})  # managed by prepare()
    for want, *others in run_on_ranks(_as_ranks, 2, *runs):
        for got in others:
            assert (want[2], got[2]) == ("DistributedDataParallel", "Sequential")
            assert got[0] == want[0]
            assert_equal(got[1], want[1])


def test_clipping_and_resuming_are_the_same_on_all_ranks(tmp_path: Path) -> None:
    state = str(tmp_path / "state")
    runs = [{"managed": True, "ours": True, "save": state}, {"managed": True, "ours": True, "load": state}]
    first, second = run_on_ranks(_as_ranks, 2, *runs)
    for want, got in (first, second):
        assert got[0] == want[0][-len(got[0]) :]
        assert_equal(got[1], want[1])
    assert_equal(first[0][1], second[0][1])


def test_accelerates_own_trains_and_does_not_clip_in_silence() -> None:
    runs = [{"managed": False, "clip": None}, {"managed": True, "clip": None}, {"managed": True}]
    for want, got, refused in run_on_ranks(_as_ranks, 2, *runs):
        assert_equal(got[1], want[1])
        assert "clip_grad_by_norm" in refused
