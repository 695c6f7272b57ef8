"""``gemini finetune`` over ranks that have parts of the model: the numbers of one process, at any layout."""

from __future__ import annotations

import dataclasses
import json
import signal
import sys
from argparse import Namespace
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from plan_samples import plan_for

pytest.importorskip("transformers", reason="the extra 'hf' is not installed")

sys.path.insert(0, str(Path(__file__).parents[1] / "parallel"))

from finetune_runs import LLAMA, Signalling, run, small_run
from hf_models import SIZES, saved
from processes import close_workers, run_on_ranks

from gemini.cli.main import main
from gemini.cli.plan_search import _finetune_command
from gemini.comm.ranks import Rank, make_peers
from gemini.errors import ConfigError
from gemini.forecast.machine import MachineSpeeds
from gemini.jobs.finetune import job
from gemini.jobs.finetune.adapters import adapted
from gemini.jobs.finetune.config import FineTuneConfig
from gemini.jobs.finetune.layouts import refuse_unfit_parts, refuse_unread
from gemini.parallel import Layout, ParallelPlan
from gemini.parallel.plan import PlanBudgets


@pytest.fixture(autouse=True, scope="module")
def _workers_end() -> Iterator[None]:
    yield
    close_workers()


@dataclass(frozen=True)
class Told:
    """A run on ranks; it is to stop after a step (0: never)."""

    config: FineTuneConfig
    stop_after: int = 0


def train(runs: Sequence[Told]) -> list[tuple[list[float], float | None, int]]:
    """Run one after another on this rank."""
    peers = make_peers(None)
    assert peers is not None
    rank, found = Rank(peers.share.place, peers.share.world, peers.say), []
    for told in runs:
        stops = 0 if rank.index else told.stop_after
        result = job.run(told.config, show=lambda _, stops=stops: Signalling(stops), rank=rank)
        found.append((list(result.losses), result.summary.eval_loss, result.exit_code))
    return found


@pytest.fixture
def config(tmp_path: Path) -> FineTuneConfig:
    """A run in fp32 with packed documents, evaluation and the best weights kept."""
    base = small_run(tmp_path)
    lines = [
        {"prompt": "all work and no play "[: 6 + row], "completion": " makes a dull boy"[: 5 + row]}
        for row in range(20)
    ]
    Path(base.data).write_text("\n".join(map(json.dumps, lines)))
    return dataclasses.replace(
        base, accumulate=2, precision="fp32", steps=4, eval_share=0.3, eval_every=3, keep_best=True
    )


def figures(config: FineTuneConfig) -> list[tuple[float, float]]:
    """Return losses and norms of all steps."""
    lines = Path(config.output, "metrics.jsonl").read_text().splitlines()
    return [(record["loss"], record["grad_norm"]) for record in map(json.loads, lines)]


def assert_alike(config: FineTuneConfig, want: FineTuneConfig) -> None:
    """Assert that a run has the figures and the exported weights of another one."""
    for (loss, norm), (own_loss, own_norm) in zip(figures(config), figures(want), strict=True):
        assert loss == pytest.approx(own_loss, rel=1e-5)
        assert norm == pytest.approx(own_norm, rel=1e-6)
    picture = {"memory.png"}  # of chunks alone
    assert {*names_in(config.output)} | picture == {*names_in(want.output)} | picture
    got, ours = (state_of(each.output) for each in (config, want))
    assert got.keys() == ours.keys()
    for name, value in ours.items():
        torch.testing.assert_close(got[name], value, rtol=1e-3, atol=1e-4)


def names_in(directory: str) -> list[str]:
    return sorted(path.name for path in Path(directory).iterdir())


def state_of(directory: str) -> dict[str, torch.Tensor]:
    """Return what transformers, or PEFT, loads of a run."""
    model = Path(directory, "model")
    if (model / "adapter_config.json").exists():
        peft = pytest.importorskip("peft")
        return dict(peft.load_peft_weights(str(model), device="cpu"))
    return dict(LLAMA.from_pretrained(model).state_dict())


@pytest.mark.dear("runs in one process, and eight on two ranks")
def test_ranks_with_parts_train_as_one_process_does(config: FineTuneConfig, tmp_path: Path) -> None:
    adapters = {"lora": 4, "packing": False, "keep_best": False, "eval_every": 0}
    wanted = {
        "all": config,
        "lora": dataclasses.replace(config, output=str(tmp_path / "lora"), **adapters),
    }
    evaluated = {name: run(each).summary.eval_loss for name, each in wanted.items()}
    plain = LLAMA.from_pretrained(config.model)
    plan_for(
        plain, layout=Layout(dp=2), zero_stage=1, dtype="fp32", num_microbatches=1, microbatch_size=2
    ).save(tmp_path / "plan.json")
    kinds = {
        "tp": ("all", {"tp": 2}),
        "pp": ("all", {"pp": 2, "activation_checkpointing": True, "tiled_loss": "yes"}),
        "sp": ("all", {"sp": 2, "tiled_loss": "yes"}),
        "lora tp": ("lora", {"tp": 2}),
        "lora pp": ("lora", {"pp": 2}),
        "plan": ("all", {"plan": str(tmp_path / "plan.json"), "device_bytes": None, "non_model_bytes": None}),
    }
    runs = {
        name: dataclasses.replace(wanted[kind], output=str(tmp_path / name), **changes)
        for name, (kind, changes) in kinds.items()
    }
    stopped = dataclasses.replace(config, output=str(tmp_path / "stopped"), resume="auto")
    told = [Told(each) for each in runs.values()]
    told += [
        Told(dataclasses.replace(stopped, **kinds["plan"][1]), stop_after=1),
        Told(dataclasses.replace(stopped, pp=2), stop_after=2),
    ]
    found = run_on_ranks(train, 2, told)[0]
    for (name, (kind, _)), (_, eval_loss, code) in zip(kinds.items(), found, strict=False):
        assert code == 0, name
        assert eval_loss == pytest.approx(evaluated[kind], rel=1e-5), name
        assert_alike(runs[name], wanted[kind])
    assert main(["ckpt", "verify", stopped.output]) == 0
    alone = run(stopped, stop_after=3)
    found += [(alone.losses, None, alone.exit_code)]
    found += run_on_ranks(train, 2, [Told(dataclasses.replace(stopped, tp=2))])[0]
    was_stopped = 128 + signal.SIGUSR1
    assert [(len(losses), code) for losses, _, code in found[-4:]] == [
        (1, was_stopped),
        (2, was_stopped),
        (3, was_stopped),
        (4, 0),
    ]
    assert_alike(stopped, config)


def test_options_that_do_not_go_with_parts_are_refused_by_name(config: FineTuneConfig) -> None:
    for changes, said in (
        ({"tp": 2, "nproc": 3}, "--tp 2 need 2 ranks for one copy of the model, but there are 3"),
        ({"tp": 2, "lora": 4, "quantize": "nf4"}, "--quantize nf4 does not go with --tp"),
        ({"pp": 2, "objective": "dpo"}, "--objective dpo does not go with --pp"),
        ({"tp": 2, "sp": 2, "lora": 4, "dora": True}, "--dora does not go with --tp, --sp"),
        ({"pp": 2, "lora": 4, "lora_target_parameters": "mlp.experts.down_proj"}, "cannot be divided"),
        ({"tp": 2, "nproc": 6, "accumulate": 4}, "3 ranks divide the rows of a step"),
    ):
        with pytest.raises(ConfigError, match=said):
            dataclasses.replace(config, **{"eval_every": 0, "keep_best": False, **changes})
    assert dataclasses.replace(config, tp=2, pp=2).num_ranks == 4
    assert dataclasses.replace(config, tp=2, pp=2).data_ranks(8) == 2


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"tp": 3}, "tp 3: "),
        ({"pp": 4}, "choose pp from 1 to 2"),
        ({"tp": 2, "tiled_loss": "yes"}, "--tiled-loss does not go with --tp: "),
        ({"sp": 2, "lora": 4, "lora_targets": "embed_tokens,q_proj", "tp": 2}, "lora_embedding_A"),
    ],
    ids=range(4),
)
def test_a_model_that_does_not_go_over_the_ranks_is_refused_without_its_weights(
    changes: dict[str, Any], said: str, config: FineTuneConfig
) -> None:
    given = FineTuneConfig(model=config.model, data="nothing", output=config.output, **changes)

    def check() -> None:
        refuse_unread(given)
        refuse_unfit_parts(given, adapted(given))

    with pytest.raises(ConfigError, match=said):
        check()


def test_parts_of_rows_with_documents_in_windows_are_refused_before_data_is_read(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    windows = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 8, "head_dim": 8}
    kind = transformers.Gemma3TextConfig(**{**SIZES, **windows})
    saved(kind, transformers.Gemma3ForCausalLM, tmp_path / "base")
    given = FineTuneConfig(model=str(tmp_path / "base"), data="nothing", output=str(tmp_path), sp=2)
    with pytest.raises(ConfigError, match="give --no-packing"):
        refuse_unfit_parts(given, adapted(given))
    for changes in ({"packing": False}, {"documents": "joined"}, {"sp": 1, "tp": 2}):
        refuse_unfit_parts(dataclasses.replace(given, **changes), adapted(given))


def test_the_command_that_a_search_prints_has_what_its_plan_does_not_say(config: FineTuneConfig) -> None:
    asked = {"model": config.model, "save_plan": "p.json", "seq": 24, "disk_dir": "disk"}
    adapters = {"lora": 4, "lora_targets": "q_proj,v_proj", "quantize": "nf4", "dora": True}
    model = LLAMA.from_pretrained(config.model)
    for nbytes, said in ((0, ""), (2**20, "--disk-dir disk ")):
        plan = dataclasses.replace(
            plan_for(model, layout=Layout(dp=2)), budgets=PlanBudgets(2**20, 0, nbytes)
        )
        command = _finetune_command(plan, Namespace(**asked, **adapters))
        assert command.endswith(
            " --plan p.json --seq 24 --lora 4 --lora-targets q_proj,v_proj --quantize nf4 "
            f"{said}--dora --data PATH --output DIR"
        )


@pytest.mark.dear("a search, and a run of its plan by two processes that import transformers")
def test_a_plan_that_was_searched_for_two_ranks_runs(
    config: FineTuneConfig, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    speed = {"ranks": 2, "latency_seconds": 1e-4, "bytes_per_second": 1e9}
    kinds = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send")
    machine = MachineSpeeds("m", {"fp32": 1e11}, 1e10, 1e10, 1e-5, device_bytes=2**30)
    machine.save(tmp_path / "machine.json")
    known = json.loads((tmp_path / "machine.json").read_text())
    known["collectives"] = [{"kind": kind, **speed} for kind in kinds]
    (tmp_path / "machine.json").write_text(json.dumps(known))
    plan = str(tmp_path / "p.json")
    asked = ["plan", config.model, "--ranks", "2", "--search", "--batch", "4", "--seq", "24"]
    asked += ["--machine", str(tmp_path / "machine.json"), "--pin", "tp=2", "--save-plan", plan]
    assert main(asked) == 0
    said = " ".join(capfd.readouterr().out.split())
    assert f"gemini finetune --model {config.model} --plan {plan} --seq 24 --data PATH --output DIR" in said
    options = ["--data", config.data, "--seq", "24", "--steps", "2", "--lr", "1e-2", "--json"]
    given = ["finetune", "--model", config.model, "--plan", plan, "--output", config.output, *options]
    assert main(given) == 0
    said = capfd.readouterr()
    assert "plan: tp 2, ZeRO" in said.err
    summary = json.loads(Path(config.output, "summary.json").read_text())
    assert any("trained on 2 ranks (tp 2, dp 1)" in note for note in summary["notes"])
    assert any("the plan predicted" in note for note in summary["notes"])
    rows = ParallelPlan.load(plan)
    plain = dataclasses.replace(
        config,
        output=str(tmp_path / "plain"),
        batch=rows.microbatch_size,
        accumulate=rows.num_microbatches,
        steps=2,
        eval_share=0.0,
        eval_every=0,
        keep_best=False,
    )
    run(plain)
    assert [loss for loss, _ in figures(config)] == pytest.approx(
        [loss for loss, _ in figures(plain)], rel=1e-5
    )
