"""Models and adapters as a stranger might make them, given to what is done after training; and whatever a
path can name, given to every command that takes one. Each is read, or refused in one line. Nothing waits,
nothing outside is opened, and what is refused leaves nothing behind."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hostile_inputs import Outside, Stranger, no_longer_than, socket_at
from mutants import MUTANTS, SEED

from gemini.cli.command_line import EXIT_ERROR
from gemini.cli.main import main
from gemini.errors import GeminiError
from gemini.jobs.after_training.adapter_merge import merge
from gemini.jobs.after_training.gguf_file import export_gguf
from gemini.jobs.after_training.sampling import SampleConfig, Sampled, sample

transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")

_SECONDS = 60


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model in shards with a tokenizer of bytes; adapters for it beside it."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    path = tmp_path_factory.mktemp("base") / "model"
    config = transformers.LlamaConfig(
        vocab_size=258, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2,
        max_position_embeddings=64, eos_token_id=0, bos_token_id=None,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config)
    model.save_pretrained(path, max_shard_size="4KB")
    letters = ["<end>", *sorted(pre_tokenizers.ByteLevel.alphabet()), "th"]
    vocab = {letter: number for number, letter in enumerate(letters)}
    inner = Tokenizer(models.BPE(vocab=vocab, merges=[("t", "h")]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    transformers.PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<end>").save_pretrained(path)
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["q_proj"]))
    adapted.save_pretrained(path.with_name("adapters"))
    return path


@pytest.fixture
def outside(tmp_path: Path, base: Path) -> Iterator[Outside]:
    path = tmp_path / "outside"
    path.mkdir()
    shutil.copy(next(base.glob("*-of-*")), path / "secret.safetensors")
    shutil.copy(base / "config.json", path / "secret.json")
    watch = Outside(path)
    yield watch
    watch.close()


def _exported(base: Path, given: Path, out: Path) -> None:
    pytest.importorskip("gguf", reason="the extra 'gguf' is not installed")
    export_gguf(given, out, "f16")


def _sampled(base: Path, given: Path, out: Path) -> None:
    config = SampleConfig(given, ["the"], max_new_tokens=1, device_bytes=2**20, disk_dir=str(out))
    sample(config, lambda _: None, Sampled())
    shutil.rmtree(out)


Door = Callable[[Path, Path, Path], Any]
DOORS: dict[str, tuple[Door, str, float]] = {
    "merge, the adapters": (lambda base, given, out: merge(base, given, out), "adapters", 0.05),
    "merge, the base": (
        lambda base, given, out: merge(given, base.with_name("adapters"), out),
        "model",
        0.05,
    ),
    "export": (_exported, "model", 0.15),
    "sample": (_sampled, "model", 0.05),
}


@pytest.mark.parametrize("name", DOORS)
def test_a_directory_is_taken_or_refused_in_one_line(
    name: str, base: Path, outside: Outside, tmp_path: Path
) -> None:
    door, kind, share = DOORS[name]
    stranger = Stranger(base.with_name(kind), outside.path)
    wrong, taken = [], set()
    for number in range(round(MUTANTS * share)):
        given, out = tmp_path / "given", tmp_path / "out"
        what = stranger.make(SEED * 10**6 + number, given)
        outside.was_touched()
        found = ""
        try:
            with no_longer_than(_SECONDS):
                door(base, given, out)
            taken.add(True)
        except GeminiError as error:
            taken.add(False)
            found = f"several lines: {error}" if "\n" in str(error) else ""
            found = found or ("leaves something" if out.exists() and name != "sample" else "")
        except Exception as error:
            found = f"{type(error).__name__}: {error}"[:300]
        if outside.was_touched():
            found = "touches what is outside"
        if found:
            wrong.append(f"{number} ({what}): {found}")
        shutil.rmtree(given)
        for left in tmp_path.glob("out*"):
            shutil.rmtree(left) if left.is_dir() else left.unlink()
        if any(path.name.startswith(".out") for path in tmp_path.iterdir()):
            wrong.append(f"{number} ({what}): a temporary directory stays")
    assert not wrong, "\n".join(wrong)
    assert taken == {True, False}, "some are taken, and some refused"


_TUNED = ["--output", "OUT", "--steps", "1", "--seq", "8"]
_SAMPLED = ["--prompt", "a", "--max-new-tokens", "1"]
COMMANDS: dict[str, list[str]] = {
    "plan": ["plan", "{}"],
    "plan --machine": ["plan", "gpt2", "--machine", "{}"],
    "finetune": ["finetune", "{}"],
    "finetune --model": ["finetune", "--model", "{}", "--data", "DATA", *_TUNED],
    "finetune --data": ["finetune", "--model", "MODEL", "--data", "{}", *_TUNED],
    "merge, the base": ["merge", "{}", "ADAPTERS", "OUT"],
    "merge, the adapters": ["merge", "MODEL", "{}", "OUT"],
    "export": ["export", "{}", "OUT"],
    "sample": ["sample", "{}", *_SAMPLED],
    "sample --adapter": ["sample", "MODEL", *_SAMPLED, "--adapter", "{}"],
    "serve": ["serve", "{}", "--port", "0"],
    "serve --adapter": ["serve", "MODEL", "--adapter", "{}", "--port", "0"],
    "serve --config": ["serve", "--config", "{}"],
    "ckpt inspect": ["ckpt", "inspect", "{}"],
    "ckpt verify": ["ckpt", "verify", "{}"],
    "ckpt convert": ["ckpt", "convert", "{}", "OUT", "--to", "hf"],
    "train --data": ["train", "--steps", "1", "--data", "{}"],
    "train --resume": ["train", "--data", "DATA", "--checkpoint", "{}", "--resume"],
    "convert-config": ["convert-config", "{}"],
    "simulate": ["simulate", "{}"],
    "run --hostfile": ["run", "--hostfile", "{}", "-m", "no_such_module"],
}


def _each_a(make: Callable[[Path], Any]) -> Callable[[Path], Any]:
    """Return what makes a directory with something of this kind under each name that a reader looks for."""

    def directory(path: Path) -> None:
        path.mkdir()
        names = (
            "config.json",
            "model.safetensors",
            "adapter_config.json",
            "tokenizer.json",
            "run.json",
            "a.jsonl",
        )
        for name in names:
            make(path / name)

    return directory


PATHS: dict[str, Callable[[Path], Any]] = {
    "nothing": lambda path: None,
    "fifo": os.mkfifo,
    "socket": socket_at,
    "link to itself": lambda path: path.symlink_to(path.name),
    "zero": lambda path: path.symlink_to("/dev/zero"),
    "own memory": lambda path: path.symlink_to("/proc/self/mem"),
    "empty": Path.touch,
    "bytes": lambda path: path.write_bytes(b"\xff\0\xfe" * 99),
    "sparse": lambda path: path.touch() or os.truncate(path, 2**40),
    "empty directory": Path.mkdir,
    "fifos": _each_a(os.mkfifo),
    "zeros": _each_a(lambda path: path.symlink_to("/dev/zero")),
    "sparse files": _each_a(lambda path: path.touch() or os.truncate(path, 2**40)),
    "directories": _each_a(Path.mkdir),
}
NAMES = {
    "long": "x" * 5000,
    "long part": "x" * 300,
    "no text": "\udcff",
    "escape": "\x1b[2J",
    "line": "a\nb",
    "none": "",
}


@pytest.mark.dear("twenty commands are given twenty kinds of paths")
@pytest.mark.parametrize("command", COMMANDS)
def test_whatever_a_path_names_is_read_or_refused_in_one_line(
    command: str, base: Path, outside: Outside, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = tmp_path / "data.txt"
    data.write_text("some text")
    given = tmp_path / "given" / "path.json"
    places = {"MODEL": base, "ADAPTERS": base.with_name("adapters"), "DATA": data, "OUT": tmp_path / "out"}
    wrong = []
    for kind in [*PATHS, "links out", *NAMES]:
        given.parent.mkdir()
        if kind == "links out":
            _each_a(lambda path: path.symlink_to(outside.path / "secret.json"))(given)
        elif kind in PATHS:
            PATHS[kind](given)
        asked = NAMES.get(kind, str(given))
        outside.was_touched()
        capsys.readouterr()
        with no_longer_than(_SECONDS):
            code = main(
                [asked if each == "{}" else str(places.get(each, each)) for each in COMMANDS[command]]
            )
        said = capsys.readouterr().err.splitlines()
        lines = [line for line in said if line.startswith("gemini: error: ")]
        is_one_line = len(lines) == (code == EXIT_ERROR) and all(map(str.isprintable, lines))
        if code not in (0, EXIT_ERROR) or not is_one_line or "Traceback" in "".join(said):
            wrong.append(f"{kind}: code {code}: {said[-3:]}"[:400])
        if outside.was_touched():
            wrong.append(f"{kind}: opens what is outside")
        shutil.rmtree(given.parent)
    assert not wrong, "\n".join(wrong)
