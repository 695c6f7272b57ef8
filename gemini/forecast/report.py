"""Report: a forecast as plain data, for people and for scripts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from gemini.errors import OutOfBudgetError
from gemini.forecast.forecast import (
    BatchForecast,
    Settings,
    StepTime,
    forecast_batch,
    largest_batch,
    samples_to_compute_bound,
    time_step,
)
from gemini.forecast.machine import DTYPE_NAMES
from gemini.forecast.rehearsal import ModelSource
from gemini.runtime.intercept.precision import BYTES

SECONDS_PER_DAY = 86400


@dataclass(frozen=True)
class Wear:
    """The bytes that a step writes to a drive with an endurance of ``tbw_bytes``, and how many steps and days
    it lasts."""

    step_bytes: int
    tbw_bytes: int
    steps: float
    days: float


@dataclass(frozen=True)
class Report:
    """The output of ``gemini plan``. ``step`` is None if the model does not fit; ``largest_batch`` is 0 if no
    batch does."""

    source: ModelSource
    settings: Settings
    forecast: BatchForecast
    step: StepTime | None
    obstacles: tuple[str, ...]
    largest_batch: int
    wear: Wear | None

    @property
    def fits(self) -> bool:
        """Whether a step can run within the budgets."""
        return not self.obstacles

    @property
    def units_per_step(self) -> int:
        """Tokens, or samples, of one optimizer step."""
        return self.settings.batch * self.settings.accumulation * self.source.tokens

    @property
    def units_to_compute_bound(self) -> int | None:
        """Tokens, or samples, with which one forward pass hides its transfers; None if there are no
        transfers."""
        if self.step is None:
            return None
        samples = samples_to_compute_bound(self.step, self.settings.batch)
        return None if samples is None else samples * self.source.tokens

    @property
    def num_parameters(self) -> int:
        """Number of elements of all parameters that are not quantized; tied ones count once."""
        groups = self.forecast.blueprint.groups
        return sum(spec.layout.used_numel for spec in groups if spec.dtype is not BYTES)

    @property
    def quantized_bytes(self) -> int:
        """Bytes of 4-bit and 8-bit weights with their scales."""
        groups = self.forecast.blueprint.groups
        return sum(spec.layout.used_numel for spec in groups if spec.dtype is BYTES)

    @property
    def budgets(self) -> dict[str, int]:
        """Byte limit of each tier; 0 for an unused tier."""
        capacity = self.forecast.blueprint.context.capacity
        return {"device": capacity.device_bytes, "host": capacity.host_bytes, "disk": capacity.disk_bytes}

    @property
    def notes(self) -> tuple[str, ...]:
        """Decisions made for the user, one line each."""
        if self.source.spans is None:
            return self.source.notes
        few, more, most = self.source.spans
        return (
            *self.source.notes,
            f"It runs token by token: steps of {few}, {more} and {most} {self.source.unit} were rehearsed, "
            f"and memory and times extrapolated to {self.source.tokens:,}.",
        )

    def code(self) -> str:
        """Return the Python lines that build the forecast model."""
        config, accumulation = self.settings.config, self.settings.accumulation
        options = []
        if config.precision is not None:
            options.append(f"mixed_precision={DTYPE_NAMES[config.precision]!r}")
        capacity = self.forecast.blueprint.context.capacity
        options.append(f"device_bytes={capacity.device_bytes}")
        if capacity.host_bytes:
            options.append(f"host_bytes={capacity.host_bytes}")
        if capacity.disk_bytes:
            options += [f"disk_dir={config.disk_dir!r}", f"disk_bytes={capacity.disk_bytes}"]
        clip = "max_norm=1.0" if self.settings.clips_norm else ""
        lines = [
            f"model = gemini.GeminiDDP(module, {', '.join(options)})",
            f"optimizer = gemini.GeminiAdamOptimizer(model, lr=1e-4{', ' + clip if clip else ''})",
        ]
        if accumulation > 1:
            lines.append(
                f"# {accumulation} times forward and optimizer.backward(loss), then optimizer.step()"
            )
        return "\n".join(lines)

    def to_dict(self) -> dict[str, Any]:
        """Return the report for ``--json``; sizes in bytes, times in seconds."""
        context = self.forecast.blueprint.context
        trace = self.forecast.rehearsal.trace
        return {
            "model": self.source.name,
            "machine": self.settings.machine.name,
            "parameters": self.num_parameters,
            "quantized_bytes": self.quantized_bytes,
            "batch": self.settings.batch,
            "accumulation": self.settings.accumulation,
            "unit": self.source.unit,
            "units_per_step": self.units_per_step,
            "fits": self.fits,
            "obstacles": list(self.obstacles),
            "largest_batch": self.largest_batch,
            "model_data_bytes": context.size.total_bytes,
            "non_model_bytes": self.forecast.non_model_bytes,
            "budgets": self.budgets,
            "moments": trace.num_moments,
            "chunks": len(trace.chunk_bytes),
            "notes": list(self.notes),
            "extrapolated_from": None if self.source.spans is None else list(self.source.spans),
            "guessed_values": self.forecast.rehearsal.num_guesses,
            "step": _step_dict(self.step),
            "units_to_compute_bound": self.units_to_compute_bound,
            "wear": None if self.wear is None else vars(self.wear),
            "code": self.code(),
        }


def make_report(source: ModelSource, settings: Settings, *, tbw_bytes: int) -> Report:
    """Forecast a step of ``source`` under ``settings``.

    Raises:
        ConfigError: the model cannot be built or managed without values.
    """
    forecast = forecast_batch(source, settings, settings.batch)
    obstacles, step = list(forecast.obstacles), None
    if not obstacles:
        try:
            step = time_step(forecast, settings)
        except OutOfBudgetError as error:
            obstacles.append(str(error))
    source = forecast.source
    largest = largest_batch(source, settings, forecast)
    if obstacles and largest:
        obstacles[-1] += f"; batch {largest} fits"
    return Report(source, settings, forecast, step, tuple(obstacles), largest, _wear(step, tbw_bytes))


def _wear(step: StepTime | None, tbw_bytes: int) -> Wear | None:
    written = 0 if step is None else step.plan.simulation.link_bytes.get("disk_write", 0)
    if step is None or not written:
        return None
    steps = tbw_bytes / written
    return Wear(written, tbw_bytes, steps, steps * step.seconds / SECONDS_PER_DAY)


def _step_dict(step: StepTime | None) -> dict[str, Any] | None:
    if step is None:
        return None
    simulation = step.plan.simulation
    return {
        "seconds": step.seconds,
        "busy_seconds": step.busy_seconds,
        "bound": step.bound,
        "stall_seconds": sum(simulation.stall_seconds),
        "peak_bytes": dict(simulation.peak_bytes),
        "link_bytes": dict(simulation.link_bytes),
        "plan": step.plan.name,
        "candidates": dict(step.plan.candidates),
        "bound_seconds": step.plan.bound_seconds,
        "sampled_share": step.sampled_share,
    }
