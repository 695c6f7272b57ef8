"""Engine: a model, its optimizer and its criterion with the features of a configuration (docs/engine.md)."""

from gemini.parallel.engine.amp import (
    AMP_TYPE,
    convert_to_amp,
    convert_to_apex_amp,
    convert_to_naive_amp,
    convert_to_torch_amp,
)
from gemini.parallel.engine.dataloader import get_dataloader
from gemini.parallel.engine.engine import Engine
from gemini.parallel.engine.gradient_handler import BaseGradientHandler, DataParallelGradientHandler
from gemini.parallel.engine.initialize import initialize
from gemini.parallel.engine.pipeline_model import build_pipeline_model, build_pipeline_model_from_cfg
from gemini.parallel.engine.pipeline_schedule import InterleavedPipelineSchedule, PipelineSchedule
from gemini.parallel.engine.schedule import BaseSchedule, NonPipelineSchedule
from gemini.parallel.engine.whole_file import load_checkpoint, save_checkpoint

__all__ = [
    "AMP_TYPE",
    "BaseGradientHandler",
    "BaseSchedule",
    "DataParallelGradientHandler",
    "Engine",
    "InterleavedPipelineSchedule",
    "NonPipelineSchedule",
    "PipelineSchedule",
    "build_pipeline_model",
    "build_pipeline_model_from_cfg",
    "convert_to_amp",
    "convert_to_apex_amp",
    "convert_to_naive_amp",
    "convert_to_torch_amp",
    "get_dataloader",
    "initialize",
    "load_checkpoint",
    "save_checkpoint",
]
