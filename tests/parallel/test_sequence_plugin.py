"""HybridParallelPlugin over parts of sequences trains as one process does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from pipeline_harness import ADAM, CHUNKS
from processes import run_on_ranks
from safetensors.torch import load_file
from test_sequence_models import LENGTH, VOCABULARY, Language, build
from torch import Tensor, nn
from torch.nn import functional

from gemini import ConfigError, CPUAdam
from gemini.parallel import Booster, HybridParallelPlugin

MAX_NORM = 0.5
Batch = dict[str, Tensor]


class Named(nn.Module):
    """A language model whose keywords are those of transformers."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.language: Language = build(kind)

    def forward(self, input_ids: Tensor, position_ids: Tensor, **labels: Tensor) -> Tensor:
        out: Tensor = self.language(input_ids, position_ids)
        return out


def batch_of(step: int) -> Batch:
    """Return four whole sequences; how many labels count differs."""
    ids = torch.randint(VOCABULARY, (4, LENGTH), generator=torch.Generator().manual_seed(step))
    labels = ids.clone()
    labels[0, 4:] = labels[3, 1:] = -100
    return {"input_ids": ids, "labels": labels, "position_ids": torch.arange(LENGTH).expand(4, LENGTH)}


def loss_of_part(logits: Tensor, batch: Batch) -> Tensor:
    """Return the mean over the labels of a part, which are at their tokens as in one process."""
    return functional.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())


def train_whole(kind: str, steps: int) -> tuple[list[float], Named, Any]:
    model = Named(kind)
    optimizer = CPUAdam(model.parameters(), **ADAM)
    losses = []
    for step in range(steps):
        batch = batch_of(step)
        labels = batch.pop("labels")
        loss = functional.cross_entropy(model(**batch).flatten(0, 1), labels.flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, model, optimizer


def labels_of(batch: Batch) -> float:
    return float((batch["labels"] != -100).sum())


def _train(sizes: dict[str, Any], kind: str, steps: int, directory: str) -> list[float]:
    chunks = {} if "zero_stage" in sizes else CHUNKS
    plugin = HybridParallelPlugin(max_norm=MAX_NORM, num_microbatches=2, **sizes, **chunks)
    booster, model = Booster(plugin=plugin), Named(kind)
    model, optimizer, *_ = booster.boost(model, CPUAdam(model.parameters(), **ADAM))
    ranks, losses = plugin.data_ranks, []
    for step in range(steps):
        part = {name: value.chunk(ranks.size)[ranks.number] for name, value in batch_of(step).items()}
        out = booster.execute_pipeline(iter([part]), model, loss_of_part, optimizer, count=labels_of)
        optimizer.step()
        losses.append(float(out["loss"]))
    booster.save_model(model, f"{directory}/model")
    booster.save_optimizer(optimizer, f"{directory}/optimizer")
    return losses


SIZES = [
    (2, {"sp_size": 2}),
    (2, {"sp_size": 2, "sp_mode": "ring"}),
    (4, {"sp_size": 2}),
    (4, {"sp_size": 2, "tp_size": 2}),
    (4, {"sp_size": 2, "pp_size": 2}),
    (4, {"sp_size": 2, "pp_size": 2, "sp_mode": "ring", "zero_stage": 2}),
    (2, {"sp_size": 2, "zero_stage": 1}),
]


@pytest.mark.parametrize(("ranks", "sizes"), SIZES)
def test_parts_of_sequences_train_as_one_process_does(
    tmp_path: Path, ranks: int, sizes: dict[str, Any]
) -> None:
    wanted, model, optimizer = train_whole("torch", 4)
    for losses in run_on_ranks(_train, ranks, sizes, "torch", 4, str(tmp_path)):
        assert losses == pytest.approx(wanted, rel=1e-5)
    weights, states = load_file(tmp_path / "model"), load_file(tmp_path / "optimizer")
    for name, param in model.named_parameters():
        mean = optimizer.state[param]["exp_avg"]
        assert torch.allclose(states[f"{name}/exp_avg"], mean, rtol=1e-3, atol=1e-5), name
        if "in_proj_bias" not in name:  # that of keys has no gradient but rounding, which Adam magnifies
            assert torch.allclose(weights[name], param, rtol=1e-4, atol=1e-5), name


def _refused(bad: str) -> tuple[str, float]:
    plugin = HybridParallelPlugin(sp_size=2, **CHUNKS)
    booster, model = Booster(plugin=plugin), Named("torch")
    model, optimizer, *_ = booster.boost(model, CPUAdam(model.parameters(), **ADAM))
    batch: Any = batch_of(0)
    if bad == "no dict":
        batch = batch["input_ids"]
    else:
        batch["ids"] = batch.pop("input_ids")
    with pytest.raises(ConfigError) as caught:
        booster.execute_pipeline(iter([batch]), model, loss_of_part, optimizer)
    out = booster.execute_pipeline(iter([batch_of(0)]), model, loss_of_part, optimizer)  # it goes on
    return str(caught.value), float(out["loss"])


@pytest.mark.parametrize(("bad", "message"), [("no dict", "is a Tensor"), ("no tokens", "has input_ids")])
def test_a_batch_that_cannot_be_cut_is_refused_and_ranks_go_on(bad: str, message: str) -> None:
    wanted = train_whole("torch", 1)[0][0]
    for found, loss in run_on_ranks(_refused, 2, bad):
        assert message in found
        assert loss == pytest.approx(wanted, rel=1e-5)


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(ConfigError, match="sp_mode is 'rings'; it may be ulysses or ring"):
        HybridParallelPlugin(sp_size=2, sp_mode="rings")
    with pytest.raises(ConfigError, match="sp_size 2 do not divide 1"):
        Booster(plugin=HybridParallelPlugin(sp_size=2)).boost(Named("torch"))
