"""``gemini finetune`` on a model that is made on the spot."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from finetune_runs import LLAMA, files_of, plainly_trained, run, save_tokenizer, small_run
from hf_models import SIZES, assert_same, saved

import gemini
from gemini.cli.finetune import forecast_source
from gemini.cli.main import main
from gemini.errors import CheckpointError, ConfigError
from gemini.forecast.forecast import Settings, forecast_batch
from gemini.forecast.machine import MachineSpeeds
from gemini.jobs.finetune import task
from gemini.jobs.finetune.config import TILED_LOSS, FineTuneConfig
from gemini.jobs.finetune.encoding import Encoder
from gemini.jobs.finetune.task import FineTuneTask
from gemini.jobs.finetune.token_cache import TOKENS
from gemini.runtime.config import GeminiConfig

transformers = pytest.importorskip("transformers", reason="the extra 'hf' is not installed")
tokenizers = pytest.importorskip("tokenizers", reason="comes with transformers")
peft = pytest.importorskip("peft", reason="the extra 'hf' is not installed")

RECIPES = Path(__file__).resolve().parents[2] / "recipes"


@pytest.fixture
def config(tmp_path: Path) -> FineTuneConfig:
    return small_run(tmp_path)


@pytest.mark.parametrize("packing", [True, False])
def test_a_tight_budget_gives_the_weights_of_an_ordinary_loop(config: FineTuneConfig, packing: bool) -> None:
    config = dataclasses.replace(
        config, packing=packing, accumulate=2, precision="fp32", eval_share=0.1, eval_every=2
    )
    want, losses = plainly_trained(config)
    result = run(config)
    assert list(result.losses) == losses
    assert losses[-1] < losses[0]
    assert result.summary.link_bytes["disk_read"] > 0
    assert result.summary.data is not None
    assert result.summary.data.endswith("in JSON lines, data.jsonl")
    assert result.summary.model is not None
    assert_same(LLAMA.from_pretrained(result.summary.model), want.eval())
    tokenizer = transformers.AutoTokenizer.from_pretrained(result.summary.model)
    assert tokenizer.decode(tokenizer("work")["input_ids"]).replace(" ", "") == "work"
    records = [json.loads(line) for line in Path(config.output, "metrics.jsonl").read_text().splitlines()]
    assert [record["step"] for record in records if "eval_loss" in record] == [2, 4, 6]
    assert result.summary.eval_loss == records[-1]["eval_loss"]


@pytest.mark.parametrize("lora", [0, 4])
def test_a_tiled_loss_trains_alike(
    config: FineTuneConfig, lora: int, caplog: pytest.LogCaptureFixture
) -> None:
    config = dataclasses.replace(config, accumulate=2, precision="fp32", eval_share=0.1, lora=lora)
    want = run(config)
    got = run(config, tiled_loss="yes", output=f"{config.output}-tiled")
    assert list(got.losses) == pytest.approx(list(want.losses), rel=1e-5)
    assert got.summary.eval_loss == pytest.approx(want.summary.eval_loss, rel=1e-5)
    assert "reads logits" not in caplog.text
    with pytest.raises(ConfigError, match="has tiled_loss = 'no', but this command has tiled_loss = 'yes'"):
        run(config, tiled_loss="yes", resume="yes")


def test_the_plan_of_a_tiled_loss_counts_no_logits(config: FineTuneConfig) -> None:
    sizes = {**SIZES, "vocab_size": 30_000, "num_hidden_layers": 1}
    transformers.LlamaConfig(**sizes, architectures=["LlamaForCausalLM"]).save_pretrained(config.model)

    def non_model_bytes(tiled_loss: str) -> int:
        changed = dataclasses.replace(config, tiled_loss=tiled_loss, batch=8, seq=512)
        options = GeminiConfig(device_bytes=2**30, tiled_loss=TILED_LOSS[tiled_loss])
        settings = Settings(8, options, MachineSpeeds("any", {"fp32": 1e11}, 1e10, 1e10))
        return forecast_batch(forecast_source(changed, 512), settings, 8).non_model_bytes

    whole = 4 * 8 * 512 * 30_000
    assert non_model_bytes("no") > 2 * whole
    assert non_model_bytes("yes") == non_model_bytes("auto") < whole / 5


@pytest.mark.parametrize(
    "changes",
    [
        {"state_dtype": "int8", "eval_share": 0.1, "eval_every": 2, "epochs": 0.5, "steps": None},
        {"lora": 4, "lora_dropout": 0.3, "activation_checkpointing": True},
    ],
    ids=["full", "adapters"],
)
def test_a_run_that_was_stopped_and_resumed_is_the_one_that_was_not(
    config: FineTuneConfig, changes: dict[str, Any], tmp_path: Path
) -> None:
    config = dataclasses.replace(config, **changes, resume="auto")
    if config.lora:  # answers of several lengths, packed whole
        records = [{"prompt": "abc", "completion": "d e" * (1 + row % 5)} for row in range(40)]
        Path(config.data).write_text("\n".join(map(json.dumps, records)))
    want = run(config)
    there = str(tmp_path / "again")
    stopped = run(config, stop_after=3, output=there)
    assert stopped.exit_code == 128 + signal.SIGUSR1
    assert stopped.summary.model is None
    resumed = run(config, output=there, device_bytes=2**22)
    assert (resumed.exit_code, resumed.summary.first_step) == (0, 3)
    assert resumed.losses == want.losses
    assert files_of(resumed) == files_of(want)


def test_a_resumed_run_takes_the_tokens_of_the_first_where_nothing_changed(
    config: FineTuneConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = dataclasses.replace(config, resume="auto", eval_share=0.1)
    want = run(config, output=f"{config.output}-whole")
    run(config, stop_after=3)
    kept = Path(config.output, TOKENS)
    assert kept.stat().st_mode & 0o077 == 0
    encoded: list[str] = []
    encode = Encoder.encode

    def noted(encoder: Encoder, document: Any) -> Any:
        encoded.append(document.place)
        return encode(encoder, document)

    monkeypatch.setattr(Encoder, "encode", noted)
    resumed = run(config)
    assert encoded == []
    assert resumed.losses == want.losses
    assert files_of(resumed) == files_of(want)
    data = kept.read_bytes()
    for damaged in (data[:-4], data[:-1] + b"\x01", b"{}\n", b"\xff\n"):
        kept.write_bytes(damaged)
        run(config)
        assert len(encoded) == 20, "what is damaged is made again"
        assert kept.read_bytes() == data
        encoded.clear()
    times = Path(config.data).stat()
    Path(config.data).write_bytes(Path(config.data).read_bytes())
    os.utime(config.data, ns=(times.st_atime_ns, times.st_mtime_ns))  # as cp -p leaves it
    run(config)
    assert len(encoded) == 20
    encoded.clear()
    data = kept.read_bytes()
    Path(config.model, "tokenizer_config.json").write_text(
        Path(config.model, "tokenizer_config.json").read_text() + "\n"
    )
    run(config)
    assert len(encoded) == 20
    assert kept.read_bytes() != data, "it is of the tokenizer that is there now"


def test_a_pad_token_that_the_model_has_no_embedding_for_fills_no_row(config: FineTuneConfig) -> None:
    """A tokenizer may have got one after the model was trained."""
    config = dataclasses.replace(config, packing=False, steps=2)
    want = run(config).losses
    save_tokenizer(Path(config.model), pad_token="<pad>")
    assert run(config, output=f"{config.output}2").losses == want


def test_a_run_that_ended_is_exported_again_by_the_same_command(config: FineTuneConfig) -> None:
    want = files_of(run(config))
    (Path(config.output) / "model" / "model.safetensors").unlink()
    (Path(config.output) / "summary.json").unlink()  # as of a run that was killed after its last save
    Path(config.output, "checkpoint", "step-00000003.partial").mkdir()
    with pytest.raises(ConfigError, match="already holds a run"):
        run(config)
    assert files_of(run(config, resume="auto")) == want
    assert json.loads((Path(config.output) / "summary.json").read_text())["last_step"] == config.steps
    assert not list(Path(config.output).rglob("*.partial"))
    with pytest.raises(ConfigError, match=r"lr = 0\.01, but this command has lr = 0\.02"):
        run(config, resume="auto", lr=0.02)
    with pytest.raises(CheckpointError, match="nothing to resume; check the path, or give --resume auto"):
        run(config, resume="yes", output=f"{config.output}2")


def test_a_run_resumes_from_a_copy_of_its_model_and_not_from_other_weights(
    config: FineTuneConfig, tmp_path: Path
) -> None:
    want = run(config, steps=1).losses
    elsewhere = shutil.copytree(config.model, tmp_path / "elsewhere")
    assert run(config, steps=1, resume="auto", model=str(elsewhere)).losses == want
    torch.manual_seed(1)
    LLAMA(LLAMA.from_pretrained(elsewhere).config).save_pretrained(elsewhere)
    with pytest.raises(ConfigError, match=r"has model = '\w+', .* the model \(--model\) is not"):
        run(config, steps=1, resume="auto", model=str(elsewhere))


def test_a_model_that_no_run_has_made_is_never_replaced(config: FineTuneConfig, tmp_path: Path) -> None:
    first = files_of(run(config))
    own = Path(config.output, "model")
    with pytest.raises(ConfigError, match="is the model that the run starts from"):
        run(config, model=str(own), overwrite=True)
    (tmp_path / "users").mkdir()
    own.rename(tmp_path / "users" / "model")
    with pytest.raises(ConfigError, match="was not written by a run"):
        run(config, output=str(tmp_path / "users"))
    assert {file.name: file.read_bytes() for file in (tmp_path / "users" / "model").iterdir()} == first


def test_starting_over_leaves_nothing_of_the_run_before(config: FineTuneConfig) -> None:
    run(config)
    stopped = run(config, overwrite=True, stop_after=2)
    assert stopped.summary.model is None
    assert not Path(config.output, "model").exists()


def test_adapters_merge_into_what_transformers_makes_of_them(config: FineTuneConfig, tmp_path: Path) -> None:
    config = dataclasses.replace(config, lora=4, precision="fp32", lora_targets="q_proj, v_proj")
    apart = run(config)
    merged = run(config, merge=True, output=str(tmp_path / "merged"))
    assert apart.summary.model is not None
    assert merged.summary.model is not None
    adapted = peft.PeftModel.from_pretrained(LLAMA.from_pretrained(config.model), apart.summary.model)
    names = {name for name, _ in adapted.named_parameters() if "lora_" in name}
    assert all(re.search("[qv]_proj", name) for name in names)
    assert_same(LLAMA.from_pretrained(merged.summary.model), adapted.merge_and_unload().requires_grad_())


def test_conversations_are_learned_by_the_template_that_is_exported(
    config: FineTuneConfig, capsys: pytest.CaptureFixture[str]
) -> None:
    messages = [{"role": "user", "content": "ping"}, {"role": "assistant", "content": "pong"}]
    Path(config.data).write_text((json.dumps({"messages": messages}) + "\n") * 3)
    config = dataclasses.replace(config, seq=48)
    task = FineTuneTask(config, Path("unused"), resume=False, scratch=None)
    assert (task.samples.num_learned, task.samples.layout) == (15, "whole")
    assert "data: 3 conversations (messages) in JSON lines, data.jsonl" in task.describe()
    assert any("no chat template, so a plain one" in line for line in task.describe())
    result = run(config)
    assert result.losses[-1] < result.losses[0]
    assert result.summary.model is not None
    tokenizer = transformers.AutoTokenizer.from_pretrained(result.summary.model)
    asked = tokenizer.apply_chat_template(messages[:1], tokenize=False, add_generation_prompt=True)
    assert asked == "### user\nping\n\n### assistant\n"


def test_records_are_shown_as_they_are_learned_and_nothing_is_trained(
    config: FineTuneConfig, capsys: pytest.CaptureFixture[str]
) -> None:
    Path(config.data).write_text(json.dumps({"prompt": "a b", "completion": "cd"}) + "\n" + "no JSON")
    assert main(["finetune", "--model", config.model, "--data", config.data, "--show", "1"]) == 0
    shown = capsys.readouterr().out.splitlines()
    assert shown[0] == f"line 1 of {config.data}: prompt-completion, 6 tokens, 3 of them in the loss"
    assert [line.split(None, 2)[2] for line in shown[2:-1]] == [
        "-     'a'", "-     ' '", "-     'b'", "yes   'c'", "yes   'd'", "yes   '<end>'",
    ]  # fmt: skip
    assert main(["finetune", "--model", config.model, "--data", config.data, "--show", "2"]) == 2
    assert "line 2 of" in capsys.readouterr().err


def test_a_model_that_takes_no_positions_is_refused_with_what_it_can_do(config: FineTuneConfig) -> None:
    bloom = transformers.BloomConfig(vocab_size=96, hidden_size=8, n_layer=1, n_head=2)
    saved(bloom, transformers.BloomForCausalLM, Path(config.model))
    with pytest.raises(ConfigError, match=r"'bloom', which takes no position_ids.* --no-packing"):
        run(config)
    assert run(config, documents="joined").losses
    assert run(config, packing=False, overwrite=True).losses


def test_documents_that_see_each_other_all_the_same_are_noticed_before_training(
    config: FineTuneConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = {**SIZES, "max_position_embeddings": 64, "initializer_range": 0.5}
    saved(transformers.LlamaConfig(**sizes), LLAMA, Path(config.model))
    assert run(config, steps=1).losses
    monkeypatch.setattr(transformers.models.llama.modeling_llama, "create_causal_mask", lambda **_: None)
    with pytest.raises(ConfigError, match="LlamaForCausalLM does not keep packed documents apart"):
        run(config, overwrite=True)


@pytest.mark.parametrize("file", ["config.json", "tokenizer_config.json"])
def test_code_of_a_directory_is_neither_run_nor_asked_about(
    file: str, config: FineTuneConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    monkeypatch.setattr("builtins.input", lambda *text: asked.append("asked") or "y")
    path = Path(config.model, file)
    classes = {"AutoConfig": "own.C", "AutoModelForCausalLM": "own.M", "AutoTokenizer": ["own.T", None]}
    own = {"auto_map": classes, "model_type": "own", "tokenizer_class": "OwnTokenizer"}
    path.write_text(json.dumps({**json.loads(path.read_text()), **own}))
    Path(config.model, "own.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w').close()\n")
    with pytest.raises(ConfigError, match=r"transformers cannot read the (config|tokenizer)"):
        run(config)
    if file == "config.json":
        for kind in (None, "AutoModelForCausalLM"):
            with pytest.raises(ConfigError, match="transformers cannot load the model"):
                gemini.from_pretrained(config.model, kind, device_bytes="1MiB")
    assert not asked
    assert not (tmp_path / "ran").exists()


def without_tokenizer(config: FineTuneConfig) -> dict[str, Any]:
    for file in Path(config.model).glob("tokenizer*"):
        file.unlink()
    return {}


def without_weights(config: FineTuneConfig) -> dict[str, Any]:
    (Path(config.model) / "model.safetensors").unlink()
    return {}


def empty(config: FineTuneConfig) -> dict[str, Any]:
    Path(config.data).write_text("\n\n")
    return {}


def of_another_kind(config: FineTuneConfig) -> dict[str, Any]:
    transformers.ViTConfig().save_pretrained(config.model)
    return {}


def of_more_tokens(config: FineTuneConfig) -> dict[str, Any]:
    directory = Path(config.output).parent / "other"
    save_tokenizer(directory, additional_special_tokens=["<more>"])
    Path(config.data).write_text(json.dumps({"text": "<more>"}))
    return {"tokenizer": str(directory)}


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (without_tokenizer, "has no tokenizer; copy tokenizer.json .* with --tokenizer"),
        (lambda _: {"seq": 65}, "--seq 65 is above the 64 positions .* give --seq 64 or less"),
        (empty, "--data has 0 tokens.* give more data"),
        (lambda _: {"model": "nowhere"}, "--model nowhere has no config.json.*\\(hf download"),
        (of_another_kind, "a 'vit', for which transformers has no AutoModelForCausalLM"),
        (of_more_tokens, "line 1 of .* has token 96, .* has only 96 embeddings"),
        (lambda _: {"eval_share": 0.99}, "leaves none to train on"),
        (lambda _: {"device_bytes": 1024}, "raise device_bytes to at least"),
        (lambda _: {"lora": 2, "lora_targets": "nothing"}, "--lora-targets nothing: .* or all-linear"),
        (
            lambda _: {"lora": 2, "lora_targets": "v_proj,q_prooj"},
            r"--lora-targets q_prooj: .* of this name \(did you mean q_proj\?\)",
        ),
        (
            lambda _: {"lora": 2, "lora_target_parameters": "mlp.up_prj.weight"},
            r"--lora-target-parameters mlp\.up_prj\.weight: .* \(did you mean mlp\.up_proj\.weight\?\)",
        ),
        (
            lambda _: {"lora": 2, "lora_targets": "mlp.up_proj.weight"},
            "no layer of this name, but a parameter; give it to --lora-target-parameters",
        ),
        (
            lambda _: {"lora": 2, "lora_target_parameters": "up_proj"},
            "no parameter of this name, but a layer; give it to --lora-targets",
        ),
        (without_weights, "has no weights"),
    ],
)
def test_what_cannot_be_trained_is_refused_before_anything_is_written(
    spoil: Callable[[FineTuneConfig], dict[str, Any]], message: str, config: FineTuneConfig
) -> None:
    with pytest.raises((ConfigError, gemini.errors.OutOfBudgetError), match=message):
        run(config, **spoil(config))
    assert not Path(config.output).exists()


def test_a_recipe_that_ships_runs_and_says_first_what_to_expect(
    config: FineTuneConfig, capsys: pytest.CaptureFixture[str]
) -> None:
    paths = ["--model", config.model, "--data", config.data, "--output", config.output]
    small = ["--seq", "16", "--steps", "2", "--accumulate", "2", "--device-bytes", "4MiB"]
    assert main(["finetune", str(RECIPES / "lora.toml"), *paths, *small, "--lora", "4"]) == 0
    shown = capsys.readouterr()
    said = [line for line in shown.err.splitlines() if line.startswith("plan: ")]
    assert re.match("plan: the run fits: .* of model data", said[0])
    assert re.match(r"plan: model data peaks at DEVICE .* per step, .* tokens/s, bound by", said[1])
    assert shown.err.index(said[1]) < shown.err.index("step 1/2")
    assert "gemini finetune" in shown.out
    assert LLAMA.from_pretrained(Path(config.output) / "model").dtype == torch.bfloat16


def test_the_recipe_of_a_quantized_base_runs_and_exports_adapters(
    config: FineTuneConfig, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("bitsandbytes", reason="the extra 'quantized' is not installed")
    paths = ["--model", config.model, "--data", config.data, "--output", config.output]
    small = ["--seq", "16", "--steps", "2", "--accumulate", "2", "--device-bytes", "4MiB"]
    assert main(["finetune", str(RECIPES / "qlora.toml"), *paths, *small, "--lora", "4"]) == 0
    shown = capsys.readouterr().err
    said = [line for line in shown.splitlines() if line.startswith("plan: ")]
    assert re.match("plan: the run fits: .* of model data", said[0])
    assert re.match(r"plan: model data peaks at DEVICE .* per step, .* tokens/s, bound by", said[1])
    assert "on a base model in nf4" in shown
    assert (Path(config.output) / "model" / "adapter_model.safetensors").is_file()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"device_bytes": 1024}, "raise device_bytes to at least"),
        ({"lora": 2, "lora_targets": "v_proj,q_prooj"}, r"--lora-targets q_prooj: .*did you mean q_proj"),
        ({"eval_data": "nowhere"}, "--eval-data nowhere"),
        ({"seq": 65}, "--seq 65 is above the 64 positions"),
        ({"resume": "yes", "lr": 0.5}, r"has lr = 0\.01, but this command has lr = 0\.5"),
        ({"resume": "yes", "steps": 1}, "is at step 2, past --steps 1; raise --steps"),
    ],
)
def test_what_shows_without_data_is_refused_before_data_is_read(
    changes: dict[str, Any], message: str, config: FineTuneConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    if "resume" in changes:
        run(config, steps=2)

    def read(*_: Any, **__: Any) -> None:
        raise AssertionError("the data was read")

    monkeypatch.setattr(task, "Samples", read)
    with pytest.raises((ConfigError, gemini.errors.OutOfBudgetError), match=message):
        run(config, **changes)


def test_what_does_not_fit_is_said_once_by_the_names_of_options(
    config: FineTuneConfig, capsys: pytest.CaptureFixture[str]
) -> None:
    paths = ["--model", config.model, "--data", config.data, "--output", config.output]
    assert main(["finetune", *paths, "--device-bytes", "16KiB"]) == 2
    said = capsys.readouterr().err
    assert said.startswith("gemini: error: ")
    assert "raise --device-bytes" in said
    assert not Path(config.output).exists()


def test_activations_that_exceed_the_budget_are_no_reason_to_say_that_it_does_not_fit(
    config: FineTuneConfig, capsys: pytest.CaptureFixture[str]
) -> None:
    paths = ["--model", config.model, "--data", config.data, "--output", config.output]
    few = ["--seq", "64", "--steps", "1", "--batch", "4", "--device-bytes", "256KiB"]
    assert main(["finetune", *paths, *few, "--disk-dir", config.output]) == 0
    said = capsys.readouterr().err
    assert "plan: activations will exceed the budget" in said
    assert "does not fit" not in said


@pytest.mark.parametrize("below", ["", "/out"])
def test_an_output_that_cannot_be_made_is_refused_before_data_are_read(
    below: str, config: FineTuneConfig, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"--output .*/file is a file; name another directory"):
        run(config, output=f"{tmp_path}/file{below}", data="nowhere")
