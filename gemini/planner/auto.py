"""``autoparallelize()``: plan the training of a plain model over the running ranks, and boost it for that
plan."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from gemini.errors import ConfigError
from gemini.forecast.machine import MachineSpeeds, measure_machine
from gemini.forecast.rehearsal import mean_of_outputs
from gemini.memstats.collectives import CollectiveSpeeds
from gemini.offload.async_file import checked_directory
from gemini.parallel.booster.booster import Booster
from gemini.parallel.booster.plugin.base import Criterion
from gemini.parallel.booster.plugin.hybrid import HybridParallelPlugin
from gemini.parallel.booster.ranks import Ranks, join_launched_group
from gemini.parallel.booster.sequences import own_part
from gemini.parallel.collective_speeds import measure_among
from gemini.parallel.layout import Layout
from gemini.parallel.layout_plan import Run, trainable_outline
from gemini.parallel.mesh import Mesh
from gemini.parallel.pipeline.batches import call_arguments
from gemini.parallel.plan import DTYPES, ParallelPlan
from gemini.parallel.sequence.outline import SequenceOutline
from gemini.placement.probe import probe_links
from gemini.planner.chunks import StageCapacity
from gemini.planner.plans import plan_of
from gemini.planner.search import Question, require_speeds, search
from gemini.planner.space import Pins
from gemini.runtime.config import GeminiConfig
from gemini.runtime.intercept.nested import cast_floating, map_tensors
from gemini.system.device import default_budget_bytes

_TYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_SAMPLE_SECONDS = 2.0


@dataclass(frozen=True)
class Parallelized:
    """A model that is wrapped for training by its ``plan``. ``booster`` saves and loads ``model`` and
    ``optimizer``."""

    model: nn.Module
    optimizer: Any
    criterion: Criterion
    booster: Booster
    plan: ParallelPlan

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the model."""
        return self.model(*args, **kwargs)

    @property
    def num_samples(self) -> int:
        """Number of samples that this rank gives to each step. Ranks along tp, sp and pp give the same
        samples."""
        return self.plan.num_microbatches * self.plan.microbatch_size

    @property
    def data_ranks(self) -> Ranks:
        """The ranks that divide the data."""
        return self.booster.plugin.data_ranks

    def step(self, batch: Any) -> torch.Tensor:
        """Train on ``num_samples`` samples of this rank: forward, backward and update. Return the mean loss
        over all ranks.

        Raises:
            ConfigError: there is no optimizer, or the batch cannot be cut into the plan's micro-batches.
        """
        if self.optimizer is None:
            raise ConfigError("step() updates weights: give autoparallelize() an optimizer")
        self.optimizer.zero_grad()
        done = self.booster.execute_pipeline(iter([batch]), self.model, self.criterion, self.optimizer)
        self.optimizer.step()
        loss: torch.Tensor = done["loss"]
        return loss


@dataclass(frozen=True)
class _Asked:
    """The arguments of :func:`autoparallelize`. ``config`` has the budgets; with ``machine`` None, speeds are
    measured."""

    model: nn.Module
    samples: Any
    batch: int
    loss: Criterion
    dtype: str
    machine: MachineSpeeds | None
    config: GeminiConfig
    pins: Pins

    def plan(self, world: int, speeds: CollectiveSpeeds) -> ParallelPlan:
        """Return the fastest plan for ``world`` ranks. ``speeds`` (of collectives) are used only if
        ``machine`` is None."""
        machine, seconds = self.machine, 0.0
        if machine is None:
            host = bool(self.config.host_bytes)
            links = probe_links(disk_dir=self.config.disk_dir, host=host, ranks=_ranks_here(world))
            measured = measure_machine(_TYPES[self.dtype], links)
            machine, seconds = dataclasses.replace(measured, collectives=speeds), _SAMPLE_SECONDS
        require_speeds(machine, world)
        question = Question(
            world, self.batch, machine, _capacity(self.config, world), self.pins, sample_seconds=seconds
        )
        outline = trainable_outline(self.model).to(_TYPES[self.dtype] if self.dtype != "fp32" else None)
        return plan_of(search(outline, self._run_of, question), question, self.model, self.dtype)

    def _run_of(self, samples: int) -> Run:
        def of_meta(tensor: torch.Tensor) -> torch.Tensor:
            shape = (samples, *tensor.shape[1:]) if tensor.dim() else ()
            made = torch.empty(shape, dtype=tensor.dtype, device="meta")
            return made if self.dtype == "fp32" else cast_floating(made, _TYPES[self.dtype])

        batch = map_tensors(self.samples, of_meta)

        def run_once(model: nn.Module, sequence: SequenceOutline | None) -> torch.Tensor:
            own = batch if sequence is None else own_part(sequence, batch)
            args, kwargs = call_arguments(own)
            loss: torch.Tensor = self.loss(model(*args, **kwargs), own)
            return loss

        return run_once


def _plan_of_all(read: Callable[[], _Asked]) -> ParallelPlan:
    """Return the plan. Collective: every rank calls it and gets the same plan. Only rank 0 calls ``read`` and
    searches; an error of rank 0 is raised on all ranks."""
    world = Ranks().size
    if world == 1:
        return read().plan(1, CollectiveSpeeds())
    with Mesh(Layout(tp=world)) as mesh:
        everyone = mesh.axis("tp")
        assert everyone is not None
        asked = everyone.together(lambda: read() if everyone.rank == 0 else None)
        known = everyone.say("" if asked is None or asked.machine is None else "a machine")[0]
        speeds = CollectiveSpeeds() if known else measure_among(everyone)
        plan = everyone.together(lambda: None if asked is None else asked.plan(world, speeds))
        said = everyone.say("" if plan is None else json.dumps(plan.to_json()))[0]
    return ParallelPlan.from_json(json.loads(said))


def _capacity(config: GeminiConfig, world: int) -> StageCapacity:
    """Return the bytes that each rank may use. The default of a tier is this rank's part of what is free on
    this machine."""
    here, device_bytes = _ranks_here(world), config.device_bytes
    if device_bytes is None:
        device_bytes = default_budget_bytes() // here
    disk_bytes = config.disk_bytes or 0
    if config.disk_dir is not None and config.disk_bytes is None:
        disk_bytes = shutil.disk_usage(checked_directory(config.disk_dir)).free // here
    return StageCapacity(device_bytes, config.host_bytes or 0, disk_bytes)


def _ranks_here(world: int) -> int:
    """Return the number of ranks on this machine."""
    said = os.environ.get("LOCAL_WORLD_SIZE", "")
    return int(said) if said.isdecimal() and int(said) else world


def _num_samples(samples: Any) -> int:
    found = [each for each in tree_leaves(samples) if isinstance(each, torch.Tensor) and each.dim()]
    if not found:
        raise ConfigError("samples have no tensor: give a batch as the model is called with it")
    return len(found[0])


def autoparallelize(
    model: nn.Module,
    samples: Any,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    batch: int | None = None,
    loss: Criterion = mean_of_outputs,
    dtype: str = "fp32",
    machine: MachineSpeeds | Path | str | None = None,
    device_bytes: int | str | None = None,
    host_bytes: int | str = 0,
    disk_dir: Path | str | None = None,
    disk_bytes: int | str | None = None,
    pins: Sequence[str] = (),
    **options: Any,
) -> Parallelized:
    """Find the fastest way to train ``model`` over the running ranks, and boost it for that plan. Collective:
    all ranks call this and get the same plan; a single process counts as one rank::

        trained = gemini.autoparallelize(model, batch, torch.optim.AdamW(model.parameters()), batch=32)
        for batch in loader:            # of trained.num_samples samples on each rank that divides the data
            loss = trained.step(batch)

    Args:
        samples: a batch as :meth:`Booster.execute_pipeline` takes it, of one or more samples, on any device.
            Only its shapes and types matter.
        batch: number of samples in a step of all ranks; None: the number in ``samples``.
        loss: called with ``(outputs, micro_batch)``, returns the mean loss of a micro-batch. Default: the
            model's own loss.
        dtype: type in which operators compute: ``"fp32"`` (parameters keep their type), ``"bf16"`` or
            ``"fp16"``.
        machine: speeds of the machine, or the file that has them (docs/plan.md). None: they are measured now,
            collectives among the running ranks.
        device_bytes, host_bytes, disk_dir, disk_bytes: budget of each rank on each tier. ``device_bytes``
            None: one rank's part of what is free on this machine.
        pins: settings that the plan must have, such as ``["tp=2", "zero=3"]``: see ``gemini plan --pin``.
        options: keywords of HybridParallelPlugin that a plan does not set, such as ``max_norm``.

    Raises:
        ConfigError: the pins exclude every plan, or the model cannot be planned. Ranks other than 0 raise it
            for every failure.
        OutOfBudgetError: no plan fits. The message names budgets that are enough. Only rank 0 raises it.
    """
    join_launched_group()

    def read() -> _Asked:
        if dtype not in DTYPES:
            raise ConfigError(f"dtype is {dtype!r}; it may be {', '.join(DTYPES)}")
        num_samples = _num_samples(samples) if batch is None else batch
        if type(num_samples) is not int or num_samples < 1:
            raise ConfigError(f"batch is {num_samples!r}; give the number of samples in a step of all ranks")
        speeds = MachineSpeeds.load(Path(machine)) if isinstance(machine, (str, Path)) else machine
        config = GeminiConfig.from_options(
            device_bytes=device_bytes, host_bytes=host_bytes, disk_dir=disk_dir, disk_bytes=disk_bytes
        )
        return _Asked(model, samples, num_samples, loss, dtype, speeds, config, Pins.parse(pins))

    plan = _plan_of_all(read)
    if plan.budgets.disk_bytes:
        options = {"disk_dir": disk_dir, **options}
    booster = Booster(plugin=HybridParallelPlugin(plan=plan, **options))
    boosted, updating, criterion, *_ = booster.boost(model, optimizer, loss)
    return Parallelized(boosted, updating, criterion, booster, plan)
