"""TRL's trainers, changed in the line that makes them, print what they do without us and end with the same
weights."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers", reason="the extra 'hf' is not installed")
datasets = pytest.importorskip("datasets", reason="comes with trl")
trl = pytest.importorskip("trl", reason="only the extra 'test' brings it")
import peft  # noqa: E402
import tokenizers  # noqa: E402
from hf_models import SIZES, assert_same, saved  # noqa: E402

import gemini  # noqa: E402
from gemini.integrations.transformers import GeminiTrainerMixin  # noqa: E402

LLAMA = transformers.LlamaForCausalLM
TEXTS = [{"text": "all work and no play"[: 8 + row]} for row in range(8)]
PAIRS = [
    {"prompt": "all work", "chosen": " and play"[: 4 + row % 5], "rejected": " and no play"[: 3 + row]}
    for row in range(8)
]
KINDS = {
    "SFT": (trl.SFTTrainer, trl.SFTConfig, TEXTS),
    "DPO": (trl.DPOTrainer, trl.DPOConfig, PAIRS),
    "reward": (trl.RewardTrainer, trl.RewardConfig, PAIRS),
}
TIGHT: dict[str, Any] = {
    "device_bytes": "250KiB",
    "host_bytes": "2MiB",
    "non_model_bytes": 0,
    "min_chunk_size_mb": 0.01,
    "search_range_mb": 0.01,
}


@pytest.fixture(autouse=True)
def _without_bars() -> None:
    datasets.disable_progress_bars()


def tokenizer() -> Any:
    """Return one that has a token for each letter."""
    letters = {chr(code): code - 30 for code in range(32, 126)}
    bpe = tokenizers.models.BPE(vocab={"<end>": 0, "<unk>": 1, **letters}, merges=[], unk_token="<unk>")
    inner = tokenizers.Tokenizer(bpe)
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=inner, eos_token="<end>", unk_token="<unk>", pad_token="<end>"
    )


def build(kind: Any = LLAMA, **more: Any) -> Any:
    torch.manual_seed(0)
    return kind(transformers.LlamaConfig(**SIZES, eos_token_id=0, pad_token_id=0, **more))


def train(name: str, directory: Path, model: Any, *, ours: bool, **options: Any) -> Any:
    """Train with a trainer of TRL as it is, and our AdamW, or with ours; return it."""
    kind, arguments, rows = KINDS[name]
    more = options.pop("args", {})
    args = arguments(
        str(directory),
        per_device_train_batch_size=2,
        num_train_epochs=1,
        learning_rate=1e-2,
        logging_steps=1,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        **{"bf16": False, "save_strategy": "no", **more},
    )
    data = {"args": args, "train_dataset": datasets.Dataset.from_list(rows), "processing_class": tokenizer()}
    if ours:
        trainer = GeminiTrainerMixin.on(kind)(model=model, **data, **{"gemini": TIGHT, **options})
    else:
        trainer = kind(model=model, **data, **options)
        adam = {"lr": args.learning_rate, "betas": (args.adam_beta1, args.adam_beta2)}
        trainer.optimizer_cls_and_kwargs = (gemini.HybridAdam, {**adam, "eps": args.adam_epsilon})
    trainer.train()
    return trainer


def printed(trainer: Any) -> list[dict[str, float]]:
    """Return all that was printed but times and what the runtime did."""
    *steps, _end = trainer.state.log_history
    return [{key: value for key, value in log.items() if "gemini/" not in key} for log in steps]


@pytest.mark.parametrize("precision", [{}, {"bf16": True}], ids=["fp32", "autocast"])
@pytest.mark.parametrize("name", ["SFT", "reward"])
def test_figures_and_weights_are_those_of_trl_itself(name: str, precision: Any, tmp_path: Path) -> None:
    kind = (LLAMA, {}) if name == "SFT" else (transformers.LlamaForSequenceClassification, {"num_labels": 1})
    want, got = (
        train(name, tmp_path, build(kind[0], **kind[1]), ours=ours, args=precision) for ours in (False, True)
    )
    assert printed(got) == printed(want)
    assert len(printed(got)) == 4
    assert_same(got.model, want.model)
    assert got.handle.stats()["host"]["peak_bytes"] > 0


def test_a_reference_model_is_managed_too(tmp_path: Path) -> None:
    want = train("DPO", tmp_path, build(), ref_model=build(), ours=False)
    got = train("DPO", tmp_path, build(), ref_model=build(), ours=True)
    assert printed(got) == printed(want)
    assert_same(got.model, want.model)
    stats = gemini.handle_of(got.ref_model).stats()
    assert stats["device"]["budget_bytes"] == 250 * 1024
    assert not any(param.requires_grad for param in got.ref_model.parameters())


def lora() -> Any:
    return peft.LoraConfig(r=4, task_type="CAUSAL_LM")


SYNCED = {"args": {"sync_ref_model": True, "ref_model_sync_steps": 2}}


@pytest.mark.parametrize(
    ("name", "more"),
    [
        ("SFT", lambda: {"peft_config": lora()}),
        ("DPO", lambda: {"peft_config": lora()}),
        ("DPO", lambda: {}),
        ("DPO", lambda: SYNCED),
        ("DPO", lambda: {"args": {"precompute_ref_log_probs": True}}),
    ],
    ids=["adapters", "preferences with adapters", "no reference", "synchronized", "precomputed"],
)
def test_what_trl_makes_of_a_directory_itself_is_managed(name: str, more: Any, tmp_path: Path) -> None:
    model = saved(build().config, LLAMA, tmp_path / "model")
    want, got = (
        train(name, tmp_path, str(model), ours=ours, **copy.deepcopy(more())) for ours in (False, True)
    )
    assert printed(got) == printed(want)
    assert_same(got.model, want.model)
    reference = getattr(got, "ref_model", None)
    assert reference is None or gemini.handle_of(reference).stats()["device"]["budget_bytes"] == 250 * 1024


def test_a_model_with_adapters_that_is_managed_gets_its_reference(tmp_path: Path) -> None:
    models = [peft.get_peft_model(build(), lora()) for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    gemini.manage(models[1], **TIGHT)
    want = train("DPO", tmp_path, models[0], ours=False)
    got = train("DPO", tmp_path, models[1], ours=True, gemini=None)
    assert printed(got) == printed(want)
    assert_same(got.model, want.model)
