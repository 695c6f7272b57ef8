"""Language models with ``tiled_loss``: the plain loss and its gradients, without logits, under any budget."""

from __future__ import annotations

import copy
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gemini
from gemini.errors import ConfigError, StateError
from gemini.losses.lazy_logits import LazyLogits
from gemini.model.tiled_heads import TiledHeads
from gemini.parallel.tensor.layers import LocalColumnLayer
from gemini.runtime.activation import activations

transformers = pytest.importorskip("transformers", reason="the extra 'hf' is not installed")
peft = pytest.importorskip("peft", reason="the extra 'hf' is not installed")

from hf_models import SIZES  # noqa: E402
from trainer_runs import Tokens, arguments, build, figures, ours, tight, unmanaged  # noqa: E402

import gemini.integrations.transformers as integration  # noqa: E402

GPT2: dict[str, Any] = {"vocab_size": 96, "n_embd": 32, "n_layer": 1, "n_head": 4, "n_positions": 64}
CONFIGS: dict[str, Any] = {
    "llama": transformers.LlamaConfig(**SIZES),
    "tied": transformers.LlamaConfig(**SIZES, tie_word_embeddings=True),
    "bias": transformers.PhiConfig(**SIZES),
    "soft cap": transformers.Gemma2Config(
        **SIZES, num_key_value_heads=2, head_dim=8, final_logit_softcapping=3.0, pad_token_id=0
    ),
    "divided": transformers.GraniteConfig(**SIZES, logits_scaling=4.0),
    "multiplied": transformers.CohereConfig(**SIZES, logit_scale=0.25),
    "gpt2": transformers.GPT2Config(**GPT2),
}
TIGHT: dict[str, Any] = {
    "device_bytes": "80KiB",
    "non_model_bytes": 0,
    "min_chunk_size_mb": 0.01,
    "search_range_mb": 0.02,
}


def made(name: str) -> Any:
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(copy.deepcopy(CONFIGS[name])).eval()


def batch(rows: int = 2, *, ignored: int = 3) -> dict[str, Any]:
    tokens = torch.randint(0, 96, (rows, 12), generator=torch.Generator().manual_seed(1))
    labels = tokens.clone()
    labels[:, :ignored] = -100
    return {"input_ids": tokens, "labels": labels, "use_cache": False}


def gradients(model: nn.Module) -> dict[str, Tensor]:
    named = model.named_parameters()
    return {name: param.grad.detach().clone() for name, param in named if param.grad is not None}


def tiled(model: Any, inputs: dict[str, Any]) -> Any:
    """Return what an unmanaged model gives with a tiled loss."""
    heads = TiledHeads(model, True, 0, lambda: 0)
    with heads.during(inputs):
        out = model(**inputs)
    heads.release()
    assert "forward" not in vars(model.get_output_embeddings())
    return out


def assert_near(got: dict[str, Tensor], want: dict[str, Tensor]) -> None:
    assert got.keys() == want.keys()
    largest = max(each.norm().item() for each in want.values())
    for name, value in want.items():
        assert (got[name] - value).norm().item() < 1e-6 * max(value.norm().item(), largest / 100), name


@pytest.mark.parametrize("name", CONFIGS)
def test_any_budget_gives_the_bits_of_the_tiled_loss_and_nearly_those_of_the_plain_one(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model, inputs = made(name), batch()
    plain, unmanaged_ = copy.deepcopy(model), copy.deepcopy(model)
    want = plain(**inputs)
    want.loss.backward()
    alone = tiled(unmanaged_, inputs)
    alone.loss.backward()
    assert_near(gradients(unmanaged_), gradients(plain))
    with caplog.at_level(logging.WARNING):
        handle = gemini.manage(model, tiled_loss=True, disk_dir=str(tmp_path), optimizer_rule="none", **TIGHT)
        got = model(**inputs)
        got.loss.backward()
        assert "reads logits" not in caplog.text
    assert got.loss.item() == alone.loss.item() == pytest.approx(want.loss.item(), rel=1e-6)
    assert handle.stats()["disk_read"]["bytes"] > 0
    found, same = gradients(model), gradients(unmanaged_)
    assert found.keys() == same.keys()
    assert all(torch.equal(value, same[key]) for key, value in found.items())
    assert torch.equal(got.logits.detach(), want.logits.detach())
    handle.close()


@pytest.mark.parametrize(
    ("more", "options"),
    [
        ({}, {}),
        ({"gradient_accumulation_steps": 3, "max_grad_norm": 0.5}, {}),
        ({"label_smoothing_factor": 0.1}, {}),
        ({"bf16": True}, {}),
        ({}, {"activation_offload": True}),
        ({}, {"activation_offload": "auto", "activation_recompute": True, "non_model_bytes": None}),
    ],
    ids=["plain", "accumulated and clipped", "smoothed", "autocast", "offloaded", "recomputed"],
)
def test_a_trainer_prints_nearly_what_it_does_without_tiles(
    more: dict[str, Any],
    options: dict[str, Any],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(activations, "SMALLEST_BYTES", 1)
    more = {**more, "eval_strategy": "steps", "eval_steps": 3}
    want = unmanaged(arguments(tmp_path / "want", **more))
    budget = {**tight(str(tmp_path / "got")), **options, "tiled_loss": True}
    if options.get("non_model_bytes", 0) is None:
        budget["device_bytes"] = "2MiB"
    got = ours(arguments(tmp_path / "got", **more), **budget)
    assert "reads logits" not in caplog.text
    near = 2e-2 if more.get("bf16") else 1e-5
    assert len(figures(got)) == len(figures(want)) > 2
    for one, other in zip(figures(got), figures(want), strict=True):
        assert one == pytest.approx(other, rel=near)
    got.handle.close()


def test_a_trainer_that_asks_for_logits_gets_them(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    seen: dict[bool, Any] = {}

    def evaluated(is_tiled: bool) -> dict[str, float]:
        def metrics(predictions: Any) -> dict[str, float]:
            seen[is_tiled] = predictions
            return {"best": float((predictions.predictions == predictions.label_ids).mean())}

        trainer = integration.GeminiTrainer(
            model=build(),
            args=arguments(tmp_path / str(is_tiled)),
            eval_dataset=Tokens(4),
            compute_metrics=metrics,
            preprocess_logits_for_metrics=lambda logits, labels: logits.argmax(-1),
            gemini={**tight(str(tmp_path / str(is_tiled))), "tiled_loss": is_tiled},
        )
        found: dict[str, float] = trainer.evaluate()
        trainer.handle.close()
        return found

    want, got = evaluated(False), evaluated(True)
    assert (seen[True].predictions == seen[False].predictions).all()
    assert got["eval_best"] == want["eval_best"]
    assert "reads logits" in caplog.text


def test_weights_after_steps_are_those_of_the_same_tiles_without_a_budget(tmp_path: Path) -> None:
    def trained(**options: Any) -> dict[str, Tensor]:
        model = made("tied")
        handle = gemini.manage(model, tiled_loss=True, **options)
        optimizer = gemini.GeminiAdamOptimizer(handle, lr=1e-2, max_norm=0.5)
        for step in range(4):
            with handle.no_sync():
                optimizer.backward(model(**batch(ignored=step)).loss / 2)
            optimizer.backward(model(**batch(3)).loss / 2)
            optimizer.step()
            optimizer.zero_grad()
        weights: dict[str, Tensor] = handle.state_dict()
        kept = {name: value.clone() for name, value in weights.items()}
        handle.close()
        return kept

    want = trained()
    got = trained(disk_dir=str(tmp_path), **{**TIGHT, "device_bytes": "160KiB"})
    assert all(torch.equal(value, got[name]) for name, value in want.items())


def test_a_head_that_is_frozen_passes_gradients_on() -> None:
    inputs = batch()
    models = [made("llama"), made("llama")]
    for model in models:
        model.lm_head.weight.requires_grad_(False)
    models[0](**inputs).loss.backward()
    tiled(models[1], inputs).loss.backward()
    assert models[1].lm_head.weight.grad is None
    assert_near(gradients(models[1]), gradients(models[0]))


def test_labels_that_are_all_ignored_give_what_torch_gives() -> None:
    inputs, models = batch(ignored=12), [made("llama"), made("llama")]
    losses = [models[0](**inputs).loss, tiled(models[1], inputs).loss]
    assert all(loss.isnan() for loss in losses)
    for loss in losses:
        loss.backward()
    got, want = gradients(models[1]), gradients(models[0])
    assert all(torch.equal(got[name], value) for name, value in want.items())


def test_adapters_train_beside_a_head_and_on_a_copy_of_it() -> None:
    inputs = batch()
    config = peft.LoraConfig(
        r=4, target_modules=["q_proj"], modules_to_save=["lm_head"], task_type="CAUSAL_LM"
    )
    model = peft.get_peft_model(made("llama"), config).eval()
    same = copy.deepcopy(model)
    handle = gemini.manage(model, tiled_loss=True)
    logits = model(**inputs).logits
    assert type(logits) is LazyLogits
    model(**inputs).loss.backward()
    same(**inputs).loss.backward()
    assert_near(gradients(model), gradients(same))
    handle.close()


def test_auto_leaves_small_logits_alone() -> None:
    model, whole = made("llama"), 4 * 2 * 12 * 96
    handle = gemini.manage(model, tiled_loss="auto", device_bytes="2MiB")
    assert type(model(**batch()).logits) is torch.Tensor
    handle.close()
    heads, head = TiledHeads(made("llama"), "auto", 16 * whole - 1, lambda: 0), made("llama").lm_head
    with heads.during({}):
        assert heads.is_lazy(torch.zeros(2, 12, 32), head)
        assert not heads.is_lazy(torch.zeros(2, 11, 32), head)


def test_a_pass_without_gradients_or_labels_computes_its_logits() -> None:
    model, inputs = made("llama"), batch()
    del inputs["labels"]
    handle = gemini.manage(model, tiled_loss=True)
    with torch.no_grad():
        assert type(model(**inputs).logits) is torch.Tensor
        assert model.generate(inputs["input_ids"], max_new_tokens=3, do_sample=False).shape == (2, 15)
    handle.close()


def test_logits_that_are_read_after_the_step_are_refused() -> None:
    model = made("llama")
    handle = gemini.manage(model, tiled_loss=True)
    optimizer = gemini.GeminiAdamOptimizer(handle, lr=1e-2)
    out = model(**batch())
    optimizer.backward(out.loss)
    before = out.logits.argmax(-1)
    later = model(**batch())
    optimizer.step()
    assert before.shape == (2, 12)
    assert torch.equal(out.logits.argmax(-1), before)
    with pytest.raises(StateError, match="after the weights of the head"):
        later.logits.argmax(-1)
    handle.close()


def test_released_models_and_copies_have_heads_of_their_own() -> None:
    model = made("llama")
    handle = gemini.manage(model, tiled_loss=True)
    copied = copy.deepcopy(model)
    assert type(copied(**batch()).logits) is torch.Tensor
    gemini.manage(copied, tiled_loss=True)
    assert type(copied(**batch()).logits) is LazyLogits
    gemini.handle_of(copied).close()
    handle.release()
    assert "forward" not in vars(model.lm_head)
    assert type(model(**batch()).logits) is torch.Tensor


class _Doubling(nn.Linear):
    def forward(self, hidden: Tensor) -> Tensor:
        return 2 * super().forward(hidden)


class _Part(LocalColumnLayer, nn.Linear):
    """A head of which each rank has some entries."""


@pytest.mark.parametrize("case", ["no head", "own forward", "cut", "adapters", "unknown"])
def test_what_cannot_be_tiled_is_refused_by_name_and_left_alone_by_auto(case: str) -> None:
    model: Any = made("llama")
    message = {
        "no head": "has no head",
        "own forward": "_Doubling",
        "cut": "divided over ranks",
        "adapters": "lm_head.* has adapters",
    }.get(case, "unknown")
    if case == "no head":
        model = nn.Sequential(nn.Linear(4, 4))
    elif case == "own forward":
        model.lm_head = _Doubling(32, 96, bias=False)
    elif case == "cut":
        model.lm_head.__class__ = _Part
    elif case == "adapters":
        model = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["lm_head"]))
    with pytest.raises(ConfigError, match=message):
        gemini.manage(model, tiled_loss="often" if case == "unknown" else True)
    assert not any(type(param).__name__ == "ManagedParameter" for param in model.parameters())
    if case != "unknown":
        gemini.manage(model, tiled_loss="auto").close()
