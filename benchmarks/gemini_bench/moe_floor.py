"""The least DEVICE that training a mixture gets along with, found by trying."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from gemini.errors import OutOfBudgetError
from gemini_bench.moe_mixture import STATES_OF_ADAM, Mixture, Trainee, same_weights, sizes

_STEP = 4096  # budgets are tried in these steps


def measure_floor(mixture: Mixture, shape: Sequence[int], steps: int, disk_dir: str) -> dict[str, Any]:
    """Return the least ``device_bytes`` with which some steps run that get tokens of ``shape``, what one
    expert's matrix takes with its gradient and its states, and whether losses and weights were those of plain
    torch at every budget that was enough."""
    nbytes = sizes(mixture)
    batches = [mixture.tokens(*shape, seed=number) for number in range(steps)]
    with Trainee(mixture, "plain") as plain:
        losses = [plain.step(tokens) for tokens in batches]
        weights = plain.weights()
    tried: dict[int, bool] = {}
    equal: list[bool] = []

    def runs(budget: int) -> bool:
        try:
            with Trainee(mixture, "by the expert", device_bytes=budget, disk_dir=disk_dir) as trainee:
                is_same = [trainee.step(tokens) for tokens in batches] == losses
                tried[budget] = trainee.peak_bytes() <= budget
                equal.append(is_same and same_weights(trainee.weights(), weights))
        except OutOfBudgetError:
            tried[budget] = False
        return tried[budget]

    least = least_budget(runs, (2 + STATES_OF_ADAM) * nbytes["parameters"])
    return {
        "least_bytes": least,
        "expert_bytes": (2 + STATES_OF_ADAM) * nbytes["expert"],
        "dense_bytes": nbytes["dense"],
        "experts_share": nbytes["experts"] / nbytes["parameters"],
        "tried": {str(budget): ran for budget, ran in tried.items()},
        "equal": bool(equal) and all(equal),
    }


def least_budget(runs: Callable[[int], bool], most: int) -> int:
    """Return the least multiple of 4 KiB with which something ``runs``, as it does with ``most``."""
    low, high = 0, -(-most // _STEP)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if runs(middle * _STEP) else (middle, high)
    return high * _STEP
