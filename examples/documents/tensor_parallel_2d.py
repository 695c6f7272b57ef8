# Example: EX13, 2D tensor parallelism
# Repair: the arguments are parsed, which the document leaves out; what is printed is compared
# Run: gemini run --nproc-per-node 4 examples/documents/tensor_parallel_2d.py
# Shows: weights [128, 512] and [512, 128], inputs [8, 128], outputs [8, 512] and [8, 128] on each rank
import torch
from stand_ins import printed

import gemini.compat as colossalai
import gemini.compat.nn as col_nn
from gemini.compat.context import ParallelMode
from gemini.compat.core import global_context as gpc
from gemini.compat.utils import get_current_device, print_rank_0

CONFIG = dict(parallel=dict(data=1, pipeline=1, tensor=dict(size=4, mode="2d")))


class MLP(torch.nn.Module):
    def __init__(self, dim: int = 256):
        super().__init__()
        intermediate_dim = dim * 4
        self.dense_1 = col_nn.Linear(dim, intermediate_dim)
        print_rank_0(f"Weight of the first linear layer: {self.dense_1.weight.shape}")
        self.activation = torch.nn.GELU()
        self.dense_2 = col_nn.Linear(intermediate_dim, dim)
        print_rank_0(f"Weight of the second linear layer: {self.dense_2.weight.shape}")
        self.dropout = col_nn.Dropout(0.1)

    def forward(self, x):
        x = self.dense_1(x)
        print_rank_0(f"Output of the first linear layer: {x.shape}")
        x = self.activation(x)
        x = self.dense_2(x)
        print_rank_0(f"Output of the second linear layer: {x.shape}")
        x = self.dropout(x)
        return x


def main():
    parser = colossalai.get_default_parser()
    args = parser.parse_args()
    colossalai.launch(
        config=CONFIG,
        rank=args.rank,
        world_size=args.world_size,
        local_rank=args.local_rank,
        host=args.host,
        port=args.port,
    )

    m = MLP()
    x = torch.randn((16, 256), device=get_current_device())
    torch.distributed.broadcast(x, src=0)  # synchronize input
    # partition input
    x = torch.chunk(x, 2, dim=0)[gpc.get_local_rank(ParallelMode.PARALLEL_2D_COL)]
    x = torch.chunk(x, 2, dim=-1)[gpc.get_local_rank(ParallelMode.PARALLEL_2D_ROW)]
    print_rank_0(f"Input: {x.shape}")
    m(x)


lines = printed(main)
if torch.distributed.get_rank() == 0:
    assert lines == [
        "Weight of the first linear layer: torch.Size([128, 512])",
        "Weight of the second linear layer: torch.Size([512, 128])",
        "Input: torch.Size([8, 128])",
        "Output of the first linear layer: torch.Size([8, 512])",
        "Output of the second linear layer: torch.Size([8, 128])",
    ]
