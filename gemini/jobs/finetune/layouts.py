"""The layout of a run's ranks, from its plan and its options, and checks whether the model can be cut for
it."""

from __future__ import annotations

import dataclasses

from torch import nn

from gemini.errors import ConfigError
from gemini.jobs.finetune.config import PARTS, FineTuneConfig
from gemini.jobs.finetune.samples import JOINED
from gemini.parallel.families import family_of
from gemini.parallel.layout import Layout
from gemini.parallel.layout_plan import LayoutChoices, refuse_uncuttable
from gemini.parallel.plan import ParallelPlan

# Options about chunks with their defaults. Below ZeRO 3 there are no chunks.
_OF_CHUNKS = {
    "device_bytes": None,
    "host_bytes": None,
    "disk_bytes": None,
    "non_model_bytes": None,
    "policy": "auto",
    "activations": "keep",
    "tiled_loss": "no",
}


def plan_of(config: FineTuneConfig) -> ParallelPlan | None:
    """Return the plan that ``config`` names, or None. Raises ConfigError."""
    return None if config.plan is None else ParallelPlan.load(config.plan)


def trains_parts(config: FineTuneConfig) -> bool:
    """Return whether ranks have parts of the model, or a plan has a ZeRO stage below 3. Otherwise ranks share
    whole models in chunks."""
    return config.num_parts > 1 or _lower_stage(config) is not None


def refuse_unread(config: FineTuneConfig) -> None:
    """Raise ConfigError for an option that has no effect with the layout of ``config``."""
    if (stage := _lower_stage(config)) is not None:
        for name, usual in _OF_CHUNKS.items():
            if getattr(config, name) != usual:
                raise ConfigError(
                    f"--{name.replace('_', '-')} needs chunks, but the plan {config.plan} has ZeRO "
                    f"{stage}, which uses none: leave it out, or search with --pin zero=3"
                )
    if config.tiled_loss == "yes" and config.tp > 1:
        raise ConfigError(
            "--tiled-loss does not go with --tp: tiles need the whole head on one rank; leave it "
            "out, or use --pp or --sp"
        )


def _lower_stage(config: FineTuneConfig) -> int | None:
    """Return the plan's ZeRO stage if it is below 3 (no chunks); otherwise None."""
    plan = plan_of(config)
    if plan is None or plan.world_size == 1 or plan.zero_stage == 3:
        return None
    return plan.zero_stage


def refuse_unfit_parts(config: FineTuneConfig, model: nn.Module) -> None:
    """Raise ConfigError if ``model``, whole and on ``meta``, cannot be cut for the ranks of ``config``."""
    sizes = {name: getattr(config, name) for name in PARTS}
    choices = LayoutChoices(Layout(**sizes))
    if (plan := plan_of(config)) is not None:
        choices = LayoutChoices(
            dataclasses.replace(plan.layout, dp=1),
            plan.sp_mode,
            plan.schedule,
            plan.stages_per_rank,
            plan.num_microbatches,
            split=plan.begins or "bytes",
        )
    refuse_uncuttable(model, choices)
    _refuse_packed_windows(config, model)


def _refuse_packed_windows(config: FineTuneConfig, model: nn.Module) -> None:
    """Raise ConfigError if rows are cut over sp, contain several documents, and layers of ``model`` have
    attention windows: the mask of documents does not support windows."""
    if config.sp == 1 or not config.packing or config.documents == JOINED:
        return
    if family_of(model).has_windows:
        raise ConfigError(
            "this model has layers with windowed attention, and over --sp these cannot keep packed "
            "documents apart; give --no-packing (one document per row), --documents joined "
            "(documents may attend to earlier ones), or --tp or --pp"
        )
