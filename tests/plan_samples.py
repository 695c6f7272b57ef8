"""Plans for tests, made by hand: what they predict says nothing."""

from __future__ import annotations

from typing import Any

from torch import nn

from gemini.parallel import Layout, ParallelPlan, fingerprint
from gemini.parallel.plan import LeftOut, PlanBudgets, Prediction, RankPrediction, RunnerUp

MIB = 2**20


def plan_for(model: nn.Module | None = None, /, **changed: Any) -> ParallelPlan:
    """Return a plan for ``model``, on one rank in one stage but for what is ``changed``."""
    layout = changed.pop("layout", Layout())
    each = RankPrediction(8 * MIB, 4 * MIB, 0, MIB, 2 * MIB, 3 * MIB, 4 * MIB)
    settings: dict[str, Any] = {
        "sp_mode": "ulysses",
        "schedule": "1f1b",
        "stages_per_rank": 1,
        "num_microbatches": 4,
        "microbatch_size": 2,
        "begins": (),
        "zero_stage": 3,
        "budgets": PlanBudgets(64 * MIB, 16 * MIB, 0),
        "recompute": (),
        "dtype": "fp32",
        "predicted": Prediction(1.5, {"compute": 1.0, "bubble": 0.5}, (each,) * layout.pp, {"pp": 4096}),
        "runners_up": (RunnerUp("tp 2", 1.75, "sums over tp take 0.3 s"),),
        "left_out": (LeftOut("sp 2", "the model has one head"),),
        "model": "0" * 16 if model is None else fingerprint(model),
        "machine": "a machine",
    }
    return ParallelPlan(layout, **{**settings, **changed})
