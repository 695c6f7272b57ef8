"""The memory that a job is given, as its options have it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gemini.errors import ConfigError

POLICIES = ("auto", "cpu", "cuda", "const")
PRECISIONS = ("fp32", "bf16")
ACTIVATIONS = ("keep", "offload", "plan")


@dataclass(frozen=True)
class MemoryOptions:
    """Options of every job; sizes are bytes, None leaves a budget to the runtime. ``device`` is what
    ``GeminiDDP`` takes for one."""

    device: str = "cpu"
    device_bytes: int | None = None
    host_bytes: int | None = None
    disk_dir: str | None = None
    disk_bytes: int | None = None
    non_model_bytes: int | None = None
    policy: str = "auto"
    precision: str = "fp32"
    activations: str = "keep"

    @property
    def device_kind(self) -> str:
        """Return the kind of device, of which numbers are the same: ``cpu`` or ``cuda``."""
        return self.device.partition(":")[0]

    def managed_options(self) -> dict[str, Any]:
        """Return the keywords of ``GeminiDDP`` that say the same."""
        return {
            "device": self.device,
            "placement_policy": self.policy,
            "mixed_precision": "bf16" if self.precision == "bf16" else None,
            "device_bytes": self.device_bytes,
            "host_bytes": self.host_bytes,
            "disk_dir": self.disk_dir,
            "disk_bytes": self.disk_bytes,
            "non_model_bytes": self.non_model_bytes,
            "activation_offload": False if self.activations == "keep" else "auto",
            "activation_recompute": self.activations == "plan",
        }

    def check_activations(self) -> None:
        """Raise ConfigError where ``--activations`` does not go with the other options."""
        if self.activations not in ACTIVATIONS:
            raise ConfigError(
                f"--activations is {self.activations!r}; it must be one of {', '.join(ACTIVATIONS)}"
            )
        if self.activations != "keep" and not (self.disk_dir or self.host_bytes):
            raise ConfigError(
                f"--activations {self.activations} needs a tier below DEVICE; add --disk-dir DIR, or "
                "--host-bytes"
            )
        if self.activations == "plan" and self.device_kind != "cpu":
            raise ConfigError(
                f"--activations plan is for the CPU in this release, not for --device {self.device}; use "
                "--activations offload, or --activation-checkpointing"
            )
        if self.activations != "keep" and self.policy != "auto":
            raise ConfigError(
                f"--activations {self.activations} needs --policy auto, which measures what stays on DEVICE"
            )


def make_disk_directory(path: str) -> None:
    """Make the directory of the DISK tier where there is none. Raise ConfigError where that cannot be."""
    try:
        Path(path).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"cannot make --disk-dir {path}: {error.strerror}") from error
