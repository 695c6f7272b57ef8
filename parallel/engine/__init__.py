"""Engine: a model, its optimizer and its criterion with the features of a configuration (docs/engine.md).

Also exports the functions of :mod:`gemini.parallel.launch` that programs with an engine use.
"""

from gemini.parallel.engine.amp import (
    AMP_TYPE,
    convert_to_amp,
    convert_to_apex_amp,
    convert_to_naive_amp,
    convert_to_torch_amp,
)
from gemini.parallel.engine.dataloader import get_dataloader
from gemini.parallel.engine.engine import Engine
from gemini.parallel.engine.gradient_handler import (
    BaseGradientHandler,
    DataParallelGradientHandler,
    MoeGradientHandler,
)
from gemini.parallel.engine.initialize import initialize
from gemini.parallel.engine.pipeline_model import build_pipeline_model, build_pipeline_model_from_cfg
from gemini.parallel.engine.schedule import (
    BaseSchedule,
    InterleavedPipelineSchedule,
    NonPipelineSchedule,
    PipelineSchedule,
)
from gemini.parallel.engine.whole_file import load_checkpoint, save_checkpoint
from gemini.parallel.launch import (
    disable_existing_loggers,
    get_default_parser,
    get_dist_logger,
    global_context,
    launch,
    launch_from_openmpi,
    launch_from_slurm,
    launch_from_torch,
    shutdown,
)
from gemini.system.device import current_device

__all__ = [
    "AMP_TYPE",
    "BaseGradientHandler",
    "BaseSchedule",
    "DataParallelGradientHandler",
    "Engine",
    "InterleavedPipelineSchedule",
    "MoeGradientHandler",
    "NonPipelineSchedule",
    "PipelineSchedule",
    "build_pipeline_model",
    "build_pipeline_model_from_cfg",
    "convert_to_amp",
    "convert_to_apex_amp",
    "convert_to_naive_amp",
    "convert_to_torch_amp",
    "current_device",
    "disable_existing_loggers",
    "get_dataloader",
    "get_default_parser",
    "get_dist_logger",
    "global_context",
    "initialize",
    "launch",
    "launch_from_openmpi",
    "launch_from_slurm",
    "launch_from_torch",
    "load_checkpoint",
    "save_checkpoint",
    "shutdown",
]
