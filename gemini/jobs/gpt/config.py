"""TrainConfig: all options of one run of ``gemini train``, frozen."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar

from gemini.errors import ConfigError
from gemini.jobs.gpt.model import GPTConfig
from gemini.jobs.run.managed import POLICIES, PRECISIONS, MemoryOptions
from gemini.jobs.run.run_directory import RESUME
from gemini.jobs.run.trackers import parse_trackers

VOCAB = 256
"""One token per byte value."""


@dataclass(frozen=True)
class TrainConfig(MemoryOptions):
    """Options of ``gemini train``. Raise ConfigError for a combination that cannot work."""

    NOT_KEPT: ClassVar = ("checkpoint", "resume", "overwrite", "verify")  # not stored for a resume

    data: str | None = None
    layers: int = 4
    hidden: int = 128
    heads: int = 4
    seq: int = 128
    batch: int = 4
    steps: int = 40
    lr: float = 1e-3
    checkpoint: str | None = None
    checkpoint_every: int = 0
    resume: str = "no"
    overwrite: bool = False
    verify: bool = False
    seed: int = 0
    accumulate: int = 1
    clip: float = 1.0
    activation_checkpointing: bool = False
    report_to: str = ""

    def __post_init__(self) -> None:
        self.gpt()
        for name in ("batch", "steps", "accumulate"):
            if getattr(self, name) < 1:
                raise ConfigError(f"--{name} is {getattr(self, name)}; it must be at least 1")
        if not 0 < self.lr < float("inf"):
            raise ConfigError(f"--lr is {self.lr}; it must be a positive number, such as 1e-3")
        if not 0 <= self.clip < float("inf"):
            raise ConfigError(f"--clip is {self.clip}; it must be a positive number, or 0 for no clipping")
        if not 0 <= self.seed < 2**63:
            raise ConfigError(f"--seed is {self.seed}; it must be from 0 to 2**63 - 1")
        if self.policy not in POLICIES:
            raise ConfigError(f"--policy is {self.policy!r}; it must be one of {', '.join(POLICIES)}")
        if self.precision not in PRECISIONS:
            raise ConfigError(f"--precision is {self.precision!r}; it must be one of {', '.join(PRECISIONS)}")
        self.check_activations()
        self._check_checkpointing()

    def gpt(self) -> GPTConfig:
        """Return the config of the model that this run trains."""
        return GPTConfig(
            vocab=VOCAB,
            layers=self.layers,
            hidden=self.hidden,
            heads=self.heads,
            seq=self.seq,
            checkpoint_activations=self.activation_checkpointing,
        )

    def identity(self) -> dict[str, int | float | str]:
        """Return the settings that the numbers of a run depend on.

        Budgets, tiers and policy are not among them (law 1). The device is not either, because a run may
        continue on another device, although the last digits then differ.
        """
        names = ("layers", "hidden", "heads", "seq", "batch", "lr", "precision", "seed", "accumulate", "clip")
        return {name: getattr(self, name) for name in names}

    def options(self) -> dict[str, Any]:
        """Return the options that are stored for a resume. Paths are absolute."""
        given = asdict(self)
        for name in self.NOT_KEPT:
            del given[name]
        for name in ("data", "disk_dir"):
            if given[name] is not None:
                given[name] = str(Path(given[name]).absolute())
        return given

    @property
    def tokens_per_step(self) -> int:
        """Number of bytes of text in one optimizer step."""
        return self.batch * self.seq * self.accumulate

    def _check_checkpointing(self) -> None:
        if self.checkpoint_every < 0:
            raise ConfigError(
                f"--checkpoint-every is {self.checkpoint_every}; it must be 0 (at the end) or more"
            )
        parse_trackers(self.report_to)
        if self.checkpoint is None:
            for option, given in (
                ("--resume", self.resume != "no"),
                ("--overwrite", self.overwrite),
                ("--checkpoint-every", self.checkpoint_every > 0),
                ("--report-to", bool(parse_trackers(self.report_to))),
            ):
                if given:
                    raise ConfigError(f"{option} needs --checkpoint DIR, the directory of the run")
        if self.resume not in RESUME:
            raise ConfigError(f"--resume is {self.resume!r}; it must be one of {', '.join(RESUME)}")
        if self.resume != "no" and self.overwrite:
            raise ConfigError("--resume continues a run and --overwrite starts it over; give one of them")
