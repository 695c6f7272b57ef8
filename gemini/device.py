"""What the computing device is and how much memory the process may use. Leaf: the only runtime file that
knows."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import torch

from gemini.errors import ConfigError

# Left to the interpreter, the page cache and other processes when no budget is given.
FREE_MARGIN = 0.10

_CGROUP_FILES = (
    (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")),
    (
        Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"),
        Path("/sys/fs/cgroup/memory/memory.usage_in_bytes"),
    ),
)


def resolve_device(device: torch.device | str | int | None) -> torch.device:
    """Return the computing device: the CPU in this release.

    Raises:
        ConfigError: for a CUDA device, which this release cannot manage yet.
    """
    if device is None:
        return torch.device("cpu")
    resolved = torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
    if resolved.type != "cpu":
        raise ConfigError(
            f"device {str(resolved)!r} is not supported in this release: DEVICE is CPU memory; "
            "pass device='cpu' or leave it out"
        )
    return resolved


def free_memory_bytes() -> int:
    """Return the bytes this process could still take: the machine's, or the control group's if that is
    less."""
    free = int(psutil.virtual_memory().available)
    for limit_file, usage_file in _CGROUP_FILES:
        try:
            limit, usage = limit_file.read_text().strip(), usage_file.read_text().strip()
        except OSError:
            continue
        if limit.isdigit() and usage.isdigit():
            free = min(free, max(0, int(limit) - int(usage)))
    return free


def default_budget_bytes() -> int:
    """Return the DEVICE budget used when none is given: free memory less a margin."""
    return int(free_memory_bytes() * (1.0 - FREE_MARGIN))


def cuda_available() -> bool:
    """Say whether torch can use a CUDA GPU in this process."""
    return torch.cuda.is_available()


def current_device() -> torch.device:
    """Return the current GPU, or the CPU where there is none."""
    return torch.device("cuda", torch.cuda.current_device()) if cuda_available() else torch.device("cpu")


def select_device(index: int) -> None:
    """Make GPU ``index`` the current one, so that processes of one machine take one each; does nothing
    without a GPU."""
    if cuda_available():
        torch.cuda.set_device(index % torch.cuda.device_count())


def cuda_name(device: torch.device) -> str:
    """Return what a CUDA device calls itself."""
    return torch.cuda.get_device_name(device)


def cuda_memory_bytes(device: torch.device) -> tuple[int, int]:
    """Return the free and the total bytes of a CUDA device."""
    free, total = torch.cuda.mem_get_info(device)
    return int(free), int(total)


def synchronize(device: torch.device) -> None:
    """Wait until a CUDA device has done everything it was given."""
    torch.cuda.synchronize(device)


@contextmanager
def launching(device: torch.device) -> Iterator[int]:
    """Make a CUDA device the current one inside; yields the address of its current stream."""
    with torch.cuda.device(device):
        yield torch.cuda.current_stream(device).cuda_stream
