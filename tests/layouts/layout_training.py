"""Trains a case: with plain torch in one process, and in its layouts over the ranks of a process group."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from layout_cases import SAVED_AT, STEPS, Case, Layout
from layout_models import (
    OWN_PLAN,
    SUBJECTS,
    batch_of,
    block_names,
    built,
    labels_in,
    loss_of,
    parameter_bytes,
)
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import gemini
from gemini import GeminiDDP, GeminiError, GeminiOptimizer, checkpoint
from gemini.parallel import (
    Booster,
    GeminiPlugin,
    HybridParallelPlugin,
    LowLevelZeroPlugin,
    ParallelPlan,
    TorchDDPPlugin,
    TorchFSDPPlugin,
)

Batch = dict[str, Tensor]
_EVALUATED = 900  # the number of the batch that is evaluated
_CHUNKS = {"min_chunk_size_mb": 0.004, "search_range_mb": 0.004, "non_model_bytes": 0}
ADAM = {"lr": 1e-2, "eps": 1e-3, "weight_decay": 0.01}  # an eps that does not magnify rounding
_RULES: dict[str, tuple[Callable[..., torch.optim.Optimizer], dict[str, Any]]] = {
    "AdamW": (torch.optim.AdamW, ADAM),
    "HybridAdam": (gemini.HybridAdam, ADAM),
    "CPUAdam": (gemini.CPUAdam, ADAM),
    "SGD": (torch.optim.SGD, {"lr": 0.05, "momentum": 0.9}),
    "Adagrad": (torch.optim.Adagrad, {"lr": 1e-2, "eps": 1e-3}),
    "RMSprop": (torch.optim.RMSprop, {"lr": 1e-3, "eps": 1e-3}),
}
ADAM_RULES = ("AdamW", "HybridAdam", "CPUAdam")
# Ours have torch's numbers, up to rounding.
_PLAIN = {"HybridAdam": "AdamW", "CPUAdam": "AdamW"}


@dataclass
class Trained:
    """What a training showed: by step the loss and the norm before clipping; what evaluations and generation
    gave, the weights behind the last step; ``refused``: the error that ended it."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    evaluated: list[float] = field(default_factory=list)
    generated: list[list[int]] = field(default_factory=list)
    weights: dict[str, Tensor] = field(default_factory=dict)
    refused: str = ""


def layout_of(case: Case, step: int) -> Layout:
    """Return the layout that trains a step."""
    return case.layouts[0 if step < SAVED_AT else -1]


@lru_cache(maxsize=16)
def _shares(case: Case, layout: Layout, step: int, part: int = 0) -> list[list[Batch]]:
    """Return the micro-batches of each rank of data parallelism, of one batch of a step."""
    rows = [case.rows * layout.microbatches + (case.skewed and rank % 2) for rank in range(layout.dp)]
    length = case.lengths[step % STEPS]
    seed = 1000 * case.seed + 2 * step + part
    whole = batch_of(case.subject, seed, sum(rows), length, case.padding, case.ignores)
    cut = {name: value.split(rows) for name, value in whole.items()}
    of_ranks = [{name: value[rank] for name, value in cut.items()} for rank in range(layout.dp)]
    return [
        [
            {name: value.chunk(layout.microbatches)[micro] for name, value in batch.items()}
            for micro in range(layout.microbatches)
        ]
        for batch in of_ranks
    ]


@lru_cache(maxsize=16)
def _whole(case: Case, layout: Layout, step: int, part: int, number: int) -> Batch:
    """Return the micro-batches of a rank as one batch."""
    batches = _shares(case, layout, step, part)[number]
    return {name: torch.cat([batch[name] for batch in batches]) for name in batches[0]}


def make_batches(case: Case, layout: Layout) -> None:
    """Make what all ranks are given, so that no step does."""
    for step in range(STEPS):
        for number in range(layout.dp):
            _whole(case, layout, step, 0, number)


def _optimizer(case: Case, model: nn.Module, rule: str) -> torch.optim.Optimizer:
    make, options = _RULES[rule]
    trained = [param for param in model.parameters() if param.requires_grad]
    if not case.grouped:
        return make(trained, **options)
    vectors = {"params": [param for param in trained if param.dim() < 2], "lr": options["lr"] / 2}
    if "weight_decay" in options:
        vectors["weight_decay"] = 0.0
    matrices = {"params": [param for param in trained if param.dim() > 1]}
    return make([group for group in (matrices, vectors) if group["params"]], **options)


def _scheduler(case: Case, optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.7) if case.scheduled else None


def model_of(case: Case, seed: int = 13) -> nn.Module:
    return built(case.subject, tied=case.tied, lora=case.lora, frozen=case.frozen, seed=seed)


def _prompt(case: Case) -> Tensor:
    return batch_of(case.subject, 1000 * case.seed + 901, 2, 5, "", False)["input_ids"]


def _generate(case: Case, model: Any) -> list[int]:
    with torch.no_grad():
        ids = model.generate(input_ids=_prompt(case), max_new_tokens=3, min_new_tokens=3, do_sample=False)
    return [int(each) for each in ids.flatten()]


def can_generate(case: Case, layout: Layout) -> bool:
    """Stages, and parts of sequences, have no model to generate with."""
    of_parts = {"pp_size", "sp_size", "sequence_parallel_norms"}
    return case.generates and not of_parts & {*layout.size, *dict(layout.options)}


# -- one process, plain torch --------------------------------------------------------------------------


def train_plain(case: Case, dtype: torch.dtype = torch.float32) -> Trained:
    """Train on all micro-batches of all ranks, one after another."""
    model, found = model_of(case).to(dtype), Trained()
    trained = [param for param in model.parameters() if param.requires_grad]
    optimizer = _optimizer(case, model, _PLAIN.get(case.rule, case.rule))
    scheduler = _scheduler(case, optimizer)
    for step in range(STEPS):
        layout, losses = layout_of(case, step), []
        for part in range(case.accumulate):
            losses.append(_plain_loss(case, layout, model, step, part))
            losses[-1].backward()
        found.losses.append(losses[-1].item())
        found.norms.append(float(nn.utils.clip_grad_norm_(trained, case.max_norm)))
        optimizer.step()
        optimizer.zero_grad()
        if scheduler is not None:
            scheduler.step()
        if step % 2 == 0:
            model.eval()
            if case.evaluates:
                with torch.no_grad():
                    found.evaluated.append(_plain_loss(case, layout, model, _EVALUATED, 0).item())
            if can_generate(case, layout):
                found.generated.append(_generate(case, model))
            model.train()
    found.weights = {name: value.detach().clone() for name, value in model.state_dict().items()}
    return found


def _plain_loss(case: Case, layout: Layout, model: nn.Module, step: int, part: int) -> Tensor:
    shares = _shares(case, layout, step, part)
    dtype = next(model.parameters()).dtype

    def loss(batch: Batch) -> Tensor:
        cast = {name: x.to(dtype) if x.is_floating_point() else x for name, x in batch.items()}
        return loss_of(model(**cast), batch)

    losses = [[loss(batch) for batch in share] for share in shares]
    weights = torch.tensor(_weights(case, layout, shares))
    return (torch.stack([torch.stack(each) for each in losses]) * weights).sum() / weights.sum()


def _weights(case: Case, layout: Layout, shares: list[list[Batch]]) -> list[list[float]]:
    """Return by what the loss of each rank's micro-batches counts. Ranks with parts of sequences make the
    loss of a micro-batch the mean over its labels on all ranks."""
    if layout.program == "hybrid" and (case.counted or "sp_size" in layout.size):
        counts = [[labels_in(case.subject, batch, shifted=False) for batch in share] for share in shares]
        if case.counted:
            return counts
        totals = [sum(column) for column in zip(*counts, strict=True)]
        return [[count / total for count, total in zip(row, totals, strict=True)] for row in counts]
    return [[1.0] * len(share) for share in shares]


# -- over ranks ----------------------------------------------------------------------------------------


def train_on_ranks(case: Case, directory: str) -> Trained:
    """Train over the ranks of the default group; the first one returns the weights."""
    found, place = Trained(), Path(directory)
    try:
        for number, layout in enumerate(case.layouts):
            with ExitStack() as closing:
                run = Run(case, layout, place, closing, number)
                if number:
                    run.load()
                ends = STEPS if number + 1 == len(case.layouts) else SAVED_AT
                for step in range(SAVED_AT if number else 0, ends):
                    run.step(step, found)
                run.save(last=ends == STEPS)
                if ends == STEPS:
                    found.weights = run.weights()
    except GeminiError as error:
        found.refused = f"{type(error).__name__}: {error}"
    return found


class Run:
    """Some steps of a case in one of its layouts. ``closing`` gives back what it holds."""

    def __init__(self, case: Case, layout: Layout, place: Path, closing: ExitStack, number: int) -> None:
        self.case, self.layout, self._place = case, layout, place
        model = model_of(case, seed=13 + number)
        recompute = _recomputed(model, layout)
        optimizer = _optimizer(case, model, case.rule)
        self._scheduler = _scheduler(case, optimizer)
        options = {**budgets(case, layout, place), **dict(layout.options)}
        if copies := options.pop("copies", 0):
            shape = (copies, dist.get_world_size() // copies)
            options["process_group"] = init_device_mesh("cpu", shape, mesh_dim_names=("copy", "part"))
        if layout.program == "wrapper":
            self.model: Any = GeminiDDP(model, mixed_precision=case.precision or None, **options)
            closing.callback(self.model.close)
            self.optimizer: Any = GeminiOptimizer(optimizer, self.model, max_norm=case.max_norm)
            self.number, self.booster = dist.get_rank(), None
            return
        plugin = _plugin(case, layout, options, recompute)
        self.booster = Booster(case.precision or None, plugin)
        closing.callback(_leave, plugin)
        boosted = self.booster.boost(model, optimizer, lr_scheduler=self._scheduler)
        self.model, self.optimizer, _, _, self._scheduler = boosted
        if isinstance(self.model, GeminiDDP):
            closing.callback(self.model.close)
        self.number = plugin.data_ranks.number

    def step(self, step: int, found: Trained) -> None:
        case = self.case
        for part in range(case.accumulate):
            waits = case.no_sync and part + 1 < case.accumulate
            with self._no_sync() if waits else nullcontext():
                loss = self.run_batch(step, part, trains=True)
        self.update(loss, found)
        if step % 2 == 0:
            self.model.eval()
            if case.evaluates:
                found.evaluated.append(self.run_batch(_EVALUATED, 0, trains=False))
            if can_generate(case, self.layout):
                found.generated.append(_generate(case, self.model.module))
            self.model.train()

    def update(self, loss: float, found: Trained) -> None:
        """Update the weights behind a step of this ``loss``."""
        case = self.case
        if self.layout.program in ("ddp", "fsdp"):
            self.optimizer.clip_grad_by_norm(case.max_norm)
        self.optimizer.step()
        self.optimizer.zero_grad()
        if self._scheduler is not None:
            self._scheduler.step()
        found.losses.append(loss)
        found.norms.append(float(self.optimizer.get_grad_norm()))

    def _no_sync(self) -> Any:
        return (
            self.model.no_sync() if self.booster is None else self.booster.no_sync(self.model, self.optimizer)
        )

    def run_batch(self, step: int, part: int, *, trains: bool) -> float:
        """Return the mean loss over the ranks of one batch; where it ``trains``, gradients are added."""
        case, layout = self.case, self.layout
        whole = _whole(case, layout, step, part, self.number)
        if layout.program == "hybrid":
            shifted = "sp_size" in layout.size
            done = self.booster.execute_pipeline(
                iter([whole]),
                self.model,
                loss_of,
                self.optimizer if trains else None,
                count=(lambda batch: labels_in(case.subject, batch, shifted=shifted))
                if case.counted
                else None,
            )
            return float(done["loss"])
        with nullcontext() if trains else torch.no_grad():
            loss = loss_of(self.model(**whole), whole)
        if trains:
            self.optimizer.backward(loss)
        mean = loss.detach().double()
        dist.all_reduce(mean)
        return float(mean) / dist.get_world_size()

    def save(self, *, last: bool) -> None:
        where = self._place / ("last" if last else "saved")
        if self.booster is None:
            checkpoint.save(where, self.model, self.optimizer, scheduler=self._scheduler)
            return
        where.mkdir(exist_ok=True)
        self.booster.save_model(self.model, where / "model", shard=not last and self.case.shard)
        self.booster.save_optimizer(self.optimizer, where / "optimizer", shard=self.case.shard)
        if self._scheduler is not None:
            self.booster.save_lr_scheduler(self._scheduler, where / "scheduler")

    def load(self) -> None:
        where = self._place / "saved"
        if self.booster is None:
            checkpoint.load(where, self.model, self.optimizer, scheduler=self._scheduler)
            return
        self.booster.load_model(self.model, where / "model")
        self.booster.load_optimizer(self.optimizer, where / "optimizer")
        if self._scheduler is not None:
            self.booster.load_lr_scheduler(self._scheduler, where / "scheduler")

    def weights(self) -> dict[str, Tensor]:
        """Return the whole weights on the first rank."""
        if self.booster is None:
            state = {name: value.detach().clone() for name, value in self.model.state_dict().items()}
        else:
            from safetensors.torch import load_file

            state = load_file(self._place / "last" / "model")
        return state if dist.get_rank() == 0 else {}


def _plugin(case: Case, layout: Layout, options: dict[str, Any], recompute: list[Any]) -> Any:
    if layout.program == "ddp":
        return TorchDDPPlugin()
    if layout.program == "fsdp":
        return TorchFSDPPlugin()
    options["max_norm"] = case.max_norm
    if layout.program == "gemini":
        return GeminiPlugin(**options)
    if layout.program == "zero":
        return LowLevelZeroPlugin(**options)
    if layout.plan:
        return HybridParallelPlugin(plan=Path(layout.plan), **options)
    if SUBJECTS[case.subject].is_own and "tp_size" in layout.size:
        options["tp_plan"] = OWN_PLAN
    return HybridParallelPlugin(
        **layout.size, num_microbatches=layout.microbatches, recompute=recompute, **options
    )


def _leave(plugin: Any) -> None:
    """Tell the others of a grid that this rank makes no more calls, as a program's end does."""
    mesh = getattr(plugin, "mesh", None)
    if mesh is not None:
        mesh.leave("ended the case")


def budgets(case: Case, layout: Layout, place: Path) -> dict[str, Any]:
    """Return the options of chunks: small ones, and what DEVICE and HOST may hold of this rank's part; of a
    plan the directory of DISK alone."""
    if layout.plan:
        place.mkdir(exist_ok=True, parents=True)
        return {"disk_dir": str(place)} if ParallelPlan.load(layout.plan).budgets.disk_bytes else {}
    stage = dict(layout.options).get("zero_stage", 3)
    if layout.program in ("zero", "ddp", "fsdp") or stage != 3:
        return {}
    options: dict[str, Any] = dict(_CHUNKS)
    if layout.device:
        part = 4 * parameter_bytes(case.subject) / case.world
        options["device_bytes"] = int(_working_set(case) + layout.device * part)
    if layout.host:
        options["host_bytes"] = layout.host
    if layout.disk:
        options["disk_dir"] = str(place / "tier")
        (place / "tier").mkdir(exist_ok=True, parents=True)
    return options


def _working_set(case: Case) -> int:
    """Return what the largest operator and the largest update need at once, over ranks too."""
    return 8 * max(param.numel() * 4 for param in model_of(case).parameters()) + 2**16


def _recomputed(model: Any, layout: Layout) -> list[Any]:
    """Return what the plugin recomputes; the model does so itself where the layout says that."""
    names = block_names(model)
    if layout.recompute == "model" and hasattr(model, "activation_checkpointing_enable"):
        model.activation_checkpointing_enable({"use_reentrant": False})
    if layout.recompute == "blocks":
        return names[::2]
    return [tuple(names[:2])] if layout.recompute == "group" else []


# -- comparison ----------------------------------------------------------------------------------------

LOSS_TOLERANCE, NORM_TOLERANCE, WEIGHT_TOLERANCE = 1e-5, 1e-5, 2e-5
_BF16_TOLERANCE = 0.1


def differences(case: Case, want: Trained, got: Trained) -> dict[str, float]:
    """Return how far apart two trainings are, at most: relative for losses and norms, absolute for weights;
    tokens that are not equal count 1. What is missing is infinitely far."""
    found = {"loss": _apart(want.losses, got.losses), "norm": _apart(want.norms, got.norms)}
    found["evaluation"] = _apart(want.evaluated, got.evaluated)
    found["tokens"] = float(want.generated != got.generated)
    for name, value in got.weights.items():
        gap = float((value.float() - want.weights[name].float()).abs().max())
        found["weights"] = max(found.get("weights", 0.0), math.inf if math.isnan(gap) else gap)
    return found


def _apart(want: list[float], got: list[float]) -> float:
    if len(want) != len(got):
        return math.inf
    gaps = [abs(one - two) / max(abs(one), 1e-3) for one, two in zip(want, got, strict=True)]
    return math.inf if any(map(math.isnan, gaps)) else max(gaps, default=0.0)


def too_far(case: Case, apart: dict[str, float], rounding: dict[str, float] | None = None) -> Iterator[str]:
    """Yield what differs by more than a limit, and by more than ten times the ``rounding`` of plain training
    where that is known. In 16 bits losses alone are compared."""
    if case.precision:
        limits = {"loss": _BF16_TOLERANCE, "evaluation": _BF16_TOLERANCE}
    else:
        limits = {
            "loss": LOSS_TOLERANCE,
            "evaluation": LOSS_TOLERANCE,
            "norm": NORM_TOLERANCE,
            "weights": WEIGHT_TOLERANCE,
            "tokens": 0.0,
        }
    for name, limit in limits.items():
        if apart.get(name, 0.0) > max(limit, 10 * (rounding or {}).get(name, 0.0)):
            yield f"{name} differs by {apart[name]:.2e}"
