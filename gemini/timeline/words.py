"""What people read for the short names of the code."""

from __future__ import annotations

from collections.abc import Mapping

from gemini.timeline.summary import StepSummary

LINK_TITLES: Mapping[str, str] = {
    "h2d": "HOST to DEVICE",
    "d2h": "DEVICE to HOST",
    "disk_read": "read from DISK",
    "disk_write": "write to DISK",
}
PART_TITLES: Mapping[str, str] = {
    "forward": "computing: forward",
    "backward": "computing: backward",
    "optimizer": "computing: optimizer",
    **{link: f"waiting: {title}" for link, title in LINK_TITLES.items()},
    "memory": "waiting: memory being mapped",
    "runtime": "the runtime itself",
}


def parts(step: StepSummary) -> dict[str, float]:
    """Return the seconds of a step by what they went into; they add up to its length."""
    unexplained = step.wait_seconds - sum(step.wait_by_link.values())
    found = {
        **step.compute_seconds,
        **step.wait_by_link,
        "memory": max(0.0, unexplained),
        "runtime": step.runtime_seconds,
    }
    return {name: found[name] for name in PART_TITLES if found.get(name, 0.0) > 0}


def seconds_text(seconds: float) -> str:
    """Return a duration with three digits or so: ``1.93 s``, ``12.4 ms``, ``85 us``."""
    if seconds >= 1:
        return f"{seconds:.2f} s"
    if seconds >= 1e-3:
        return f"{seconds * 1e3:.1f} ms"
    return f"{seconds * 1e6:.0f} us"
