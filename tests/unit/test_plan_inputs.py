"""What a model is called with follows from its signature and its config."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from gemini.cli.plan_inputs import ModelKind, PositionTable, image_shape, most_tokens, waveform_samples


def kind(
    name: str = "Model", accepts: tuple[str, ...] = (), modalities: tuple[str, ...] = (), **fields: Any
) -> ModelKind:
    """A model whose main input is the first that it accepts."""
    return ModelKind(name, SimpleNamespace(**fields), dict.fromkeys(accepts, False), accepts[0], modalities)


def shapes(of: ModelKind, batch: int = 2, seq: int = 10) -> dict[str, Any]:
    inputs = of.inputs(batch, seq)
    return {name: tuple(x.shape) if isinstance(x, torch.Tensor) else x for name, x in inputs.items()}


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        (kind(accepts=("input_ids", "labels")), {"input_ids": (2, 10), "labels": (2, 10)}),
        (
            kind("BertForMultipleChoice", ("input_ids", "labels")),
            {"input_ids": (2, 2, 10), "labels": (2,)},
        ),
        (
            kind("ViTForImageClassification", ("pixel_values", "labels"), ("image",), image_size=32),
            {"pixel_values": (2, 3, 32, 32), "labels": (2,)},
        ),
        (
            kind("SegformerForSemanticSegmentation", ("pixel_values", "labels"), ("image",)),
            {"pixel_values": (2, 3, 224, 224), "labels": (2, 224, 224)},
        ),
        (
            kind("DetrForObjectDetection", ("pixel_values", "labels"), is_encoder_decoder=True),
            {"pixel_values": (2, 3, 224, 224)},
        ),
        (
            kind(accepts=("pixel_values",), num_frames=4, image_size=[8, 6]),
            {"pixel_values": (2, 4, 3, 8, 6)},
        ),
        (
            kind(
                "CLIPModel",
                ("input_ids", "pixel_values", "return_loss"),
                ("image", "text"),
                vision_config=SimpleNamespace(image_size=16, num_channels=1),
            ),
            {"input_ids": (2, 10), "pixel_values": (2, 1, 16, 16), "return_loss": True},
        ),
        (
            kind(accepts=("input_ids", "pixel_values"), modalities=("image", "text"), image_token_id=7),
            {"input_ids": (2, 10)},
        ),
        (
            kind(
                "WhisperForConditionalGeneration",
                ("input_features", "decoder_input_ids", "labels"),
                ("audio", "text"),
                num_mel_bins=80,
                max_source_positions=1500,
                is_encoder_decoder=True,
                decoder_start_token_id=1,
            ),
            {"input_features": (2, 80, 3000), "labels": (2, 10)},
        ),
        (
            kind("T5", ("input_ids", "decoder_input_ids", "labels"), is_encoder_decoder=True),
            {"input_ids": (2, 10), "decoder_input_ids": (2, 10), "labels": (2, 10)},
        ),
        (
            kind("Wav2Vec2ForCTC", ("input_values", "labels"), conv_kernel=[10, 3], conv_stride=[5, 2]),
            {"input_values": (2, ((10 - 1) * 2 + 3 - 1) * 5 + 10)},
        ),
        (
            kind(accepts=("input_values",), audio_channels=1, upsampling_ratios=[8, 4]),
            {"input_values": (2, 1, 320)},
        ),
        (
            kind(accepts=("input_values",), num_mel_bins=16, max_length=64),
            {"input_values": (2, 64, 16)},
        ),
    ],
)
def test_inputs_are_those_of_the_kind_of_data(model: ModelKind, expected: dict[str, Any]) -> None:
    assert shapes(model) == expected


@pytest.mark.parametrize(
    ("fields", "dtype", "shape"),
    [
        ({}, torch.int64, (2,)),
        ({"num_labels": 1}, torch.float32, (2,)),
        ({"num_labels": 3, "problem_type": "multi_label_classification"}, torch.float32, (2, 3)),
    ],
)
def test_labels_of_a_classifier_are_classes_or_what_its_config_says(
    fields: dict[str, Any], dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    labels = kind("BertForSequenceClassification", ("input_ids", "labels"), **fields).inputs(2, 10)["labels"]
    assert (labels.dtype, tuple(labels.shape)) == (dtype, shape)


@pytest.mark.parametrize("size", [8, [8, 8], (8, 8), {"height": 8, "width": 8}])
def test_an_image_size_has_any_of_its_forms(size: Any) -> None:
    assert image_shape(SimpleNamespace(image_size=size)) == (3, 8, 8)


def test_a_sound_is_as_long_as_the_frames_that_are_asked_for() -> None:
    config = SimpleNamespace(conv_kernel=[10, 3, 3, 3, 3, 2, 2], conv_stride=[5, 2, 2, 2, 2, 2, 2])
    length = waveform_samples(config, 49)
    for kernel, stride in zip(config.conv_kernel, config.conv_stride, strict=True):
        length = (length - kernel) // stride + 1
    assert length == 49


@pytest.mark.parametrize(
    ("tables", "limit"),
    [
        ([], None),
        ([PositionTable("bert.embeddings.position_embeddings", 512)], 512),
        ([PositionTable("roberta.embeddings.position_embeddings", 514, 2)], 512),
        ([PositionTable("transformer.wpe", 1024), PositionTable("transformer.wte", 100)], 1024),
        ([PositionTable("encoder.embed_positions", 96), PositionTable("decoder.embed_positions", 64)], 64),
        ([PositionTable("block.0.relative_attention_bias", 32)], None),
        ([PositionTable("vision_model.embeddings.position_embedding", 17)], None),
    ],
)
def test_tables_of_positions_limit_the_tokens(tables: list[PositionTable], limit: int | None) -> None:
    assert most_tokens(tables, kind(accepts=("input_ids",))) == limit


def test_positions_of_what_is_heard_or_seen_do_not_limit_the_text() -> None:
    listens = kind(accepts=("input_features", "decoder_input_ids"), is_encoder_decoder=True)
    tables = [
        PositionTable("model.encoder.embed_positions", 15),
        PositionTable("decoder.embed_positions", 44),
    ]
    assert most_tokens(tables, listens) == 44
    assert most_tokens(tables, kind(accepts=("pixel_values",))) is None
