"""``gemini plan config.json``: what transformers builds is rehearsed, or refused in one line."""

from __future__ import annotations

import builtins
import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from forecast_models import machine
from torch import nn

from gemini.cli.main import main
from gemini.cli.plan_model import ModelOptions, find_model
from gemini.errors import ConfigError
from gemini.forecast import report

VISION = {
    "hidden_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "intermediate_size": 128,
    "image_size": 32,
    "patch_size": 16,
}
TEXT = {
    "hidden_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "intermediate_size": 128,
    "vocab_size": 256,
}
T5 = {"d_model": 64, "d_kv": 16, "d_ff": 128, "num_layers": 1, "num_heads": 4, "vocab_size": 256}
COUPLES = {
    "d_model": 64,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 128,
    "decoder_ffn_dim": 128,
    "vocab_size": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 1,
}
STAGES = {"hidden_sizes": [8, 16], "depths": [1, 1]}
SOUND = {
    **{name: TEXT[name] for name in ("hidden_size", "num_hidden_layers", "num_attention_heads")},
    "intermediate_size": 128,
    "conv_dim": [16] * 7,
    "num_conv_pos_embeddings": 16,
    "num_conv_pos_embedding_groups": 4,
}
PAIR = {"text_config": TEXT, "vision_config": VISION}
SEGFORMER = {
    "hidden_sizes": [8, 16, 32, 64],
    "num_attention_heads": [1, 2, 4, 8],
    "depths": [1, 1, 1, 1],
    "decoder_hidden_size": 16,
}
# Architecture: model type, fields, and what a step learns from where nobody asks for a length.
MODELS: dict[str, tuple[str, dict[str, Any], tuple[int, str]]] = {
    "WhisperForConditionalGeneration": ("whisper", COUPLES, (448, "tokens")),
    "BartForConditionalGeneration": ("bart", COUPLES, (1024, "tokens")),
    "CLIPModel": ("clip", PAIR, (77, "tokens")),
    "SiglipModel": ("siglip", PAIR, (64, "tokens")),
    "ViTForImageClassification": ("vit", VISION, (1, "samples")),
    "Dinov2Model": ("dinov2", {**VISION, "image_size": 28, "patch_size": 14}, (1, "samples")),
    "ResNetForImageClassification": ("resnet", {"embedding_size": 8, **STAGES}, (1, "samples")),
    "ConvNextForImageClassification": ("convnext", {**STAGES, "num_stages": 2}, (1, "samples")),
    "SwinForImageClassification": (
        "swin",
        {"embed_dim": 16, "depths": [1, 1], "num_heads": [2, 4], "image_size": 64, "window_size": 4},
        (1, "samples"),
    ),
    "SegformerForSemanticSegmentation": ("segformer", SEGFORMER, (1, "samples")),
    "YolosForObjectDetection": ("yolos", {**VISION, "image_size": [32, 48]}, (1, "samples")),
    "VideoMAEForVideoClassification": ("videomae", {**VISION, "num_frames": 4}, (1, "samples")),
    "Wav2Vec2ForCTC": ("wav2vec2", SOUND, (1024, "frames")),
    "T5ForConditionalGeneration": ("t5", T5, (1024, "tokens")),
    "BertForMaskedLM": ("bert", TEXT, (512, "tokens")),
    "BertForSequenceClassification": ("bert", TEXT, (512, "tokens")),
    "RobertaForMaskedLM": ("roberta", {**TEXT, "max_position_embeddings": 514}, (512, "tokens")),
    "GPT2ForSequenceClassification": (
        "gpt2",
        {"n_embd": 64, "n_layer": 1, "n_head": 4, "vocab_size": 256, "pad_token_id": 0},
        (1024, "tokens"),
    ),
    "DebertaV2ForMaskedLM": ("deberta-v2", TEXT, (512, "tokens")),
    "MixtralForCausalLM": (
        "mixtral",
        {**TEXT, "num_key_value_heads": 2, "num_local_experts": 4},
        (1024, "tokens"),
    ),
    "Qwen3MoeForCausalLM": (
        "qwen3_moe",
        {**TEXT, "head_dim": 16, "num_experts": 8, "moe_intermediate_size": 32},
        (1024, "tokens"),
    ),
}


@pytest.fixture
def described(tmp_path: Path) -> list[str]:
    """Options that name a machine in a file."""
    machine().save(tmp_path / "machine.json")
    return ["--machine", str(tmp_path / "machine.json"), "--device-bytes", "2GiB"]


def written(directory: Path, fields: dict[str, Any]) -> str:
    (directory / "config.json").write_text(json.dumps(fields))
    return str(directory)


def plan(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> tuple[int, dict[str, Any]]:
    code = main(["plan", *arguments, "--json"])
    return code, json.loads(capsys.readouterr().out)


def test_a_hugging_face_config_needs_transformers_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    real_import = builtins.__import__

    def without(name: str, *args: Any, **kwargs: Any) -> Any:
        if name == "transformers":
            raise ImportError(name)
        return real_import(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ConfigError, match="pip install transformers"):
        find_model(str(tmp_path), ModelOptions(32, checkpointing=False))


LLAMA = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 256,
}


def test_a_config_that_transformers_refuses_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class AutoConfig:
        @staticmethod
        def for_model(**_fields: Any) -> None:
            raise ValueError("no heads\nto speak of" + 1000 * "!")

    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    monkeypatch.setitem(sys.modules, "transformers", SimpleNamespace(AutoConfig=AutoConfig))
    with pytest.raises(ConfigError, match="as a 'llama' model: no heads to speak of") as refusal:
        find_model(str(tmp_path), ModelOptions(32, checkpointing=False))
    assert len(str(refusal.value).replace(str(tmp_path), "")) < 500


@pytest.mark.parametrize(
    ("path", "name"), [("own.json", "own.json (llama)"), ("dir", "dir/config.json (llama)")]
)
def test_a_hugging_face_model_has_the_name_of_its_file(
    path: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = SimpleNamespace(for_model=lambda **_fields: SimpleNamespace())
    model = SimpleNamespace(from_config=lambda _config: nn.Linear(2, 2))
    monkeypatch.setitem(sys.modules, "transformers", SimpleNamespace(AutoConfig=config, AutoModel=model))
    monkeypatch.chdir(tmp_path)
    Path("dir").mkdir()
    for file in (Path("own.json"), Path("dir", "config.json")):
        file.write_text('{"model_type": "llama"}')
    assert find_model(path, ModelOptions(32, checkpointing=False)).name == name


@pytest.mark.parametrize("said", [["LlamaForCausalLN"], "LlamaForCausalLN"])
def test_an_architecture_that_transformers_lacks_is_no_other_model(
    said: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = SimpleNamespace(for_model=lambda **_fields: SimpleNamespace())
    monkeypatch.setitem(sys.modules, "transformers", SimpleNamespace(AutoConfig=config))
    (tmp_path / "config.json").write_text(json.dumps({**LLAMA, "architectures": said}))
    with pytest.raises(ConfigError, match=r"no 'LlamaForCausalLN'.*correct the name"):
        find_model(str(tmp_path), ModelOptions(32, checkpointing=False))


@pytest.mark.parametrize("options", [[], ["--checkpointing"]])
def test_a_config_is_built_and_rehearsed(
    options: list[str], tmp_path: Path, described: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("transformers", reason="optional: builds models from a config.json")
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    code, found = plan([str(tmp_path), *described, *options, "--seq", "32"], capsys)
    assert code == 0
    assert found["units_per_step"] == 32


@pytest.mark.parametrize("architecture", MODELS)
def test_models_of_every_kind_of_data_are_planned(
    architecture: str,
    tmp_path: Path,
    described: list[str],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("transformers", reason="optional: builds models from a config.json")
    # The largest batch takes more rehearsals than all else; test_forecast.py has its laws.
    monkeypatch.setattr(report, "largest_batch", lambda *_: 1)
    model_type, fields, (units, unit) = MODELS[architecture]
    name = written(tmp_path, {"model_type": model_type, "architectures": [architecture], **fields})
    code, found = plan([name, *described], capsys)
    assert code == 0
    assert (found["units_per_step"], found["unit"]) == (units, unit)
    shortened = any(f"--seq {units}, not 1024" in note for note in found["notes"])
    assert shortened == (unit == "tokens" and units < 1024)


def test_more_tokens_than_there_are_positions_are_refused_where_they_are_asked_for(
    tmp_path: Path, described: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("transformers", reason="optional: builds models from a config.json")
    name = written(tmp_path, {"model_type": "bert", "architectures": ["BertForMaskedLM"], **TEXT})
    assert main(["plan", name, *described, "--seq", "513"]) == 2
    assert "give --seq 512 or less" in capsys.readouterr().err
    assert plan([name, *described, "--seq", "512"], capsys)[1]["notes"] == []


def test_a_loop_over_tokens_is_extrapolated_and_says_so(
    tmp_path: Path, described: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("transformers", reason="optional: builds models from a config.json")
    fields = {"hidden_size": 32, "num_hidden_layers": 1, "vocab_size": 64, "state_size": 4}
    name = written(tmp_path, {"model_type": "mamba", "architectures": ["MambaForCausalLM"], **fields})
    code, found = plan([name, *described, "--seq", "100000"], capsys)
    assert code == 0
    few, more, most = found["extrapolated_from"]
    assert 4 * few == 2 * more == most < 1000
    assert found["notes"] == [
        f"It runs token by token: steps of {few}, {more} and {most} tokens were rehearsed, and memory "
        "and times extrapolated to 100,000."
    ]


@pytest.mark.parametrize(
    ("fields", "what"),
    [
        ({"model_type": "llama", "num_hidden_layers": 10**9}, "num_hidden_layers is 1e+09"),
        ({"model_type": "llama", "hidden_size": 2**62}, "config.json"),
        ({"model_type": "bert", "num_attention_heads": 5}, "config.json"),
        ({"model_type": "patchtst", "architectures": ["PatchTSTForPrediction"]}, "factory"),
    ],
)
def test_what_cannot_be_built_or_called_is_one_line(
    fields: dict[str, Any],
    what: str,
    tmp_path: Path,
    described: list[str],
    capsys: pytest.CaptureFixture[str],
) -> None:
    pytest.importorskip("transformers", reason="optional: builds models from a config.json")
    assert main(["plan", written(tmp_path, fields), *described]) == 2
    error = capsys.readouterr().err
    assert what in error
    assert error.startswith("gemini: error: ")
    assert error.count("\n") == 1


def make_fifo(path: Path) -> None:
    os.mkfifo(path)


@pytest.mark.parametrize("option", ["model", "--machine"])
@pytest.mark.parametrize(
    ("make", "what"),
    [
        (make_fifo, "no regular file"),
        (Path.mkdir, "cannot read"),
        (lambda path: path.write_text(100_000 * "[" + 100_000 * "]"), "nested"),
        (lambda path: path.write_text(100_000 * '{"a":' + "1" + 100_000 * "}"), "nested"),
        (lambda path: path.write_text('{"model_type": ' + "9" * 5000 + "}"), ""),
        (lambda path: os.truncate(os.open(path, os.O_CREAT | os.O_WRONLY), 2**40), "bytes"),
        (lambda path: path.write_bytes(b"\xff\xfe"), ""),
    ],
)
def test_a_file_that_is_no_description_is_one_line(
    option: str, make: Any, what: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "config.json"
    make(path)
    model = str(tmp_path) if option == "model" else "gpt2"
    assert main(["plan", model, *([] if option == "model" else [option, str(path)])]) == 2
    error = capsys.readouterr().err
    assert what in error
    assert error.startswith("gemini: error: ")
    assert error.count("\n") == 1


@pytest.mark.parametrize("name", ["x" * 5000, "a\0b", "./" + "y" * 300 + "/config.json"])
def test_a_name_that_no_file_can_have_is_one_line(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", name]) == 2
    assert capsys.readouterr().err.count("\n") == 1
