"""Pipeline parallelism: a model cut into stages that pass micro-batches on (docs/parallel.md)."""

from gemini.parallel.pipeline.built_stages import BuiltStages
from gemini.parallel.pipeline.layers import PipelinableContext, partition_uniform
from gemini.parallel.pipeline.orders import Costs, make_order, simulate
from gemini.parallel.pipeline.tied_weights import SharedParameters

__all__ = [
    "BuiltStages",
    "Costs",
    "PipelinableContext",
    "SharedParameters",
    "make_order",
    "partition_uniform",
    "simulate",
]
