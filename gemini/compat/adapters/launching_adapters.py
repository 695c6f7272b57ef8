"""Launch functions with the defaults of ColossalAI's documentation: NCCL, and the same seed on all ranks."""

from __future__ import annotations

from gemini.parallel import launch as ours
from gemini.parallel.launch.launching import ConfigLike

SEED = 1024


def launch(
    config: ConfigLike = None,
    rank: int | None = None,
    world_size: int | None = None,
    host: str | None = None,
    port: int | str | None = None,
    backend: str = "nccl",
    local_rank: int | None = None,
    seed: int | None = SEED,
) -> None:
    """See :func:`gemini.parallel.launch.launch`."""
    ours.launch(config, rank, world_size, host, port, backend, local_rank, seed=seed)


def launch_from_torch(config: ConfigLike = None, backend: str = "nccl", seed: int | None = SEED) -> None:
    """See :func:`gemini.parallel.launch.launch_from_torch`."""
    ours.launch_from_torch(config, backend, seed=seed)


def launch_from_slurm(
    config: ConfigLike = None,
    host: str | None = None,
    port: int | str | None = None,
    backend: str = "nccl",
    seed: int | None = SEED,
) -> None:
    """See :func:`gemini.parallel.launch.launch_from_slurm`."""
    ours.launch_from_slurm(config, host, port, backend, seed=seed)


def launch_from_openmpi(
    config: ConfigLike = None,
    host: str | None = None,
    port: int | str | None = None,
    backend: str = "nccl",
    seed: int | None = SEED,
) -> None:
    """See :func:`gemini.parallel.launch.launch_from_openmpi`."""
    ours.launch_from_openmpi(config, host, port, backend, seed=seed)


def is_using_pp() -> bool:
    """Return whether the launched configuration uses pipeline parallelism."""
    return ours.global_context.is_initialized(ours.ParallelMode.PIPELINE)
