# Example: EX27, Configure parallelization
# Repair: the format with types instead of values is left out
# Run: gemini run --nproc-per-node 8 examples/documents/parallel_settings.py
# Shows: what the document calls ok is taken, with its defaults, and tensor=4 without a mode is refused
import gemini.compat as colossalai
from gemini import ConfigError
from gemini.compat.context import ParallelMode
from gemini.compat.core import global_context as gpc

# this is ok
both = dict(pipeline=dict(size=2), tensor=dict(size=4, mode="2d"))

# this is ok
short = dict(pipeline=2, tensor=dict(size=4, mode="2d"))

# this is not ok
# as you need to specify the mode for tensor parallelism
no_mode = dict(pipeline=2, tensor=4)

# this is ok as well as tensor will be default to size 1
# and mode None
no_tensor = dict(pipeline=2)

# this is ok as well as pipeline will default to size 1
no_pipeline = dict(tensor=dict(size=4, mode="2d"))

for parallel, data, pipeline, tensor in (
    (both, 1, 2, 4),
    (short, 1, 2, 4),
    (no_tensor, 4, 2, 1),
    (no_pipeline, 2, 1, 4),
    ({}, 8, 1, 1),
):
    colossalai.launch_from_torch(config=dict(parallel=parallel))
    assert gpc.get_world_size(ParallelMode.DATA) == data
    assert gpc.pipeline_parallel_size == pipeline
    assert gpc.tensor_parallel_size == tensor
    assert gpc.is_initialized(ParallelMode.PARALLEL_2D_ROW) == (tensor == 4)

try:
    colossalai.launch_from_torch(config=dict(parallel=no_mode))
except ConfigError as error:
    assert "mode" in str(error)
else:
    raise AssertionError("tensor=4 has no mode")
