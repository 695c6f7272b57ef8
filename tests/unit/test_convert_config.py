"""``gemini convert-config``: what it prints runs, and every key of a file has its verdict."""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from gemini.cli.conversion import NOT_NEEDED, NOT_SUPPORTED, TAKEN, Conversion, Target
from gemini.cli.conversion_programs import program
from gemini.cli.convert_config import convert
from gemini.cli.main import main
from gemini.errors import ConfigError

OFFLOADED = {
    "train_batch_size": 32,
    "gradient_accumulation_steps": 2,
    "gradient_clipping": 1.0,
    "fp16": {"enabled": True, "loss_scale": 0,
             "initial_scale_power": 12, "loss_scale_window": 500, "hysteresis": 3},
    "optimizer": {"type": "AdamW", 
                  "params": {"lr": 3e-5, "betas": [0.8, 0.99], "eps": 1e-7, "weight_decay": 0.1}},
    "scheduler": {
        "type": "WarmupDecayLR",
        "params": {"warmup_min_lr": 0, "warmup_max_lr": 3e-5, "warmup_num_steps": 3, "total_num_steps": 9},
    },
    "zero_optimization": {
        "stage": 3,
        "offload_param": {"device": "nvme", "nvme_path": "DISK", "pin_memory": True, "buffer_count": 5},
        "offload_optimizer": {"device": "nvme", "nvme_path": "DISK", "pipeline_read": True},
        "stage3_max_live_parameters": 1e9,
        "overlap_comm": True,
    },
    "aio": {"block_size": 1048576},
    "steps_per_print": 2000,
}  # fmt: skip

PLAIN: dict[str, dict[str, Any]] = {
    "nothing": {},
    "stage 2 bf16": {"bf16": {"enabled": True}, "zero_optimization": {"stage": 2}},
    "offloaded": OFFLOADED,
    "fixed scale": {"fp16": {"enabled": True, "loss_scale": 128}},
    "adam": {"optimizer": {"type": "Adam",
                           "params": {"lr": 1, "adam_w_mode": False, "bias_correction": False}}},
    "lion": {"optimizer": {"type": "Lion",
                           "params": {"lr": 1e-4, "betas": [0.9, 0.99], "weight_decay": 0.1}}},
    "sgd": {"optimizer": {"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9}}},
    "unknown optimizer": {"optimizer": {"type": "OneBitLamb", "params": {"lr": 0.1, "freeze_step": 3}}},
    "cosine": {
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "scheduler": {"type": "WarmupCosineLR", "params": {"warmup_num_steps": 2, "total_num_steps": 8}},
    },
    "legacy": {"zero_optimization": {"stage": 2, "cpu_offload": True}},
    "of the Trainer": {
        "bf16": {"enabled": "auto"},
        "fp16": {"enabled": "auto"},
        "gradient_clipping": "auto",
        "gradient_accumulation_steps": "auto",
        "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": "auto", "eps": "auto"}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": "auto", "warmup_max_lr": "auto"}},
        "zero_optimization": {"stage": 3, "reduce_bucket_size": "auto"},
    },
}  # fmt: skip


class Model(nn.Module):
    """Takes a batch by keyword and returns an object with a loss, as models of transformers do."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))

    def forward(self, x: torch.Tensor) -> SimpleNamespace:
        """Return the loss over a batch."""
        return SimpleNamespace(loss=self.body(x).float().square().mean())


def written(document: Any, path: Path, *, disk: Path) -> Path:
    path.write_text(json.dumps(document).replace('"DISK"', json.dumps(str(disk))))
    return path


def run_program(found: Conversion) -> dict[str, Any]:
    """Run what is printed for a loop on four batches; return its names."""
    torch.manual_seed(0)
    names: dict[str, Any] = {"model": Model(), "loader": [{"x": torch.rand(4, 6)} for _ in range(4)]}
    exec(compile(program(found), "printed", "exec"), names)
    return names


@pytest.mark.parametrize("name", PLAIN)
def test_what_is_printed_trains(name: str, tmp_path: Path) -> None:
    found = convert(written(PLAIN[name], tmp_path / "ds_config.json", disk=tmp_path), Target.LOOP)
    names = run_program(found)
    assert names["model"].stats()["step"] == 4 // int(found.of("loop").get("accumulation", "1"))
    assert {verdict for _, verdict, _ in found.keys} <= {TAKEN, NOT_NEEDED, NOT_SUPPORTED}
    assert all(text for _, _, text in found.keys)


# Each optimizer with each scheduler and each way to warm up: all that is printed is built and trains.
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "AdamW": {"lr": 1e-3, "betas": [0.8, 0.99]},
    "Lamb": {"lr": 1e-3, "betas": [0.8, 0.99], "weight_decay": 0.1},
    "Lion": {"lr": 1e-3},
    "SGD": {"lr": 1e-3, "momentum": 0.9},
    "Muon": {"lr": 0.02, "momentum": 0.95},
}
SCHEDULERS = ("WarmupLR", "WarmupDecayLR", "WarmupCosineLR")
WARMUP, TOTAL = 4, 10


@pytest.mark.parametrize("warmup", ["log", "linear"])
@pytest.mark.parametrize("scheduler", SCHEDULERS)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_each_optimizer_trains_under_each_scheduler(
    optimizer: str, scheduler: str, warmup: str, tmp_path: Path
) -> None:
    params: dict[str, Any] = {"warmup_num_steps": WARMUP, "warmup_type": warmup}
    if scheduler != "WarmupLR":
        params["total_num_steps"] = TOTAL
    document = {
        "optimizer": {"type": optimizer, "params": OPTIMIZERS[optimizer]},
        "scheduler": {"type": scheduler, "params": params},
    }
    found = convert(written(document, tmp_path / "ds.json", disk=tmp_path))
    names = run_program(found)
    classes = {"SGD": "torch.optim.SGD", "AdamW": "gemini.HybridAdam"}
    assert found.optimizer_class == classes.get(optimizer, f"gemini.{optimizer}")
    assert names["model"].stats()["step"] == 4
    assert names["scheduler"].last_epoch == 4


def test_the_words_say_how_a_warmup_rises_and_what_follows(tmp_path: Path) -> None:
    for kind, shape in (("WarmupLR", "log"), ("WarmupCosineLR", "linear")):
        params = {"warmup_num_steps": WARMUP, "warmup_type": shape}
        if kind != "WarmupLR":
            params["total_num_steps"] = TOTAL
        document = {"scheduler": {"type": kind, "params": params}}
        found = convert(written(document, tmp_path / "ds.json", disk=tmp_path))
        ((verdict, text),) = [each[1:] for each in found.keys if each[0] == "scheduler.type"]
        assert verdict == TAKEN
        assert ("logarithmic" if shape == "log" else "linear") in text
        assert ("cosine" in text) == (kind == "WarmupCosineLR")


@pytest.mark.parametrize(
    ("kind", "params", "says"),
    [
        ("StepLR", {"step_size": 3}, "create it for the optimizer: torch.optim.lr_scheduler.StepLR"),
        ("WarmupLR", {"warmup_max_lr": [1e-3, 1e-4]}, "a rate for each parameter group"),
        ("WarmupLR", {"warmup_num_steps": "auto"}, "write numbers for warmup_num_steps"),
        ("OneCycle", {"cycle_min_lr": "auto", "cycle_max_lr": 1e-3}, "write numbers for cycle_min_lr"),
    ],
)
def test_a_schedule_that_nobody_knows_is_left_out(
    kind: str, params: dict[str, Any], says: str, tmp_path: Path
) -> None:
    document = {
        "optimizer": {"type": "SGD", "params": {"lr": 0.5}},
        "scheduler": {"type": kind, "params": params},
    }
    found = convert(written(document, tmp_path / "ds.json", disk=tmp_path), Target.LOOP)
    assert found.schedule is None
    assert found.of("optimizer")["lr"] == "0.5"  # the rate of the optimizer stays
    said = [each for each in found.keys if each[0].startswith("scheduler")]
    assert {verdict for _, verdict, _ in said} == {NOT_SUPPORTED}
    assert any(says in text for _, _, text in said)


def test_rates_of_groups_that_are_equal_are_one_rate(tmp_path: Path) -> None:
    def converted(peak: object) -> Conversion:
        params = {"warmup_max_lr": peak, "warmup_min_lr": [0, 0], "warmup_num_steps": 4}
        document = {"optimizer": {"type": "Adam"}, "scheduler": {"type": "WarmupLR", "params": params}}
        return convert(written(document, tmp_path / "ds.json", disk=tmp_path), Target.LOOP)

    listed = converted([1e-3, 1e-3])
    assert listed.schedule == converted(1e-3).schedule
    assert listed.schedule is not None
    assert said_of(listed, "scheduler.params.warmup_max_lr")[0] == TAKEN


def test_lamb_is_ours_with_deepspeeds_defaults(tmp_path: Path) -> None:
    lamb = {"optimizer": {"type": "Lamb", "params": {"lr": 1e-3}}}
    found = convert(written(lamb, tmp_path / "lamb.json", disk=tmp_path))
    assert found.optimizer_class == "gemini.Lamb"
    assert found.of("optimizer") == {"lr": "0.001", "eps": "1e-08", "bias_correction": "True"}


def said_of(found: Conversion, key: str) -> tuple[str, str]:
    """Return verdict and sentence of a key."""
    ((verdict, text),) = [each[1:] for each in found.keys if each[0] == key]
    return verdict, text


@pytest.mark.parametrize(
    ("params", "schedule", "rates"),
    [
        ({}, {}, (0.02, 3e-4)),  # the defaults of both libraries
        ({"lr": 0.1}, {}, (0.1, 0.1)),
        ({"lr": 0.1, "adam_lr": 0.2}, {}, (0.1, 0.2)),
        ({"lr": 0.1, "muon_lr": 0.3}, {}, (0.3, 0.1)),
        ({"lr": 0.1, "muon_lr": 0.3, "adam_lr": 0.2}, {}, (0.3, 0.2)),
        ({"lr": 0.1, "adam_lr": 0.2}, {"warmup_num_steps": 2}, (0.1, 0.2)),
        ({"lr": 0.1, "adam_lr": 0.2}, {"warmup_max_lr": 0.4}, (0.4, 0.4)),  # of all groups
        ({}, {"warmup_num_steps": 2}, (1e-3, 1e-3)),  # the scheduler's default
    ],
)
def test_muon_has_a_group_of_matrices_and_one_for_adam(
    params: dict[str, float], schedule: dict[str, float], rates: tuple[float, float], tmp_path: Path
) -> None:
    more = {"momentum": 0.9, "weight_decay": 0.1, "betas": [0.8, 0.9], "eps": 1e-8, "ns_steps": 3}
    others = {"ns_method": "gram", "per_head_muon": True}
    document: dict[str, Any] = {"optimizer": {"type": "Muon", "params": {**params, **more, **others}}}
    if schedule:
        document["scheduler"] = {"type": "WarmupLR", "params": schedule}
    found = convert(written(document, tmp_path / "ds.json", disk=tmp_path), Target.LOOP)
    first, second = run_program(found)["optimizer"].param_groups
    assert (first["use_muon"], second["use_muon"]) == (True, False)
    assert tuple(group.get("initial_lr", group["lr"]) for group in (first, second)) == rates
    assert (first["momentum"], first["ns_steps"]) == (0.9, 3)
    assert (second["betas"], second["eps"]) == ((0.8, 0.9), 1e-8)
    assert [group["weight_decay"] for group in (first, second)] == [0.1, 0.1]
    assert all(said_of(found, f"optimizer.params.{key}")[0] != NOT_SUPPORTED for key in (*params, *more))
    assert said_of(found, "optimizer.params.per_head_muon")[0] == NOT_SUPPORTED


def test_the_trainer_has_adam_where_the_file_has_muon(tmp_path: Path) -> None:
    document = {"optimizer": {"type": "Muon", "params": {"lr": 0.02, "momentum": 0.95, "adam_lr": 3e-4}}}
    found = convert(written(document, tmp_path / "ds.json", disk=tmp_path), Target.TRAINER)
    assert "learning_rate=0.0003" in program(found)
    verdict, text = said_of(found, "optimizer.type")
    assert verdict == NOT_SUPPORTED
    assert "--for accelerate" in text
    assert said_of(found, "optimizer.params.adam_lr")[0] == TAKEN
    assert said_of(found, "optimizer.params.momentum") == (NOT_SUPPORTED, "only Muon uses it")


@pytest.mark.parametrize(
    ("kind", "ours"),
    [("OneBitAdam", "HybridAdam"), ("ZeroOneAdam", "HybridAdam"), ("OneBitLamb", "Lamb")],
)
def test_optimizers_of_one_bit_send_whole_gradients_and_the_report_says_so(
    kind: str, ours: str, tmp_path: Path
) -> None:
    params = {"lr": 1e-3, "betas": [0.8, 0.9], "weight_decay": 0.1, "freeze_step": 400, "cuda_aware": False}
    document = {"optimizer": {"type": kind, "params": {**params, "comm_backend_name": "nccl"}}}
    found = convert(written(document, tmp_path / "ds.json", disk=tmp_path), Target.LOOP)
    verdict, text = said_of(found, "optimizer.type")
    assert verdict == TAKEN
    assert "after the warmup DeepSpeed freezes the second moment" in text
    for key in ("freeze_step", "cuda_aware", "comm_backend_name"):
        assert said_of(found, f"optimizer.params.{key}")[0] == NOT_NEEDED
    group = run_program(found)["optimizer"].param_groups[0]
    assert found.optimizer_class == f"gemini.{ours}"
    assert (group["lr"], group["betas"], group["weight_decay"]) == (1e-3, (0.8, 0.9), 0.1)


def test_values_arrive_where_ours_are(tmp_path: Path) -> None:
    found = convert(written(OFFLOADED, tmp_path / "ds.json", disk=tmp_path))
    optimizer = run_program(found)["optimizer"]
    group = optimizer.param_groups[0]
    assert (group["betas"], group["eps"], group["weight_decay"]) == ((0.8, 0.99), 1e-7, 0.1)
    assert group["initial_lr"] == 3e-5
    assert found.of("model") == {"mixed_precision": '"fp16"', "disk_dir": f'"{tmp_path}"'}
    assert found.of("managed") == {
        "growth_interval": "500", "hysteresis": "3", "initial_scale": "2**12", "max_norm": "1.0"
    }  # fmt: skip


def test_a_file_of_something_else_is_refused(tmp_path: Path) -> None:
    path = written({"model_type": "llama", "hidden_size": 128}, tmp_path / "config.json", disk=tmp_path)
    with pytest.raises(ConfigError, match=r"only model_type, hidden_size; name ds_config\.json"):
        convert(path)


def test_unknown_keys_are_reported_one_by_one(tmp_path: Path) -> None:
    document = {
        **OFFLOADED,
        "invented": 1,
        "zero_optimization": {"stage": 1, "also": {"a": 2, "b": [{"c": 3}]}},
    }
    found = convert(written(document, tmp_path / "ds.json", disk=tmp_path))
    verdicts = {key: verdict for key, verdict, _ in found.keys}
    for key in ("invented", "zero_optimization.also.a", "zero_optimization.also.b.0.c"):
        assert verdicts[key] == NOT_SUPPORTED


AUTOMATIC = {"zero_optimization": {"stage": 2, "reduce_bucket_size": "auto"}}
FSDP = {"transformer_layer_cls_to_wrap": "GPT2Block"}


@pytest.mark.parametrize(
    ("key", "document", "guess"),
    [
        ("gradient_acumulation_steps", {"gradient_acumulation_steps": 4}, "gradient_accumulation_steps"),
        ("zero_optimisation.stage", {"zero_optimisation": {"stage": 2}}, "zero_optimization.stage"),
        (
            "fp16.loss_scale_windows",
            {"fp16": {"enabled": True, "loss_scale_windows": 9}},
            "fp16.loss_scale_window",
        ),
        (
            "optimizer.params.bettas",
            {"optimizer": {"type": "Adam", "params": {"bettas": [0.9, 0.9]}}},
            "betas",
        ),
    ],
)
def test_a_mistyped_key_gets_the_nearest_one(
    key: str, document: dict[str, Any], guess: str, tmp_path: Path
) -> None:
    document = {"train_batch_size": 8, **document}
    verdict, text = said_of(convert(written(document, tmp_path / "ds.json", disk=tmp_path)), key)
    assert verdict == NOT_SUPPORTED
    assert f"(did you mean {guess}?)" in text


@pytest.mark.parametrize(
    ("document", "suffix", "target"),
    [
        ({"train_batch_size": 8}, ".json", Target.LOOP),
        ({"optimizer": {"type": "AdamW", "params": {"lr": "auto"}}}, ".json", Target.TRAINER),
        (AUTOMATIC, ".json", Target.TRAINER),
        ({"pipeline": {"stages": "auto"}}, ".json", Target.LOOP),  # DeepSpeed's own
        (FSDP, ".json", Target.TRAINER),
        ({"distributed_type": "NO"}, ".yaml", Target.ACCELERATE),
        ({"distributed_type": "DEEPSPEED", "deepspeed_config": {}}, ".json", Target.ACCELERATE),
    ],
)
def test_the_target_follows_from_the_file_unless_it_is_named(
    document: Any, suffix: str, target: Target, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = written(document, tmp_path / f"a{suffix}", disk=tmp_path)
    assert convert(file).target is target
    for each in Target:
        assert convert(file, each).target is each
        assert main(["convert-config", str(file), "--for", each.value]) == 0
        classes = {Target.LOOP: "GeminiDDP", Target.TRAINER: "GeminiTrainer"}
        assert classes.get(each, "GeminiAccelerator") in capsys.readouterr().out


def test_a_narrow_terminal_cuts_no_key(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "20")
    name = "stage3_gather_16bit_weights_on_model_save"
    file = written({"zero_optimization": {name: True}}, tmp_path / "ds.json", disk=tmp_path)
    assert main(["convert-config", str(file)]) == 0
    (line,) = [line for line in capsys.readouterr().err.splitlines() if name in line]
    assert line.startswith(f"  zero_optimization.{name}: ")
    assert line.endswith("returns pieces")


def test_batches_are_worked_out_as_deepspeed_does(tmp_path: Path) -> None:
    for document, batch, times in (
        ({"train_batch_size": 24, "train_micro_batch_size_per_gpu": 4}, "4", "max(1, 6 // ranks)"),
        ({"train_batch_size": 24, "gradient_accumulation_steps": 3}, "max(1, 8 // ranks)", "3"),
        ({"train_batch_size": 24}, "max(1, 24 // ranks)", "1"),
        (
            {"train_batch_size": 24, "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 3},
            "4",
            "3",
        ),
    ):
        found = convert(written(document, tmp_path / "ds.json", disk=tmp_path))
        loop = found.of("loop")
        assert (loop["batch"], loop.get("accumulation", "1")) == (batch, times)


ACCELERATE = """\
distributed_type: FSDP
mixed_precision: bf16
gradient_accumulation_steps: 2
num_processes: 8
fsdp_config:
  fsdp_sharding_strategy: {strategy}
  fsdp_offload_params: true
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
  fsdp_something_new: 3
"""


@pytest.mark.parametrize("strategy", ["FULL_SHARD", "1", "HYBRID_SHARD", "SHARD_GRAD_OP"])
def test_an_fsdp_section_of_accelerate_is_converted(strategy: str, tmp_path: Path) -> None:
    file = tmp_path / "default_config.yaml"
    file.write_text(ACCELERATE.format(strategy=strategy))
    found = convert(file, Target.LOOP)
    assert run_program(found)["model"].stats()["step"] == 2
    verdicts = {key: verdict for key, verdict, _ in found.keys}
    assert verdicts["fsdp_config.fsdp_auto_wrap_policy"] == NOT_NEEDED
    assert verdicts["fsdp_config.fsdp_something_new"] == NOT_SUPPORTED
    assert verdicts["num_processes"] == NOT_NEEDED


def test_a_deepspeed_section_of_accelerate_is_converted(tmp_path: Path) -> None:
    file = tmp_path / "default_config.yaml"
    file.write_text(
        "distributed_type: DEEPSPEED\nmixed_precision: 'no'\ndeepspeed_config:\n  zero_stage: 3\n"
        f"  offload_param_device: nvme\n  offload_param_nvme_path: {tmp_path}\n  gradient_clipping: 0.5\n"
        "  zero3_init_flag: true\n"
    )
    found = convert(file)
    assert found.of("model") == {"disk_dir": f'"{tmp_path}"'}
    assert found.of("loop") == {"max_norm": "0.5"}
    assert "deepspeed_config.offload_param_nvme_path" in {key for key, _, _ in found.keys}
    run_program(convert(file, Target.LOOP))


def test_keys_of_a_plugin_are_reported_as_the_file_has_them(tmp_path: Path) -> None:
    plugin = {"zero_stage": 2, "gradient_accumulation_steps": 2, "a.b": 1, "fp16": {"enabled": True}, "": 3}
    document = {"distributed_type": "DEEPSPEED", "gradient_accumulation_steps": 4, "deepspeed_config": plugin}
    found = convert(written(document, tmp_path / "a.yaml", disk=tmp_path))
    keys = {"zero_stage", "gradient_accumulation_steps", "a.b", "fp16.enabled", ""}
    wanted = {f"deepspeed_config.{key}" for key in keys}
    assert {key for key, _, _ in found.keys} == {"distributed_type", "gradient_accumulation_steps", *wanted}


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("a.json", "[1]", "a list"),
        ("a.json", "{", "is not valid JSON"),
        ("a.json", "[" * 100_000, "is not valid JSON"),
        ("a.json", '{"bf16": {"enabled": true}, "fp16": {"enabled": true}}', "both"),
        ("a.json", '{"bf16": 3}', "bf16 is a int"),
        ("a.json", '{"zero_optimization": {"stage": 7}}', "stage is 7"),
        ("a.json", '{"zero_optimization": {"stage": true}}', "stage is True"),
        ("a.json", '{"gradient_accumulation_steps": 0}', "steps is 0"),
        ("a.json", '{"gradient_clipping": 1e999}', "must be a number"),
        ("a.json", '{"gradient_clipping": NaN}', "must be a number"),
        ("a.json", '{"fp16": {"enabled": true, "initial_scale_power": 1e9}}', "0 to 126"),
        ("a.json", '{"gradient_clipping": "much"}', "clipping is 'much'"),
        ("a.json", '{"zero_optimization": {"offload_param": {"device": "nvme"}}}', "nvme_path is missing"),
        ("a.json", '{"zero_optimization": {"offload_param": {"device": "tape"}}}', "'tape'"),
        ("a.json", '{"optimizer": {"type": "Adam", "params": {"betas": ["x", 1]}}}', "two numbers"),
        ("a.json", '{"optimizer": {"type": "Adam", "params": {"betas": [0.9, NaN]}}}', "two numbers"),
        ("a.json", '{"optimizer": {"type": "Adam", "params": {"betas": [0.9, 1e999]}}}', "two numbers"),
        (
            "a.json",
            '{"optimizer": {"type": "Adam", "params": {"lr": -1e-4}}}',
            "params.lr is -0.0001; it must be 0 or more",
        ),
        ("a.json", '{"optimizer": {"type": "Adam", "params": {"eps": -1}}}', "params.eps is -1"),
        (
            "a.json",
            '{"optimizer": {"type": "Adam", "params": {"weight_decay": -0.1}}}',
            "weight_decay is -0.1",
        ),
        (
            "a.json",
            '{"optimizer": {"type": "Adam", "params": {"betas": [0.9, 1.0]}}}',
            "at least 0 and below 1",
        ),
        (
            "a.json",
            '{"optimizer": {"type": "Adam", "params": {"betas": [-0.1, 0.9]}}}',
            "at least 0 and below 1",
        ),
        (
            "a.json",
            '{"scheduler": {"type": "WarmupDecayLR", "params": {"warmup_num_steps": -3}}}',
            "warmup_num_steps is -3",
        ),
        (
            "a.json",
            '{"scheduler": {"type": "WarmupCosineLR", '
            '"params": {"warmup_num_steps": 9, "total_num_steps": 9}}}',
            "total_num_steps is 9 and warmup_num_steps is 9",
        ),
        (
            "a.json",
            '{"scheduler": {"type": "WarmupDecayLR", "params": {"warmup_max_lr": -1}}}',
            "warmup_max_lr is -1",
        ),
        ("a.json", '{"gradient_clipping": -1}', "clipping is -1"),
        (
            "a.json",
            '{"train_batch_size": 9, "train_micro_batch_size_per_gpu": 2}',
            "a multiple of the second",
        ),
        (
            "a.json",
            '{"scheduler": {"type": "OneCycle", "params": {"cycle_max_lr": 1}}}',
            "cycle_min_lr is missing",
        ),
        (
            "a.json",
            '{"scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 0}}}',
            "warmup_max_lr is 0",
        ),
        (
            "a.json",
            '{"scheduler": {"type": "LRRangeTest", "params": {"lr_range_test_step_size": 0}}}',
            "1 or more",
        ),
        ("a.json", '{"scheduler": []}', "scheduler is a list"),
        ("a.json", '{"optimizer": {"type": "AdmaW"}}', r"torch.optim \(did you mean AdamW\?\)"),
        ("a.json", '{"optimizer": {"type": "asdg"}}', r"optimizer.type is 'asdg'.* \(did you mean ASGD\?\)"),
        ("a.json", '{"scheduler": {"type": "WarmupDecayRL"}}', r"\(did you mean WarmupDecayLR\?\)"),
        ("a.json", '{"scheduler": {"type": "warmuplr"}}', r"\(did you mean WarmupLR\?\)"),
        ("a.yaml", "deepspeed_config:\n  optimizer: {type: Lino}\n", "_config.optimizer.type is 'Lino'"),
        (
            "a.json",
            '{"scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": [-1, -1]}}}',
            r"warmup_max_lr is \[-1, -1\]; each must be 0 or more",
        ),
        ("a.json", '{"optimizer": "AdamW"}', "optimizer is a str"),
        ("a.json", '{"zero_optimization": true}', "zero_optimization is a bool"),
        ("a.json", '{"tensorboard": true}', "tensorboard is a bool"),
        ("a.yaml", "deepspeed_config: 3\n", "deepspeed_config is a int"),
        (
            "a.yaml",
            "deepspeed_config:\n  deepspeed_config_file: ds.json\n",
            "convert it: gemini convert-config",
        ),
        ("a.yaml", "a: &a [1]\nb: *a\n", "a.yaml has aliases"),
        ("a.yaml", "fsdp_config: {}\ngradient_accumulation_steps: 0\n", "1 or more"),
        ("a.yaml", "a: [", "is not valid YAML"),
        ("a.yaml", "fsdp_config:\n  fsdp_sharding_strategy: HALF\n", "HALF"),
        ("a.yaml", "!!python/object/apply:os.system ['true']", "is not valid YAML"),
    ],
)
def test_what_is_none_is_refused_by_its_key(name: str, text: str, says: str, tmp_path: Path) -> None:
    file = tmp_path / name
    file.write_text(text)
    with pytest.raises(ConfigError, match=says):
        convert(file)


def test_texts_of_a_file_and_its_name_never_become_code(tmp_path: Path) -> None:
    disk = tmp_path / "'); names['ran'] = 1; ('"
    disk.mkdir()
    found = convert(written(OFFLOADED, tmp_path / "a\nnames['ran'] = 1\n.json", disk=disk))
    assert "ran" not in run_program(found)
    assert found.of("model")["disk_dir"] == repr(str(disk))


def test_what_is_no_regular_file_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "ds.json")
    with pytest.raises(ConfigError, match="no regular file"):
        convert(tmp_path / "ds.json")
    (tmp_path / "big.json").write_bytes(b" " * (2**20 + 1))
    with pytest.raises(ConfigError, match="more than"):
        convert(tmp_path / "big.json")


def test_the_command_prints_a_program_and_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = written(OFFLOADED, tmp_path / "ds.json", disk=tmp_path)
    assert main(["convert-config", str(file)]) == 0
    out, err = capsys.readouterr()
    compile(out, "printed", "exec")
    assert "steps_per_print" in err
    assert main(["convert-config", str(file), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["program"] == out
    assert main(["convert-config", str(tmp_path / "none.json")]) == 2


@pytest.mark.parametrize("key", ["[/red]", "[bold]x", "\ud800", "a\x1b[2J"])
def test_any_key_is_printed_as_it_is(key: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = written(
        {key: 1, "optimizer": {"type": "Adam", "params": {key: 1}}}, tmp_path / "ds.json", disk=tmp_path
    )
    for option in ([], ["--json"]):
        assert main(["convert-config", str(file), *option]) == 0
        out, err = capsys.readouterr()
        assert "\x1b" not in out + err
    assert key in [each["key"] for each in json.loads(out)["keys"]]


def test_a_key_in_brackets_is_no_markup(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = written({"[red]": 1, "bf16": {"enabled": True}}, tmp_path / "ds.json", disk=tmp_path)
    assert main(["convert-config", str(file)]) == 0
    assert "[red]" in capsys.readouterr().err


def test_an_unquoted_no_is_a_precision(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("distributed_type: FSDP\nmixed_precision: no\n")
    assert "mixed_precision" not in convert(tmp_path / "a.yaml").of("model")
