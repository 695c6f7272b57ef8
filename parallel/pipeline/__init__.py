"""Pipeline parallelism: a model cut into stages that pass micro-batches on (docs/parallel.md)."""

from gemini.parallel.pipeline.built_stages import BuiltStages
from gemini.parallel.pipeline.layers import PipelinableContext, partition_balanced, partition_uniform
from gemini.parallel.pipeline.orders import Costs, Simulated, make_order, simulate
from gemini.parallel.pipeline.pipeline import Pipeline, Schedule
from gemini.parallel.pipeline.split import split
from gemini.parallel.pipeline.tied_weights import SharedParameters

__all__ = [
    "BuiltStages",
    "Costs",
    "PipelinableContext",
    "Pipeline",
    "Schedule",
    "SharedParameters",
    "Simulated",
    "make_order",
    "partition_balanced",
    "partition_uniform",
    "simulate",
    "split",
]
