"""A model of transformers inside another module trains over ranks with parts of sequences as by itself."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from processes import run_on_ranks
from torch import Tensor, nn
from torch import distributed as dist

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


class Strict(Inside):
    """Takes two arguments only."""

    def forward(self, input_ids: Tensor, labels: Tensor) -> Any:
        return self.model(input_ids=input_ids, labels=labels)


class Convolved(Inside):
    """Mixes tokens before the model."""

    def __init__(self, model: Any) -> None:
        super().__init__(model)
        self.mix = nn.Conv1d(32, 32, 3, padding=1)

    def forward(self, input_ids: Tensor, labels: Tensor, **_: Any) -> Any:
        mixed = self.mix(self.model.get_input_embeddings()(input_ids).mT).mT
        return self.model(inputs_embeds=mixed, labels=labels)


class Two(Inside):
    """Learns from another model of transformers."""

    def __init__(self, model: Any) -> None:
        super().__init__(model)
        self.other = llama().requires_grad_(False)

    def forward(self, input_ids: Tensor, labels: Tensor, **_: Any) -> Any:
        taught = self.other(input_ids=input_ids[:, :9]).logits.detach()
        out = self.model(input_ids=input_ids, labels=labels)
        loss = out.loss + nn.functional.mse_loss(out.logits[:, :9], taught)
        return transformers.modeling_outputs.CausalLMOutput(loss=loss)


class Twice(Inside):
    """Runs the model in both directions."""

    def forward(self, input_ids: Tensor, labels: Tensor, **_: Any) -> Any:
        first = self.model(input_ids=input_ids, labels=labels)
        second = self.model(input_ids=input_ids.flip(1), labels=labels.flip(1))
        return transformers.modeling_outputs.CausalLMOutput(loss=first.loss + second.loss / 2)


class Pooled(Inside):
    """Classifies the mean of hidden states."""

    def __init__(self, model: Any) -> None:
        super().__init__(model.model)
        self.head = nn.Linear(32, 3)

    def forward(self, input_ids: Tensor, **_: Any) -> Any:
        mean = self.model(input_ids=input_ids).last_hidden_state.mean(1)
        loss = nn.functional.cross_entropy(self.head(mean), input_ids[:, 0] % 3)
        return transformers.modeling_outputs.CausalLMOutput(loss=loss)


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


def prefixed() -> Any:
    return adapted(peft.PrefixTuningConfig(num_virtual_tokens=3, task_type="CAUSAL_LM"))


def classifier() -> Any:
    torch.manual_seed(0)
    config = llama().config
    config.num_labels, config.pad_token_id = VOCABULARY, 0
    return Labelled(transformers.LlamaForSequenceClassification(config))


class Labelled(Inside):
    """Classifies whole sequences by their first tokens."""

    def forward(self, input_ids: Tensor, **_: Any) -> Any:
        return self.model(input_ids=input_ids, labels=input_ids[:, 0])


TRAINED: dict[str, Callable[[], Any]] = {
    "alone": llama,
    "LoRA": lora,
    "a module": lambda: Inside(llama()),
    "a module in a module": lambda: Inside(Inside(llama())),
    "LoRA in a module": lambda: Inside(lora()),
    "by position": lambda: ByPosition(llama()),
    "a loss of its own": lambda: OwnLoss(llama()),
    "a convolution": lambda: Convolved(llama()),
    "two models": lambda: Two(llama()),
    "two arguments": lambda: Strict(llama()),
    "twice": lambda: Twice(llama()),
    "a mean": lambda: Pooled(llama()),
    "a classifier": classifier,
    "virtual tokens": prompted,
}


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "a loss of its own": (lambda: OwnLoss(llama()), "OwnLoss computes its own loss"),
    "a convolution": (
        lambda: Convolved(llama()),
        "Convolved mixes tokens outside its LlamaForCausalLM, in mix",
    ),
    "two models": (lambda: Two(llama()), "Two has 2 models of transformers (model, other)"),
    "no shifted labels": (lambda: Strict(llama()), "Strict.forward() does not take shift_labels"),
    "virtual tokens": (prompted, "adds its own tokens before the sequence (PromptTuningConfig)"),
}


def batch(step: int) -> dict[str, Tensor]:
    ids = torch.randint(VOCABULARY, (4, 15), generator=torch.Generator().manual_seed(step))
    return {"input_ids": ids, "labels": ids}


def losses(build: Callable[[], Any], **sizes: Any) -> list[float]:
    """Return the losses of two steps."""
    model = build()
    trained = [param for param in model.parameters() if param.requires_grad]
    booster = Booster(plugin=HybridParallelPlugin(zero_stage=1, **sizes))
    model, optimizer, *_ = booster.boost(model, CPUAdam(trained, lr=1e-3))
    found = []
    for step in range(2):
        out = booster.execute_pipeline(iter([batch(step)]), model, lambda output, _: output.loss, optimizer)
        optimizer.step()
        optimizer.zero_grad()
        found.append(float(out["loss"]))
    return found


def losses_of_all(**sizes: Any) -> dict[str, list[float]]:
    return {name: losses(build, **sizes) for name, build in TRAINED.items()}


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
            losses(build, sp_size=2, sp_cut="batch")
            said[name] = ""
        except ConfigError as error:
            said[name] = str(error)
    return said


def test_what_a_wrapper_would_compute_wrongly_from_parts_is_refused() -> None:
    for said in run_on_ranks(refusals, 2):
        for name, (_, wanted) in REFUSED.items():
            assert wanted in said[name], (name, said[name])


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"sp_cut": "heads"}, "sp_cut is 'heads'; it may be auto, batch or blocks"),
        ({"sp_cut": "blocks", "pp_size": 2}, "needs all blocks on one rank"),
    ],
)
def test_places_that_cannot_be_cut_at_are_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        HybridParallelPlugin(sp_size=2, **options)


def refused(call: Callable[[], object]) -> str:
    with pytest.raises(ConfigError) as caught:
        call()
    return str(caught.value)


def different_batches() -> tuple[str, str]:
    """Run a model that takes whole batches with another batch on each rank."""
    booster = Booster(plugin=HybridParallelPlugin(sp_size=2, zero_stage=1))
    model = Twice(llama())
    model, optimizer, *_ = booster.boost(model, CPUAdam(model.parameters()))
    own, criterion = batch(dist.get_rank()), lambda output, _: output.loss
    return (
        refused(lambda: model(**own)),
        refused(lambda: booster.execute_pipeline(iter([own]), model, criterion, optimizer)),
    )


def test_ranks_that_run_whole_batches_must_have_the_same() -> None:
    for directly, through_the_booster in run_on_ranks(different_batches, 2):
        assert "along sp" in directly
        assert "different" in through_the_booster


def prefix_refusals() -> tuple[str, str]:
    return refused(lambda: losses(prefixed, sp_size=2)), refused(lambda: losses(prefixed, tp_size=2))


def test_a_prefix_of_keys_is_refused() -> None:
    for of_sequences, of_layers in run_on_ranks(prefix_refusals, 2):
        assert "adds keys and values of its own to each attention" in of_sequences
        assert "a rank has only its own heads" in of_layers


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
