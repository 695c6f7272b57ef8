"""Tensors and parameters with a distribution spec: a facade over DTensor and tensor parallelism."""

from gemini.parallel.colo.tensor import (
    ColoInitContext,
    ColoParameter,
    ColoTensor,
    ColoTensorSpec,
    ComputePattern,
    ComputeSpec,
    ProcessGroup,
    ReplicaSpec,
    ShardSpec,
)
from gemini.parallel.colo.wrapping import GeminiDDP, apply_specs

__all__ = [
    "ColoInitContext",
    "ColoParameter",
    "ColoTensor",
    "ColoTensorSpec",
    "ComputePattern",
    "ComputeSpec",
    "GeminiDDP",
    "ProcessGroup",
    "ReplicaSpec",
    "ShardSpec",
    "apply_specs",
]
