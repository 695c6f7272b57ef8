"""LoRA, and several models of transformers, in a model that is cut compute what they do in the whole one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from processes import run_on_ranks
from tensor_harness import TOLERANCE, make_mesh
from test_tensor_transformers import build, inputs_of
from torch import Tensor, nn

from gemini import ConfigError
from gemini.parallel import parallelize

peft = pytest.importorskip("peft", reason="peft is not installed")

CASES: dict[str, tuple[str, Any]] = {
    "llama": ("llama", ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]),
    "llama, one key head": ("llama, one key head", ["q_proj", "k_proj", "v_proj"]),
    "gpt2": ("gpt2", ["c_attn", "c_proj", "c_fc"]),
    "bert": ("bert", ["query", "value", "dense"]),
    "bart": ("bart", ["q_proj", "v_proj", "out_proj", "fc1", "fc2"]),
}


def adapted(name: str, targets: list[str], **more: Any) -> Any:
    model = build(name)
    torch.manual_seed(3)
    config = peft.LoraConfig(r=2, lora_alpha=4, target_modules=targets, init_lora_weights=False, **more)
    return peft.get_peft_model(model, config)


def apart(case: str) -> dict[str, float]:
    """Return how far loss, logits and gradients are from those of the whole model."""
    name, targets = CASES[case]
    whole, model, inputs = adapted(name, targets), adapted(name, targets), inputs_of(name)
    wanted = whole(**inputs)
    wanted.loss.backward()
    partition = parallelize(model, make_mesh(tp=2))
    out = model(**inputs)
    out.loss.backward()
    grads = {key: param.grad for key, param in model.named_parameters() if param.grad is not None}
    grads = partition.gather_state(grads)
    trained = {key: param.grad for key, param in whole.named_parameters() if param.grad is not None}
    assert grads.keys() == trained.keys()
    assert any("lora_A" in key for key in partition.cuts) or "key head" in case
    assert any("lora_B" in key for key in partition.cuts)
    largest = max(float(grad.abs().max()) for grad in trained.values())
    found = {key: float((grads[key] - grad).abs().max()) / largest for key, grad in trained.items()}
    found["loss"] = abs(float(out.loss - wanted.loss))
    found["logits"] = _relative(out.logits, wanted.logits)
    return found


def _relative(got: Tensor, wanted: Tensor) -> float:
    return float((got - wanted).abs().max() / wanted.abs().max())


@pytest.mark.parametrize("case", CASES)
def test_lora_goes_with_the_layers_that_are_cut(case: str) -> None:
    for errors in run_on_ranks(apart, 2, case):
        assert max(errors.values()) <= TOLERANCE, errors


def refused() -> list[str]:
    said = []
    for targets, more in ((["q_proj"], {"use_dora": True}), (["embed_tokens"], {})):
        model = adapted("llama", targets, **more)
        try:
            parallelize(model, make_mesh(tp=2))
            said.append("")
        except ConfigError as error:
            said.append(str(error))
    return said


def test_adapters_of_other_kinds_are_refused_by_name() -> None:
    for dora, embedding in run_on_ranks(refused, 2):
        assert "adapters of lora_magnitude_vector cannot be cut" in dora
        assert "adapters of lora_embedding_A, lora_embedding_B cannot be cut" in embedding


class Pair(nn.Module):
    """Two models of transformers, each with a plan of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.text, self.tokens = build("bert"), build("llama")

    def forward(self, **batch: Tensor) -> Tensor:
        loss: Tensor = self.text(**batch).loss + self.tokens(**batch).loss
        return loss


def apart_of_a_pair() -> tuple[float, int]:
    torch.manual_seed(0)
    whole = Pair()
    torch.manual_seed(0)
    model = Pair()
    batch = inputs_of("llama")
    wanted = whole(**batch)
    partition = parallelize(model, make_mesh(tp=2))
    cut = {name.partition(".")[0] for name in partition.cuts}
    return abs(float(model(**batch) - wanted)), len(cut)


def test_several_models_of_transformers_are_each_cut_by_their_own_plan() -> None:
    for error, cut in run_on_ranks(apart_of_a_pair, 2):
        assert error <= TOLERANCE
        assert cut == 2
