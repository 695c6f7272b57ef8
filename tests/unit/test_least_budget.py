"""What a refusal asks for is accepted."""

from __future__ import annotations

import re
from typing import Any

import pytest
from torch import nn

from gemini import GeminiDDP, OutOfBudgetError


class Odd(nn.Module):
    """Parameters of sizes that waste a different share of every chunk size."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(2000, 256)
        self.recurrent = nn.LSTM(256, 128, num_layers=2)
        self.head = nn.Linear(128, 2000)


@pytest.mark.parametrize(
    "options", [{}, {"non_model_bytes": 2**18}, {"mixed_precision": "bf16"}, {"placement_policy": "cuda"}]
)
@pytest.mark.parametrize("build", [Odd, lambda: nn.Linear(700, 900), lambda: nn.LSTM(300, 300)])
def test_what_a_refusal_asks_for_is_accepted(build: Any, options: dict[str, Any], tmp_path: Any) -> None:
    with pytest.raises(OutOfBudgetError) as refused:
        GeminiDDP(build(), device_bytes=2**19, disk_dir=str(tmp_path), **options)
    asked = re.search(r"raise device_bytes to at least (\d+)", str(refused.value))
    assert asked is not None
    with GeminiDDP(build(), device_bytes=int(asked[1]), disk_dir=str(tmp_path), **options):
        pass


@pytest.mark.parametrize(
    "options", [{}, {"host_bytes": 2**20}, {"host_bytes": 2**20, "mixed_precision": "bf16"}]
)
@pytest.mark.parametrize("build", [Odd, lambda: nn.Sequential(*(nn.Linear(90, 90) for _ in range(30)))])
def test_it_is_accepted_without_a_disk_too(build: Any, options: dict[str, Any]) -> None:
    with pytest.raises(OutOfBudgetError, match="raise host_bytes, or give disk_dir") as refused:
        GeminiDDP(build(), device_bytes=2**16, **options)
    asked = re.search(r"raise device_bytes to at least (\d+)", str(refused.value))
    assert asked is not None
    with GeminiDDP(build(), device_bytes=int(asked[1]), **options):
        pass
