"""``gemini finetune`` over ranks: the numbers of one process, one checkpoint, one end."""

from __future__ import annotations

import dataclasses
import json
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

pytest.importorskip("transformers", reason="the extra 'hf' is not installed")

sys.path.insert(0, str(Path(__file__).parents[1] / "parallel"))

from finetune_runs import Signalling, run, small_run
from processes import close_workers, run_on_ranks

from gemini.cli.finetune import forecast_lines
from gemini.cli.main import main
from gemini.comm.ranks import Rank, make_peers
from gemini.errors import ConfigError
from gemini.jobs.finetune import job
from gemini.jobs.finetune.config import FineTuneConfig


@pytest.fixture(autouse=True, scope="module")
def _workers_end() -> Iterator[None]:
    yield
    close_workers()


@pytest.fixture
def config(tmp_path: Path) -> FineTuneConfig:
    return dataclasses.replace(
        small_run(tmp_path), accumulate=2, precision="fp32", steps=4, eval_share=0.1, resume="auto"
    )


def train(config: FineTuneConfig, stop_after: int, who_stops: int) -> tuple[list[float], float | None, int]:
    """Train on this rank, as the command does: the first one prints a forecast. One is told to stop after a
    step.
    """
    peers = make_peers(None)
    assert peers is not None
    rank = Rank(peers.share.place, peers.share.world, peers.say)
    stops = stop_after if rank.index == who_stops else 0
    forecast = None if rank.index else forecast_lines
    config = dataclasses.replace(config, nproc=rank.count)
    result = job.run(config, show=lambda _: Signalling(stops), forecast=forecast, rank=rank)
    return list(result.losses), result.summary.eval_loss, result.exit_code


def over_ranks(config: FineTuneConfig, ranks: int, stop_after: int = 0) -> Any:
    return run_on_ranks(train, ranks, config, stop_after, 0)


def names_in(directory: str) -> list[str]:
    return sorted(path.name for path in Path(directory).iterdir())


def weights_of(directory: str | Path) -> dict[str, torch.Tensor]:
    (file,) = Path(directory, "model").glob("*.safetensors")
    return load_file(file)


@pytest.mark.dear("a run in one process, and the same on two")
@pytest.mark.parametrize(
    "changes",
    [
        {"eval_share": 0.3, "eval_every": 3, "keep_best": True},
        {"lora": 4, "precision": "bf16"},
        {"lora": 4, "dora": True, "merge": True, "batch": 4, "accumulate": 1},
        {"lora": 4, "quantize": "nf4"},
        {"lora": 4, "quantize": "int8"},
    ],
    ids=["full", "adapters", "merged", "4 bits", "8 bits"],
)
def test_ranks_train_as_one_process_does(
    changes: dict[str, Any], config: FineTuneConfig, tmp_path: Path
) -> None:
    if "quantize" in changes:
        pytest.importorskip("bitsandbytes", reason="the extra 'quantized' is not installed")
        pytest.importorskip("torchao", reason="the extra 'quantized' is not installed")
    config = dataclasses.replace(config, **changes)
    want = run(config)
    there = str(tmp_path / "ranks")
    (losses, eval_loss, code), other = over_ranks(dataclasses.replace(config, output=there), 2)
    assert (code, other[2]) == (0, 0)
    near = 1e-5 if config.precision == "fp32" else 1e-2
    assert losses == pytest.approx(list(want.losses), rel=near)
    assert eval_loss == pytest.approx(want.summary.eval_loss, rel=near)
    assert names_in(there) == names_in(config.output)
    got, ours = weights_of(there), weights_of(config.output)
    assert got.keys() == ours.keys()
    for name, value in ours.items():
        torch.testing.assert_close(got[name], value, rtol=100 * near, atol=10 * near)
    assert "fine-tuned with `gemini finetune`" in Path(there, "model", "README.md").read_text()


@pytest.mark.dear("a run in one process, and the same on two")
@pytest.mark.parametrize("lora", [4, 0], ids=["adapters", "all weights"])
def test_ranks_share_pairs_of_preferences(lora: int, config: FineTuneConfig, tmp_path: Path) -> None:
    pairs = [
        {"prompt": "all work", "chosen": " and play"[:row], "rejected": " and no"} for row in range(2, 8)
    ]
    Path(config.data).write_text("\n".join(map(json.dumps, pairs)))
    config = dataclasses.replace(config, objective="dpo", lora=lora, eval_share=0.0, steps=3)
    want = run(config)
    there = dataclasses.replace(config, output=str(tmp_path / "ranks"))
    losses, _, _ = over_ranks(there, 2)[0]
    assert losses == pytest.approx(list(want.losses), rel=1e-5)
    records = [
        [json.loads(line)["rewards/margins"] for line in Path(each, "metrics.jsonl").read_text().splitlines()]
        for each in (there.output, config.output)
    ]
    assert records[0] == pytest.approx(records[1], rel=1e-3, abs=1e-5)


@pytest.mark.dear("runs in one process, and on two")
def test_ranks_stop_after_one_step_and_any_number_goes_on(config: FineTuneConfig, tmp_path: Path) -> None:
    want = run(config)
    there = dataclasses.replace(config, output=str(tmp_path / "ranks"))
    stopped = over_ranks(there, 2, stop_after=2)
    assert [len(losses) for losses, _, _ in stopped] == [2, 2], "only the first rank was told"
    assert {code for _, _, code in stopped} == {128 + signal.SIGUSR1}
    assert not (tmp_path / "ranks" / "model").exists()
    resumed = run(there, stop_after=4)
    assert (resumed.summary.first_step, resumed.summary.last_step) == (2, 4)
    losses, _, code = over_ranks(there, 2)[0]
    assert code == 0
    assert losses == pytest.approx(list(want.losses), rel=1e-5)


def test_rows_that_ranks_cannot_share_are_refused(config: FineTuneConfig) -> None:
    assert config.rows_of_rank(2) == (2, 1)
    assert dataclasses.replace(config, accumulate=3).rows_of_rank(2) == (1, 3)
    with pytest.raises(
        ConfigError,
        match=r"neither --batch 2 nor --accumulate 2 is a multiple of 3",
    ):
        dataclasses.replace(config, nproc=3)


@pytest.mark.dear("two processes import transformers")
def test_what_ranks_fail_with_is_said_once(
    config: FineTuneConfig, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "bad.jsonl").write_text('{"text": 3}\n')
    options = ["--model", config.model, "--data", str(tmp_path / "bad.jsonl"), "--output", config.output]
    assert main(["finetune", *options, "--nproc", "2", "--accumulate=2", "--quiet"]) == 2
    error = capfd.readouterr().err
    assert error.count("gemini: error:") == 1
    assert "line 1 of" in error
    assert "Traceback" not in error
