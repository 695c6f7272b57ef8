"""PEFT adapters on a model that ``gemini.from_pretrained`` loads."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hf_models import SIZES, assert_same, saved

import gemini
from gemini.errors import ConfigError

transformers = pytest.importorskip("transformers", reason="the extra 'hf' is not installed")
peft = pytest.importorskip("peft", reason="the extra 'hf' is not installed")

LLAMA = transformers.LlamaForCausalLM
TASK = "CAUSAL_LM"
CONFIGS: dict[str, Callable[[], Any]] = {
    "LoRA": lambda: peft.LoraConfig(r=4, task_type=TASK),
    "DoRA": lambda: peft.LoraConfig(r=4, use_dora=True, task_type=TASK),
    "a whole layer": lambda: peft.LoraConfig(r=4, modules_to_save=["lm_head"], task_type=TASK),
    "values of the weights": lambda: peft.LoraConfig(r=4, init_lora_weights="pissa", task_type=TASK),
    "buffers": lambda: peft.VeraConfig(r=4, task_type=TASK),
}


@pytest.fixture
def base(tmp_path: Path) -> Path:
    return saved(transformers.LlamaConfig(**SIZES), LLAMA, tmp_path / "base")


def tight(directory: Path) -> dict[str, Any]:
    return {"device_bytes": "600KiB", "disk_dir": str(directory), "non_model_bytes": 0}


def train(model: Any, optimizer: torch.optim.Optimizer) -> list[float]:
    losses = []
    model.eval()
    for step in range(3):
        tokens = (torch.arange(12) + step).reshape(2, 6)
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("name", CONFIGS)
def test_adapters_start_and_train_as_on_an_unmanaged_model(name: str, base: Path, tmp_path: Path) -> None:
    torch.manual_seed(7)
    want = peft.get_peft_model(LLAMA.from_pretrained(base), CONFIGS[name]())
    torch.manual_seed(7)
    got = gemini.from_pretrained(base, LLAMA, adapter=CONFIGS[name](), **tight(tmp_path))
    assert_same(got, want)
    trained = [param for param in want.parameters() if param.requires_grad]
    losses = train(want, gemini.CPUAdam(trained, lr=1e-2))
    assert train(got, gemini.GeminiAdamOptimizer(got, lr=1e-2)) == losses
    assert_same(got, want)


FROZEN_BUFFERS: dict[str, Callable[[], Any]] = {
    "VeRA": lambda: peft.VeraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type=TASK),
    "PVeRA": lambda: peft.PveraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type=TASK),
    "TinyLoRA": lambda: peft.TinyLoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type=TASK),
    "UniLoRA": lambda: peft.UniLoraConfig(target_modules=["q_proj", "v_proj"], task_type=TASK),
    "OSF": lambda: peft.OSFConfig(target_modules=["q_proj", "v_proj"], task_type=TASK),
}


@pytest.mark.parametrize("name", FROZEN_BUFFERS)
@pytest.mark.parametrize("kept", [False, True], ids=["all in bf16", "adapters in fp32"])
def test_adapters_whose_frozen_weights_are_buffers_train_in_bf16(
    name: str, kept: bool, base: Path, tmp_path: Path
) -> None:
    torch.manual_seed(7)
    plain = peft.get_peft_model(LLAMA.from_pretrained(base), FROZEN_BUFFERS[name]())
    trained = {name for name, param in plain.named_parameters() if param.requires_grad}
    losses = []
    for budget in (tight(tmp_path), {}):
        torch.manual_seed(7)
        model = peft.get_peft_model(LLAMA.from_pretrained(base), FROZEN_BUFFERS[name]())
        gemini.manage(model, mixed_precision="bf16", keep_fp32=trained if kept else (), **budget)
        losses.append(train(model, gemini.GeminiAdamOptimizer(model, lr=1e-2)))
    assert losses[0] == losses[1]
    want = train(plain, gemini.CPUAdam([p for p in plain.parameters() if p.requires_grad], lr=1e-2))
    assert losses[0] == pytest.approx(want, rel=1e-2)


def test_saved_adapters_are_loaded_on_top_and_merged(base: Path, tmp_path: Path) -> None:
    first = peft.get_peft_model(LLAMA.from_pretrained(base), CONFIGS["LoRA"]())
    with torch.no_grad():
        for param in first.parameters():
            if param.requires_grad:
                param.add_(0.5)
    first.save_pretrained(tmp_path / "adapter")
    alone = gemini.from_pretrained(tmp_path / "adapter", LLAMA, **tight(tmp_path))
    assert_same(alone, first)
    on_top = gemini.from_pretrained(base, LLAMA, adapter=tmp_path / "adapter", **tight(tmp_path))
    assert_same(on_top, first)
    on_top.merge_and_unload().save_pretrained(tmp_path / "merged")
    merged = LLAMA.from_pretrained(tmp_path / "merged").requires_grad_(False)
    assert_same(merged, first.merge_and_unload())


def test_adapters_of_a_config_alone_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="adapters"):
        gemini.from_pretrained(
            transformers.LlamaConfig(**SIZES), LLAMA, adapter=CONFIGS["LoRA"](), **tight(tmp_path)
        )


def test_adapters_that_learn_inputs_are_refused(base: Path, tmp_path: Path) -> None:
    config = peft.PromptTuningConfig(task_type=TASK, num_virtual_tokens=4)
    with pytest.raises(ConfigError, match="PromptTuningConfig"):
        gemini.from_pretrained(base, LLAMA, adapter=config, **tight(tmp_path))


@pytest.mark.parametrize("name", ["LoRA", "DoRA", "a whole layer"])
def test_adapters_may_come_after_the_model_was_managed(name: str, base: Path, tmp_path: Path) -> None:
    def put_on(model: Any) -> Any:
        torch.manual_seed(7)
        return peft.get_peft_model(model, CONFIGS[name]())

    def adam(model: Any) -> torch.optim.Optimizer:
        return gemini.CPUAdam([p for p in model.parameters() if p.requires_grad], lr=1e-2)

    want = put_on(LLAMA.from_pretrained(base))
    losses = train(want, adam(want))
    net = LLAMA.from_pretrained(base)
    handle = gemini.manage(net, **tight(tmp_path))
    got = put_on(net)
    optimizer = gemini.GeminiOptimizer(adam(got), net)
    assert train(got, optimizer) == losses
    assert_same(got, want)
    gemini.checkpoint.save(tmp_path / "saved", net, optimizer)

    again = put_on(LLAMA.from_pretrained(base))
    loaded = gemini.manage(again.base_model.model, **tight(tmp_path))
    gemini.checkpoint.load(tmp_path / "saved", loaded, gemini.GeminiOptimizer(adam(again), loaded))
    assert_same(again, want)
    got.merge_and_unload()
    assert handle.adopt() == []
    assert [*handle.storage.slots] == [name for name, _ in net.named_parameters()]
    handle.release()
    for param, plain in zip(net.parameters(), want.merge_and_unload().parameters(), strict=True):
        assert torch.equal(param, plain)
