"""Launch: join the processes of a run, read its configuration, and create its groups (docs/compat.md)."""

from gemini.parallel.launch.config import Config
from gemini.parallel.launch.context import global_context
from gemini.parallel.launch.coordinator import DistCoordinator, print_rank_0, priority_execution
from gemini.parallel.launch.group_kinds import ParallelMode
from gemini.parallel.launch.launching import (
    get_default_parser,
    launch,
    launch_from_openmpi,
    launch_from_slurm,
    launch_from_torch,
    shutdown,
    spawn,
)
from gemini.parallel.launch.log import DistributedLogger, disable_existing_loggers, get_dist_logger
from gemini.parallel.launch.registry import (
    DIST_GROUP_INITIALIZER,
    GRADIENT_HANDLER,
    INITIALIZER_MAPPING,
    LAYERS,
    MODELS,
    ProcessGroupInitializer,
)

__all__ = [
    "DIST_GROUP_INITIALIZER",
    "GRADIENT_HANDLER",
    "INITIALIZER_MAPPING",
    "LAYERS",
    "MODELS",
    "Config",
    "DistCoordinator",
    "DistributedLogger",
    "ParallelMode",
    "ProcessGroupInitializer",
    "disable_existing_loggers",
    "get_default_parser",
    "get_dist_logger",
    "global_context",
    "launch",
    "launch_from_openmpi",
    "launch_from_slurm",
    "launch_from_torch",
    "print_rank_0",
    "priority_execution",
    "shutdown",
    "spawn",
]
