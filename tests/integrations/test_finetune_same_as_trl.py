"""The tokens that ``gemini finetune`` makes of records, and those that it learns, are those of TRL."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from chat_tokenizers import MODELS, make_tokenizer
from pairs import first

from gemini.jobs.finetune.encoding import PLAIN_TEMPLATE, Encoder
from gemini.jobs.finetune.record_files import find_data
from gemini.jobs.finetune.record_kinds import Documents
from gemini.jobs.finetune.samples import IGNORED, Samples

transformers = pytest.importorskip("transformers", reason="the extra 'hf' is not installed")
trl = pytest.importorskip("trl", reason="only the extra 'test' brings it")
datasets = pytest.importorskip("datasets", reason="comes with trl")

Rows = list[dict[str, Any]]
ASKED = [
    ("Hello, how are you today?", "Fine, thanks; it rains."),
    ("Name the capital of France.", "The capital of France is Paris.\n\nIt is \u00e9normous \U0001f600."),
    ("What color is the sky?", "blue"),
    ("Say it again.", "def add(one, other):\n    return one + other"),
]


def turns(*pairs: tuple[str, str]) -> Rows:
    return [
        {"role": role, "content": text}
        for pair in pairs
        for role, text in zip(("user", "assistant"), pair, strict=True)
    ]


CHATS = [turns(*ASKED[:2]), turns(ASKED[2]), turns(*ASKED), turns(*ASKED[1:3])]
PROMPTS = [{"prompt": f"Q: {question}\nA:", "completion": f" {answer}"} for question, answer in ASKED]
TEXTS = [{"text": f"{question} {answer}"} for question, answer in ASKED]


def as_lines(path: Path, rows: Rows) -> Path:
    path = path.with_suffix(".jsonl")
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


def as_list(path: Path, rows: Rows) -> Path:
    path = path.with_suffix(".json")
    path.write_text(json.dumps(rows, indent=2))
    return path


def as_table(path: Path, rows: Rows) -> Path:
    path = path.with_suffix(".csv")
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    return path


def as_columns(path: Path, rows: Rows) -> Path:
    path = path.with_suffix(".parquet")
    datasets.Dataset.from_list(rows).to_parquet(path)
    return path


def as_directory(path: Path, rows: Rows) -> Path:
    path.mkdir()
    (path / "README.md").write_text("about the data")
    as_lines(path / "a", rows[:1])
    as_columns(path / "b", rows[1:])
    return path


def as_texts(path: Path, rows: Rows) -> Path:
    path.mkdir()
    for number, row in enumerate(rows):
        (path / f"{number}.txt").write_text(row["text"])
    return path


@dataclass(frozen=True)
class Format:
    """Records in files of one kind, and the same records as TRL wants them, with its options."""

    write: Callable[[Path, Rows], Path]
    rows: Rows
    of_trl: Rows
    options: dict[str, Any] = field(default_factory=dict)
    loss_on: str = "answers"
    keys: str = ""


ANSWERS = {"assistant_only_loss": True}
MESSAGES = [{"messages": chat} for chat in CHATS]
SPEAKERS = {"user": "human", "assistant": "gpt"}
SHAREGPT = [
    {"conversations": [{"from": SPEAKERS[each["role"]], "value": each["content"]} for each in chat]}
    for chat in CHATS
]
ALPACA = [{"instruction": question, "input": "", "output": answer} for question, answer in ASKED]
SINGLE = [{"messages": turns(pair)} for pair in ASKED]
CHAT_PROMPTS = [{"prompt": chat[:-1], "completion": chat[-1:]} for chat in CHATS]
FORMATS = {
    "text in lines": Format(as_lines, TEXTS, TEXTS),
    "text in a table": Format(as_table, TEXTS, TEXTS),
    "texts in files": Format(as_texts, TEXTS, TEXTS),
    "prompts in lines": Format(as_lines, PROMPTS, PROMPTS),
    "prompts in a table": Format(as_table, PROMPTS, PROMPTS),
    "prompts, all learned": Format(
        as_lines, PROMPTS, PROMPTS, {"completion_only_loss": False}, loss_on="all"
    ),
    "prompts of messages": Format(as_lines, CHAT_PROMPTS, CHAT_PROMPTS),
    "alpaca in a list": Format(as_list, ALPACA, SINGLE, ANSWERS),
    "alpaca in a table": Format(as_table, ALPACA, SINGLE, ANSWERS),
    "questions, renamed": Format(
        as_list,
        [{"question": row["prompt"], "answer": row["completion"]} for row in PROMPTS],
        PROMPTS,
        keys="prompt=question,completion=answer",
    ),
    "sharegpt in a list": Format(as_list, SHAREGPT, MESSAGES, ANSWERS),
    "sharegpt in columns": Format(as_columns, SHAREGPT, MESSAGES, ANSWERS),
    "messages in lines": Format(as_lines, MESSAGES, MESSAGES, ANSWERS),
    "messages in columns": Format(as_columns, MESSAGES, MESSAGES, ANSWERS),
    "messages in a directory": Format(as_directory, MESSAGES, MESSAGES, ANSWERS),
    "messages, all learned": Format(as_list, MESSAGES, MESSAGES, loss_on="all"),
}


@cache
def tokenizer_of(model: str) -> Any:
    return make_tokenizer(model)


def encoder(model: str, loss_on: str) -> Encoder:
    return Encoder(tokenizer_of(model), loss_on=loss_on, vocabulary=10**6, model=model)


def ours(form: Format, model: str, path: Path) -> Rows:
    documents = Documents(find_data(str(form.write(path / "data", form.rows))), keys=form.keys)
    made = [encoder(model, form.loss_on).encode(document) for document in documents]
    return [{"input_ids": each.ids, "labels": labels(each.ids, each.learned)} for each in made]


def labels(ids: list[int], learned: list[bool] | None) -> list[int]:
    if learned is None:
        return ids
    return [token if is_learned else IGNORED for token, is_learned in zip(ids, learned, strict=True)]


def of_trl(rows: Rows, model: str, path: Path, **options: Any) -> Any:
    """Return the data set that TRL's trainer makes of records."""
    tokenizer = tokenizer_of(model)
    if not tokenizer.chat_template:
        tokenizer.chat_template = PLAIN_TEMPLATE
    config = transformers.LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=8,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=1,
    )
    arguments = {"max_length": 8192, "report_to": [], "use_cpu": True, "bf16": False, **options}
    trainer = trl.SFTTrainer(
        model=transformers.LlamaForCausalLM(config),
        args=trl.SFTConfig(str(path / "trl"), **arguments),
        train_dataset=datasets.Dataset.from_list(rows),
        processing_class=tokenizer,
    )
    return trainer.train_dataset


def shown(row: dict[str, Any], model: str) -> str:
    """Return tokens and texts of a row, those that are learned in brackets; it tells rows apart."""
    pairs = zip(row["input_ids"], row["labels"], strict=True)
    text = tokenizer_of(model)
    return " ".join(
        f"[{token}{text.decode([token])}]" if token == label else f"{token}{text.decode([token])}({label})"
        for token, label in pairs
    )


def assert_same_rows(got: Rows, want: Any, model: str) -> None:
    """Assert that rows have the same tokens and labels; a difference of long lists takes pytest minutes."""
    assert len(got) == len(want)
    for one, other in zip(got, want, strict=True):
        ours, theirs = shown(one, model), shown(other, model)
        if ours != theirs:
            pytest.fail(f"ours: {ours}\n TRL: {theirs}")


# Every run takes each format once and each model; `make test-full` all of the product.
CASES = [(form, model) for form in FORMATS for model in MODELS]
CASES.sort(key=lambda case: (list(FORMATS).index(case[0]) - list(MODELS).index(case[1])) % len(MODELS))


@pytest.mark.parametrize(("name", "model"), first(CASES, len(FORMATS)))
def test_tokens_and_what_is_learned_of_them_are_those_of_trl(name: str, model: str, tmp_path: Path) -> None:
    form = FORMATS[name]
    got = ours(form, model, tmp_path)
    want = of_trl(form.of_trl, model, tmp_path, **form.options)
    assert_same_rows(got, want, model)
    if form.loss_on == "answers" and form.of_trl is not TEXTS:
        assert all(IGNORED in row["labels"] for row in got)


@pytest.mark.parametrize(
    ("layout", "strategy"), [("whole", "bfd"), ("cut", "wrapped"), ("joined", "wrapped")]
)
def test_packed_rows_are_those_of_trl(layout: str, strategy: str, tmp_path: Path) -> None:
    model, seq = "llama3", 64
    rows = [{"messages": chat} for chat in CHATS * 3]
    form = Format(as_lines, rows, rows, ANSWERS)
    documents = Documents(find_data(str(form.write(tmp_path / "data", rows))))
    encoded = map(encoder(model, "answers").encode, documents)
    made = Samples(encoded, seq=seq, layout=layout, pad=0, directory=None)
    options = {**ANSWERS, "packing": True, "packing_strategy": strategy, "max_length": seq}
    want = of_trl(rows, model, tmp_path, **options)
    assert made.num_rows == len(want)
    for number, row in enumerate(want):
        inputs = {name: value[0].tolist() for name, value in made.rows([number]).inputs.items()}
        length = len(row["input_ids"])
        assert inputs["input_ids"][:length] == row["input_ids"]
        labels = row["labels"]
        if strategy == "bfd":
            collated = trl.trainer.sft_trainer.DataCollatorForLanguageModeling(0, padding_free=True)([row])
            assert inputs["position_ids"][:length] == collated["position_ids"][0].tolist()
            labels = collated["labels"][0].tolist()
        if layout != "cut":
            assert inputs["labels"][:length] == labels
        assert set(inputs["labels"][length:]) <= {IGNORED}
