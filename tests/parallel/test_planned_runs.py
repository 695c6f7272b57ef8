"""HybridParallelPlugin(plan=): what a plan says is what runs, with the numbers of one process; and blocks
that compute their activations again change no bit of them."""

from __future__ import annotations

import copy
import pickle
import random
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch
from pairs import pairs
from pipeline_harness import ADAM, CHUNKS, MAX_NORM, Trained, batch_of, language, loss_of, train_whole
from plan_samples import plan_for
from processes import RanksFailed, run_on_ranks
from tensor_harness import LANGUAGE_PLAN, WIDTH
from torch import Tensor, nn

import gemini
from gemini import ConfigError, CPUAdam, handle_of
from gemini.parallel import Booster, HybridParallelPlugin, Layout, ParallelPlan
from gemini.parallel.plan import PlanBudgets
from gemini.runtime.activation.recomputed_blocks import recompute_blocks

STEPS = 3
BLOCKS = tuple(f"blocks.{index}" for index in range(4))
# Of four blocks, over two ranks.
LAYOUTS: dict[str, dict[str, Any]] = {
    "pp": {"layout": Layout(pp=2), "begins": ("blocks.3",)},
    "zbv": {
        "layout": Layout(pp=2),
        "schedule": "zbv",
        "stages_per_rank": 2,
        "begins": ("blocks.1", "blocks.2", "blocks.3"),
    },
    "tp": {"layout": Layout(tp=2)},
    "dp": {"layout": Layout(dp=2), "num_microbatches": 2},
}


def settings(layout: str, **changed: Any) -> ParallelPlan:
    return plan_for(language(), **{"num_microbatches": 4, "microbatch_size": 4, **LAYOUTS[layout], **changed})


def train(plan: ParallelPlan | Path) -> Trained:
    options = CHUNKS if not isinstance(plan, ParallelPlan) or plan.zero_stage == 3 else {}
    plugin = HybridParallelPlugin(plan=plan, tp_plan=LANGUAGE_PLAN, max_norm=MAX_NORM, **options)
    booster, model = Booster(plugin=plugin), language()
    model, optimizer, *_ = booster.boost(model, CPUAdam(model.parameters(), **ADAM))
    ranks, found = plugin.data_ranks, Trained([], [], {})
    for step in range(STEPS):
        part = batch_of(step).chunk(ranks.size)[ranks.number]
        out = booster.execute_pipeline(iter([part]), model, loss_of, optimizer)
        optimizer.step()
        found.losses.append(float(out["loss"]))
        found.norms.append(optimizer.get_grad_norm())
    found.more = plugin.stats(model)
    parts = model.state_dict(keep_vars=True)
    found.weights = {name: value.detach().clone() for name, value in parts.items()}
    return found


def equal(one: list[Trained], other: list[Trained]) -> bool:
    return all(
        first.losses == second.losses
        and first.norms == second.norms
        and all(torch.equal(value, second.weights[name]) for name, value in first.weights.items())
        for first, second in zip(one, other, strict=True)
    )


@pairs(layout=list(LAYOUTS), zero_stage=[0, 1, 3], recompute=[BLOCKS, BLOCKS[1:3]])
def test_a_plan_trains_as_one_process_and_what_it_recomputes_changes_no_bit(
    layout: str, zero_stage: int, recompute: tuple[str, ...]
) -> None:
    plan = settings(layout, zero_stage=zero_stage, recompute=recompute)
    found, whole = run_on_ranks(train, 2, plan), train_whole(STEPS)
    for number, rank in enumerate(found):
        assert rank.losses == pytest.approx(whole.losses, rel=1e-5)
        assert rank.norms == pytest.approx(whole.norms, rel=1e-5)
        assert rank.more["predicted"] == plan.predicted.of_rank(number if plan.layout.pp > 1 else 0)
        assert 0 < rank.more["measured"]["step_seconds"] < 60
        if zero_stage == 3:
            assert 0 < rank.more["measured"]["device_bytes"] <= plan.budgets.device_bytes  # type: ignore[operator]
    assert equal(found, run_on_ranks(train, 2, replace(plan, recompute=())))


@pytest.mark.parametrize(("layout", "zero_stage"), [("dp", 3), ("pp", 0), ("tp", 3)])
def test_groups_that_a_plan_recomputes_change_no_bit(layout: str, zero_stage: int) -> None:
    plan = settings(layout, zero_stage=zero_stage, groups=((BLOCKS[0], BLOCKS[1:3]),))
    found = run_on_ranks(train, 2, plan)
    if zero_stage == 3:
        assert all(0 < rank.more["measured"]["device_bytes"] <= 2**26 for rank in found)
    assert equal(found, run_on_ranks(train, 2, replace(plan, groups=None)))


def _budgets_of_rank(plan: ParallelPlan) -> tuple[int, int, bool]:
    plugin, model = HybridParallelPlugin(plan=plan, tp_plan=LANGUAGE_PLAN), language()
    boosted, *_ = Booster(plugin=plugin).boost(model)
    stats = boosted.stats()
    return (
        stats["device"]["budget_bytes"],
        stats["host"]["budget_bytes"],
        handle_of(boosted).manager.activations is not None,
    )


def test_each_rank_of_a_pipeline_has_the_budgets_of_its_stage() -> None:
    own = (PlanBudgets(3 * 2**24, 2**24), PlanBudgets(2**26))
    plan = settings("pp", budgets=PlanBudgets(2**26, 2**24), stage_budgets=own, activation_offload="auto")
    assert run_on_ranks(_budgets_of_rank, 2, plan) == [(3 * 2**24, 2**24, True), (2**26, 0, False)]


@pytest.mark.dear("two ranks start, and each imports what it runs")
def test_a_group_of_blocks_in_several_stages_is_refused() -> None:
    plan = settings("pp", groups=(BLOCKS,))
    with pytest.raises(RanksFailed, match="different stages"):
        run_on_ranks(train, 2, plan)


def test_a_plan_runs_from_its_file_on_one_process(tmp_path: Path) -> None:
    plan = plan_for(language(), num_microbatches=4, microbatch_size=4, recompute=BLOCKS)
    plan.save(tmp_path / "plan.json")
    assert train(tmp_path / "plan.json").losses == pytest.approx(train_whole(STEPS).losses, rel=1e-5)


def _boost(plan: ParallelPlan, other_on: int) -> str:
    from torch import distributed as dist

    model = language(tied=dist.get_rank() != other_on)
    before = [param.data_ptr() for param in model.parameters()]
    try:
        Booster(plugin=HybridParallelPlugin(plan=plan, tp_plan=LANGUAGE_PLAN)).boost(model)
    except ConfigError as error:
        assert [param.data_ptr() for param in model.parameters()] == before
        return str(error)
    return ""


def test_a_plan_of_another_model_is_refused_on_all_ranks() -> None:
    wrong, right = run_on_ranks(_boost, 2, settings("pp"), 0)
    assert "fingerprint" in wrong
    assert "rank 0" in right
    assert "fingerprint" in right
    for more in run_on_ranks(_boost, 2, replace(settings("pp"), layout=Layout(pp=2, dp=2)), 2):
        assert "it is for 4 ranks (dp 2 x pp 2 x sp 1 x tp 1), but there are 2" in more


def test_a_batch_of_another_size_than_planned_is_refused() -> None:
    plan = plan_for(language(), num_microbatches=4, microbatch_size=2)
    with pytest.raises(ConfigError, match="16 samples cannot be cut into micro-batches of 2"):
        train(plan)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_a_booster_does_not_contradict_the_plan(precision: str) -> None:
    booster = Booster(precision, HybridParallelPlugin(plan=plan_for(language())))
    with pytest.raises(ConfigError, match="the plan says fp32"):
        booster.boost(language())


def test_a_disk_needs_its_directory_from_the_user(tmp_path: Path) -> None:
    model = language()
    plan = plan_for(model, budgets=PlanBudgets(2**26, 0, 2**24))
    with pytest.raises(ConfigError, match="disk_dir"):
        Booster(plugin=HybridParallelPlugin(plan=plan)).boost(model)
    plugin = HybridParallelPlugin(plan=plan, disk_dir=tmp_path)
    boosted, *_ = Booster(plugin=plugin).boost(model)
    assert boosted.stats()["disk"]["budget_bytes"] == 2**24
    boosted.close()


@pytest.mark.parametrize("zero_stage", [1, 3])
def test_what_was_measured_is_of_the_last_step_and_not_of_the_time_between(
    zero_stage: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]
    monkeypatch.setattr("gemini.runtime.manager.time", SimpleNamespace(perf_counter=lambda: now[0]))
    model = language()
    plan = plan_for(model, zero_stage=zero_stage)
    plugin = HybridParallelPlugin(plan=plan, **(CHUNKS if zero_stage == 3 else {}))
    model, optimizer, *_ = Booster(plugin=plugin).boost(model, CPUAdam(model.parameters(), **ADAM))
    assert plugin.stats(model)["measured"] == {}
    for step in range(3):
        loss = loss_of(model(batch_of(step)), batch_of(step))
        now[0] += 1
        optimizer.backward(loss)
        now[0] += 2
        optimizer.step()
        now[0] += 4
        with torch.no_grad():
            model(batch_of(step))
        now[0] += 8
    measured = plugin.stats(model)["measured"]
    assert measured["step_seconds"] == 3
    if zero_stage == 3:
        peaks = [each["device_bytes"] + each["non_model_bytes"] for each in model.timeline()]
        assert measured["device_bytes"] == max(peaks)
        assert model.stats(flat=True)["predicted/step_seconds"] == 1.5


# -- blocks that recompute -------------------------------------------------------------------------------

SMALL: dict[str, Any] = {"min_chunk_size_mb": 0.001, "search_range_mb": 0, "non_model_bytes": 0}
RUNS: list[str] = []  # no attribute: that would be a change of the module


class Noisy(nn.Module):
    """A block with dropout, and what counts its runs."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.inner, self.name = nn.Linear(WIDTH, WIDTH), name

    def forward(self, x: Tensor) -> Tensor:
        RUNS.append(self.name)
        out: Tensor = x + nn.functional.dropout(torch.tanh(self.inner(x)), 0.5)
        return out


def noisy() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(*(Noisy(f"{index}") for index in range(3)))


def gradients(model: nn.Module, names: tuple[str, ...], device_bytes: str | None = None) -> list[Tensor]:
    """Run three steps of SGD; return the weights."""
    recompute_blocks(model, names)
    if device_bytes is not None:
        managed = gemini.GeminiDDP(model, device_bytes=device_bytes, host_bytes="1MiB", **SMALL)
        optimizer: Any = gemini.GeminiOptimizer(CPUAdam(managed.parameters(), **ADAM), managed)
        model = managed
    else:
        optimizer = CPUAdam(model.parameters(), **ADAM)
    torch.manual_seed(4)
    for step in range(3):
        loss = model(torch.full((2, WIDTH), 0.1 * step)).square().sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return [value.detach().clone() for value in model.state_dict().values()]


@pytest.mark.parametrize("device_bytes", [None, "24KiB"])
def test_named_blocks_run_twice_and_draw_the_same_random_numbers(device_bytes: str | None) -> None:
    wanted = gradients(noisy(), ())
    RUNS.clear()
    found = gradients(noisy(), ("0", "2"), device_bytes)
    assert all(map(torch.equal, wanted, found))
    assert [RUNS.count(name) for name in "012"] == [6, 3, 6]


def test_what_saves_nothing_runs_once() -> None:
    model = noisy()
    recompute_blocks(model, ("1",))
    RUNS.clear()
    with torch.no_grad():
        model(torch.ones(2, WIDTH))
    assert RUNS == ["0", "1", "2"]


def test_copies_and_pickles_have_the_forward_of_their_class() -> None:
    model = noisy()
    recompute_blocks(model, ("1",))
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        RUNS.clear()
        other(torch.ones(2, WIDTH)).sum().backward()
        assert RUNS == ["0", "1", "2"]


class Changing(nn.Module):
    """A block that draws numbers of Python and numpy, and keeps what it has seen, which it looks at."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.seen, self.shapes = nn.Linear(2, 2), 0, list[Any]()
        self.register_buffer("mean", torch.zeros(2))

    def forward(self, x: Tensor) -> Tensor:
        self.seen += 1
        self.shapes.append(x.shape)
        self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        self.last = x.detach()
        factor = self.seen + len(self.shapes) + random.random() + numpy.random.rand()
        out: Tensor = torch.tanh(self.inner(x) * factor - self.mean)
        return out


CHANGING: dict[str, Callable[[], nn.Module]] = {
    "attributes": Changing,
    "batch norm": lambda: nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Tanh()),
    "spectral norm": lambda: nn.Sequential(
        nn.utils.parametrizations.spectral_norm(nn.Linear(2, 2)), nn.Tanh()
    ),
}


def changed_by(kind: str, names: tuple[str, ...], chunks: bool) -> list[Any]:
    """Train; return all that a model has then, and the next random numbers."""
    torch.manual_seed(2)
    random.seed(2)
    numpy.random.seed(2)
    model: Any = nn.Sequential(CHANGING[kind](), nn.Linear(2, 2), CHANGING[kind]())
    recompute_blocks(model, names)
    modules = list(model)
    if chunks:
        model = gemini.GeminiDDP(model, **SMALL)
        optimizer: Any = gemini.GeminiOptimizer(CPUAdam(model.parameters(), **ADAM), model)
    else:
        optimizer = CPUAdam(model.parameters(), **ADAM)
    for step in range(3):
        passes = [model(torch.rand(4, 2) + step).square().sum() for _ in range(2)]
        for loss in passes:  # the second pass is over before the first one is run again
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    kept = [
        (getattr(each, "seen", 0), getattr(each, "shapes", 0), getattr(each, "last", 0)) for each in modules
    ]
    found = [*model.state_dict().values(), kept, random.random(), numpy.random.rand(), torch.rand(1)]
    return [each.tolist() if isinstance(each, Tensor) else str(each) for each in found]


@pytest.mark.parametrize("chunks", [False, True])
@pytest.mark.parametrize("kind", list(CHANGING))
def test_a_block_that_changes_itself_does_so_once_and_runs_again_as_it_was(kind: str, chunks: bool) -> None:
    assert changed_by(kind, ("0", "2"), chunks) == changed_by(kind, (), chunks)


class Hidden(nn.Module):
    """A block with a counter within an object of another class."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.box = nn.Linear(2, 2), SimpleNamespace(seen=0)

    def forward(self, x: Tensor) -> Tensor:
        self.box.seen += 1
        out: Tensor = self.inner(x) * self.box.seen
        return out


def test_a_block_with_a_change_that_cannot_be_undone_is_refused() -> None:
    model = nn.Sequential(Hidden(), nn.Linear(2, 2))
    recompute_blocks(model, ("0",))
    with pytest.raises(ConfigError, match="'0' cannot be recomputed in backward"):
        model(torch.ones(3, 2))


@pytest.mark.parametrize(
    ("names", "said"),
    [
        (("3",), "no such block"),
        (("",), "no such block"),
        (("0", "0"), "twice"),
        (("0", "0.inner"), "and '0' around it"),
        (("list",), "ModuleList has no forward"),
    ],
)
def test_names_of_no_blocks_are_refused_and_nothing_changes(names: tuple[str, ...], said: str) -> None:
    model = noisy()
    model.list = nn.ModuleList([nn.Linear(2, 2)])
    with pytest.raises(ConfigError, match=said):
        recompute_blocks(model, names)
    with pytest.raises(ConfigError, match=said):
        Booster(plugin=HybridParallelPlugin(recompute=names)).boost(model)
    assert not any("forward" in vars(module) for module in model.modules())
    recompute_blocks(model, ("0",))
    with pytest.raises(ConfigError, match="its forward is already replaced"):
        recompute_blocks(model, ("0",))


def _boost_around() -> None:
    model = nn.Sequential(OrderedDict(body=noisy()))
    Booster(plugin=HybridParallelPlugin(pp_size=2, recompute=["body"])).boost(model)


def test_what_holds_the_blocks_of_several_stages_is_refused() -> None:
    with pytest.raises(RanksFailed, match="'body', which contains the blocks between which stages are cut"):
        run_on_ranks(_boost_around, 2)
