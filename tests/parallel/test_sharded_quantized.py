"""Frozen quantized weights over ranks: each keeps a part of their bytes, and computes with all of them."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from processes import close_workers, own_part, run_on_ranks
from torch import Tensor, nn
from torch import distributed as dist
from torch.nn import functional as F

sys.path.insert(0, str(Path(__file__).parents[1] / "training"))

from quantized_models import BITSANDBYTES, KINDS, VOCABULARY, build, needs, trained

import gemini
from gemini import checkpoint
from gemini.errors import ConfigError
from gemini.parallel.booster.plugin import HybridParallelPlugin
from gemini.parallel.partition import refuse_quantized
from gemini.parallel.zero import LowLevelZeroOptimizer

KIB = 1024
IDS = torch.arange(10)[None]
TIGHT = {"device_bytes": 400 * KIB, "non_model_bytes": 0, "min_chunk_size_mb": 16 * KIB / 2**20}


@pytest.fixture(autouse=True, scope="module")
def _workers_end() -> Iterator[None]:
    yield
    close_workers()  # they have imported libraries that no other test on ranks needs


def loss_of(model: nn.Module, step: int) -> Tensor:
    """Return the mean loss of this rank's rows of a batch."""
    ids = own_part(torch.randint(0, VOCABULARY, (4, 8), generator=torch.Generator().manual_seed(step)))
    return F.cross_entropy(model(ids).flatten(0, 1), ids.flatten())


def train(model: nn.Module, optimizer: Any, steps: int = 3) -> list[float]:
    """Train; return the losses of this rank."""
    losses = []
    for step in range(steps):
        optimizer.zero_grad()
        loss = loss_of(model, step)
        backward = getattr(optimizer, "backward", Tensor.backward)
        backward(loss)
        optimizer.step()
        losses.append(loss.item())
    return losses


def values(state: dict[str, Any]) -> dict[str, Tensor]:
    """Return plain values of a state dict, in which weights may be wrappers around plain tensors."""
    plain = {}
    for name, value in state.items():
        if hasattr(value, "get_original_weight"):
            value = value.get_original_weight()
        elif hasattr(value, "__tensor_flatten__"):
            value = value.dequantize()
        plain[name] = value.clone() if isinstance(value, Tensor) else value
    return plain


def assert_same(got: dict[str, Any], want: dict[str, Any]) -> None:
    """Check that frozen values have the same bits, and trained ones are as near as sums in another order."""
    assert got.keys() == want.keys()
    for name, value in want.items():
        if ".up." in name or ".down." in name:
            torch.testing.assert_close(got[name], value, rtol=1e-3, atol=1e-5)
        else:
            assert torch.equal(got[name], value), name


def _train_and_load(kind: str, directory: str) -> Any:
    """Train in chunks, save, then load the values of another model; return what each did."""
    model = build(kind, seed=dist.get_rank())  # the values of the first rank count
    gemini.manage(model, disk_dir=directory, **TIGHT)
    handle = gemini.handle_of(model)
    optimizer = gemini.GeminiAdamOptimizer(model, lr=1e-2)
    losses = train(model, optimizer)
    state = values(model.state_dict())
    checkpoint.save(Path(directory, "saved"), handle, optimizer)
    gathered = handle.peers.traffic.gathered
    loaded = None
    if kind.startswith("torchao"):  # layers of bitsandbytes refuse their own state dict by now
        other = build(kind, seed=2)
        model.load_state_dict(other.state_dict())
        loaded = torch.equal(model(IDS), other(IDS))
    handle.release()
    released = type(model.blocks[0].widen.base.weight) is type(build(kind).blocks[0].widen.base.weight)
    return losses, state, loaded, released, gathered


@pytest.mark.dear("two processes import bitsandbytes and torchao")
@pytest.mark.parametrize("kind", KINDS)
def test_ranks_train_on_a_quantized_base_as_one_process_does(kind: str, tmp_path: Path) -> None:
    plain = build(kind)
    losses = train(plain, torch.optim.AdamW(trained(plain), lr=1e-2, weight_decay=0.0))
    each = run_on_ranks(_train_and_load, 2, kind, str(tmp_path))
    means = [sum(pair) / 2 for pair in zip(*(rank[0] for rank in each), strict=True)]
    assert means == pytest.approx(losses, rel=1e-4)
    for _, state, loaded, released, gathered in each:
        assert_same(state, values(plain.state_dict()))
        assert loaded in (True, None)
        assert released
        assert gathered > 0
    one = build(kind, seed=3)
    gemini.manage(one)
    handle = gemini.handle_of(one)
    checkpoint.load(tmp_path / "saved", handle, gemini.GeminiAdamOptimizer(one, lr=1e-2))
    assert_same(values(one.state_dict()), values(plain.state_dict()))


def _train_replicas(kind: str, stage: int) -> Any:
    """Train a model that each rank holds whole in ordinary memory."""
    model = build(kind)
    adam = torch.optim.AdamW(trained(model), lr=1e-2, weight_decay=0.0)
    losses = train(model, LowLevelZeroOptimizer(adam, stage=stage))
    return losses, values(model.state_dict())


@pytest.mark.parametrize("kind", ["bitsandbytes-4bit", "torchao-8bit"])
@pytest.mark.parametrize("stage", [0, 2])
def test_stages_without_chunks_exchange_the_gradients_of_adapters_alone(kind: str, stage: int) -> None:
    plain = build(kind)
    losses = train(plain, torch.optim.AdamW(trained(plain), lr=1e-2, weight_decay=0.0))
    each = run_on_ranks(_train_replicas, 2, kind, stage)
    means = [sum(pair) / 2 for pair in zip(*(rank[0] for rank in each), strict=True)]
    assert means == pytest.approx(losses, rel=1e-4)
    for _, state in each:
        assert_same(state, values(plain.state_dict()))


def _manage_with_codes() -> str:
    bnb = needs(BITSANDBYTES)
    codes = ("nf4", "fp4")[dist.get_rank()]
    layer = bnb.nn.Linear4bit(64, 64, quant_type=codes)
    layer.load_state_dict(nn.Linear(64, 64).state_dict())
    try:
        gemini.manage(nn.Sequential(layer.to("cpu")))
    except ConfigError as error:
        return str(error)
    return ""


def test_ranks_with_other_tables_of_codes_are_refused() -> None:
    needs(BITSANDBYTES)
    assert all("the same model" in said for said in run_on_ranks(_manage_with_codes, 2))


def _load(directory: str, kind: str) -> dict[str, Tensor]:
    import transformers

    if kind == "int8":
        from torchao.quantization import Int8WeightOnlyConfig

        asked: Any = transformers.TorchAoConfig(Int8WeightOnlyConfig(version=2))
    else:
        asked = transformers.BitsAndBytesConfig(
            load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True
        )
    model = gemini.from_pretrained(directory, "LlamaForCausalLM", quantization_config=asked, **TIGHT)
    return values(model.state_dict())


@pytest.mark.dear("two processes import the way in which transformers quantizes")
@pytest.mark.parametrize("kind", ["nf4", "int8"])
def test_weights_quantized_while_they_are_loaded_have_the_bits_of_one_process(
    kind: str, tmp_path: Path
) -> None:
    transformers = pytest.importorskip("transformers", reason="the extra 'hf' is not installed")
    needs(BITSANDBYTES)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_hidden_layers": 2}
    transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=64, **sizes)).save_pretrained(tmp_path)
    want = _load(str(tmp_path), kind)
    for state in run_on_ranks(_load, 2, str(tmp_path), kind):
        assert_same(state, want)


def test_ways_to_divide_a_model_refuse_a_quantized_weight_by_name() -> None:
    model = build("torchao-8bit")
    with pytest.raises(ConfigError, match=r"blocks\.0\.widen\.base\.weight.*sequence parallelism"):
        refuse_quantized(model)
    with pytest.raises(ConfigError, match=r"blocks\.0\.widen\.base\.weight.*sequence parallelism"):
        HybridParallelPlugin(tp_size=1, pp_size=1, sp_size=2).configure(model, None, None, None)
