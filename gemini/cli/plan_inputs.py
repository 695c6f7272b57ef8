"""Derives the inputs of a Hugging Face model: their names, their shapes, and the maximum number of tokens.

Everything follows from the parameter names of ``forward`` and the fields of the config; transformers is not
needed.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

# Kind of data -> argument names, in order of preference.
_MODALITIES = {
    "text": ("input_ids",),
    "image": ("pixel_values",),
    "video": ("pixel_values", "pixel_values_videos"),
    "audio": ("input_features", "input_values"),
}
_IMAGE_SIZE, _CHANNELS = 224, 3  # defaults if a config does not say
_SAMPLING_RATE = 16_000
_PARTS = {"image": ("vision_config", "backbone_config", "encoder"), "audio": ("audio_config", "encoder")}
_PLACEHOLDERS = ("image_token_id", "image_token_index", "audio_token_id", "audio_token_index")
# Arguments with one number per sample, besides "labels".
_SAMPLE_LABELS = ("next_sentence_label", "sentence_order_label", "start_positions", "end_positions")
_CHOICES = 2


@dataclass(frozen=True)
class ModelKind:
    """The properties of a model from which its inputs follow.

    Attributes:
        parameters: name of each parameter of ``forward``, and whether it is required.
        modalities: the kinds of data that the class declares.
    """

    name: str
    config: Any
    parameters: Mapping[str, bool]
    main_input: str = "input_ids"
    modalities: tuple[str, ...] = ()

    @property
    def data(self) -> tuple[str, ...]:
        """The parameters that receive data: the main input, required parameters, and one for each kind of
        data. Images and sounds are left out if placeholder tokens mark their places, because these depend on
        values."""
        names = [self.main_input] if self.main_input in self.parameters else []
        names += [name for name, required in self.parameters.items() if required]
        for modality in self.modalities:
            if modality == "text" or not self.has_placeholders:
                found = [name for name in _MODALITIES.get(modality, ()) if name in self.parameters]
                names += found if not any(name in names for name in found) else []
        return tuple(dict.fromkeys(names))

    @property
    def has_placeholders(self) -> bool:
        """Whether some tokens of the text represent images or sounds."""
        return "input_ids" in self.parameters and any(
            _field(self.config, name) is not None for name in _PLACEHOLDERS
        )

    @property
    def decodes_text(self) -> bool:
        """Whether a decoder gets its own tokens."""
        return "decoder_input_ids" in self.parameters and bool(_field(self.config, "is_encoder_decoder"))

    @property
    def unit(self) -> str:
        """The unit of ``--seq``: tokens, or frames of a sound; ``samples`` if it has no meaning."""
        if "input_ids" in self.data or self.decodes_text:
            return "tokens"
        sounds = {"input_values", "input_features"} & set(self.data)
        return "frames" if sounds and _fixed_frames(self.config) is None else "samples"

    @property
    def notes(self) -> tuple[str, ...]:
        """Assumptions that the config does not state, one line each."""
        notes = []
        if "pixel_values" in self.data and _field(self.config, "image_size", part="image") is None:
            notes.append(
                f"The config has no image size: planned for {_IMAGE_SIZE} x {_IMAGE_SIZE}; for "
                "another size write a factory (package.module:function)."
            )
        if self.has_placeholders and set(self.modalities) - {"text"}:
            notes.append(
                "Planned for text only: the positions of images or sounds depend on token values; to "
                "include them write a factory (package.module:function)."
            )
        return tuple(notes)

    def inputs(self, batch: int, seq: int) -> dict[str, Any]:
        """Return the known keyword arguments of a training step, on ``meta``."""
        inputs: dict[str, Any] = {}
        for name in self.data:
            shape = _data_shape(name, self, batch, seq)
            if shape is not None:
                inputs[name] = _empty(shape, torch.float32 if name not in _TOKENS else torch.int64)
        inputs |= self._targets(batch, seq)
        if self.decodes_text and (
            "labels" not in inputs or _field(self.config, "decoder_start_token_id") is None
        ):
            inputs["decoder_input_ids"] = _empty((batch, seq))
        return inputs

    def _targets(self, batch: int, seq: int) -> dict[str, Any]:
        targets: dict[str, Any] = {
            name: _empty((batch,)) for name in _SAMPLE_LABELS if name in self.parameters
        }
        if "return_loss" in self.parameters:
            targets["return_loss"] = True
        labels = self._labels(batch, seq) if "labels" in self.parameters else None
        return targets if labels is None else {**targets, "labels": labels}

    def _labels(self, batch: int, seq: int) -> torch.Tensor | None:
        """Return labels; None if a loss depends on their values (boxes, transcripts)."""
        if re.search("For(Sequence|Image|Video|Audio)Classification", self.name):
            labels = _field(self.config, "num_labels") or 0
            if _field(self.config, "problem_type") == "multi_label_classification":
                return _empty((batch, labels), torch.float32)
            return _empty((batch,), torch.float32 if labels == 1 else torch.int64)
        if re.search("For(MultipleChoice|NextSentencePrediction)", self.name):
            return _empty((batch,))
        if self.name.endswith("ForSemanticSegmentation"):
            return _empty((batch, *image_shape(self.config)[1:]))
        return _empty((batch, seq)) if self.unit == "tokens" else None


_TOKENS = ("input_ids", "decoder_input_ids")


def _empty(shape: tuple[int, ...], dtype: torch.dtype = torch.int64) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def _data_shape(name: str, kind: ModelKind, batch: int, seq: int) -> tuple[int, ...] | None:
    """Return the shape of one input; None if it is unknown."""
    config = kind.config
    if name in _TOKENS:
        return (batch, _CHOICES, seq) if kind.name.endswith("ForMultipleChoice") else (batch, seq)
    if name in ("pixel_values", "pixel_values_videos"):
        frames = _field(config, "num_frames", part="image")
        return (batch, *([] if frames is None else [frames]), *image_shape(config))
    if name == "input_features":
        return (batch, *_features(config, seq))
    if name == "input_values":
        fixed = _fixed_frames(config)
        if fixed is not None:
            return (batch, *fixed)
        channels = _field(config, "audio_channels")
        return (batch, *([] if channels is None else [channels]), waveform_samples(config, seq))
    return None


def image_shape(config: Any) -> tuple[int, int, int]:
    """Return channels, height and width of the images of a config."""
    size = _field(config, "image_size", part="image") or _IMAGE_SIZE
    if isinstance(size, Mapping):
        size = (size.get("height", _IMAGE_SIZE), size.get("width", _IMAGE_SIZE))
    height, width = (size, size) if isinstance(size, int) else tuple(size)[-2:]
    return _field(config, "num_channels", "in_channels", part="image") or _CHANNELS, height, width


def waveform_samples(config: Any, frames: int) -> int:
    """Return the number of waveform samples that a model converts to this number of frames."""
    kernels, strides = (_field(config, name, part="audio") for name in ("conv_kernel", "conv_stride"))
    if kernels and strides:
        samples = frames
        for kernel, stride in zip(reversed(kernels), reversed(strides), strict=True):
            samples = (samples - 1) * stride + kernel
        return samples
    ratios = _field(config, "upsampling_ratios", "downsampling_ratios", part="audio")
    return frames * math.prod(ratios) if ratios else _SAMPLING_RATE


def _features(config: Any, seq: int) -> tuple[int, int]:
    """Return the two dimensions of a spectrogram or of similar features."""
    fixed = _fixed_frames(config)
    if fixed is not None:
        return fixed
    width = _field(config, "input_feat_per_channel", "feature_projection_input_dim", part="audio")
    halvings = _field(config, "num_conv_layers", part="audio") or 0
    return seq * 2**halvings, width or _field(config, "num_mel_bins", part="audio") or 80


def _fixed_frames(config: Any) -> tuple[int, int] | None:
    """Return the shape of spectrograms with a fixed length; None if any length is possible."""
    mels = _field(config, "num_mel_bins", part="audio")
    if mels is None:
        return None
    positions = _field(config, "max_source_positions", part="audio")
    if positions is not None:  # Whisper: counted after a convolution of stride 2
        return mels, 2 * positions
    length = _field(config, "max_length", part="audio")
    return None if length is None else (length, mels)


def _field(config: Any, *names: str, part: str | None = None) -> Any:
    """Return the first of these fields that is set in a config, or in its part for images or sounds."""
    for each in (config, *(getattr(config, name, None) for name in _PARTS.get(part or "", ()))):
        for name in names:
            found = each.get(name) if isinstance(each, Mapping) else getattr(each, name, None)
            if found is not None:
                return found
    return None


@dataclass(frozen=True)
class PositionTable:
    """An embedding by its name in the model; ``first`` is the row of the first position."""

    name: str
    rows: int
    first: int = 0


def most_tokens(tables: Iterable[PositionTable], kind: ModelKind) -> int | None:
    """Return the maximum number of tokens for the tables of learned positions; None: no limit. On ``meta``, a
    lookup beyond the table would not raise."""
    if kind.unit != "tokens":
        return None
    other = r"vision|visual|image|audio"
    if not {"input_ids"} & set(kind.data):
        other += r"|(^|\.)encoder\."  # the encoder's input is not text
    limits = [
        table.rows - table.first
        for table in tables
        if re.search(r"(^|_)(positions?|pos|position_embeds|wpe)(_|$)", table.name.rpartition(".")[2])
        and not re.search(other, table.name)
    ]
    return max(min(limits), 1) if limits else None
