"""``gemini convert-config``: what it prints runs, and no key of a file is left without a word."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from gemini.cli.conversion import BY_HAND, DONE, NONE, NOT_NEEDED, Conversion
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
    """Run what is printed on four batches; return its names."""
    torch.manual_seed(0)
    names: dict[str, Any] = {"model": Model(), "loader": [{"x": torch.rand(4, 6)} for _ in range(4)]}
    exec(compile(found.program(), "printed", "exec"), names)
    return names


def leaves(document: Any, where: str = "") -> set[str]:
    """Return the paths of the sections at the top and of the keys below them."""
    found = set()
    for key, value in document.items():
        path = f"{where}.{key}" if where else key
        found |= leaves(value, path) if isinstance(value, dict) and value else {path}
    return found


@pytest.mark.parametrize("name", PLAIN)
def test_what_is_printed_trains(name: str, tmp_path: Path) -> None:
    found = convert(written(PLAIN[name], tmp_path / "ds_config.json", disk=tmp_path))
    names = run_program(found)
    assert names["model"].stats()["step"] == 4 // found.accumulation
    assert {verdict for _, verdict, _ in found.keys} <= {DONE, NOT_NEEDED, BY_HAND, NONE}
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
    classes = {"Lamb": "gemini.Lamb", "Lion": "gemini.Lion", "SGD": "torch.optim.SGD"}
    assert found.optimizer_class == classes.get(optimizer, "gemini.HybridAdam")
    assert names["model"].stats()["step"] == 4
    assert names["scheduler"].last_epoch == 4


def share_of_deepspeed(scheduler: str, step: int) -> float:
    """Return the share of the highest rate that DeepSpeed's schedulers have in a step, by their defaults."""
    least = 0.01 if scheduler == "WarmupCosineLR" else 0.0
    if step < WARMUP:
        return least + (1 - least) * math.log(step + 1) / math.log(WARMUP)
    if scheduler == "WarmupDecayLR":
        return (TOTAL - step) / (TOTAL - WARMUP)
    if scheduler == "WarmupCosineLR":
        way = (step - WARMUP + 1) / (TOTAL - WARMUP)
        return 0.0001 + (1 - 0.0001) * (1 + math.cos(math.pi * way)) / 2
    return 1.0


@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_a_logarithmic_warmup_has_the_rates_of_deepspeed(scheduler: str, tmp_path: Path) -> None:
    params = {"warmup_num_steps": WARMUP, "total_num_steps": TOTAL}
    if scheduler == "WarmupLR":
        del params["total_num_steps"]
    document = {
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "scheduler": {"type": scheduler, "params": params},
    }
    found = convert(written(document, tmp_path / "ds.json", disk=tmp_path))
    names: dict[str, Any] = {"torch": torch}
    names["optimizer"] = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1e-3)
    exec("\n".join(found.schedule), names)
    rates = []
    for _ in range(TOTAL):
        rates.append(names["optimizer"].param_groups[0]["lr"])
        names["optimizer"].step()
        names["scheduler"].step()
    assert rates == pytest.approx([1e-3 * share_of_deepspeed(scheduler, step) for step in range(TOTAL)])
    assert any("logarithmic" in text for key, _, text in found.keys if key == "scheduler.type")


def test_lamb_is_ours_and_muon_says_why_it_is_not_printed(tmp_path: Path) -> None:
    lamb = {"optimizer": {"type": "Lamb", "params": {"lr": 1e-3}}}
    found = convert(written(lamb, tmp_path / "lamb.json", disk=tmp_path))
    assert found.optimizer_class == "gemini.Lamb"
    assert found.optimizer == {"lr": "0.001", "eps": "1e-08", "bias_correction": "True"}
    muon = {"optimizer": {"type": "Muon", "params": {"lr": 0.02, "momentum": 0.95}}}
    found = convert(written(muon, tmp_path / "muon.json", disk=tmp_path))
    assert found.optimizer == {}
    (said,) = [(verdict, text) for key, verdict, text in found.keys if key == "optimizer.type"]
    assert said[0] == NONE
    assert "takes matrices alone" in said[1]
    assert {key for key, verdict, _ in found.keys if verdict == NONE} >= {
        "optimizer.params.lr",
        "optimizer.params.momentum",
    }


def test_values_arrive_where_ours_are(tmp_path: Path) -> None:
    found = convert(written(OFFLOADED, tmp_path / "ds.json", disk=tmp_path))
    optimizer = run_program(found)["optimizer"]
    group = optimizer.param_groups[0]
    assert (group["betas"], group["eps"], group["weight_decay"]) == ((0.8, 0.99), 1e-7, 0.1)
    assert group["initial_lr"] == 3e-5
    assert found.model == {"mixed_precision": '"fp16"', "disk_dir": repr(str(tmp_path))}
    assert found.managed == {
        "growth_interval": "500", "hysteresis": "3", "initial_scale": "2**12", "max_norm": "1.0"
    }  # fmt: skip


def test_a_file_of_something_else_is_refused(tmp_path: Path) -> None:
    path = written({"model_type": "llama", "hidden_size": 128}, tmp_path / "config.json", disk=tmp_path)
    with pytest.raises(ConfigError, match=r"but model_type, hidden_size; name ds_config\.json"):
        convert(path)


def test_no_key_is_left_without_a_word(tmp_path: Path) -> None:
    unknown = {**OFFLOADED, "invented": 1, "zero_optimization": {"stage": 1, "also_invented": {"a": 2}}}
    for document in (*PLAIN.values(), unknown):
        found = convert(written(document, tmp_path / "ds.json", disk=tmp_path))
        said = {key for key, _, _ in found.keys}
        for path in leaves(document) - {"fp16.loss_scale"}:
            sections = {path.rsplit(".", count)[0] for count in range(path.count(".") + 1)}
            assert sections & said or any(key.startswith(f"{path.split('.')[0]}.") for key in said), path
    verdicts = {key: verdict for key, verdict, _ in found.keys}
    assert verdicts["invented"] == NONE
    assert verdicts["zero_optimization.also_invented"] == NONE


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
    found = convert(file)
    assert run_program(found)["model"].stats()["step"] == 2
    verdicts = {key: verdict for key, verdict, _ in found.keys}
    assert verdicts["fsdp_config.fsdp_auto_wrap_policy"] == NOT_NEEDED
    assert verdicts["fsdp_config.fsdp_something_new"] == NONE
    assert verdicts["num_processes"] == BY_HAND


def test_a_deepspeed_section_of_accelerate_is_converted(tmp_path: Path) -> None:
    file = tmp_path / "default_config.yaml"
    file.write_text(
        "distributed_type: DEEPSPEED\nmixed_precision: 'no'\ndeepspeed_config:\n  zero_stage: 3\n"
        f"  offload_param_device: nvme\n  offload_param_nvme_path: {tmp_path}\n  gradient_clipping: 0.5\n"
        "  zero3_init_flag: true\n"
    )
    found = convert(file)
    assert found.model == {"disk_dir": repr(str(tmp_path))}
    assert found.managed == {"max_norm": "0.5"}
    run_program(found)


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("a.json", "[1]", "a list"),
        ("a.json", "{", "no JSON"),
        ("a.json", "[" * 100_000, "no JSON"),
        ("a.json", '{"bf16": {"enabled": true}, "fp16": {"enabled": true}}', "both"),
        ("a.json", '{"bf16": 3}', "bf16 is a int"),
        ("a.json", '{"zero_optimization": {"stage": 7}}', "stage is 7"),
        ("a.json", '{"zero_optimization": {"stage": true}}', "stage is True"),
        ("a.json", '{"gradient_accumulation_steps": 0}', "steps is 0"),
        ("a.json", '{"gradient_clipping": 1e999}', "to be a number"),
        ("a.json", '{"gradient_clipping": NaN}', "to be a number"),
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
            "params.lr is -0.0001; it is to be 0 or more",
        ),
        ("a.json", '{"optimizer": {"type": "Adam", "params": {"eps": -1}}}', "params.eps is -1"),
        (
            "a.json",
            '{"optimizer": {"type": "Adam", "params": {"weight_decay": -0.1}}}',
            "weight_decay is -0.1",
        ),
        ("a.json", '{"optimizer": {"type": "Adam", "params": {"betas": [0.9, 1.0]}}}', "0 to below 1"),
        ("a.json", '{"optimizer": {"type": "Adam", "params": {"betas": [-0.1, 0.9]}}}', "0 to below 1"),
        (
            "a.json",
            '{"scheduler": {"type": "WarmupDecayLR", "params": {"warmup_num_steps": -3}}}',
            "warmup_num_steps is -3",
        ),
        (
            "a.json",
            '{"scheduler": {"type": "WarmupCosineLR", '
            '"params": {"warmup_num_steps": 9, "total_num_steps": 9}}}',
            "total_num_steps is 9, and warmup_num_steps 9",
        ),
        (
            "a.json",
            '{"scheduler": {"type": "WarmupDecayLR", "params": {"warmup_max_lr": -1}}}',
            "warmup_max_lr is -1",
        ),
        ("a.json", '{"gradient_clipping": -1}', "clipping is -1"),
        ("a.yaml", "a: &a [1]\nb: *a\n", "a.yaml has aliases"),
        ("a.yaml", "fsdp_config: {}\ngradient_accumulation_steps: 0\n", "1 or more"),
        ("a.yaml", "a: [", "no YAML"),
        ("a.yaml", "fsdp_config:\n  fsdp_sharding_strategy: HALF\n", "HALF"),
        ("a.yaml", "!!python/object/apply:os.system ['true']", "no YAML"),
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
    assert found.model["disk_dir"] == repr(str(disk))


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
        {key: 1, "optimizer": {"type": key, "params": {key: 1}}}, tmp_path / "ds.json", disk=tmp_path
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
    assert "mixed_precision" not in convert(tmp_path / "a.yaml").model
