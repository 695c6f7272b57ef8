"""What ``gemini finetune --nproc`` says beforehand of each rank is what the rank then has."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers", reason="the extra 'hf' is not installed")
pytest.importorskip("bitsandbytes", reason="the extra 'quantized' is not installed")

sys.path.insert(0, str(Path(__file__).parents[1] / "parallel"))

from finetune_runs import small_run
from processes import close_workers, run_on_ranks

import gemini
from gemini.cli.finetune import forecast_lines, forecast_source
from gemini.comm.ranks import Rank, make_peers
from gemini.forecast.forecast import forecast_rank
from gemini.jobs.finetune.config import FineTuneConfig
from gemini.jobs.finetune.task import FineTuneTask
from gemini.runtime.config import GeminiConfig


@pytest.fixture(autouse=True, scope="module")
def _workers_end() -> Iterator[None]:
    yield
    close_workers()


def sizes_of(configs: list[FineTuneConfig]) -> list[Any]:
    """Return how much model data this rank has of each run, after a step."""
    peers = make_peers(None)
    assert peers is not None
    rank, found = Rank(peers.share.place, peers.share.world, peers.say), []
    for config in configs:
        task = FineTuneTask(config, Path("unused"), resume=False, scratch=None, rank=rank)
        engine = task.engine()
        task.step(engine, 0)
        found.append(dataclasses.replace(gemini.handle_of(engine.module).manager.size, operator_name=""))
        engine.close()
    return found


@pytest.mark.dear("two ranks import transformers")
def test_the_forecast_of_a_rank_has_the_sizes_of_one_that_runs(tmp_path: Path) -> None:
    base = dataclasses.replace(small_run(tmp_path), documents="joined", nproc=2)
    configs = [
        dataclasses.replace(base, lora=4, quantize="nf4"),
        dataclasses.replace(base, lora=4),
        dataclasses.replace(base, precision="fp32", accumulate=2),
    ]
    real = run_on_ranks(sizes_of, 2, configs)[0]
    for config, size in zip(configs, real, strict=True):
        options = config.managed_options()
        del options["device"]
        rows, passes = config.rows_of_rank(2)
        forecast = forecast_rank(
            forecast_source(config, 24), GeminiConfig.from_options(**options), rows, 2, accumulation=passes
        )
        assert dataclasses.replace(forecast.blueprint.context.size, operator_name="") == size
        said = "\n".join(forecast_lines(dataclasses.replace(config, device_bytes=2**22), 24))
        assert said.startswith("plan: the run fits on each of 2 ranks: ")
