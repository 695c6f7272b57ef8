"""``gemini bench gpu``: every case, one record."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any

from gemini_bench import (
    gpu_bound,
    gpu_copies,
    gpu_largest,
    gpu_offload,
    gpu_peers,
    gpu_preop,
    gpu_remap,
    gpu_resident,
)
from gemini_bench.cases import choose, run_cases
from gemini_bench.gpu_device import CUDA, SIMULATED, about_device, require_gpu
from gemini_bench.session import CaseResult, Session

CASES: Mapping[str, Callable[[Session, str], CaseResult]] = MappingProxyType(
    {
        "copies": gpu_copies.run,
        "remap": gpu_remap.run,
        "resident": gpu_resident.run,
        "offload": gpu_offload.run,
        "bound": gpu_bound.run,
        "largest": gpu_largest.run,
        "peers": gpu_peers.run,
        "preop": gpu_preop.run,
    }
)


def chosen(names: Sequence[str] | None, device: str) -> list[str]:
    """Return the cases to run, in the table's order; None is all. Raise ConfigError for an unknown name, or
    where ``device`` is a GPU and there is none."""
    found = choose(CASES, names)
    if device == CUDA:
        require_gpu()
    return found


def run(session: Session, device: str, names: Sequence[str], command: Sequence[str]) -> dict[str, Any]:
    """Run the named cases and return one plain dict; a case that fails leaves its error, the others go on."""
    cases = {name: partial(_run, name, device) for name in names}
    return {**run_cases("gpu", session, cases, command), "device": about_device(device)}


def _run(name: str, device: str, session: Session) -> CaseResult:
    result = CASES[name](session, device)
    if device != SIMULATED:
        return result
    # Figures of a GPU that is none are not judged.
    return dataclasses.replace(result, rows=[dataclasses.replace(row, target=None) for row in result.rows])
