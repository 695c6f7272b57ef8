"""What a safetensors file can hold is saved as it is, anything else refused before anything is written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import nn

import gemini
from gemini import CheckpointError, checkpoint
from gemini.checkpoint.convert import convert
from gemini.checkpoint.tensor_file import TYPE_NAMES
from gemini.parallel import Booster

HELD = sorted(TYPE_NAMES, key=str)


def model(buffer: torch.Tensor | None, name: str = "kept", parameter: str = "") -> nn.Module:
    torch.manual_seed(0)
    made = nn.Sequential(nn.Linear(4, 4))
    made.register_buffer(name, buffer)
    if parameter:
        made.register_parameter(parameter, nn.Parameter(torch.ones(3)))
    return made


def values(dtype: torch.dtype) -> torch.Tensor:
    """Return values that no other type of as many bits has."""
    raw = torch.arange(1, 7 * dtype.itemsize + 1, dtype=torch.uint8)
    return (raw % 2).bool() if dtype == torch.bool else raw.view(dtype)


def bits(tensor: torch.Tensor) -> list[int]:
    found: list[int] = tensor.resolve_conj().contiguous().view(torch.uint8).tolist()
    return found


def managed(module: nn.Module) -> tuple[gemini.GeminiDDP, gemini.GeminiOptimizer]:
    wrapped = gemini.GeminiDDP(module)
    return wrapped, gemini.GeminiAdamOptimizer(wrapped)


@pytest.mark.parametrize("dtype", HELD, ids=str)
def test_a_buffer_of_any_type_that_a_file_holds_comes_back(tmp_path: Path, dtype: torch.dtype) -> None:
    want = values(dtype)
    with managed(model(want.clone()))[0] as wrapped:
        checkpoint.save(tmp_path, wrapped, gemini.GeminiAdamOptimizer(wrapped))
        Booster().save_model(wrapped, tmp_path / "model.safetensors")
    with managed(model(torch.zeros_like(want)))[0] as other:
        checkpoint.load(tmp_path, other, gemini.GeminiAdamOptimizer(other))
        assert bits(other.module.kept) == bits(want)
    plain = model(torch.zeros_like(want))
    Booster().load_model(plain, tmp_path / "model.safetensors")
    assert bits(plain.kept) == bits(want)  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", HELD, ids=str)
def test_a_buffer_of_any_type_is_converted(tmp_path: Path, dtype: torch.dtype) -> None:
    want = values(dtype)
    with managed(model(want.clone()))[0] as wrapped:
        saved = checkpoint.save(tmp_path / "run", wrapped, gemini.GeminiAdamOptimizer(wrapped))
    for form in ("torch", "dcp", "hf"):
        convert(saved, tmp_path / form, form)
    assert bits(torch.load(tmp_path / "torch", weights_only=True)["model"]["kept"]) == bits(want)
    there = safetensors.torch.load_file(tmp_path / "hf" / "model-buffers.safetensors")["kept"]
    kept_as_it_is = dtype.itemsize == 1 or not dtype.is_floating_point
    assert there.dtype == (dtype if kept_as_it_is else torch.float32)


def test_a_conjugated_buffer_is_saved_as_what_it_is(tmp_path: Path) -> None:
    want = torch.randn(4, dtype=torch.complex64)
    with managed(model(want.conj()))[0] as wrapped:
        checkpoint.save(tmp_path, wrapped, gemini.GeminiAdamOptimizer(wrapped))
    with checkpoint.CheckpointReader(checkpoint.latest(tmp_path)) as reader:
        assert torch.equal(reader.weight("kept"), want.conj())


@pytest.mark.parametrize(
    ("module", "named"),
    [
        (
            lambda: model(torch.zeros(4, dtype=torch.complex128)),
            r"'kept' is torch.complex128.*persistent=False",
        ),
        (lambda: model(torch.eye(3).to_sparse()), r"'kept' is torch.sparse_coo.*persistent=False"),
        (lambda: model(torch.zeros(1), "__metadata__"), r"'__metadata__'; give it another name"),
        (lambda: model(None, parameter="__metadata__"), r"'__metadata__'; give it another name"),
        (lambda: model(torch.zeros(1), "a\ud800"), r"'a\\ud800' is no text.*another name"),
        (lambda: model(None, parameter="\udfff"), r"'\\udfff' is no text.*another name"),
    ],
)
def test_what_no_file_holds_is_refused_before_anything_is_written(
    tmp_path: Path, module: Any, named: str
) -> None:
    with managed(module())[0] as wrapped:
        optimizer = gemini.GeminiAdamOptimizer(wrapped)
        for save in (checkpoint.save, checkpoint.save_async):
            with pytest.raises(CheckpointError, match=named):
                save(tmp_path / "run", wrapped, optimizer)
        with pytest.raises(CheckpointError, match=named):
            Booster().save_model(wrapped, tmp_path / "model", shard=True)
    assert list(tmp_path.iterdir()) == []
