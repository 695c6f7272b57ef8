"""The numbers of one step and of a whole run, for the display, the metrics and the summary."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from gemini.jobs.run.verify import Verdict
from gemini.system.config import format_bytes

TIERS = ("device", "host", "disk")
LINKS = ("h2d", "d2h", "disk_read", "disk_write")


@dataclass(frozen=True)
class TierUse:
    """Bytes of one tier: now, peak, and limit (None: no limit)."""

    nbytes: int
    peak_bytes: int
    budget_bytes: int | None


@dataclass(frozen=True)
class StepReport:
    """One finished step.

    Attributes:
        step: number of the step, from 1.
        stall_seconds: waiting time of this step alone.
        eval_loss: held-out loss after this step, if it was evaluated.
        grad_norm: norm before clipping, if clipping measured it.
        extra: further values, by name.
    """

    step: int
    loss: float
    lr: float
    seconds: float
    tokens: int
    stall_seconds: float
    tiers: Mapping[str, TierUse]
    eval_loss: float | None = None
    grad_norm: float | None = None
    extra: Mapping[str, float] = field(default_factory=dict)

    @property
    def tokens_per_second(self) -> float:
        """The speed of this step."""
        return self.tokens / self.seconds if self.seconds > 0 else 0.0

    @property
    def stall_share(self) -> float:
        """The share of this step that was spent waiting for transfers, from 0 to 1."""
        return min(1.0, self.stall_seconds / self.seconds) if self.seconds > 0 else 0.0

    def to_metrics(self) -> dict[str, Any]:
        """Return the record for metrics.jsonl; the loss is exact."""
        return {
            "step": self.step,
            "loss": self.loss,
            "lr": self.lr,
            "seconds": round(self.seconds, 6),
            "tokens": self.tokens,
            "stall_seconds": round(self.stall_seconds, 6),
            **({} if self.grad_norm is None else {"grad_norm": self.grad_norm}),
            **({} if self.eval_loss is None else {"eval_loss": self.eval_loss}),
            **self.extra,
            **{f"{name}_bytes": use.nbytes for name, use in self.tiers.items()},
        }


@dataclass(frozen=True)
class Summary:
    """The results of a run. Sizes are in bytes; ``stall_share`` is from 0 to 1.

    Attributes:
        ratio: model data divided by the budgets of DEVICE and HOST; None without limits.
        peak_non_model_bytes: None if it was not measured.
        eval_loss: the last held-out loss.
        best_step, best_eval_loss: the step with the lowest held-out loss, and that loss, if the run keeps its
            weights.
        data: the kind, number and files of the records trained on.
        model: directory of the exported model or adapters.
        first_loss_step: the step of ``first_loss``, from 1. A resumed run has a step of the first run.
    """

    parameters: int
    model_data_bytes: int
    budget_bytes: Mapping[str, int | None]
    ratio: float | None
    peak_bytes: Mapping[str, int]
    peak_non_model_bytes: int | None
    link_bytes: Mapping[str, int]
    first_step: int
    last_step: int
    first_loss: float | None
    last_loss: float | None
    tokens: int
    seconds: float
    tokens_per_second: float
    stall_share: float
    interrupted: bool
    eval_loss: float | None = None
    best_eval_loss: float | None = None
    best_step: int | None = None
    data: str | None = None
    checkpoint: str | None = None
    model: str | None = None
    picture: str | None = None
    notes: tuple[str, ...] = ()
    first_loss_step: int | None = None
    verify: Verdict | None = field(default=None)

    @property
    def trained_steps(self) -> int:
        """Number of steps that this process trained; 0 if a resumed run had none left."""
        return self.last_step - self.first_step

    def to_dict(self) -> dict[str, Any]:
        """Return plain data for summary.json and ``--json``."""
        verdict = None if self.verify is None else self.verify.to_dict()
        return {**asdict(self), "verify": verdict}


def tier_uses(stats: Mapping[str, Any]) -> dict[str, TierUse]:
    """Return the use of every tier from ``GeminiDDP.stats()``."""
    return {
        name: TierUse(stats[name]["bytes"], stats[name]["peak_bytes"], stats[name]["budget_bytes"])
        for name in TIERS
        if name in stats
    }


def model_data_ratio(model_data_bytes: int, budgets: Mapping[str, int | None]) -> float | None:
    """Return model data divided by the budgets of DEVICE and HOST together; None if either has no limit or
    both are 0."""
    fast = [budgets.get(name) for name in ("device", "host")]
    limits = [limit for limit in fast if limit is not None]
    if len(limits) < len(fast) or sum(limits) == 0:
        return None
    return model_data_bytes / sum(limits)


def over_budget_note(timeline: Sequence[Mapping[str, Any]], budget_bytes: int | None) -> list[str]:
    """Return a note if model data and activations together exceeded DEVICE's budget. The runtime limits only
    model data."""
    used = max((int(entry["device_bytes"]) + int(entry["non_model_bytes"]) for entry in timeline), default=0)
    if budget_bytes is None or used <= budget_bytes:
        return []
    return [
        f"DEVICE held {format_bytes(used)} with activations and temporaries, above its budget of "
        f"{format_bytes(budget_bytes)}: raise --device-bytes, or lower --batch or --seq; "
        "--activations plan and --activation-checkpointing also reduce activations, if the run does "
        "not use them yet"
    ]


def steady_speed(reports: Sequence[StepReport]) -> tuple[float, float]:
    """Return tokens per second and stall share. The first step only records, so it counts only if it is the
    only one."""
    steady = reports[1:] or reports
    seconds = sum(report.seconds for report in steady)
    if seconds <= 0:
        return 0.0, 0.0
    stalled = sum(report.stall_seconds for report in steady)
    return sum(report.tokens for report in steady) / seconds, min(1.0, stalled / seconds)
