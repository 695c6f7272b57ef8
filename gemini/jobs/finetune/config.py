"""Everything one run of ``gemini finetune`` is told, in one frozen value."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar

from gemini.errors import ConfigError
from gemini.jobs.run.memory import POLICIES, PRECISIONS, MemoryOptions
from gemini.optim.kernels import STATE_DTYPES

SCHEDULES = ("cosine", "linear", "constant")
RESUME = ("no", "auto", "yes")
ALL_LINEAR = "all-linear"
_PATHS = ("model", "data", "tokenizer", "disk_dir")
# What the numbers of a run depend on, beside its model and its tokens. How many steps there are may change.
_IDENTITY = (
    *("seq", "packing", "batch", "accumulate", "lr", "schedule", "warmup", "weight_decay", "clip"),
    *("precision", "state_dtype", "lora", "lora_alpha", "lora_dropout", "lora_targets", "eval_share", "seed"),
)


@dataclass(frozen=True)
class FineTuneConfig(MemoryOptions):
    """Options of ``gemini finetune`` and keys of its recipes; sizes are bytes, None leaves a budget to the
    runtime. ``steps`` None: as many as ``epochs`` take; ``seq`` None: 1024, or as many as the model has
    positions for; ``lora`` is the rank, 0 trains all weights.

    Raise ConfigError for a combination that cannot work.
    """

    NOT_KEPT: ClassVar = ("output", "resume", "overwrite", "plan")  # when a run is resumed

    model: str = ""
    data: str = ""
    output: str = ""
    tokenizer: str | None = None
    seq: int | None = None
    packing: bool = True
    batch: int = 1
    accumulate: int = 1
    epochs: float = 1.0
    steps: int | None = None
    lr: float = 1e-5
    schedule: str = "cosine"
    warmup: float = 0.03
    weight_decay: float = 0.0
    clip: float = 1.0
    precision: str = "bf16"
    state_dtype: str = "fp32"
    lora: int = 0
    lora_alpha: int | None = None
    lora_dropout: float = 0.0
    lora_targets: str = ALL_LINEAR
    merge: bool = False
    eval_share: float = 0.0
    eval_every: int = 0
    seed: int = 0
    activation_checkpointing: bool = False
    checkpoint_every: int = 0
    resume: str = "no"
    overwrite: bool = False
    plan: bool = True

    def __post_init__(self) -> None:
        for name, what in (
            ("model", "a directory that save_pretrained() has made"),
            ("data", "a .jsonl or text file, or a directory of them"),
            ("output", "a directory for the checkpoint and the trained model"),
        ):
            if not getattr(self, name):
                raise ConfigError(f"--{name} is missing: name {what}, here or in the recipe")
        self._check_numbers()
        self._check_choices()
        if self.merge and not self.lora:
            raise ConfigError("--merge puts adapters into the weights; give --lora RANK, or leave it out")
        if self.resume != "no" and self.overwrite:
            raise ConfigError("--resume continues a run and --overwrite starts it over; give one of them")
        self.check_activations()

    def identity(self) -> dict[str, Any]:
        """Return what the numbers of a run depend on; budgets, tiers, policy and device are not among it."""
        return {name: getattr(self, name) for name in _IDENTITY}

    def options(self) -> dict[str, Any]:
        """Return what a run has when it is resumed, unless it is told otherwise; paths are absolute."""
        given = asdict(self)
        for name in self.NOT_KEPT:
            del given[name]
        for name in _PATHS:
            if given[name] is not None:
                given[name] = str(Path(given[name]).absolute())
        return given

    def _check_numbers(self) -> None:
        for name, least in (
            ("seq", 2),
            ("batch", 1),
            ("accumulate", 1),
            ("steps", 1),
            ("lora", 0),
            ("eval_every", 0),
            ("checkpoint_every", 0),
        ):
            value = getattr(self, name)
            if value is not None and value < least:
                raise ConfigError(f"{option(name)} is {value}; it must be at least {least}")
        for name, low, high in (
            ("epochs", 0.0, math.inf),
            ("lr", 0.0, math.inf),
            ("lora_alpha", 0.0, math.inf),
        ):
            value = getattr(self, name)
            if value is not None and not low < value < high:
                raise ConfigError(f"{option(name)} is {value}; it must be a number above {low:g}")
        for name, high in (
            ("warmup", 1.0),
            ("lora_dropout", 1.0),
            ("eval_share", 1.0),
            ("weight_decay", math.inf),
            ("clip", math.inf),
        ):
            if not 0 <= getattr(self, name) < high:
                below = "" if high == math.inf else f" and below {high:g}"
                raise ConfigError(f"{option(name)} is {getattr(self, name)}; it must be at least 0{below}")
        if not 0 <= self.seed < 2**63:
            raise ConfigError(f"--seed is {self.seed}; it must be from 0 to 2**63 - 1")
        if self.eval_every and not self.eval_share:
            raise ConfigError("--eval-every needs something held out: add --eval-share 0.05")

    def _check_choices(self) -> None:
        for name, choices in (
            ("schedule", SCHEDULES),
            ("precision", PRECISIONS),
            ("state_dtype", STATE_DTYPES),
            ("policy", POLICIES),
            ("resume", RESUME),
        ):
            if getattr(self, name) not in choices:
                raise ConfigError(
                    f"{option(name)} is {getattr(self, name)!r}; it must be one of {', '.join(choices)}"
                )


def option(name: str) -> str:
    """Return the option that sets a field."""
    return f"--{name.replace('_', '-')}"
