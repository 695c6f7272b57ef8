"""``gemini finetune --objective dpo``: the tokens, losses, rewards and weights of TRL's DPOTrainer."""

from __future__ import annotations

import dataclasses
import json
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from chat_tokenizers import make_tokenizer
from finetune_runs import LLAMA, files_of, run, small_run

from gemini.errors import ConfigError, InputError
from gemini.jobs.finetune import job
from gemini.jobs.finetune.config import FineTuneConfig
from gemini.jobs.finetune.encoding import PLAIN_TEMPLATE, Encoder
from gemini.jobs.finetune.record_files import find_data
from gemini.jobs.finetune.record_kinds import Documents
from gemini.jobs.finetune.task import FineTuneTask

transformers = pytest.importorskip("transformers", reason="the extra 'hf' is not installed")
peft = pytest.importorskip("peft", reason="the extra 'hf' is not installed")

PAIRS = [
    {"prompt": "all work", "chosen": " and play"[: 4 + row % 5], "rejected": " and no play"[: 3 + row]}
    for row in range(8)
]
ASKED = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Name the capital of France."},
]
GOOD, BAD = ({"role": "assistant", "content": text} for text in ("Paris.", "The capital of France is Rome."))


@pytest.fixture
def config(tmp_path: Path) -> FineTuneConfig:
    """Return a run in which each step learns from all pairs."""
    config = small_run(tmp_path)
    Path(config.data).write_text("\n".join(map(json.dumps, PAIRS)))
    changes = {"schedule": "constant", "warmup": 0.0, "precision": "fp32", "steps": 4, "batch": 4}
    return dataclasses.replace(config, **changes, objective="dpo", lora=4, dpo_beta=0.2, accumulate=2)


def metrics_of(config: FineTuneConfig) -> list[dict[str, Any]]:
    return [json.loads(line) for line in Path(config.output, "metrics.jsonl").read_text().splitlines()]


def trained_by_trl(config: FineTuneConfig, directory: Path) -> Any:
    trl = pytest.importorskip("trl", reason="only the extra 'test' brings it")
    datasets = pytest.importorskip("datasets", reason="comes with trl")
    torch.manual_seed(config.seed)
    model = LLAMA.from_pretrained(config.model)
    if config.lora:
        lora = peft.LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", task_type="CAUSAL_LM")
        model = peft.get_peft_model(model, lora)
    arguments: dict[str, Any] = {"precompute_ref_log_probs": not config.lora}
    arguments |= {"report_to": [], "use_cpu": True, "bf16": False, "save_strategy": "no", "logging_steps": 1}
    arguments |= {"learning_rate": config.lr, "lr_scheduler_type": "constant", "beta": config.dpo_beta}
    trainer = trl.DPOTrainer(
        model=model,
        args=trl.DPOConfig(str(directory), max_steps=4, per_device_train_batch_size=8, **arguments),
        train_dataset=datasets.Dataset.from_list(PAIRS),
        processing_class=transformers.AutoTokenizer.from_pretrained(config.model),
    )
    trainer.train()
    return trainer


@pytest.mark.dear("TRL and its trainer are imported, and run")
@pytest.mark.parametrize("lora", [4, 0], ids=["adapters", "all weights"])
def test_losses_rewards_and_weights_are_those_of_trl(
    lora: int, config: FineTuneConfig, tmp_path: Path
) -> None:
    config = dataclasses.replace(config, lora=lora)
    want = trained_by_trl(config, tmp_path / "trl")
    result = run(config)
    logs = [log for log in want.state.log_history if "loss" in log]
    assert list(result.losses) == pytest.approx([log["loss"] for log in logs], rel=1e-5)
    assert result.losses[0] == pytest.approx(0.6931, abs=1e-4), "without training both are the reference"
    assert result.losses[-1] < result.losses[0]
    for record, log in zip(metrics_of(config), logs, strict=True):
        for name in ("rewards/chosen", "rewards/rejected", "rewards/margins", "rewards/accuracies"):
            assert record[name] == pytest.approx(log[name], rel=1e-4, abs=1e-5)
        assert record["grad_norm"] == pytest.approx(float(log["grad_norm"]), rel=1e-4)
    assert result.summary.model is not None
    if lora:
        ours = peft.load_peft_weights(result.summary.model, device="cpu")
        theirs = peft.get_peft_model_state_dict(want.model)
    else:
        ours, theirs = LLAMA.from_pretrained(result.summary.model).state_dict(), want.model.state_dict()
    assert ours.keys() == theirs.keys()
    for name, value in ours.items():
        torch.testing.assert_close(value, theirs[name], rtol=1e-3, atol=1e-4)
    card = Path(result.summary.model, "README.md").read_text()
    assert "| objective | DPO on preference pairs, beta 0.2 |" in card


def encoder(model: str) -> Encoder:
    return Encoder(make_tokenizer(model), loss_on="answers", vocabulary=10**6, model=model)


def pairs_of(directory: Path, *records: dict[str, Any], **options: Any) -> list[Any]:
    file = directory / "pairs.jsonl"
    file.write_text("\n".join(map(json.dumps, records)))
    return list(Documents(find_data(str(file)), pairs=True, **options))


@pytest.mark.parametrize("model", ["llama3", "qwen3-instruct"])
@pytest.mark.parametrize("is_chat", [False, True], ids=["text", "messages"])
def test_tokens_of_pairs_are_those_of_trl(model: str, is_chat: bool, tmp_path: Path) -> None:
    trl = pytest.importorskip("trl", reason="only the extra 'test' brings it")
    datasets = pytest.importorskip("datasets", reason="comes with trl")
    chats = [{"prompt": ASKED, "chosen": [GOOD], "rejected": [BAD]}]
    chats += [{"prompt": [*ASKED, BAD, ASKED[1]], "chosen": [BAD], "rejected": [GOOD]}]
    records = chats if is_chat else PAIRS
    text = make_tokenizer(model)
    text.chat_template = text.chat_template or PLAIN_TEMPLATE
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    arguments = {"report_to": [], "use_cpu": True, "bf16": False}
    trainer = trl.DPOTrainer(
        model=LLAMA(transformers.LlamaConfig(vocab_size=len(text), **sizes)),
        args=trl.DPOConfig(str(tmp_path / "trl"), **arguments),
        train_dataset=datasets.Dataset.from_list(records),
        processing_class=text,
        peft_config=peft.LoraConfig(r=1, task_type="CAUSAL_LM"),
    )
    for document, row in zip(pairs_of(tmp_path, *records), trainer.train_dataset, strict=True):
        for encoded, name in zip(
            encoder(model).encode_pair(document), ("chosen_ids", "rejected_ids"), strict=True
        ):
            assert encoded.ids == row["prompt_ids"] + row[name]
            assert encoded.learned is not None
            assert encoded.learned.index(True) == len(row["prompt_ids"])
            assert all(encoded.learned[len(row["prompt_ids"]) :])


def test_a_pair_is_the_same_in_every_shape_that_data_sets_have(tmp_path: Path) -> None:
    sharegpt = [
        {"from": "system", "value": ASKED[0]["content"]},
        {"from": "human", "value": ASKED[1]["content"]},
    ]
    question, system = ASKED[1]["content"], ASKED[0]["content"]
    answers = {"chosen": GOOD["content"], "rejected": BAD["content"]}
    shapes = [
        {"prompt": ASKED, "chosen": [GOOD], "rejected": [BAD]},
        {"prompt": ASKED, "chosen": GOOD, "rejected": BAD},
        {"prompt": ASKED, **answers},
        {"chosen": [*ASKED, GOOD], "rejected": [*ASKED, BAD]},
        {"prompt": question, "chosen": [*ASKED, GOOD], "rejected": [*ASKED, BAD]},
        {"messages": ASKED, "chosen": GOOD, "rejected": BAD},
        {"prompt": question, "system": system, "chosen": [GOOD], "rejected": [BAD]},
        {"instruction": question, "input": "", "system": system, **answers},
        {
            "conversations": sharegpt,
            **{
                name: {"from": "gpt", "value": answer["content"]}
                for name, answer in (("chosen", GOOD), ("rejected", BAD))
            },
        },
    ]
    for shape, document in zip(shapes, pairs_of(tmp_path, *shapes), strict=True):
        assert document.rejected is not None
        assert document.messages == [*ASKED, GOOD], shape
        assert document.rejected.messages == [*ASKED, BAD], shape
        assert document.num_prompt == document.rejected.num_prompt == 2
    (renamed,) = pairs_of(
        tmp_path, {"q": "a", "good": "b", "bad": "c"}, keys="prompt=q,chosen=good,rejected=bad"
    )
    assert (renamed.prompt, renamed.completion, renamed.rejected.completion) == ("a", "b", "c")


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"text": "a"}, r"is a text, but --objective dpo needs preference pairs"),
        ({"prompt": "a", "chosen": "b"}, "has 'chosen' but no 'rejected'.* --data-keys rejected=KEY"),
        ({"prompt": "a", "chosen": None, "rejected": "b"}, "has 'rejected' but no 'chosen'"),
        ({"chosen": "a", "rejected": "b"}, "has no prompt before its chosen and rejected answers"),
        ({"chosen": [GOOD], "rejected": [BAD]}, "has no prompt, and its answers do not start with the same"),
        ({"prompt": "a", "chosen": 3, "rejected": "b"}, "both text, or both lists of messages"),
        ({"prompt": "a", "chosen": [GOOD], "rejected": []}, "has no messages"),
        (
            {"prompt": ASKED, "chosen": [{"role": "assistant"}], "rejected": [BAD]},
            "needs a role and a content",
        ),
    ],
)
def test_what_is_no_pair_is_refused_by_line(record: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=f"line 1 of .*{message}") as raised:
        pairs_of(tmp_path, record)
    assert "\n" not in str(raised.value)


@pytest.mark.dear("a whole run, and one that is stopped and resumed")
def test_a_run_that_was_stopped_and_resumed_is_the_one_that_was_not(
    config: FineTuneConfig, tmp_path: Path
) -> None:
    config = dataclasses.replace(
        config, batch=1, accumulate=2, lora_dropout=0.2, eval_share=0.2, keep_best=True, resume="auto"
    )
    want = run(config)
    there = str(tmp_path / "again")
    assert run(config, stop_after=2, output=there).exit_code == 128 + signal.SIGUSR1
    resumed = run(config, output=there)
    assert resumed.losses == want.losses
    assert files_of(resumed) == files_of(want)
    with pytest.raises(ConfigError, match=r"has dpo_beta = 0\.2, but this command has dpo_beta = 0\.3"):
        run(config, dpo_beta=0.3)


def test_a_pair_with_an_answer_beyond_the_row_is_left_out_whole(config: FineTuneConfig) -> None:
    longer = {"prompt": "all work " * 3, "chosen": "a", "rejected": "b"}
    Path(config.data).write_text("\n".join(map(json.dumps, [*PAIRS, longer, *PAIRS])))
    task = FineTuneTask(config, Path("unused"), resume=False, scratch=None)
    assert task.samples.num_rows == 16
    batch = task.samples.rows([8, 3])
    assert batch.num_pairs == batch.weight == 2
    rows = batch.inputs["input_ids"]
    assert torch.equal(rows[0, :8], rows[2, :8]), "the prompt of one pair"
    assert any("16 pairs of rows of 24" in line and "of 8 pairs" in line for line in task.describe())
    lines = list(job.preview(dataclasses.replace(config, show=1)))
    assert sum("preference, " in line for line in lines) == 2


def test_options_that_do_not_go_with_pairs_are_refused(config: FineTuneConfig) -> None:
    for changes, message in (
        ({"loss_on": "all"}, "--loss-on all does not go with --objective dpo"),
        ({"tiled_loss": "yes"}, "--tiled-loss yes does not go with --objective dpo"),
        ({"data_format": "text"}, "--data-format is text"),
        ({"dpo_beta": 0.0}, "--dpo-beta is 0.0"),
        ({"objective": "kto"}, "--objective is 'kto'; it must be one of sft, dpo"),
    ):
        with pytest.raises(ConfigError, match=message):
            dataclasses.replace(config, **changes)
    with pytest.raises(InputError, match=r"line 1 of .* preference pair .*--objective dpo, or"):
        run(config, objective="sft", dpo_beta=0.1)
