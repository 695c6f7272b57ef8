"""The training of the contenders of ``gemini bench exact``: twelve settings of one small job."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed import HashStore  # type: ignore[attr-defined]

from gemini_bench.llama import Llama, LlamaConfig

ADAM: dict[str, Any] = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01}
MAX_NORM = 1.0
LOSS_SCALE = 2.0**12
_SEED = 1234
_ANOTHER_SEED = 4321

Batch = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Setting:
    """One way to train. ``weights`` and ``states``: where they lie beyond the memory that computes: "host" or
    "disk"; "" keeps them there. ``parts``: micro-batches of a step, on each of ``ranks``. ``resumes``: half
    of the steps are taken by other processes, which continue from a checkpoint."""

    title: str
    precision: str = "fp32"
    weights: str = ""
    states: str = ""
    parts: int = 1
    max_norm: float = 0.0
    ranks: int = 1
    resumes: bool = False

    @property
    def offloads(self) -> bool:
        """Whether anything lies beyond the memory that computes."""
        return bool(self.weights or self.states)

    @property
    def dtype(self) -> torch.dtype:
        """The type that operators compute in."""
        return {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[self.precision]


SETTINGS: Mapping[str, Setting] = MappingProxyType(
    {
        "plain": Setting("fp32"),
        "weights": Setting("weights offloaded to CPU memory", weights="host"),
        "states": Setting("optimizer states offloaded to CPU memory", states="host"),
        "disk": Setting("optimizer states on a disk", states="disk"),
        "accumulation": Setting("4 micro-batches accumulated", parts=4),
        "clipping": Setting("norm clipped at 1", max_norm=MAX_NORM),
        "combined": Setting(
            "4 micro-batches, norm clipped, weights and states offloaded",
            weights="host",
            states="host",
            parts=4,
            max_norm=MAX_NORM,
        ),
        "bf16": Setting("bf16, fp32 masters", precision="bf16"),
        "fp16": Setting("fp16, fp32 masters, loss scale", precision="fp16"),
        "resume": Setting("saved and resumed half-way", resumes=True),
        "ranks": Setting("2 ranks", ranks=2),
        "ranks-combined": Setting(
            "2 ranks, 4 micro-batches, norm clipped", parts=4, max_norm=MAX_NORM, ranks=2
        ),
    }
)


@dataclass(frozen=True)
class Job:
    """``steps`` of ``model`` on micro-batches of ``batch`` x ``seq`` tokens. Some sizes are odd on purpose:
    vectors have ends."""

    model: LlamaConfig
    batch: int = 4
    seq: int = 33
    steps: int = 20

    @classmethod
    def of(cls, options: Mapping[str, Any]) -> Job:
        """Return the job that ``dataclasses.asdict`` has made plain data of."""
        values = {field.name: options[field.name] for field in dataclasses.fields(cls)}
        return cls(**{**values, "model": LlamaConfig(**values["model"])})

    def make_model(self, *, resumes: bool = False) -> Llama:
        """Return the model with its first values, the same in every process; other ones for a process that
        ``resumes``, because a checkpoint must replace them."""
        torch.manual_seed(_ANOTHER_SEED if resumes else _SEED)
        return Llama(self.model)

    def micro_batches(self, setting: Setting, step: int, rank: int) -> list[Batch]:
        """Return the tokens of a rank in a step, each with those that follow it."""
        found = []
        for part in range(setting.parts):
            number = (step * setting.parts + part) * setting.ranks + rank
            generator = torch.Generator().manual_seed(_SEED + number)
            tokens = torch.randint(self.model.vocab, (self.batch, self.seq + 1), generator=generator)
            found.append((tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()))
        return found


JOB = Job(LlamaConfig(vocab=257, layers=3, hidden=64, heads=4, inner=172))
QUICK = Job(LlamaConfig(vocab=61, layers=1, hidden=32, heads=2, inner=44), batch=2, seq=9, steps=4)


class Task(NamedTuple):
    """What a contender is made for: ``rank`` of ``setting``; ``directory`` has room for files.
    ``resumes``: it continues from a checkpoint."""

    job: Job
    setting: Setting
    rank: int
    directory: str
    resumes: bool = False

    def make_model(self) -> Llama:
        """Return the model to train."""
        return self.job.make_model(resumes=self.resumes)


class NotOffered(Exception):
    """A contender does not offer the setting here; the reason continues its name."""


def token_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the mean loss, in fp32, of ``logits`` (batch, seq, vocab) against ``labels`` (batch, seq)."""
    return F.cross_entropy(logits.float().flatten(0, 1), labels.flatten())


def join_alone(setting: Setting) -> None:
    """Be a group of one process, unless the ranks of the setting have joined theirs."""
    if setting.ranks == 1:
        dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)


def set_launched(task: Task) -> None:
    """Set the variables that a launcher sets."""
    rank, world = str(task.rank), str(task.setting.ranks)
    os.environ.update(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=world, LOCAL_WORLD_SIZE=world)
    os.environ.update(MASTER_ADDR="127.0.0.1", OMP_NUM_THREADS="1")


class Contender(Protocol):
    """A model and its optimizer, of one rank."""

    def step(self, batches: Sequence[Batch]) -> list[float]:
        """Train on this rank's micro-batches; return their losses."""

    def weights(self) -> dict[str, Tensor]:
        """Return all weights in fp32, masters where there are any, by name. All ranks call it."""

    def save(self, directory: str) -> None:
        """Save everything that continuing needs. All ranks call it."""

    def load(self, directory: str) -> None:
        """Continue from the saved state. All ranks call it."""
