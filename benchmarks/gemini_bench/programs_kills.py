"""Case ``kills``: signals end runs of ``gemini finetune`` and ``gemini train``, of GeminiTrainer and of
Lightning at random moments.

Each is started again, as its user would, until it is done. Then it must have the losses, weights and files
of a run that nothing has ended. No process may show a traceback, or end with an exit code that is not
documented.
"""

from __future__ import annotations

import logging
import os
import random
import re
import shutil
import signal
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gemini_bench.killed_processes import Kill, Lived, Setting, live
from gemini_bench.killed_runs import Inputs, Left, Run, kinds
from gemini_bench.programs_model import require_packages
from gemini_bench.record import Row
from gemini_bench.session import CaseResult, Session

logger = logging.getLogger(__name__)

KILLS, QUICK_KILLS = 200, 2
_SEED = 0
# How often a kind is drawn; processes that are fresh, or several, take longer.
_SHARES = {
    "GeminiTrainer": 5,
    "Lightning": 5,
    "train": 2,
    "finetune": 3,
    "finetune on ranks": 2,
    "finetune --nproc": 1,
}
_FRESH_SHARE = 0.06  # of processes are interpreters of their own
_FULL_SHARE = 0.1  # of processes may write small files only
_LEAST_BYTES = 4096  # of such a limit
_MOST_TRIES = 3  # to be done, once nothing ends it any more
_TRACES = ("Traceback (most recent call last)", "Exception ignored", "Fatal Python error")
_IMPORTS = "importlib._bootstrap"  # in the traceback of a program that was importing

_SAVED = re.compile(r"saved step (\d+)")


@dataclass(frozen=True)
class Whole:
    """A run without kills: its files, its seconds, and the number of its changes of files."""

    left: Left
    seconds: float
    operations: int
    largest_bytes: int


@dataclass
class Found:
    """The counts of a campaign, and the problems that it found."""

    kills: Counter[str] = field(default_factory=Counter)
    signals: Counter[str] = field(default_factory=Counter)
    resumed: int = 0
    full: int = 0
    in_save: int = 0
    wrong: list[str] = field(default_factory=list)
    temporary: int = 0


def run(session: Session, *, kills: int | None = None) -> CaseResult:
    """Kill and resume in its own process.

    Raises:
        ConfigError: a package is missing.
    """
    require_packages("kills", "transformers", "accelerate", "peft", "lightning", "torchao")
    kills = kills or (QUICK_KILLS if session.quick else KILLS)
    session.progress(f"kills: {kills} of runs at random moments")
    names = ["finetune", "GeminiTrainer"] if session.quick else []
    options = {"kills": kills, "seed": _SEED, "names": names, "place": os.fspath(session.disk_dir)}
    found = session.run("programs_kills.campaign", options, sample_seconds=0.5).data()
    rows = [
        Row("kills", sum(found["kills"].values()), "kills", kills, at_least=True),
        Row("what was wrong after them", len(found["wrong"]), "", 0),
        *(Row(f"kills of {name}", number, "kills") for name, number in found["kills"].items()),
        Row("of them while a checkpoint was being written", found["in_save"], "kills"),
        Row("processes that went on from a checkpoint", found["resumed"], "processes"),
        Row("processes that a full disk has ended", found["full"], "processes"),
        Row("entries left in the directory for temporary files", found["temporary"], "entries"),
    ]
    return CaseResult(rows, {"kills": kills, "seed": _SEED}, found)


class Campaign:
    """``runs`` in directories below ``place``, and what ends them when. An interpreter takes ``importing``
    seconds until it has imported what they need."""

    def __init__(self, place: Path, runs: Mapping[str, Run], *, seed: int, importing: float) -> None:
        self._place, self._runs, self._dice = place, dict(runs), random.Random(seed)
        self._importing = importing
        self._whole: dict[str, Whole] = {}
        self.found = Found()

    def kill(self, most: int) -> Found:
        """Have runs ended until there were ``most`` kills."""
        number = 0
        while self._runs and sum(self.found.kills.values()) < most:
            number += 1
            (name,) = self._dice.choices(list(self._runs), [_SHARES.get(name, 1) for name in self._runs])
            self._case(self._runs[name], self._place / f"{number}")
        return self.found

    def _case(self, run: Run, place: Path) -> None:
        whole = self._whole.get(run.name) or self._undisturbed(run)
        if whole is None:
            del self._runs[run.name]  # there is nothing to compare with
            return
        place.mkdir()
        seen = len(self.found.wrong)
        for _ in range(self._dice.choice([1, 1, 2, 3])):
            kill, setting, fresh = self._drawn(run, whole, place)
            self._process(run, place, setting, kill, fresh=fresh)
        for _ in range(_MOST_TRIES):
            if self._process(run, place, Setting(place), None, fresh=False):
                break
        else:
            self._say(run, place, f"is not done after {_MOST_TRIES} more processes")
        self._compare(run, place, whole)
        if len(self.found.wrong) == seen:
            shutil.rmtree(place)

    def _undisturbed(self, run: Run) -> Whole | None:
        place = self._place / f"whole {run.name}"
        place.mkdir()
        lived = self._live(run, place, Setting(place), None, fresh=False)
        if any(each.code for each in lived):
            self._say(run, place, f"fails by itself: {lived[0].said[-3000:]}")
            return None
        sizes = [path.stat().st_size for path in place.rglob("*") if path.is_file()]
        whole = Whole(run.left(place), lived[0].seconds, lived[0].operations, max(sizes))
        self._whole[run.name] = whole
        return whole

    def _drawn(self, run: Run, whole: Whole, place: Path) -> tuple[Kill, Setting, bool]:
        """Draw what ends a process, and what it is."""
        dice = self._dice
        signum = dice.choice([signal.SIGKILL, signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
        again = dice.uniform(0, 0.3) if signum != signal.SIGKILL and dice.random() < 0.3 else None
        fresh = run.ranks == 1 and dice.random() < _FRESH_SHARE
        group = dice.random() < 0.5
        how = dice.choice(["operation", "operation", "seconds", "seconds", "start"])
        if how == "operation" and not (fresh or run.starts_ranks):
            kill = Kill(signum, operation=dice.randint(1, whole.operations))
        else:
            longest = whole.seconds + (self._importing if fresh else 0)
            seconds = dice.uniform(0, 1.0) if how == "start" else dice.uniform(0, 1.05 * longest)
            kill = Kill(signum, seconds=seconds, again=again, group=group)
        is_full = dice.random() < _FULL_SHARE
        file_bytes = dice.randint(_LEAST_BYTES, max(_LEAST_BYTES, whole.largest_bytes)) if is_full else 0
        return kill, Setting(place, file_bytes=file_bytes), fresh

    def _process(self, run: Run, place: Path, setting: Setting, kill: Kill | None, *, fresh: bool) -> bool:
        """Run one process, or the ranks, to the end; return whether the run is done. Record any problems."""
        saved, processes = run.saved_step(place), run.processes(place)
        lived = self._live(run, place, setting, kill, fresh=fresh)
        found, first = self.found, lived[0]
        if any(each.killed for each in lived) and kill is not None:
            found.kills[run.name] += 1
            found.signals[signal.Signals(kill.signum).name] += 1
            found.in_save += any(".partial" in path.name for path in place.rglob("*.partial"))
        for each in lived:
            for problem in _problems(run, each, setting, kill, is_only=len(lived) == 1):
                self._say(
                    run,
                    place,
                    f"{problem}; {kill}; {setting.file_bytes}; fresh {fresh}; said: {each.said[-3000:]}",
                )
        step = run.first_step(place, first.said, processes)
        if step is not None and step < saved:
            self._say(
                run,
                place,
                f"went on after step {step}, and step {saved} was saved; said {first.said[-3000:]}",
            )
        found.resumed += bool(step)
        found.full += bool(setting.file_bytes) and first.code not in (0, None) and not first.killed
        if (promised := _SAVED.findall(first.said)) and run.saved_step(place) < int(promised[-1]):
            self._say(run, place, f"said that step {promised[-1]} is saved, and it is not")
        return all(each.code == 0 for each in lived)

    def _live(
        self, run: Run, place: Path, setting: Setting, kill: Kill | None, *, fresh: bool
    ) -> list[Lived]:
        if run.ranks == 1:
            return live([run.program(place, fresh=fresh)], [setting], [kill])
        from gemini.parallel.launch.launching import free_port

        port = str(free_port())
        settings = [
            Setting(place, _environment(rank, run.ranks, port), setting.file_bytes)
            for rank in range(run.ranks)
        ]
        whom = self._dice.choice([0, 1, None]) if kill is not None else None
        kills = [kill if whom in (None, rank) else None for rank in range(run.ranks)]
        return live([run.program(place, fresh=False)] * run.ranks, settings, kills)

    def _compare(self, run: Run, place: Path, whole: Whole) -> None:
        try:
            left, want = run.left(place), whole.left
        except (OSError, ValueError, KeyError) as error:
            self._say(run, place, f"left what cannot be read: {error}")
            return
        pairs: list[tuple[str, dict[Any, Any], dict[Any, Any]]] = [
            ("steps", left.steps, want.steps),
            ("results", left.results, want.results),
        ]
        for what, mine, its in pairs:
            odd = [key for key in {**mine, **its} if mine.get(key) != its.get(key)]
            if odd:
                self._say(
                    run,
                    place,
                    f"{len(odd)} {what} differ, such as {odd[0]}: {mine.get(odd[0])} for {its.get(odd[0])}",
                )
        if left.names != want.names:
            self._say(run, place, f"has other files: {sorted(left.names ^ want.names)}")
        if _still_running(place):
            self._say(run, place, "has left processes")
        self.found.temporary += len(list((place / "tmp").iterdir())) if (place / "tmp").exists() else 0

    def _say(self, run: Run, place: Path, problem: str) -> None:
        self.found.wrong.append(f"{run.name} ({place.name}): {problem}")
        logger.warning("%s", self.found.wrong[-1])


def _environment(rank: int, ranks: int, port: str) -> dict[str, str]:
    """Return the environment variables that torchrun sets for a rank."""
    numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
    own = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "GLOO_SOCKET_IFNAME": "lo"}
    return {**{name: str(number) for name, number in numbers.items()}, **own}


def _problems(run: Run, lived: Lived, setting: Setting, kill: Kill | None, *, is_only: bool) -> Iterator[str]:
    """Yield the problems of how a process ended."""
    if lived.code is None:
        yield f"ran longer than {setting.most_seconds} s"
        return
    signum = None if kill is None or not lived.killed else kill.signum
    if signum == signal.SIGINT and _IMPORTS in lived.said:
        return  # Python's own end of a program that was importing: no handler is there yet
    shows_none = run.is_command or (
        signum is None and not setting.file_bytes
    )  # errors of a script are its user's
    if shows_none and (trace := next((each for each in _TRACES if each in lived.said), None)):
        yield f"shows {trace!r}"
    # Other ranks are ended when one has failed, or stop with it.
    allowed = {0} if is_only else {0, 2, 130, 143, -signal.SIGTERM}
    if setting.file_bytes:
        allowed |= {2} if run.is_command else {1, 2}
    if signum is not None:
        allowed |= {-signum, 128 + signum}
        if kill is not None and kill.again is not None:
            allowed.add(130)
        if not run.is_command:
            allowed.add(1)
    if lived.code not in allowed:
        yield f"ended with {lived.code}"


def _still_running(place: Path) -> list[int]:
    """Return the processes that work in a directory."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                if (entry / "cwd").readlink().is_relative_to(place):
                    found.append(int(entry.name))
            except OSError:
                continue
    return found


def _import_all() -> None:
    import lightning  # noqa: F401
    import peft  # noqa: F401
    import transformers
    from torchao.quantization import Int8WeightOnlyConfig  # type: ignore[import-untyped, import-not-found, unused-ignore] # noqa: F401

    import gemini.integrations.lightning
    import gemini.integrations.transformers
    import gemini.jobs.finetune.job
    import gemini.jobs.gpt.job  # noqa: F401
    from gemini.cli.console import silence_packages

    silence_packages()
    for name in ("LlamaForCausalLM", "GPT2LMHeadModel", "Qwen2ForCausalLM", "Trainer", "AutoTokenizer"):
        getattr(transformers, name)


def _campaign(options: dict[str, Any]) -> dict[str, Any]:
    started = time.monotonic()
    _import_all()
    importing = time.monotonic() - started
    place, names = Path(options["place"]), options["names"]
    inputs = Inputs(place / "inputs")
    inputs.directory.mkdir()
    inputs.make()
    runs = {name: run for name, run in kinds(inputs.directory).items() if not names or name in names}
    found = Campaign(place, runs, seed=options["seed"], importing=importing).kill(options["kills"])
    return {**vars(found), "kills": dict(found.kills), "signals": dict(found.signals)}


TASKS = {"campaign": _campaign}
