# Example: EX23, Add your own parallel mode
# Repair: the mode is a member of an Enum of the program, as ParallelMode needs no new one; groups are
#   returned; the bracket that the configuration lacks; sizes and arguments instead of x, arg1 and arg2
# Run: gemini run --nproc-per-node 4 examples/documents/own_parallel_mode.py
# Shows: a registered initializer makes the groups of a mode of its own, which the context then knows
from enum import Enum

import torch

import gemini.compat as colossalai
from gemini.compat.context import Config
from gemini.compat.context.dist_group_initializer import ProcessGroupInitializer
from gemini.compat.core import global_context as gpc
from gemini.compat.registry import DIST_GROUP_INITIALIZER


class OwnMode(Enum):
    NEW_MODE = "new_mode"  # define your mode here


# sample initializer class
@DIST_GROUP_INITIALIZER.register_module
class MyParallelInitializer(ProcessGroupInitializer):
    def __init__(
        self,
        rank: int,
        world_size: int,
        config: Config,
        data_parallel_size: int,
        pipeline_parallel_size: int,
        tensor_parallel_size: int,
        arg1,
        arg2,
    ):
        super().__init__(rank, world_size, config)
        self.arg1 = arg1
        self.arg2 = arg2
        # ... your variable init

    def init_parallel_groups(self):
        # initialize your process groups
        return {OwnMode.NEW_MODE: [[self.arg1, self.arg2], [self.arg1 + 1, self.arg2 + 1]]}


colossalai.constants.INITIALIZER_MAPPING["new_mode"] = "MyParallelInitializer"

parallel = dict(
    pipeline=dict(size=1),
    tensor=dict(size=4, mode="new_mode", arg1=0, arg2=2),  # this is where you enable your new parallel mode
)

colossalai.launch_from_torch(config=dict(parallel=parallel))
rank = torch.distributed.get_rank()
assert gpc.get_ranks_in_group(OwnMode.NEW_MODE) == [rank % 2, rank % 2 + 2]
assert gpc.get_local_rank(OwnMode.NEW_MODE) == rank // 2
total = torch.tensor([float(rank)])
torch.distributed.all_reduce(total, group=gpc.get_group(OwnMode.NEW_MODE))
assert total.item() == 2 * (rank % 2) + 2
