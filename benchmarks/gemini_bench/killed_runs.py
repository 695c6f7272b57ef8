"""Runs that are killed and go on: commands of this library over tiny models, and scripts with the Trainers of
transformers and Lightning. Each says how it is started, whether by the first process or a later one, and what
it has left in the end.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from gemini.checkpoint import CheckpointReader
from gemini.checkpoint.directory import complete_checkpoints, latest
from gemini.cli.main import main
from gemini_bench.killed_processes import Program

STEPS, SAVE_EVERY = 12, 2
_SEQ = 32
_LAYERS = {"num_hidden_layers": 2, "num_attention_heads": 4}
_TEXT = "all work and no play makes the model a dull one; "
_RESUMED = re.compile(r"resumed after step (\d+)|nothing is left to train: (\d+) steps are done")


@dataclass(frozen=True)
class Left:
    """What a run has left: what was logged of each step, digests of its results, and the names in its
    directory."""

    steps: dict[int, Any]
    results: dict[str, str]
    names: frozenset[str]


class Run(ABC):
    """A run in a directory. ``name`` is for people; ``ranks``: its processes, which torchrun might have
    started; ``starts_ranks``: it starts processes of its own."""

    name: str
    ranks: int = 1
    starts_ranks: bool = False
    is_command: bool = True

    @abstractmethod
    def program(self, place: Path, *, fresh: bool) -> Program:
        """Return what a process of the run does. ``fresh``: in an interpreter that has imported nothing."""

    @abstractmethod
    def left(self, place: Path) -> Left:
        """Return what has come of a run that is done."""

    @abstractmethod
    def saved_step(self, place: Path) -> int:
        """Return how many steps the newest whole checkpoint has; 0 without one."""

    @abstractmethod
    def first_step(self, place: Path, said: str, processes: int) -> int | None:
        """Return how many steps the last process took as done, judged by what it has said or written; None
        where it trained none. ``processes``: what :meth:`processes` was before it."""

    def processes(self, place: Path) -> int:
        """Return how many processes have said that they begin."""
        return 0


@dataclass(frozen=True)
class Inputs:
    """Models and data that all runs read: ``directory`` has ``llama``, ``gpt2``, ``qwen2``, ``chats.jsonl``,
    ``pairs.jsonl`` and ``text``."""

    directory: Path

    def make(self) -> None:
        """Write them."""
        import transformers

        shape: dict[str, Any] = {"vocab_size": 257, "bos_token_id": None, "eos_token_id": 0}
        sizes: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 64, **_LAYERS}
        gpt2: dict[str, Any] = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128}  # and dropout
        for name, config in (
            ("llama", transformers.LlamaConfig(**shape, **sizes, attention_dropout=0.1)),
            ("gpt2", transformers.GPT2Config(**shape, **gpt2)),
            ("qwen2", transformers.Qwen2Config(**shape, **sizes, num_key_value_heads=2)),
        ):
            torch.manual_seed(0)
            model = transformers.AutoModelForCausalLM.from_config(config)
            model.save_pretrained(self.directory / name)
            _tokenizer().save_pretrained(self.directory / name)
        chats = [{"prompt": f"Is {n} odd?", "completion": " yes" if n % 2 else " no"} for n in range(60)]
        pairs = [{"prompt": f"{n}?", "chosen": " yes", "rejected": f" no {n}"} for n in range(40)]
        for file, records in (("chats.jsonl", chats), ("pairs.jsonl", pairs)):
            (self.directory / file).write_text("\n".join(map(json.dumps, records)))
        (self.directory / "text").write_text(_TEXT * 80)


def _tokenizer() -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = ["<end>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokens = Tokenizer(models.BPE(vocab={letter: number for number, letter in enumerate(letters)}, merges=[]))
    tokens.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokens.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokens, eos_token="<end>")


class Command(Run):
    """``gemini NAME OPTIONS`` with a directory of a run, which ``where`` names."""

    def __init__(self, name: str, options: Sequence[str], where: str, ranks: int = 1) -> None:
        self.name, self._options, self._where, self.ranks = name, options, where, ranks
        self.starts_ranks = "--nproc" in options

    def program(self, place: Path, *, fresh: bool) -> Program:
        """Return what a process of the run does."""
        arguments = [*self._options, self._where, "run", "--disk-dir", "disk", "--resume", "auto"]
        if fresh:
            command = [sys.executable, "-m", "gemini", *arguments]
            return lambda: os.execv(sys.executable, command)
        return lambda: main(arguments)

    def left(self, place: Path) -> Left:
        """Return the metrics of each step, digests of what was exported and of the last checkpoint, and what
        lies in the directories."""
        run = place / "run"
        steps: dict[int, Any] = {}
        for line in (run / "metrics.jsonl").read_text().splitlines():
            record = json.loads(line)
            number = record["step"]
            if number != len(steps) + 1:
                steps[-len(steps)] = f"step {number} follows {len(steps)}"
            steps[number] = [record.get(key) for key in ("loss", "lr", "eval_loss", "grad_norm")]
        results = _checkpointed(latest(run / "checkpoint"))
        for folder in ("model", "best"):
            for file in sorted((run / folder).rglob("*")):
                if file.is_file():
                    results[os.fspath(file.relative_to(run))] = _digest(file.read_bytes())
        return Left(steps, results, _names(place))

    def saved_step(self, place: Path) -> int:
        """Return the step of the newest checkpoint by its name."""
        run = place / "run" / "checkpoint"
        return max((int(path.name.split("-")[1]) for path in complete_checkpoints(run)), default=0)

    def first_step(self, place: Path, said: str, processes: int) -> int | None:
        """Return what the display has said."""
        found = _RESUMED.search(said)
        if found is None:
            return None if "step 1/" not in said else 0
        return int(found[1] or found[2])


class Script(Run):
    """A script of :mod:`gemini_bench.killed_scripts`, which writes what it trains to ``losses.jsonl`` and, at
    its end, weights to ``weights.json``."""

    is_command = False

    def __init__(self, name: str, saved: Callable[[Path], int]) -> None:
        self.name, self._saved = name, saved

    def program(self, place: Path, *, fresh: bool) -> Program:
        """Return what a process of the run does."""
        from gemini_bench import killed_scripts

        if fresh:
            command = [sys.executable, "-m", killed_scripts.__name__, self.name]
            return lambda: os.execv(sys.executable, command)
        return lambda: killed_scripts.main([self.name])

    def left(self, place: Path) -> Left:
        """Return losses, digests of weights, and what is left of saves: a callback of Lightning's may keep
        another checkpoint than without kills, in other formats, too."""
        steps: dict[int, Any] = {}
        for number, loss in filter(None, _lines(place)):
            if steps.setdefault(number, loss) != loss:
                steps[-number] = f"step {number} had {steps[number]!r}, then {loss!r}"
        unfinished = frozenset(name for name in _names(place) if _UNFINISHED.search(name))
        return Left(steps, json.loads((place / "weights.json").read_text()), unfinished)

    def saved_step(self, place: Path) -> int:
        """Return the step of the checkpoint that the script goes on from."""
        return self._saved(place / "run")

    def first_step(self, place: Path, said: str, processes: int) -> int | None:
        """Return one less than the first step that was logged."""
        lines = _lines(place)
        begins = [number for number, line in enumerate(lines) if line is None]
        steps = lines[begins[-1] + 1 :] if len(begins) > processes else []
        return steps[0][0] - 1 if steps else None

    def processes(self, place: Path) -> int:
        """Return how many lines say that a process begins."""
        return _lines(place).count(None)


def _saved_by_trainer(run: Path) -> int:
    whole = [path.name for path in run.glob("checkpoint-*") if (path / "gemini.json").is_file()]
    return max((int(name.split("-")[1]) for name in whole), default=0)


def _saved_by_lightning(run: Path) -> int:
    """Return the step of what ``last`` names, or was to name."""
    for name in ("last.ckpt", ".last.ckpt.replaced"):
        if (run / name / "lightning.ckpt").is_file():
            return int(torch.load(run / name / "lightning.ckpt", weights_only=False)["global_step"])
    return 0


def _lines(place: Path) -> list[Any]:
    file = place / "losses.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def _checkpointed(checkpoint: Path) -> dict[str, str]:
    """Return digests of the weights and objects of a checkpoint."""
    with CheckpointReader(checkpoint) as reader:
        found = {name: _digest(_bytes(reader.weight(name))) for name in reader.weights}
        torch_generator = reader.rng()["torch"]  # no run seeds the others
        return {**found, "generator": _digest(repr(torch_generator).encode())}


def _bytes(value: torch.Tensor) -> bytes:
    return value.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def _digest(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=8).hexdigest()


_TIMED = "run/memory.png"  # there only where the last process has trained a step
_UNFINISHED = re.compile(r"(^|/)\.|\.(tmp|partial|replaced)(/|$)")


def _names(place: Path) -> frozenset[str]:
    """Return what lies in a directory but for temporary files; of a checkpoint, which a run that was stopped
    has of other steps, only that it is there."""
    names = [os.fspath(path.relative_to(place)) for path in place.rglob("*")]
    kept = [name for name in names if not (name.startswith("tmp/") or "/gemini/" in name or name == _TIMED)]
    return frozenset(re.sub(r"step-\d+(-\d+)?(/.*)?$", "step", name) for name in kept)


def kinds(inputs: Path) -> dict[str, Run]:
    """Return every kind of run by its name."""
    small = ["--steps", str(STEPS), "--checkpoint-every", str(SAVE_EVERY), "--lr", "1e-2"]

    def tune(name: str, model: str, data: str, *options: str, ranks: int = 1) -> Command:
        read = ["--model", os.fspath(inputs / model), "--data", os.fspath(inputs / data)]
        rows = ["--seq", str(_SEQ), "--batch", "2"]
        return Command(name, ["finetune", *read, *rows, *small, *options], "--output", ranks)

    best = ("--eval-share", "0.2", "--eval-every", "3", "--keep-best")
    text = ["--data", os.fspath(inputs / "text"), "--seq", str(_SEQ), "--batch", "2"]
    gpt = ["--layers", "2", "--hidden", "32", "--heads", "2"]
    tight = ("--device-bytes", "2MiB", "--no-forecast")
    runs: list[Run] = [
        tune("finetune", "llama", "chats.jsonl", "--precision", "bf16", *best, *tight),
        tune("finetune, text", "gpt2", "text", "--precision", "fp32", *tight[:2]),
        tune("finetune --lora", "gpt2", "chats.jsonl", "--lora", "4", "--lora-dropout", "0.1", *tight),
        tune("finetune --lora --merge", "llama", "text", "--lora", "4", "--merge", *tight),
        tune("finetune dpo", "qwen2", "pairs.jsonl", "--objective", "dpo", *tight),
        tune("finetune dpo --lora", "llama", "pairs.jsonl", "--objective", "dpo", "--lora", "4", *tight),
        tune("finetune int8", "llama", "chats.jsonl", "--lora", "4", "--quantize", "int8", *tight),
        tune("finetune on ranks", "llama", "chats.jsonl", *best, *tight, ranks=2),
        tune("finetune --nproc", "gpt2", "chats.jsonl", "--nproc", "2", *tight),
        Command("train", ["train", *text, *gpt, *small, *tight[:2]], "--checkpoint"),
        Script("GeminiTrainer", _saved_by_trainer),
        Script("Lightning", _saved_by_lightning),
    ]
    return {run.name: run for run in runs}
