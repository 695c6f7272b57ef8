"""Trains random layouts and compares each with one process of plain torch: ``make layouts``.

    python tests/layouts/campaign.py --cases 500 --out build/layouts.jsonl

Every case ends equal, refused by an error of ours, or as a finding: other numbers, an error that is not ours,
or no end. A seed always draws the same case; ``--seed`` runs one of them again and says all of it.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import layout_trainer
import layout_training
import torch
from layout_cases import Case, draw
from layout_training import Trained, differences, too_far
from processes import RanksFailed, close_workers, run_on_ranks

PATIENCE_SECONDS = 120.0
GOOD = ("equal", "refused")  # ends that find nothing
_CASES_OF_A_PROCESS = 40


@dataclass(frozen=True)
class End:
    """How a case ended: ``kind`` is ``"equal"``, ``"refused"``, ``"differs"``, ``"raw"`` or ``"hang"``."""

    seed: int
    case: str
    kind: str
    said: str
    apart: dict[str, float]
    seconds: float


def run(case: Case) -> End:
    """Run a case and judge it."""
    began, apart = time.monotonic(), {}
    directory = tempfile.mkdtemp(prefix="gemini-layouts-")
    try:
        how = layout_trainer if case.layouts[0].program == "trainer" else layout_training
        (want,) = run_on_ranks(how.train_plain, 1, case, timeout=PATIENCE_SECONDS)
        got = run_on_ranks(how.train_on_ranks, case.world, case, directory, timeout=PATIENCE_SECONDS)
        kind, said, apart = judge(case, want, got)
        if kind == "differs" and how is layout_training:  # some models magnify rounding: how much?
            (exact,) = run_on_ranks(how.train_plain, 1, case, torch.float64, timeout=PATIENCE_SECONDS)
            kind, said, apart = judge(case, want, got, differences(case, exact, want))
    except RanksFailed as error:
        kind, said = ("hang" if "did not end in time" in str(error) else "raw"), str(error)
    finally:
        shutil.rmtree(directory, ignore_errors=True)
    return End(case.seed, str(case), kind, said, apart, time.monotonic() - began)


def judge(
    case: Case, want: Trained, got: list[Trained], rounding: dict[str, float] | None = None
) -> tuple[str, str, dict[str, float]]:
    """Return the kind of an end, what is said of it, and how far apart the numbers are. ``rounding``: how far
    ``want`` is from training in 64 bits, if that is known."""
    refusals = [each.refused for each in got if each.refused]
    if refusals:  # a rank that hears of another's error has a StateError
        kind = "refused" if len(refusals) == len(got) else "raw"
        return kind, min(refusals, key=lambda text: text.startswith("StateError")), {}
    every = [differences(case, want, each) for each in got]
    apart = {name: max(each.get(name, 0.0) for each in every) for name in every[0]}
    far = list(too_far(case, apart, rounding))
    return ("differs" if far else "equal"), ", ".join(far), apart


def ends(seeds: Iterable[int], run_seed: Callable[[int], End]) -> Iterator[End]:
    """Run the cases of ``seeds``, in processes that serve many of them."""
    for number, seed in enumerate(seeds):
        if number % _CASES_OF_A_PROCESS == 0:
            close_workers()
        yield run_seed(seed)
    close_workers()


def reason(said: str) -> str:
    """Return a refusal without its numbers and names, so that equal ones can be counted."""
    text = re.sub(r"'[^']*'", "'..'", said.splitlines()[0])
    return re.sub(r"\d+(\.\d+)*", "N", text)[:160]


def carry_out(what: str, run_seed: Callable[[int], End], cases: int, arguments: list[str] | None) -> int:
    """Run a campaign that is described by ``what``, of so many ``cases`` unless ``arguments`` say otherwise;
    return 1 if anything was found."""
    parser = argparse.ArgumentParser(description=what, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=cases, help=f"how many seeds (default: {cases})")
    parser.add_argument("--first", type=int, default=0, help="the first seed (default: 0)")
    parser.add_argument("--seed", type=int, action="append", help="run this seed alone; may be repeated")
    parser.add_argument(
        "--out", type=Path, help="append a line of JSON for each case; seeds that it has are not run again"
    )
    options = parser.parse_args(arguments)
    seeds = options.seed or range(options.first, options.first + options.cases)
    seen = _kept(options.out)
    found = [seen[seed] for seed in seeds if seed in seen]
    for end in ends((seed for seed in seeds if seed not in seen), run_seed):
        found.append(end)
        if options.out is not None:
            with options.out.open("a") as file:
                file.write(json.dumps(asdict(end)) + "\n")
        if options.seed or end.kind not in GOOD:
            print(f"{end.kind}: {end.case}\n{end.said}\n{end.apart}", flush=True)
    _report(found)
    return int(any(end.kind not in GOOD for end in found))


def _kept(out: Path | None) -> dict[int, End]:
    """Return the ends in a file of an earlier run, by their seeds."""
    lines = out.read_text().splitlines() if out is not None and out.exists() else []
    return {end.seed: end for end in (End(**json.loads(line)) for line in lines)}


def _report(found: list[End]) -> None:
    """Print how many cases ended how, the reasons of refusals, and the largest of each number."""
    counts = Counter(end.kind for end in found)
    print(", ".join(f"{kind}: {count}" for kind, count in counts.most_common()))
    for text, count in Counter(reason(end.said) for end in found if end.kind == "refused").most_common():
        print(f"{count:5d}  {text}")
    names = dict.fromkeys(name for end in found for name in end.apart)
    for name in names:
        worst = max((end for end in found if name in end.apart), key=lambda end: end.apart[name])
        print(f"{name}: {worst.apart[name]:.2e} at most (seed {worst.seed})")


def main(arguments: list[str] | None = None) -> int:
    """Run the campaign; return 1 if anything was found."""
    return carry_out(__doc__ or "", lambda seed: run(draw(seed)), 500, arguments)


if __name__ == "__main__":
    sys.exit(main())
