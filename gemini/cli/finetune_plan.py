"""What ``gemini finetune`` says before it loads anything: does it fit, what is where, how long is a step."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from torch import nn

from gemini.chunk.manager import lacking_space
from gemini.cli.plan import settings_from
from gemini.cli.plan_hugging_face import hugging_face
from gemini.cli.train import with_options
from gemini.errors import ConfigError, GeminiError, OutOfBudgetError
from gemini.forecast.forecast import Outlook, Settings, look, time_step
from gemini.forecast.rehearsal import ModelSource
from gemini.jobs.finetune.config import FineTuneConfig
from gemini.jobs.finetune.engine import adapter_errors, adapter_of
from gemini.system.config import format_bytes

_SAMPLE_SECONDS = 1.0
_TIERS = ("device", "host", "disk")


def forecast_lines(config: FineTuneConfig, seq: int) -> Iterator[str]:
    """Yield what planning says of a run with rows of ``seq`` tokens, a line each.

    It asks nothing and refuses nothing: where it cannot say anything, it says why.
    """
    try:
        yield from _lines(config, seq)
    except GeminiError as error:
        yield f"plan: none ({error})"


def _lines(config: FineTuneConfig, seq: int) -> Iterator[str]:
    source, settings = _source(config, seq), _settings(config)
    outlook = look(source, settings, config.batch)
    size = outlook.blueprint.context.size.total_bytes
    needs = (
        f"{format_bytes(size)} of model data, {format_bytes(outlook.non_model_bytes)} of activations at most"
    )
    smaller = (
        "" if config.state_dtype == "fp32" else f"; planned with fp32 states, {config.state_dtype} take less"
    )
    if _is_refused(outlook, settings):
        yield f"plan: it {'may' if smaller else 'does'} not fit: {needs}{smaller}"
        if not smaller:
            return  # loading says why
    elif outlook.obstacles and config.activations == "keep":
        yield f"plan: activations will exceed the budget: {needs}{smaller}"
    elif outlook.obstacles:
        yield f"plan: activations are too large to stay, so --activations {config.activations} acts: {needs}"
    if outlook.obstacles:
        for obstacle in outlook.obstacles:
            yield f"plan: {with_options(obstacle).replace('--checkpointing', '--activation-checkpointing')}"
        return
    yield f"plan: it fits: {needs}{smaller}"
    step = time_step(outlook, settings)
    simulation, capacity = step.plan.simulation, outlook.blueprint.context.capacity
    budgets = (capacity.device_bytes, capacity.host_bytes, capacity.disk_bytes)
    kept = [
        f"{name.upper()} {format_bytes(simulation.peak_bytes.get(name, 0))} of {format_bytes(budget)}"
        for name, budget in zip(_TIERS, budgets, strict=True)
        if budget
    ]
    tokens = config.batch * config.accumulate * seq
    writes = simulation.link_bytes.get("disk_write", 0)
    yield (
        f"plan: at most {', '.join(kept)}; about {step.seconds:.3g} s a step, {tokens / step.seconds:,.0f} "
        f"tokens/s, bound by {step.bound}; {format_bytes(writes)} written to DISK a step"
    )


def _is_refused(outlook: Outlook, settings: Settings) -> bool:
    """Return whether the model data does not fit, so that nothing will be loaded."""
    blueprint = outlook.blueprint
    try:
        blueprint.refuse_misfit()
    except OutOfBudgetError:
        return True
    if not settings.disk_is_here:
        return False
    return lacking_space(blueprint.budgets, blueprint.context.size.total_bytes) is not None


def _source(config: FineTuneConfig, seq: int) -> ModelSource:
    adapter = adapter_of(config)

    def adapted(module: nn.Module) -> nn.Module:
        if adapter is None:
            return module
        import peft

        with adapter_errors(config):
            outer: nn.Module = peft.get_peft_model(module, adapter)
        return outer

    return hugging_face(
        Path(config.model) / "config.json",
        seq,
        seq_is_asked=True,
        checkpointing=config.activation_checkpointing,
        adapted=adapted,
    )


def _settings(config: FineTuneConfig) -> Settings:
    options = argparse.Namespace(
        machine=None,
        dtype=config.precision,
        disk_dir=config.disk_dir,
        host_bytes=config.host_bytes,
        device_bytes=config.device_bytes,
        disk_bytes=config.disk_bytes,
        batch=config.batch,
        accumulation=config.accumulate,
        no_clipping=not config.clip,
    )
    if config.device_kind != "cpu":
        raise ConfigError(f"steps on {config.device} are not planned ahead: the first one is measured")
    settings: Settings = settings_from(options)
    return replace(settings, sample_seconds=_SAMPLE_SECONDS)
