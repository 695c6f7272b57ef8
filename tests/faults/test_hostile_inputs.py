"""Whatever a stranger gives, in a directory or a file: it is refused in one line, or it is read. Nothing
waits, nothing outside is opened, nothing of it is run."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hostile_inputs import TEXTS, Hang, Outside, Stranger, no_longer_than
from mutants import MUTANTS, SEED
from safetensors.torch import save_file
from torch import nn

import gemini
from gemini.cli.conversion import Target
from gemini.cli.conversion_programs import program
from gemini.cli.convert_config import convert
from gemini.cli.plan_model import ModelOptions, find_model
from gemini.errors import GeminiError
from gemini.jobs.finetune.checkpoint_directory import ModelDirectory
from gemini.jobs.finetune.config import FineTuneConfig
from gemini.jobs.finetune.recipe import read_recipe
from gemini.jobs.finetune.record_files import find_data
from gemini.jobs.finetune.record_kinds import Documents
from gemini.parallel.booster.checkpoint.sources import TensorFiles
from gemini.parallel.launch.hosts import read_hostfile

transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")

_SECONDS = 60
_LIMITS: dict[str, Any] = {"device_bytes": "1MiB", "disk_bytes": "1MiB"}
TEMPLATE = "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"


def _save_tokenizer(directory: Path) -> None:
    from tokenizers import Tokenizer, models

    letters = {chr(code): code - 30 for code in range(32, 126)}
    inner = Tokenizer(models.BPE(vocab={"<end>": 0, "<unk>": 1, **letters}, merges=[], unk_token="<unk>"))
    made = transformers.PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<end>", unk_token="<unk>")
    made.chat_template = TEMPLATE
    made.save_pretrained(directory)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model in two shards with its tokenizer; adapters for it beside it."""
    path = tmp_path_factory.mktemp("base") / "model"
    config = transformers.LlamaConfig(
        vocab_size=96, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2,
        max_position_embeddings=64, eos_token_id=0, bos_token_id=None,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config)
    model.save_pretrained(path, max_shard_size="4KB")
    _save_tokenizer(path)
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["q_proj"]))
    adapted.peft_config["default"].base_model_name_or_path = str(path)
    adapted.save_pretrained(path.with_name("adapters"))
    plain = path.with_name("plain")
    plain.mkdir()
    files = {name: f"model-0000{n}-of-00002.safetensors" for n, name in enumerate(Plain().state_dict(), 1)}
    for name, value in Plain().state_dict().items():
        save_file({name: value}, plain / files[name])
    (plain / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": files}))
    assert len(list(path.glob("*-of-*"))) > 1
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


class Plain(nn.Module):
    """A module that transformers knows nothing of."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)


def _loaded(path: Path) -> None:
    kind = random.choice(["AutoModelForCausalLM", None])
    gemini.handle_of(gemini.from_pretrained(path, kind, disk_dir=path.parent, **_LIMITS)).close()


def _loaded_plainly(path: Path) -> None:
    gemini.handle_of(gemini.from_pretrained(path, Plain, disk_dir=path.parent, **_LIMITS)).close()


def _tuned(path: Path) -> None:
    data = path.with_name("data.jsonl")
    data.write_text('{"text": "some"}\n{"messages": [{"role": "assistant", "content": "some"}]}\n')
    model = ModelDirectory(FineTuneConfig(model=str(path), data=str(data), output=str(path.with_name("out"))))
    model.fingerprint()
    list(map(model.encoder(model.tokenizer()).encode, Documents(find_data(str(data)))))


def _planned(path: Path) -> None:
    source = find_model(str(path), ModelOptions(seq=8, checkpointing=False, seq_is_asked=False))
    with gemini.init_on("meta"):
        source.build(1)


def _boosted(path: Path) -> None:
    with TensorFiles(path) as tensors:
        for name in tensors:
            tensors[name].sum()


DOORS: dict[str, tuple[Callable[[Path], None], str, float]] = {
    "from_pretrained": (_loaded, "model", 0.08),
    "from_pretrained of a module": (_loaded_plainly, "plain", 0.2),
    "adapters": (_loaded, "adapters", 0.05),
    "finetune": (_tuned, "model", 0.1),
    "plan": (_planned, "model", 0.05),
    "booster": (_boosted, "model", 0.08),
}


def tried(door: Callable[[Path], Any], given: Path, outside: Outside) -> str | None:
    """Return what is wrong with how ``given`` was taken: None where it was read, "" where it was refused."""
    outside.was_touched()
    try:
        with no_longer_than(_SECONDS):
            door(given)
        refusal = None
    except GeminiError as error:
        refusal = f"several lines: {error}" if "\n" in str(error) else ""
    except Hang:
        refusal = "waits"
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        refusal = f"{type(error).__name__}: {error}"[:300]
    return "touches what is outside" if outside.was_touched() else refusal


@pytest.mark.parametrize("name", DOORS)
def test_a_directory_is_read_or_refused_in_one_line(
    name: str, base: Path, outside: Outside, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    door, kind, share = DOORS[name]
    stranger = Stranger(base.with_name(kind), outside.path)
    wrong, outcomes = [], set()
    for number in range(round(MUTANTS * share)):
        random.seed(number)
        target = tmp_path / "given"
        what = stranger.make(SEED * 10**6 + number, target)
        found = tried(door, target, outside)
        outcomes.add(found)
        caplog.clear()
        if found:
            wrong.append(f"{number} ({what}): {found}")
        shutil.rmtree(target)
    assert not wrong, "\n".join(wrong)
    assert outcomes == {None, ""}, "some are read, and some refused"


PIECES = [
    b"[", b"{", b"&a ", b"*a", b"!!int ", b"9" * 5000, b"\\ud800", b"\xff", b"\n", b": ", b'"', b"", b"1e999",
    b"2001-99-99", b"<<: ", b"? ", b"%YAML 9" + b"9" * 5000 + b"\n---\n", b"[" * 3000, b"\x00",
    b"\\U99999999",
]  # fmt: skip


def _text(chance: random.Random, document: str) -> bytes:
    """Return a text that is cut, changed in some bytes, or another altogether."""
    if chance.random() < 0.3:
        return chance.choice(TEXTS)
    data = bytearray(document.encode())
    for _ in range(chance.choice([1, 3, 9])):
        place = chance.randrange(len(data))
        piece = chance.choice(PIECES)
        data[place : place + chance.choice([0, 1, 4])] = piece
    return bytes(data[: chance.randrange(len(data))] if chance.random() < 0.2 else data)


RECORDS = json.dumps([{"text": "one"}, {"messages": [{"role": "user", "content": "two"}]}], indent=1)
CHATS = '{"conversations": [{"from": "gpt", "value": "a"}]}\n{"instruction": "a", "output": "b"}\n'
CONFIG = json.dumps(
    {"optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "betas": [0.8, 0.9]}}, "bf16": {"enabled": True},
     "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 4}}, "zero_optimization": {"stage": 3}}
)  # fmt: skip
RECIPE = 'model = "m"\nlr = 1e-4\nsteps = 12\n[budgets]\ndevice_bytes = "1GiB"\nlora_targets = ["a", "b"]\n'
FILES: dict[str, tuple[Callable[[Path], Any], list[tuple[str, str]]]] = {
    "recipes": (read_recipe, [("r.toml", RECIPE), ("r.yaml", "model: m\nlr: 1.0e-4\na:\n  seed: 1\n")]),
    "data": (lambda path: list(Documents(find_data(str(path)))),
             [("d.json", RECORDS), ("d.jsonl", '{"text": "a"}\n{"text": "b"}\n'), ("d.txt", "some text"),
              ("d.csv", 'prompt,completion\n"a, b",c\n'), ("d.jsonl", CHATS)]),
    "configurations": (lambda path: [compile(program(convert(path, each)), "", "exec") for each in Target],
                       [("c.json", CONFIG), ("c.yaml", "fsdp_config:\n  fsdp_offload_params: true\n")]),
    "hosts": (read_hostfile, [("hosts", "node1\nme@node2\n")]),
    "model configs": (lambda path: find_model(str(path), ModelOptions(seq=8, checkpointing=False)),
                      [("config.json", json.dumps({"model_type": "llama", "num_hidden_layers": 1}))]),
}  # fmt: skip


@pytest.mark.parametrize("name", FILES)
def test_a_file_is_read_or_refused_in_one_line(name: str, outside: Outside, tmp_path: Path) -> None:
    door, kinds = FILES[name]
    wrong = []
    for number in range(MUTANTS // (40 if name == "model configs" else 12)):
        chance = random.Random(f"{SEED} {name} {number}")
        file, document = chance.choice(kinds)
        path = tmp_path / file
        path.write_bytes(_text(chance, document))
        found = tried(door, path, outside)
        if found:
            wrong.append(f"{number}: {path.read_bytes()[:200]!r}: {found}")
    assert not wrong, "\n".join(wrong)
