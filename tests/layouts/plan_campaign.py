"""Searches plans for random models, ranks and budgets, runs each, and compares what was planned with what
happened: ``make plans``.

    python tests/layouts/plan_campaign.py --cases 200 --out build/plans.jsonl

Every case ends equal, refused by a search that has nothing to try, or as a finding: ``differs`` in numbers
from one process of plain torch; ``apart`` from the plan in memory or in what ranks send; ``unplanned``, a
plan that does not run; ``tight``, a relaxation that does not fit; ``raw``, an error that is not ours; or
``hang``. A seed always draws the same case.
"""

from __future__ import annotations

import math
import random
import re
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

import layout_trainer
import torch
from campaign import PATIENCE_SECONDS, End, carry_out, judge
from layout_cases import Case, Layout, frozen_part
from layout_models import SUBJECTS, batch_of, loss_of
from layout_training import differences, model_of, train_plain
from plan_training import Ran, Sent, train_planned
from planner_models import machine
from processes import RanksFailed, run_on_ranks
from torch import nn

from gemini.errors import ConfigError, OutOfBudgetError
from gemini.parallel import Layout as PlanLayout
from gemini.parallel import ParallelPlan
from gemini.parallel.booster.sequences import own_part
from gemini.parallel.layout_plan import Run, trainable_outline
from gemini.parallel.pipeline.orders import SCHEDULES, make_order
from gemini.planner.chunks import StageCapacity
from gemini.planner.plans import plan_of
from gemini.planner.records import CutModel, Part
from gemini.planner.search import Question, search
from gemini.planner.space import Pins
from gemini.runtime.activation.block_groups import Names, flat_names
from gemini.runtime.intercept.nested import cast_floating, map_tensors
from gemini.system.config import parse_bytes

_PLENTY = StageCapacity(2**33)
_TRIFLES = 16 * 2**10  # of DEVICE: scalars, ids and counts, which no plan has
_ADAM = ("HybridAdam", "CPUAdam")
_RULES = (*_ADAM, "AdamW", "SGD", "Adagrad", "RMSprop")


@dataclass(frozen=True)
class PlanCase:
    """What is searched for. ``room``: the share that DEVICE has of what the fastest plan would take there, 0:
    plenty; ``below``: the tiers below it, with as much as that plan takes."""

    pins: tuple[str, ...]
    batch: int  # samples of a step of all ranks
    length: int
    room: float
    below: tuple[str, ...]
    by_trainer: bool  # GeminiTrainer runs the plan, if it does such plans
    trained: Case  # all but its layout and its rows

    def __str__(self) -> str:
        case = self.trained
        said = {
            "tied": case.tied,
            "lora": case.lora,
            case.frozen: case.frozen,
            case.precision: case.precision,
        }
        said |= {case.precision: case.precision, "recomputes by itself": self.recompute}
        flags = [name for name, value in said.items() if value]
        room = f"{self.room:.2f} of DEVICE" if self.room else "plenty"
        return (
            f"seed {case.seed}: {case.subject} on {case.world}, {' '.join(self.pins) or 'no pins'}; {room}"
            f"{''.join(f' + {each}' for each in self.below)}; {self.batch} x {self.length}, {case.rule}, "
            f"max_norm {case.max_norm} {' '.join(flags)}"
        )

    @property
    def recompute(self) -> str:
        """``"model"`` where the model itself computes activations again."""
        return self.trained.layouts[0].recompute


def draw(seed: int) -> PlanCase:
    """Return the case of a seed."""
    dice = random.Random(f"plan {seed}")
    name = dice.choice(list(SUBJECTS))
    subject, world = SUBJECTS[name], dice.choices((1, 2, 3, 4), (25, 45, 5, 25))[0]
    pins, micro = _pins(dice, name, world)
    room = dice.choice((0.0, *(round(dice.uniform(0.3, 1.0), 2) for _ in range(3))))
    chunks = "zero=3" in pins
    lora = bool(subject.adapted) and dice.random() < 0.3
    case = Case(
        seed=seed,
        subject=name,
        world=world,
        layouts=(Layout("hybrid", 1, recompute="model" if dice.random() < 0.1 else ""),),
        rule=dice.choice(_ADAM if chunks or not pins or dice.random() < 0.4 else _RULES),
        max_norm=dice.choice((0.3, math.inf)),
        accumulate=1,
        no_sync=False,
        rows=1,
        skewed=False,
        lengths=(),
        padding="",
        ignores=dice.random() < 0.3,
        counted=dice.random() < 0.5,
        tied=subject.ties and dice.random() < 0.4,
        lora=lora,
        frozen="" if lora or dice.random() < 0.7 else frozen_part(dice, subject),
        precision="bf16" if dice.random() < 0.1 else "",
        evaluates=False,
        generates=False,
        shard=False,
    )
    tiers = (("host",), ("disk",), ("disk",), ("host", "disk"))
    below = dice.choice(tiers) if room and dice.random() < 0.8 else ()
    by_trainer = subject.inputs == "causal" and not case.precision and dice.random() < 0.4
    return PlanCase(
        pins, micro * dice.choice((1, 2, 4, 8)), dice.choice((16, 32, 64)), room, below, by_trainer, case
    )


def _pins(dice: random.Random, name: str, world: int) -> tuple[tuple[str, ...], int]:
    """Return what is pinned, and the number of micro-batches of all ranks or a multiple of the ranks."""
    is_one = SUBJECTS[name].inputs in ("causal", "masked", "own")
    sizes = [each for each in (1, 2, 3, 4) if world % each == 0]
    layouts = [
        (pp, tp, sp)
        for pp, tp, sp in product(sizes, repeat=3)
        if world % (pp * tp * sp) == 0 and tp != 3 and (tp == 1 or name != "own") and (sp == 1 or is_one)
    ]
    pp, tp, sp = dice.choice(layouts)
    dp = world // (pp * tp * sp)
    count = dice.choice((1, 2, 4))
    if dice.random() < 0.1:
        return (), 4 * world
    zeros = (0, 1, 2, 3, 3, 3, 3) if dp * sp > 1 else (0, 3, 3)
    pins = [f"tp={tp}", f"pp={pp}", f"sp={sp}", f"zero={dice.choice(zeros)}"]
    if pp > 1:
        styles = ("1f1b", "gpipe", *(("interleaved", "zero_bubble", "zbv", "dualpipev") if pp == 2 else ()))
        pins.append(f"schedule={dice.choice(styles)}")
        count = 4 * pp // 2
    pins.append(f"microbatches={count}")
    if sp > 1:
        pins.append(f"sp_mode={dice.choice(('ulysses', 'ring'))}")
    if dice.random() < 0.6:
        pins.append(f"recompute={dice.choice(('none', 'none', 'none', 'fit', 'rotor', 'half', 'all'))}")
    if dice.random() < 0.4:
        pins.append(f"activations={dice.choice(('device', 'lower'))}")
    return tuple(pins), dp * count


# -- the search --------------------------------------------------------------------------------------------


class Planning:
    """The searches of a case."""

    def __init__(self, case: PlanCase) -> None:
        self.case, trained = case, case.trained
        self.model = model_of(trained)
        if case.recompute and hasattr(self.model, "activation_checkpointing_enable"):
            self.model.activation_checkpointing_enable({"use_reentrant": False})
        self.dtype = trained.precision or "fp32"
        self.outline: nn.Module = trainable_outline(self.model)
        if trained.precision:
            self.outline = self.outline.to(torch.bfloat16)

    def run_of(self, samples: int) -> Run:
        """Return what runs the model on a micro-batch of so many samples."""
        case = self.case.trained
        given = batch_of(case.subject, 1, samples, self.case.length, "", case.ignores)
        dtype = torch.bfloat16 if case.precision else torch.float32
        batch = map_tensors(given, lambda x: cast_floating(x.to("meta"), dtype))

        def run(model: nn.Module, sequence: Any) -> torch.Tensor:
            own = batch if sequence is None else own_part(sequence, batch)
            return loss_of(model(**own), own)

        return run

    def plan(self, capacity: StageCapacity) -> ParallelPlan:
        """Return the fastest plan. Raises ConfigError, OutOfBudgetError."""
        case = self.case
        pins = Pins.parse(case.pins)
        question = Question(case.trained.world, case.batch, machine(case.trained.seed), capacity, pins)
        return plan_of(search(self.outline, self.run_of, question), question, self.model, self.dtype)

    def within_room(self) -> ParallelPlan:
        """Return the plan for the case's budgets, or where nothing fits for those that the refusal names."""
        free = self.plan(_PLENTY)
        if not self.case.room:
            return free
        most = max(each.device_bytes for each in free.predicted.ranks)
        given = {f"{tier}_bytes": most for tier in self.case.below}
        capacity = StageCapacity(int(most * self.case.room), **given)
        try:
            return self.plan(capacity)
        except OutOfBudgetError as error:
            return self.plan(relaxed(capacity, str(error)))

    def messages(self, plan: ParallelPlan) -> list[Sent]:
        """Return by rank along pp what it sends along tp and sp, forward and backward of a step."""
        part = Part(plan.layout.tp, plan.layout.sp, plan.sp_mode)
        record = CutModel(self.outline, part).record(self.run_of(plan.microbatch_size))
        starts = [0, *(record.blocks.index(name) + 1 for name in plan.begins), len(record.segments)]
        order = make_order(plan.schedule, plan.layout.pp, plan.num_microbatches, plan.stages_per_rank)
        splits = SCHEDULES[plan.schedule].splits  # then a block of its own is a group
        again = Counter((*_times(plan.groups or ()), *(plan.recompute if splits else ())))
        found = []
        for rank in range(plan.layout.pp):
            calls, nbytes = Counter[Any](), Counter[Any]()
            for stage in order.stages_of(rank):
                for segment in record.segments[starts[stage] : starts[stage + 1]]:
                    alone = (
                        segment.again_messages if segment.name in plan.recompute and not splits else Counter()
                    )
                    ways = (segment.forward.messages, segment.backward.messages, alone)
                    for way, times in zip(ways, (1 + again[segment.name], 1, 1), strict=True):
                        for each, number in way.items():
                            key = each.axis, each.collective
                            calls[key] += (count := number * times * plan.num_microbatches)
                            nbytes[key] += count * each.sent_bytes
            found.append({key: (calls[key], nbytes[key]) for key in calls})
        return found


def _times(groups: Iterable[Names]) -> Iterator[str]:
    """Yield the blocks of groups, each as often as it runs forward again."""
    for each in groups:
        if not isinstance(each, str):
            yield from flat_names(each)
            yield from _times(each)


def relaxed(capacity: StageCapacity, refusal: str) -> StageCapacity:
    """Return the budgets that a refusal says would do."""
    _, _, said = refusal.rpartition("For each rank ")
    named = re.findall(r"(\w+_bytes) ([\d.]+\w*)", said.partition(" would do")[0])
    larger = {name: parse_bytes(value, name=name) for name, value in named}
    if not larger:
        raise AssertionError(f"the refusal names no budget that would do: {refusal}")
    return replace(capacity, **larger)


# -- a case ------------------------------------------------------------------------------------------------


def run(case: PlanCase) -> End:
    """Search, run what is found, and judge it."""
    began, apart, said = time.monotonic(), dict[str, float](), str(case)
    directory = tempfile.mkdtemp(prefix="gemini-plans-")
    try:
        planning = Planning(case)
        plan = planning.within_room()
        said += f" -> {_settings(plan)}"
        path = Path(directory, "plan.json")
        plan.save(path)
        assert ParallelPlan.load(path) == plan, "a loaded plan is another one"
        trained = _as_layout(case, plan, path)
        by_trainer = trained.layouts[0].program == "trainer"
        plain = layout_trainer.train_plain if by_trainer else train_plain
        (want,) = run_on_ranks(plain, 1, trained, timeout=PATIENCE_SECONDS)
        ranks: list[Ran] = run_on_ranks(
            train_planned, plan.world_size, trained, directory, timeout=PATIENCE_SECONDS
        )
        got = [each.trained for each in ranks]
        kind, why, apart = judge(trained, want, got)
        if kind == "differs" and not by_trainer:  # some models magnify rounding: how much?
            (exact,) = run_on_ranks(train_plain, 1, trained, torch.float64, timeout=PATIENCE_SECONDS)
            kind, why, apart = judge(trained, want, got, differences(trained, exact, want))
        if kind == "refused":
            kind = "unplanned"
        if kind == "equal" and not by_trainer:
            apart |= held(plan, ranks)
            wrong = [*too_much(plan, ranks), *_other_messages(planning, plan, ranks)]
            kind, why = ("apart" if wrong else kind), "; ".join(wrong)
    except ConfigError as error:
        kind, why = "refused" if "\n" not in str(error) else "raw", str(error)
    except OutOfBudgetError as error:
        kind, why = ("refused" if "is left: " in str(error) else "tight"), str(error)
    except RanksFailed as error:
        kind, why = ("hang" if "did not end in time" in str(error) else "raw"), str(error)
    except Exception as error:  # whatever a search ends with is found
        kind, why = "raw", f"{type(error).__name__}: {error}"
    finally:
        shutil.rmtree(directory, ignore_errors=True)
    return End(case.trained.seed, said, kind, why, apart, time.monotonic() - began)


def _as_layout(case: PlanCase, plan: ParallelPlan, file: Path) -> Case:
    """Return the case as the campaign over layouts trains it."""
    sizes: PlanLayout = plan.layout
    lengths = (case.length,) * 4
    path, rows, count = str(file), plan.microbatch_size, plan.num_microbatches
    cut = {f"{name}_size": size for name in ("tp", "pp", "sp") if (size := getattr(sizes, name)) > 1}
    if case.by_trainer and not cut and (plan.zero_stage == 3 or sizes.dp == 1):
        layout = Layout("trainer", sizes.dp, recompute=case.recompute, plan=path)
        return replace(case.trained, layouts=(layout,), rows=rows, accumulate=count, lengths=lengths)
    options = (("zero_stage", plan.zero_stage),)
    layout = Layout(
        "hybrid", sizes.dp, tuple(cut.items()), options, count, recompute=case.recompute, plan=path
    )
    counts = case.trained.counted and sizes.sp == 1
    return replace(case.trained, layouts=(layout,), rows=rows, lengths=lengths, counted=counts)


def _settings(plan: ParallelPlan) -> str:
    again = f", {len(plan.recompute)} + {len(plan.groups or ())} recompute" if plan.recomputed else ""
    sizes, budgets = plan.layout, plan.budgets
    activations = ", activations too" if plan.activation_offload else ""
    return (
        f"tp {sizes.tp} pp {sizes.pp} sp {sizes.sp} dp {sizes.dp}, ZeRO {plan.zero_stage}, {plan.schedule}, "
        f"{plan.num_microbatches} x {plan.microbatch_size}{again}, {budgets.device_bytes} + "
        f"{budgets.host_bytes} + {budgets.disk_bytes} bytes{activations}"
    )


def held(plan: ParallelPlan, ranks: list[Ran]) -> dict[str, float]:
    """Return how far above the planned peak of DEVICE a rank came at most, and how far below it stayed; and
    the first of first steps."""
    planned = [plan.predicted.ranks[each.stage].device_bytes for each in ranks]
    shares = [max(each.device_bytes[1:]) / of - 1 for each, of in zip(ranks, planned, strict=True)]
    first = [each.device_bytes[0] / of - 1 for each, of in zip(ranks, planned, strict=True)]
    return {"above": max(shares), "below": -min(shares), "first": max(first)}


def too_much(plan: ParallelPlan, ranks: list[Ran]) -> Iterator[str]:
    """Say where a rank held more than was planned, or other model data."""
    for number, ran in enumerate(ranks):
        rank, budgets = plan.predicted.ranks[ran.stage], plan.budgets_of(ran.stage)
        if max(ran.device_bytes[1:]) > rank.device_bytes + _TRIFLES:
            yield f"rank {number} held {ran.device_bytes} of DEVICE, planned {rank.device_bytes}"
        for tier, most in ran.lower_bytes.items():
            if most > (given := getattr(budgets, f"{tier}_bytes")):
                yield f"rank {number} held {most} of {tier}, whose budget is {given}"
        for name in ("parameter_bytes", "gradient_bytes", "state_bytes"):
            nbytes = ran.model_bytes.get(name, getattr(rank, name))
            if abs(nbytes - getattr(rank, name)) > 64:
                yield f"rank {number} has {nbytes} {name}, planned {getattr(rank, name)}"


def _other_messages(planning: Planning, plan: ParallelPlan, ranks: list[Ran]) -> Iterator[str]:
    """Say where a rank called or sent otherwise than was counted, or the plan says otherwise."""
    counted = planning.messages(plan)
    for number, ran in enumerate(ranks):
        wanted, sent = counted[ran.stage], dict(ran.sent)
        for key, (calls, nbytes) in ran.sent.items():
            if key == ("tp", "all_gather"):  # ranks compare what they are given
                more = calls - wanted.get(key, (0, 0))[0]
                if 0 <= nbytes - wanted.get(key, (0, 0))[1] < 512 * max(more, 1):
                    sent[key] = wanted.get(key, (0, 0))
        sent = {key: value for key, value in sent.items() if any(value)}
        if sent != wanted:
            yield f"rank {number} sent {sent}, counted {wanted}"
    totals = [Counter[str]() for _ in counted]
    for total, each in zip(totals, counted, strict=True):
        for (axis, _), (_, nbytes) in each.items():
            total[axis] += nbytes
    if plan.predicted.sent_bytes not in [dict(each) for each in totals]:
        yield f"the plan says {plan.predicted.sent_bytes}, and ranks send {[dict(each) for each in totals]}"


def main(arguments: list[str] | None = None) -> int:
    """Run the campaign; return 1 if anything was found."""
    return carry_out(__doc__ or "", lambda seed: run(draw(seed)), 200, arguments)


if __name__ == "__main__":
    sys.exit(main())
