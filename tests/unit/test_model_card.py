"""Model cards say what a run's files record, and nothing of the machine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from gemini.errors import InputError
from gemini.jobs.run.model_card import merged_card, name_of, tuned_card

OPTIONS = {"model": "/home/me/llama", "data": "/home/me/chats.jsonl", "lora": 8, "lr": 1e-3, "packing": False}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    (tmp_path / "run.json").write_text(json.dumps({"seq": 64, "options": OPTIONS}))
    losses: list[dict[str, Any]] = [{"step": 1, "loss": 3.5}, {"step": 2, "loss": 2.5, "eval_loss": 2.75}]
    lines = [*map(json.dumps, losses), '{"step": 3, "lo']
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines))
    adapter = tmp_path / "model"
    adapter.mkdir()
    said = {"peft_type": "LORA", "r": 8, "target_modules": ["v_proj", "q_proj"], "use_dora": True}
    (adapter / "adapter_config.json").write_text(json.dumps(said))
    return tmp_path


def rows_of(card: str) -> dict[str, str]:
    lines = (line.strip("| ").split(" | ") for line in card.splitlines() if line.startswith("| "))
    return {line[0]: line[1] for line in lines if len(line) == 2}


def test_a_card_has_the_recipe_and_the_losses_and_no_path(run: Path) -> None:
    card = tuned_card(run, is_adapter=True)
    rows = rows_of(card)
    assert (rows["base"], rows["data"], rows["tokens in a row"], rows["packed"]) == (
        "llama",
        "chats.jsonl",
        "64",
        "no",
    )
    assert rows["trained"] == "LoRA adapters: rank 8, alpha 16"
    assert (rows["steps"], rows["loss, first and last step"]) == ("2", "3.5000, 2.5000")
    assert rows["last held-out loss"] == "2.7500"
    assert "weight decay" not in rows, "it is not recorded"
    assert "/home/me" not in card
    assert card.startswith('---\nbase_model: "llama"\nlibrary_name: "peft"\n')


def test_a_card_of_merged_adapters_adds_the_run_that_made_them(run: Path) -> None:
    rows = rows_of(merged_card(Path("/models/base"), run / "model"))
    assert (rows["base"], rows["on"], rows["DoRA"]) == ("base", "q_proj, v_proj", "yes")
    assert rows["loss, first and last step"] == "3.5000, 2.5000"


@pytest.mark.parametrize("text", ["{", "[]", '{"options": {"a": 1}}', '{"options": 3}'])
def test_a_file_of_another_program_adds_nothing(text: str, run: Path) -> None:
    (run / "run.json").write_text(text)
    assert "data" not in rows_of(merged_card(Path("base"), run / "model"))


def test_a_run_that_cannot_be_read_is_refused(run: Path) -> None:
    (run / "run.json").write_text('{"options": 3}')
    with pytest.raises(InputError, match="has no options of a run"):
        tuned_card(run, is_adapter=False)


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("meta/llama", "meta/llama"),
        ("/home/me/llama", "llama"),
        ("./llama/", "llama"),
        ("a/b/c", "c"),
        (None, "unknown"),
        ("", "unknown"),
    ],
)
def test_names_are_those_of_the_hub_or_the_last_part_of_a_path(path: str | None, name: str) -> None:
    assert name_of(path) == name


def test_text_of_a_stranger_stays_in_its_cell(run: Path) -> None:
    said = {"peft_type": "LORA", "r": "a | b\n# c", "target_modules": "<script>"}
    (run / "model" / "adapter_config.json").write_text(json.dumps(said))
    card = merged_card(Path("base"), run / "model")
    assert "| rank | a \\| b\\n# c |" in card
    assert "<script>" not in card
