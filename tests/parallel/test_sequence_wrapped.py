"""A model of transformers inside another module trains on parts of sequences as by itself."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from processes import run_on_ranks
from torch import Tensor, nn

from gemini import ConfigError, CPUAdam
from gemini.parallel import Booster, HybridParallelPlugin

transformers = pytest.importorskip("transformers", reason="transformers is not installed")
peft = pytest.importorskip("peft", reason="peft is not installed")

VOCABULARY = 67


def llama() -> Any:
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            use_cache=False,
        )
    )
    with torch.no_grad():
        for param in model.parameters():
            if param.ndim > 1:
                param.mul_(6)  # so that attention matters
    return model


class Inside(nn.Module):
    """Hands on what it is called with."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, **batch: Tensor) -> Any:
        return self.model(**batch)


class ByPosition(Inside):
    """Calls forward itself, and by position."""

    def forward(self, input_ids: Tensor, labels: Tensor, shift_labels: Tensor | None = None) -> Any:
        return self.model.forward(input_ids, labels=labels, shift_labels=shift_labels)


class OwnLoss(Inside):
    """Shifts labels by itself."""

    def forward(self, input_ids: Tensor, labels: Tensor, **_: Any) -> Any:
        logits = self.model(input_ids=input_ids).logits
        loss = nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        return transformers.modeling_outputs.CausalLMOutput(loss=loss)


class Convolved(Inside):
    """Mixes tokens before the model."""

    def __init__(self, model: Any) -> None:
        super().__init__(model)
        self.mix = nn.Conv1d(32, 32, 3, padding=1)


class Two(Inside):
    """Has another model of transformers."""

    def __init__(self, model: Any) -> None:
        super().__init__(model)
        self.other = llama()


def adapted(config: Any) -> Any:
    torch.manual_seed(1)
    return peft.get_peft_model(llama(), config)


def lora() -> Any:
    return adapted(
        peft.LoraConfig(
            r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False, task_type="CAUSAL_LM"
        )
    )


def prompted() -> Any:
    return adapted(peft.PromptTuningConfig(num_virtual_tokens=3, task_type="CAUSAL_LM"))


WHOLE: dict[str, Callable[[], Any]] = {
    "alone": llama,
    "LoRA": lora,
    "a module": lambda: Inside(llama()),
    "a module in a module": lambda: Inside(Inside(llama())),
    "LoRA in a module": lambda: Inside(lora()),
    "by position": lambda: ByPosition(llama()),
}
REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "a loss of its own": (lambda: OwnLoss(llama()), "OwnLoss computes its own loss"),
    "a convolution": (
        lambda: Convolved(llama()),
        "Convolved mixes tokens outside its LlamaForCausalLM, in mix",
    ),
    "two models": (lambda: Two(llama()), "Two has 2 models of transformers (model, other)"),
    "virtual tokens": (prompted, "adds its own tokens before the sequence (PromptTuningConfig)"),
}


def batch(step: int) -> dict[str, Tensor]:
    ids = torch.randint(VOCABULARY, (4, 15), generator=torch.Generator().manual_seed(step))
    return {"input_ids": ids, "labels": ids}


def losses(build: Callable[[], Any], **sizes: Any) -> list[float]:
    """Return the losses of three steps."""
    model = build()
    trained = [param for param in model.parameters() if param.requires_grad]
    booster = Booster(plugin=HybridParallelPlugin(zero_stage=1, **sizes))
    model, optimizer, *_ = booster.boost(model, CPUAdam(trained, lr=1e-3))
    found = []
    for step in range(3):
        out = booster.execute_pipeline(iter([batch(step)]), model, lambda output, _: output.loss, optimizer)
        optimizer.step()
        optimizer.zero_grad()
        found.append(float(out["loss"]))
    return found


def losses_of_all(**sizes: Any) -> dict[str, list[float]]:
    return {name: losses(build, **sizes) for name, build in WHOLE.items()}


def on_parts(mode: str) -> dict[str, list[float]]:
    return losses_of_all(sp_size=2, sp_mode=mode)


@pytest.mark.parametrize("mode", ["ulysses", "ring"])
def test_losses_are_those_of_one_process(mode: str) -> None:
    wanted = losses_of_all()
    for found in run_on_ranks(on_parts, 2, mode):
        for name, values in wanted.items():
            assert found[name] == pytest.approx(values, rel=1e-5), name


def refusals() -> dict[str, str]:
    said = {}
    for name, (build, _) in REFUSED.items():
        try:
            losses(build, sp_size=2)
            said[name] = ""
        except ConfigError as error:
            said[name] = str(error)
    return said


def test_what_a_wrapper_would_compute_wrongly_is_refused() -> None:
    for said in run_on_ranks(refusals, 2):
        for name, (_, wanted) in REFUSED.items():
            assert wanted in said[name], (name, said[name])


def signature_of_a_part() -> tuple[str, str]:
    model = llama()
    before = inspect.signature(model.forward)
    plugin = HybridParallelPlugin(sp_size=2, zero_stage=1)
    Booster(plugin=plugin).boost(model, CPUAdam(model.parameters()))
    return (str(before), type(model).__name__) if inspect.signature(model.forward) == before else ("", "")


def test_a_model_on_parts_keeps_its_name_and_its_signature() -> None:
    for signature, name in run_on_ranks(signature_of_a_part, 2):
        assert "input_ids" in signature
        assert name == "LlamaForCausalLM"
