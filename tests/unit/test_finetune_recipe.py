"""What ``gemini finetune`` is told: options, recipes, data; nothing here needs transformers."""

from __future__ import annotations

import argparse
import dataclasses
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from gemini.cli import finetune
from gemini.errors import ConfigError
from gemini.jobs.finetune.config import FineTuneConfig, read_recipe
from gemini.jobs.finetune.samples import IGNORED, Order, Samples, data_files, documents, num_learned
from gemini.jobs.run.run_directory import RunDirectory
from gemini.jobs.run.training import shaped_factor

RECIPES = Path(__file__).resolve().parents[2] / "recipes"
NEEDED = ["--model", "m", "--data", "d", "--output", "o"]


def parse(*arguments: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    finetune.add_parser(parser.add_subparsers())
    return parser.parse_args(["finetune", *arguments])


def recipe(directory: Path, text: str, name: str = "r.toml") -> Path:
    path = directory / name
    path.write_text(text)
    return path


def test_no_options_are_the_defaults_and_every_field_has_an_option(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert finetune.config_from(parse(*NEEDED)) == FineTuneConfig(model="m", data="d", output="o")
    with pytest.raises(SystemExit):
        parse("--help")
    shown = capsys.readouterr().out
    for field in dataclasses.fields(FineTuneConfig):
        assert f"--{field.name.replace('_', '-')}" in shown


@pytest.mark.parametrize("name", ["r.toml", "r.yaml"])
def test_a_recipe_has_options_by_their_names_and_options_win(name: str, tmp_path: Path) -> None:
    texts = {
        "r.toml": 'model = "m"\nlr = 1e-4\n[budgets]\ndevice-bytes = "2MiB"\nhost_bytes = "auto"\n'
        '[more]\nlora_targets = ["a", "b"]\nclip = 1\nresume = true\n',
        "r.yaml": "model: m\nlr: 1.0e-4\nbudgets:\n  device-bytes: 2MiB\n  host_bytes: auto\n"
        "lora_targets: [a, b]\nclip: 1\nresume: true\n",
    }
    if name == "r.yaml":
        pytest.importorskip("yaml", reason="pyyaml comes with transformers")
    given = read_recipe(recipe(tmp_path, texts[name], name))
    assert given == {
        "model": str(tmp_path / "m"),
        "lr": 1e-4,
        "device_bytes": 2**21,
        "host_bytes": None,
        "lora_targets": "a,b",
        "clip": 1.0,
        "resume": "yes",
    }
    more = ["--data", "d", "--output", str(tmp_path / "o"), "--lr", "1e-3"]
    config = finetune.config_from(parse(str(tmp_path / name), *more))
    assert (config.lr, config.device_bytes, config.model) == (1e-3, 2**21, str(tmp_path / "m"))


@pytest.mark.parametrize("path", sorted(RECIPES.iterdir()), ids=lambda path: path.name)
def test_recipes_that_ship_are_complete_but_for_paths(path: Path) -> None:
    config = finetune.config_from(parse(str(path), *NEEDED))
    assert config.device_bytes
    assert config.checkpoint_every


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("learning_rat = 1", "'learning_rat', which is no option"),
        ("bach = 1", "did you mean 'batch'"),
        ("devicebytes = 1", "did you mean 'device_bytes'"),
        ("xyzzy = 1", "there are model, data"),
        ('lr = "fast"', "lr = 'fast', which is no number"),
        ("batch = 1.5", "batch = 1.5, which is no whole number"),
        ("packing = 1", "packing = 1, which is no true or false"),
        ('device_bytes = "lots"', "device_bytes in .* is 'lots'"),
        ("batch = 1\n[a]\nbatch = 2", "'batch' twice"),
        ("batch = ", "is no TOML"),
    ],
)
def test_recipes_that_mean_nothing_are_refused_by_key(text: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        read_recipe(recipe(tmp_path, text))


def test_a_recipe_that_is_not_there_or_no_recipe_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"there is no recipe .*none\.toml; name a \.toml or"):
        read_recipe(tmp_path / "none.toml")
    with pytest.raises(ConfigError, match="cannot read the recipe"):
        read_recipe(tmp_path)
    with pytest.raises(ConfigError, match="is neither"):
        read_recipe(recipe(tmp_path, "{}", "r.json"))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--data", "d", "--output", "o"], "--model is missing"),
        ([*NEEDED, "--seq", "1"], "--seq is 1; it must be at least 2"),
        ([*NEEDED, "--epochs", "0"], "--epochs is 0"),
        ([*NEEDED, "--lr", "nan"], "--lr is nan"),
        ([*NEEDED, "--warmup", "1"], "--warmup is 1"),
        ([*NEEDED, "--merge"], "--merge .* give --lora RANK"),
        ([*NEEDED, "--eval-every", "3"], "add --eval-share"),
        ([*NEEDED, "--resume", "auto", "--overwrite"], "give one of them"),
        ([*NEEDED, "--activations", "plan"], "needs a tier below DEVICE"),
        (
            [*NEEDED, "--activations", "plan", "--host-bytes", "1GiB", "--device", "cuda"],
            "plan is for the CPU in this release",
        ),
    ],
)
def test_options_that_cannot_work_are_refused_by_name(arguments: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        finetune.config_from(parse(*arguments))


def test_a_run_is_resumed_with_its_options_but_for_those_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    first = finetune.config_from(parse(*NEEDED, "--lora", "4", "--lora-alpha", "8", "--no-packing"))
    RunDirectory("o", lambda _: True).start(first.identity(), first.options())
    config = finetune.config_from(parse("--output", "o", "--resume", "auto", "--device-bytes", "2MiB"))
    wanted = {"model": str(tmp_path / "m"), "data": str(tmp_path / "d"), "resume": "auto"}
    assert config == dataclasses.replace(first, device_bytes=2**21, **wanted)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 2 of .* is no JSON"),
        ("[]", "is no JSON object"),
        ('{"prompt": "a", "answer": "b"}', "it has 'prompt', 'answer'"),
        ('{"text": "a", "messages": []}', "either a text or a list of messages"),
        ('{"messages": []}', "either a text or a list"),
        ('{"messages": [{"role": "user"}]}', "each needs a role and a content"),
    ],
)
def test_lines_that_are_no_documents_are_refused_by_number(line: str, message: str, tmp_path: Path) -> None:
    file = recipe(tmp_path, f'{{"text": "fine"}}\n{line}\n', "d.jsonl")
    with pytest.raises(ConfigError, match=message):
        list(documents([file]))


def test_records_are_the_same_in_lines_and_in_a_list(tmp_path: Path) -> None:
    records = [{"text": "one"}, {"messages": [{"role": "user", "content": "two"}]}]
    lines = recipe(tmp_path, "\n".join(map(json.dumps, records)), "a.JSONL")
    listed = recipe(tmp_path, json.dumps(records, indent=1), "b.JSON")
    bare = recipe(tmp_path, "\ufeff" + "\n".join(map(json.dumps, records)), "c.json")
    for file in (lines, listed, bare):
        found = list(documents([file]))
        assert [(each.text, each.messages) for each in found] == [
            ("one", None),
            (None, records[1]["messages"]),
        ]
    named = recipe(tmp_path, '[\n{"text": "a"},\n{"instruction": "a", "output": "b"}]', "d.json")
    with pytest.raises(ConfigError, match=r"line 3 of .*d\.json needs .*'instruction', 'output'"):
        list(documents([named]))


def test_a_text_that_no_tokenizer_can_take_is_named_by_its_line(tmp_path: Path) -> None:
    for name in ("d.jsonl", "d.json"):
        file = recipe(tmp_path, '{"text": "fine"}\n{"text": "a\\ud800b"}\n', name)
        with pytest.raises(ConfigError, match=r"line 2 of .*half of a surrogate pair"):
            list(documents([file]))


def test_a_link_out_of_a_directory_of_data_is_refused(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    recipe(tmp_path, "private", "other.txt")
    recipe(tmp_path, "text", "data/a.txt")
    (tmp_path / "data" / "b.txt").symlink_to("a.txt")
    assert len(data_files(str(tmp_path / "data"))) == 2
    (tmp_path / "data" / "c.txt").symlink_to("../other.txt")
    with pytest.raises(ConfigError, match=r"c\.txt is a link out of its directory"):
        data_files(str(tmp_path / "data"))


def test_a_directory_is_read_with_all_below_it(tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    recipe(tmp_path, "second", "b/x.txt")
    recipe(tmp_path, '{"text": "first"}\n\n{"text": "next"}\n', "a.jsonl")
    recipe(tmp_path, "never", ".hidden")
    found = [document.text for document in documents(data_files(str(tmp_path)))]
    assert found == ["first", "next", "second"]
    (tmp_path / "binary.txt").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match=r"binary\.txt is no text in UTF-8"):
        list(documents(data_files(str(tmp_path))))
    with pytest.raises(ConfigError, match="does not exist"):
        data_files(str(tmp_path / "none"))


def test_packed_rows_are_all_tokens_in_their_order() -> None:
    texts = [[1, 2, 3], [4], [5, 6, 7, 8], [9]]
    samples = Samples(texts, seq=4, pad=None, directory=None)
    batch = samples.rows(range(samples.num_rows))
    assert batch["input_ids"].tolist() == [[1, 2, 3, 4], [5, 6, 7, 8]]
    assert batch["labels"].equal(batch["input_ids"])
    assert num_learned(batch) == 6
    assert "attention_mask" not in batch


def test_rows_that_are_filled_up_learn_nothing_from_what_fills_them() -> None:
    samples = Samples([[1, 2, 3], [4], [5, 6, 7, 8, 9]], seq=4, pad=0, directory=None)
    batch = samples.rows([0, 1])
    assert batch["input_ids"].tolist() == [[1, 2, 3, 0], [5, 6, 7, 8]]  # one token alone teaches nothing
    assert batch["labels"].tolist() == [[1, 2, 3, IGNORED], [5, 6, 7, 8]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1, 0], [1, 1, 1, 1]]
    assert num_learned(batch) == 5


def test_a_fingerprint_is_of_the_tokens_and_of_where_texts_end() -> None:
    def fingerprint(*texts: list[int]) -> str:
        return Samples(texts, seq=4, pad=None, directory=None).fingerprint

    whole = fingerprint([1, 2, 3, 4], [5])
    assert fingerprint([1, 2, 3, 4], [], [5]) == whole
    assert len({whole, fingerprint([1, 2, 3, 9], [5]), fingerprint([1, 2, 3], [4, 5])}) == 3


@pytest.mark.parametrize("pad", [None, 0])
def test_too_little_data_is_refused_with_its_number_of_tokens(pad: int | None) -> None:
    with pytest.raises(ConfigError, match=r"--data has \d tokens"):
        Samples([[1], []], seq=4, pad=pad, directory=None)


def test_every_epoch_has_each_row_once_and_what_is_held_out_never() -> None:
    order = Order(20, eval_share=0.2, seed=3)
    epochs = [[order[index] for index in range(first, first + 16)] for first in (0, 16)]
    assert sorted(epochs[0]) == sorted(epochs[1]) == order.learned.tolist()
    assert epochs[0] != epochs[1]
    assert not set(order.learned.tolist()) & set(order.held_out.tolist())
    assert Order(20, eval_share=0.2, seed=3)[17] == epochs[1][1]  # without what was before
    with pytest.raises(ConfigError, match="holds out 1 of 1 rows"):
        Order(1, eval_share=0.5, seed=0)


@pytest.mark.parametrize(("shape", "last"), [("cosine", 0.0), ("linear", 0.0), ("constant", 1.0)])
def test_learning_rate_rises_over_the_warmup_then_goes_its_way(shape: str, last: float) -> None:
    factors = [shaped_factor(step, steps=10, warmup=4, shape=shape) for step in range(11)]
    assert factors[:5] == [0.25, 0.5, 0.75, 1.0, 1.0]
    assert factors[4:] == sorted(factors[4:], reverse=True)
    assert factors[10] == pytest.approx(last)


def test_transformers_is_imported_on_use_alone() -> None:
    modules: Any = ["transformers", "tokenizers", "peft", "yaml"]
    code = f"""
import sys, json
import gemini.cli.main, gemini.jobs.finetune.job, gemini.cli.finetune
print(json.dumps([name for name in {modules} if name in sys.modules]))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == []
