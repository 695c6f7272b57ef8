"""``gemini bench parallel``: every case, one record."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from gemini_bench.cases import choose, run_cases
from gemini_bench.llama import LlamaConfig
from gemini_bench.parallel_job import Job
from gemini_bench.parallel_turns import Pair, compare
from gemini_bench.session import CaseResult, Session

TIME_RATIO = 0.9
MEMORY_RATIO = 0.8
SINGLE_RATIO = 1.02
WIDTH_RATIO = 1.02

_MODEL = LlamaConfig(vocab=4096, layers=8, hidden=512, heads=8, inner=1408)
_LARGE = LlamaConfig(vocab=8192, layers=16, hidden=768, heads=12, inner=2048)
_NARROW = tuple(
    LlamaConfig(vocab=1024, layers=8, hidden=hidden, heads=hidden // 32, inner=hidden * 11 // 4)
    for hidden in (128, 256, 512)
)
_TINY = LlamaConfig(vocab=64, layers=4, hidden=32, heads=4, inner=48)


def _job(session: Session, **sizes: Any) -> Job:
    if session.quick:
        quick = {**sizes, "seq": 16, "warmup_steps": 1, "measured_steps": 2}
        return Job(_TINY, _TINY, **quick)
    return Job(_MODEL, _LARGE, **sizes)


def tensor(session: Session) -> CaseResult:
    """Cut layers: the plugin, and the layers alone, against DTensor."""
    pairs = [
        Pair("ours", "parallelize_module", TIME_RATIO, MEMORY_RATIO),
        Pair("our layers, torch's AdamW", "parallelize_module", TIME_RATIO),
        Pair("ours, 60 % in memory", "parallelize_module", None, MEMORY_RATIO),
    ]
    return compare(session, "tensor", _job(session, tp=2), pairs)


def pipeline(session: Session) -> CaseResult:
    """Stages: against torch's schedules, alone and with DDP."""
    both = [
        Pair(f"ours, {style}", f"torch, {style}", TIME_RATIO, MEMORY_RATIO)
        for style in ("1F1B", "interleaved")
    ]
    alone = _job(session, pp=2, batch=4, microbatches=4)
    less = Pair("ours, 1F1B, 60 % in memory", "torch, 1F1B", None, MEMORY_RATIO)
    first = compare(session, "pipeline", alone, [*both, less], what="2 ranks: ")
    copied = replace(alone, dp=2)
    second = compare(session, "pipeline", copied, both[:1], what="2 x 2 ranks: ")
    return CaseResult(
        [*first.rows, *second.rows],
        {"2 ranks": first.settings, "2 x 2 ranks": second.settings},
        {"2 ranks": first.measured, "2 x 2 ranks": second.measured},
    )


def widths(session: Session) -> CaseResult:
    """Stages of narrow models, where what a pass costs at any size weighs most: against torch's 1F1B."""
    pair = [Pair("ours, 1F1B", "torch, 1F1B", WIDTH_RATIO)]
    alone = _job(session, pp=2, batch=4, microbatches=4, measured_steps=41)
    cases: dict[str, CaseResult] = {}
    for model in _NARROW:
        job = alone if session.quick else replace(alone, model=model)
        title = f"hidden {model.hidden}"
        cases[title] = compare(session, "widths", job, pair, what=f"{title}: ", memory=False)
    return CaseResult(
        [row for case in cases.values() for row in case.rows],
        {title: case.settings for title, case in cases.items()},
        {title: case.measured for title, case in cases.items()},
    )


def hybrid(session: Session) -> CaseResult:
    """Data and tensor parallelism: against FSDP2 over DTensor."""
    pairs = [Pair("ours", "FSDP2 x TP", TIME_RATIO, MEMORY_RATIO)]
    return compare(session, "hybrid", _job(session, dp=2, tp=2), pairs)


def single(session: Session) -> CaseResult:
    """One process: what the plugin adds to GeminiDDP."""
    pairs = [
        Pair("plugin", "GeminiDDP", SINGLE_RATIO),
        Pair("plugin, execute_pipeline", "GeminiDDP", SINGLE_RATIO),
    ]
    return compare(session, "single", _job(session, measured_steps=15), pairs, memory=False)


CASES: Mapping[str, Callable[[Session], CaseResult]] = MappingProxyType(
    {"tensor": tensor, "pipeline": pipeline, "widths": widths, "hybrid": hybrid, "single": single}
)


def chosen(names: Sequence[str] | None) -> list[str]:
    """Return the cases to run, in the table's order; None is all. Raise ConfigError for an unknown name."""
    return choose(CASES, names)


def run(session: Session, names: Sequence[str], command: Sequence[str]) -> dict[str, Any]:
    """Run the named cases and return one plain dict; a case that fails leaves its error, the others go on."""
    return run_cases("parallel", session, {name: CASES[name] for name in names}, command)
