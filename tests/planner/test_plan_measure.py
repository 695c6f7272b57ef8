"""``gemini plan --search --measure``: the plan with the fastest steps is kept."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
from planner_models import machine, net, question, run_of

from gemini.cli.main import main
from gemini.cli.plan_measure import Job, Trials, run_on_ranks, seconds_of_steps
from gemini.errors import ConfigError, StateError
from gemini.forecast.machine import own_name
from gemini.parallel import ParallelPlan
from gemini.planner.plans import plan_of
from gemini.planner.search import Found, Search
from gemini.planner.space import named
from gemini.system.threads import usable_processors

GPT = "gpt:layers=2,hidden=32,heads=4"
STEP = ["--seq", "16", "--batch", "4", "--search", "--device-bytes", "1GiB"]
SECONDS = 3.0


def measured(
    count: int, run: Callable[[ParallelPlan], float], *, ranks: int = 2
) -> tuple[Found, ParallelPlan, Found, list[str]]:
    """Return what was found with trials, the plan, what was found before, and what was told."""
    model, asked, told = net(32, 32, 32, 32), question(ranks), list[str]()
    searching = Search(model, run_of, asked)
    first = searching.run()

    def plan_at(found: Found, place: int) -> ParallelPlan:
        return plan_of(found, asked, model, "fp32", place=place)

    return *Trials(count, plan_at, run, told.append).fastest(searching, first), first, told


def names(found: Found) -> list[str]:
    return [str(each.combination) for each in found.prices]


def test_what_ran_fastest_is_the_plan_whatever_was_predicted() -> None:
    taken = iter([SECONDS, SECONDS / 2, SECONDS * 2])
    _, plan, found, told = measured(3, lambda _plan: next(taken))
    first, second, third = names(found)[:3]
    assert plan.predicted.step_seconds == found.prices[1].step_seconds
    assert plan.measured_seconds == SECONDS / 2
    one, two, *others = plan.runners_up
    assert (one.settings, one.measured_seconds, one.why) == (first, SECONDS, "took 100.0% longer")
    assert (two.settings, two.measured_seconds, two.why) == (third, SECONDS * 2, "took 300.0% longer")
    assert [each.settings for each in others] == names(found)[3:]
    assert all(each.measured_seconds is None for each in others)
    assert [each.partition(": ")[2] for each in told] == [first, second, third]
    said = plan.explain()
    assert "Why: a step took 1.5 s when plans were run; " in said
    assert f"the next best, {first}, took 3 s (+100.0%)" in said
    assert "s a step, measured 6 s; took 300.0% longer" in said


def test_what_was_measured_is_in_the_file_and_a_file_without_it_is_a_plan(tmp_path: Path) -> None:
    _, plan, _, _ = measured(2, lambda _plan: SECONDS)
    file = tmp_path / "plan.json"
    plan.save(file)
    assert ParallelPlan.load(file) == plan
    document = json.loads(file.read_text())
    assert document.pop("measured_seconds") == SECONDS
    for each in document["runners_up"]:
        del each["measured_seconds"]
    file.write_text(json.dumps(document))
    unmeasured = tuple(replace(each, measured_seconds=None) for each in plan.runners_up)
    assert ParallelPlan.load(file) == replace(plan, measured_seconds=None, runners_up=unmeasured)


def test_a_plan_that_fails_is_left_out_with_its_words_and_the_next_one_runs() -> None:
    taken = iter([StateError("rank 1 was ended by SIGKILL"), SECONDS, SECONDS / 2])

    def run(_plan: ParallelPlan) -> float:
        outcome = next(taken)
        if isinstance(outcome, StateError):
            raise outcome
        return outcome

    _, plan, found, _ = measured(2, run)
    assert plan.measured_seconds == SECONDS / 2
    assert plan.predicted.step_seconds == found.prices[2].step_seconds
    assert names(found)[0] not in [each.settings for each in plan.runners_up]
    assert (plan.left_out[0].settings, plan.left_out[0].why) == (
        names(found)[0],
        "when run: rank 1 was ended by SIGKILL",
    )


def test_a_layout_that_the_library_refuses_is_searched_without() -> None:
    tried = []

    def run(plan: ParallelPlan) -> float:
        tried.append(plan.layout)
        if len(tried) < 3:
            raise ConfigError("no such layers")
        return SECONDS

    found, plan, before, _ = measured(1, run)
    first, second, third = tried
    assert first == before.prices[0].combination.layout
    assert third == plan.layout
    assert len({first, second, third}) == 3  # each once
    assert not {first, second} & {each.combination.layout for each in found.prices}
    said = {each.settings: each.why for each in plan.left_out}
    assert said[named(first)] == said[named(second)] == "when run: no such layers"


def test_where_no_plan_runs_the_reasons_are_told() -> None:
    def run(_plan: ParallelPlan) -> float:
        raise ConfigError("no such layers")

    with pytest.raises(StateError, match="all plans failed to run: one rank: when run: no such layers"):
        measured(2, run, ranks=1)


@pytest.fixture
def here(tmp_path: Path) -> list[str]:
    """The option for a file of this machine, with speeds that nobody has measured."""
    path = tmp_path / "machine.json"
    replace(machine(3), name=own_name()).save(path)
    return ["--machine", str(path)]


@pytest.mark.parametrize("zero", [0, 3])
def test_a_rank_times_three_steps(
    zero: int, here: list[str], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    kept = tmp_path / "plan.json"
    assert main(["plan", GPT, *STEP, *here, "--pin", f"zero={zero}", "--save-plan", str(kept)]) == 0
    seconds = seconds_of_steps(ParallelPlan.load(kept), Job(GPT, 16, seq_is_asked=True))
    assert len(seconds) == 3
    assert all(0 < each < 10 for each in seconds)


@pytest.mark.dear("two ranks are measured")
def test_two_ranks_run_and_the_file_says_how_long_they_took(
    here: list[str], capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gemini.cli.plan_measure.usable_processors", lambda: [0, 1])
    kept = tmp_path / "plan.json"
    options = ["--ranks", "2", "--pin", "dp=2", "--measure", "1", "--save-plan", str(kept)]
    assert main(["plan", GPT, *STEP, *here, *options]) == 0
    plan = ParallelPlan.load(kept)
    assert plan.measured_seconds is not None
    assert 0 < plan.measured_seconds < 10
    assert f"a step took {plan.measured_seconds:.4g} s when plans were run" in capsys.readouterr().out


def test_the_words_of_a_rank_that_fails_are_those_of_the_error() -> None:
    _, plan, _, _ = measured(1, lambda _plan: SECONDS, ranks=1)
    with pytest.raises(ConfigError, match=r"^the plan does not fit: it is of a model"):
        run_on_ranks(plan, Job(GPT, 16, seq_is_asked=True))


def test_what_cannot_be_measured_here_is_refused_before_anything_takes_time(
    here: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    many = str(len(usable_processors()) + 1)
    other = tmp_path / "other.json"
    replace(machine(3), name="a server").save(other)
    for options, words in (
        (
            ["--measure", "2", "--ranks", many, *here],
            f"--measure needs {many} ranks on this machine, which has",
        ),
        (["--measure", "2", "--machine", str(other)], "describes 'a server'"),
        (["--measure", "0"], "'0' is not a number above 0"),
    ):
        with pytest.raises(SystemExit) if "not a number" in words else nullcontext():
            assert main(["plan", GPT, *STEP, *options]) == 2
        assert words in " ".join(capsys.readouterr().err.split())
    assert main(["plan", GPT, "--measure", "2", *here]) == 2
    assert "--measure belongs to a search; add --search" in capsys.readouterr().err
