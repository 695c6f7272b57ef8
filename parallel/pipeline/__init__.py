"""Pipeline parallelism: a model cut into stages that pass micro-batches on (docs/parallel.md)."""

from gemini.parallel.pipeline.built_stages import BuiltStages, join_stages
from gemini.parallel.pipeline.layers import (
    PipelinableContext,
    partition_balanced,
    partition_uniform,
    stretch_of,
)
from gemini.parallel.pipeline.orders import SCHEDULES, Costs, Simulated, make_order, simulate
from gemini.parallel.pipeline.pipeline import Executed, Pipeline, Schedule
from gemini.parallel.pipeline.split import StagedModel, choose_ranges, split
from gemini.parallel.pipeline.tied_weights import SharedParameters
from gemini.parallel.pipeline.units import Units, find_units

__all__ = [
    "SCHEDULES",
    "BuiltStages",
    "Costs",
    "Executed",
    "PipelinableContext",
    "Pipeline",
    "Schedule",
    "SharedParameters",
    "Simulated",
    "StagedModel",
    "Units",
    "choose_ranges",
    "find_units",
    "join_stages",
    "make_order",
    "partition_balanced",
    "partition_uniform",
    "simulate",
    "split",
    "stretch_of",
]
