"""Dynamic loss scale for fp16: as large as gradients allow without overflow."""

from __future__ import annotations

import logging
from dataclasses import dataclass, fields

from gemini.errors import ConfigError

logger = logging.getLogger(__name__)

# The largest power of two in fp16: it is the gradient of a loss in fp16, which 2**16 would make infinite.
INITIAL_SCALE = 2.0**15


@dataclass(frozen=True)
class LossScaleConfig:
    """``growth_interval``: clean steps before growth. ``hysteresis``: overflows in a row of bad luck that are
    forgiven less one."""

    initial_scale: float = INITIAL_SCALE
    min_scale: float = 1
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 1000
    hysteresis: int = 2
    max_scale: float = 2**32

    def __post_init__(self) -> None:
        if not 0 < self.min_scale <= self.initial_scale <= self.max_scale:
            raise ConfigError(
                f"loss scale: need 0 < min_scale ({self.min_scale}) <= initial_scale ({self.initial_scale}) "
                f"<= max_scale ({self.max_scale})"
            )
        if (
            self.growth_factor <= 1
            or not 0 < self.backoff_factor < 1
            or self.growth_interval < 1
            or self.hysteresis < 1
        ):
            raise ConfigError(
                "loss scale: growth_factor must exceed 1, backoff_factor lie in (0, 1), growth_interval and "
                "hysteresis be at least 1"
            )


def loss_scale_for(config: LossScaleConfig, defaults: LossScaleConfig, *, fp16: bool) -> LossScale | None:
    """Return what scales losses under ``fp16``, else None; say then what of ``config`` has no effect."""
    if fp16:
        return LossScale(config)
    given = [
        field.name for field in fields(config) if getattr(config, field.name) != getattr(defaults, field.name)
    ]
    if given:
        logger.warning(
            "%s of the loss scale %s no effect: losses are scaled under fp16 alone",
            ", ".join(given),
            "has" if len(given) == 1 else "have",
        )
    return None


class LossScale:
    """The scale in force; :meth:`update` it once per step with whether a gradient overflowed.

    A row of skipped steps is logged once, with their number, by the step that ends it; where the scale cannot
    back off any further, at once.
    """

    def __init__(self, config: LossScaleConfig) -> None:
        self._config = config
        self.scale = float(config.initial_scale)
        self._clean_steps = 0
        self._forgiven = config.hysteresis
        self._skipped = 0  # steps in a row
        self._scale_before = self.scale  # that row
        self._level = logging.WARNING  # of the next message
        self._told_least = False

    def update(self, overflowed: bool) -> None:
        """Back off after ``hysteresis`` overflows, grow after ``growth_interval`` clean steps."""
        config = self._config
        if overflowed:
            self._note_skipped()
            self._clean_steps = 0
            self._forgiven -= 1
            if self._forgiven <= 0:
                self.scale = max(config.min_scale, self.scale * config.backoff_factor)
            return
        self._tell_skipped()
        self._clean_steps += 1
        if self._clean_steps == config.growth_interval:
            self._clean_steps = 0
            self._forgiven = config.hysteresis
            self.scale = min(config.max_scale, self.scale * config.growth_factor)

    def _note_skipped(self) -> None:
        if not self._skipped:
            self._scale_before = self.scale
        self._skipped += 1
        if self.scale <= self._config.min_scale and self._skipped > 1 and not self._told_least:
            self._told_least = True
            logger.warning(
                "%d steps in a row were skipped: gradients overflow at the least loss scale, %g, too; they "
                "may not be finite without any: look at the loss, lower the learning rate, or min_scale",
                self._skipped,
                self.scale,
            )

    def _tell_skipped(self) -> None:
        """Log how many steps were skipped in a row that this step ends: the first row as a warning."""
        if self._skipped:
            logger.log(
                self._level,
                "%d %s skipped, in which gradients overflowed fp16: the loss scale went from %g to %g",
                self._skipped,
                "step was" if self._skipped == 1 else "steps were",
                self._scale_before,
                self.scale,
            )
            self._level = logging.INFO
        self._skipped = 0

    def state_dict(self) -> dict[str, float]:
        return {"scale": self.scale, "clean_steps": self._clean_steps, "forgiven": self._forgiven}

    def load_state_dict(self, state: dict[str, float]) -> None:
        self.scale = float(state["scale"])
        self._clean_steps = int(state["clean_steps"])
        self._forgiven = int(state["forgiven"])
