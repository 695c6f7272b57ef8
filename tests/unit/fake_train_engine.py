"""A stand-in for the runtime: plain training with the interface of a tiered engine."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from gemini.jobs.gpt.config import TrainConfig
from gemini.jobs.gpt.engine import PlainEngine

BUDGETS = {"device": 1000, "host": 0, "disk": 10_000}


class FakeEngine(PlainEngine):
    """Everything resident, counters made up, checkpoints by ``torch.save``."""

    def __init__(self, config: TrainConfig) -> None:
        super().__init__(config)
        self.closed = False
        self.steps = 0

    def step(self) -> None:
        super().step()
        self.steps += 1

    def stats(self) -> dict[str, Any]:
        tiers = {
            name: {"bytes": budget // 2, "peak_bytes": budget, "budget_bytes": budget}
            for name, budget in BUDGETS.items()
        }
        links = {
            link: {"bytes": 64 * self.steps, "seconds": 0.0}
            for link in ("h2d", "d2h", "disk_read", "disk_write")
        }
        return {**tiers, **links, "stall_seconds": 1e-4 * self.steps, "model_data_bytes": 4000}

    def timeline(self) -> list[dict[str, Any]]:
        return []

    def save(self, directory: Path, scheduler: Any, extra: Mapping[str, Any]) -> None:
        directory.mkdir(exist_ok=True)
        weights = {name: weight.clone() for name, weight in self.weights()}
        state = {
            "adam": self.optimizer.state_dict(),
            "scheduler": scheduler.state_dict(),
            "extra": dict(extra),
        }
        torch.save({"weights": weights, **state}, directory / "state.tmp")
        (directory / "state.tmp").replace(directory / "state")

    def load(self, directory: Path, scheduler: Any) -> dict[str, Any]:
        state = torch.load(directory / "state", weights_only=True)
        with torch.no_grad():
            for name, weight in self.weights():
                weight.copy_(state["weights"][name])
        self._cast_masters()
        self.optimizer.load_state_dict(state["adam"])
        scheduler.load_state_dict(state["scheduler"])
        extra: dict[str, Any] = state["extra"]
        return extra

    def close(self) -> None:
        self.closed = True


def fake_is_complete(directory: Path) -> bool:
    """Return whether ``FakeEngine.save`` has finished there."""
    return (directory / "state").exists()
