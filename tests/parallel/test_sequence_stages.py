"""HybridParallelPlugin over stages of a model and parts of sequences trains as one process does."""

from __future__ import annotations

import time
from contextlib import nullcontext
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from pipeline_harness import ADAM, CHUNKS, MAX_NORM, Trained, train_alone
from processes import run_on_ranks
from safetensors.torch import load_file
from torch import Tensor, nn
from torch import distributed as dist
from torch.nn import functional

from gemini import ConfigError, CPUAdam, StateError
from gemini.parallel import Booster, HybridParallelPlugin

transformers = pytest.importorskip("transformers", reason="models of transformers")

VOCABULARY, LENGTH, STEPS = 61, 9, 3  # a length that two does not divide
DEVICE = 240 * 1024  # less than a stage with its gradients and states
TIGHT = {"device_bytes": DEVICE, "host_bytes": "16MiB"}
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
}


def build(name: str) -> nn.Module:
    """A small model without dropout, whose embedding is its head; LLaMA has two heads of keys."""
    transformers.logging.set_verbosity_error()
    torch.manual_seed(8)
    if name == "bert":  # looks both ways, and its labels are not shifted
        off = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
        return transformers.BertForMaskedLM(transformers.BertConfig(**SIZES, **off))
    if name == "llama":
        config = transformers.LlamaConfig(**SIZES, num_key_value_heads=2, tie_word_embeddings=True)
        return transformers.LlamaForCausalLM(config)
    off = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    config = transformers.GPT2Config(
        vocab_size=VOCABULARY, n_embd=32, n_layer=4, n_head=4, n_positions=16, **off
    )
    return transformers.GPT2LMHeadModel(config)


def batch_of(step: int) -> dict[str, Tensor]:
    """Return four sequences, with padding behind and before; some have no labels in their second half."""
    ids = torch.randint(VOCABULARY, (4, LENGTH), generator=torch.Generator().manual_seed(step))
    mask = torch.ones_like(ids)
    mask[0, 6:] = mask[3, :2] = 0
    labels = ids.masked_fill(mask == 0, -100)
    labels[1, 3:] = -100
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def loss_of(output: Any, _batch: dict[str, Tensor]) -> Tensor:
    """Return the model's own: the mean over the labels of a part."""
    loss: Tensor = output.loss
    return loss


def loss_of_logits(output: Any, batch: dict[str, Tensor]) -> Tensor:
    """Return the same, of labels that are shifted already."""
    return functional.cross_entropy(output.logits.flatten(0, 1), batch["labels"].flatten())


def labels_of(batch: dict[str, Tensor]) -> float:
    return float((batch["labels"] != -100).sum())


@cache
def train_whole(name: str) -> Trained:
    """Train in one process."""
    model = build(name)
    return train_alone(model, lambda step: model(**batch_of(step)).loss, STEPS)


def boosted(name: str, options: dict[str, Any]) -> tuple[HybridParallelPlugin, Booster, Any, Any]:
    chunks = CHUNKS if options.get("zero_stage", 3) == 3 else {}
    plugin = HybridParallelPlugin(**{"max_norm": MAX_NORM, "num_microbatches": 2, **chunks, **options})
    booster, model = Booster(plugin=plugin), build(name)
    if options.get("pp_style") == "zbv":
        model.gradient_checkpointing_enable({"use_reentrant": False})
    model, optimizer, *_ = booster.boost(model, CPUAdam(model.parameters(), **ADAM))
    return plugin, booster, model, optimizer


Seen = tuple[list[float], list[float], int]  # losses, norms, the most bytes that were on DEVICE


def train(name: str, options: dict[str, Any], path: str = "") -> Seen:
    """Train over the ranks; save to ``path``."""
    plugin, booster, model, optimizer = boosted(name, options)
    criterion = loss_of_logits if name == "gpt2" else loss_of
    losses, norms, ranks = [], [], plugin.data_ranks
    for step in range(STEPS):
        part = {key: value.chunk(ranks.size)[ranks.number] for key, value in batch_of(step).items()}
        out = booster.execute_pipeline(iter([part]), model, criterion, optimizer, count=labels_of)
        optimizer.step()
        losses.append(float(out["loss"]))
        norms.append(float(optimizer.get_grad_norm()))
    if path:
        booster.save_model(model, f"{path}/model", shard=True)
        booster.save_optimizer(optimizer, f"{path}/optimizer")
    peak = model.stats()["device"]["peak_bytes"] if options.get("zero_stage", 3) == 3 else 0
    return losses, norms, peak


def train_all(cases: list[tuple[str, dict[str, Any], str]]) -> list[Seen]:
    return [train(*case) for case in cases]


GRID: dict[str, Any] = {"pp_size": 2, "sp_size": 2}
INTERLEAVED: dict[str, Any] = {**GRID, "pp_style": "interleaved", "num_model_chunks": 2}
CASES: list[tuple[str, dict[str, Any]]] = [
    ("llama", GRID),
    ("llama", {**GRID, **TIGHT}),
    ("llama", {**INTERLEAVED, "sp_mode": "ring", **TIGHT}),
    ("gpt2", {**GRID, "sp_mode": "ring"}),
    ("gpt2", {**INTERLEAVED, "zero_stage": 2}),
    ("gpt2", {**GRID, "pp_style": "zero_bubble", "zero_stage": 1}),
    ("llama", {**GRID, "pp_style": "zbv", "sp_mode": "ring"}),
    ("bert", {**GRID, "pp_style": "dualpipev", "num_microbatches": 4}),
    ("bert", {**GRID, "zero_stage": 0}),
]


def train_on(name: str, options: dict[str, Any], path: str) -> tuple[list[float], dict[str, Tensor]]:
    """Load what was saved, and train on for a step; return the loss before and after, and the weights that
    were loaded, where they are whole."""
    plugin, booster, model, optimizer = boosted(name, {**options, "num_microbatches": 1})
    booster.load_model(model, f"{path}/model")
    booster.load_optimizer(optimizer, f"{path}/optimizer")
    loaded = {}
    if plugin.mesh is None or plugin.mesh.layout.pp == 1:
        loaded = {key: value.clone() for key, value in model.state_dict().items()}
    losses = []
    for _ in range(2):
        out = booster.execute_pipeline(iter([batch_of(STEPS)]), model, loss_of, optimizer)
        optimizer.step()
        losses.append(float(out["loss"]))
    return losses, loaded


@pytest.mark.dear("nine layouts of four ranks train, save and load")
def test_models_in_stages_and_parts_of_sequences_train_as_one_process_does(tmp_path: Path) -> None:
    cases = [(*case, str(tmp_path / str(index))) for index, case in enumerate(CASES)]
    every = run_on_ranks(train_all, 4, cases, timeout=180.0)
    for trained in every:
        for (name, options), (losses, norms, peak) in zip(CASES, trained, strict=True):
            wanted = train_whole(name)
            assert losses == pytest.approx(wanted.losses, rel=1e-5), (name, options)
            assert norms == pytest.approx(wanted.norms, rel=1e-6), (name, options)
            assert peak <= DEVICE or "device_bytes" not in options, (name, options)
    ample, tight = (trained for trained in every[0][:2])
    assert ample[:2] == tight[:2]
    assert ample[2] > DEVICE
    for file in sorted((tmp_path / "0").rglob("*.safetensors")):
        other = load_file(tmp_path / "1" / file.relative_to(tmp_path / "0"))
        assert all(torch.equal(value, other[key]) for key, value in load_file(file).items())
    for index, (name, options) in enumerate(CASES):
        read = type(build(name)).from_pretrained(tmp_path / str(index) / "model")
        for key, value in train_whole(name).weights.items():
            error = float((read.state_dict()[key] - value).abs().max())
            assert error <= 1e-4, (name, options, key)  # Adam magnifies the rounding of gradients near zero

    saved = str(tmp_path / "0")
    read = type(build("llama")).from_pretrained(f"{saved}/model").state_dict()
    ((alone, loaded),) = run_on_ranks(train_on, 1, "llama", {}, saved)
    assert loaded.keys() == read.keys()
    assert all(torch.equal(value, loaded[key]) for key, value in read.items())
    for sizes in ({"pp_size": 2}, {"sp_size": 2}):
        for losses, _ in run_on_ranks(train_on, 2, "llama", sizes, saved):
            assert losses == pytest.approx(alone, rel=1e-6)
    for losses, _ in run_on_ranks(train_on, 4, "llama", {**GRID, "sp_mode": "ring"}, str(tmp_path / "2")):
        assert losses == pytest.approx(alone, rel=1e-5)


@pytest.mark.dear("eight ranks train")
def test_layers_and_data_go_with_stages_and_parts_of_sequences() -> None:
    wanted = train_whole("llama")
    for losses, norms, _ in run_on_ranks(train, 8, "llama", {**GRID, "tp_size": 2}, timeout=180.0):
        assert losses == pytest.approx(wanted.losses, rel=1e-5)
        assert norms == pytest.approx(wanted.norms, rel=1e-6)
    for losses, norms, _ in run_on_ranks(train, 8, "gpt2", {**GRID, "sp_mode": "ring"}, timeout=180.0):
        assert losses == pytest.approx(train_whole("gpt2").losses, rel=1e-5)
        assert norms == pytest.approx(train_whole("gpt2").norms, rel=1e-6)


def update_in(calls: int) -> list[Tensor]:
    """Return this rank's weights after an update of one batch, given in so many ``calls``."""
    _, booster, model, optimizer = boosted("llama", {**GRID, "num_microbatches": 2 // calls})
    for part in range(calls):
        batch = {key: value.chunk(calls)[part] for key, value in batch_of(0).items()}
        with booster.no_sync(model, optimizer) if part < calls - 1 else nullcontext():
            booster.execute_pipeline(iter([batch]), model, lambda out, _: out.loss / calls, optimizer)
    optimizer.step()
    return [param.detach().clone() for param in model.parameters()]


def accumulate() -> list[list[Tensor]]:
    return [update_in(1), update_in(2)]


def test_accumulated_gradients_are_those_of_one_batch() -> None:
    for once, twice in run_on_ranks(accumulate, 4, timeout=180.0):
        for one, two in zip(once, twice, strict=True):
            assert torch.allclose(one, two, rtol=1e-5, atol=1e-6)


def refuse() -> str:
    """Return why a model is refused whose attention cannot be replaced, of which nothing was cut."""
    config = transformers.BloomConfig(vocab_size=VOCABULARY, hidden_size=32, n_layer=2, n_head=4)
    model = transformers.BloomForCausalLM(config)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    plugin = HybridParallelPlugin(tp_size=2, sp_size=2, **CHUNKS)
    with pytest.raises(ConfigError) as refused:
        Booster(plugin=plugin).boost(model, CPUAdam(model.parameters()))
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]), name
    return str(refused.value)


def fail() -> str:
    """Return what a rank raises while one of them, with a part of a sequence in the last stage, fails."""
    _, booster, model, optimizer = boosted("llama", GRID)

    def criterion(output: Any, batch: dict[str, Tensor]) -> Tensor:
        if dist.get_rank() == 3:
            raise ValueError("a bad sample")
        return loss_of(output, batch)

    with pytest.raises((StateError, ValueError)) as failed:
        booster.execute_pipeline(iter([batch_of(0)]), model, criterion, optimizer)
    return str(failed.value)


def test_what_cannot_be_is_refused_and_a_failure_is_told_to_all() -> None:
    for said in run_on_ranks(refuse, 4, timeout=180.0):
        assert "BloomForCausalLM computes attention in its own code" in said
    began = time.monotonic()
    for said in run_on_ranks(fail, 4):
        assert "a bad sample" in said
    assert time.monotonic() - began < 30
