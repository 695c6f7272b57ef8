# Example: EX13, 1D tensor parallelism
# Repair: the arguments are parsed, which the document leaves out; what is printed is compared
# Run: gemini run --nproc-per-node 2 examples/documents/tensor_parallel_1d.py
# Shows: weights [256, 512] and [512, 256], outputs [16, 512] and [16, 256] on each rank
import torch
from stand_ins import printed

import gemini.compat as colossalai
import gemini.compat.nn as col_nn
from gemini.compat.utils import get_current_device, print_rank_0

CONFIG = dict(parallel=dict(data=1, pipeline=1, tensor=dict(size=2, mode="1d")))


class MLP(torch.nn.Module):
    def __init__(self, dim: int = 256):
        super().__init__()
        intermediate_dim = dim * 4
        self.dense_1 = col_nn.Linear(dim, intermediate_dim)
        print_rank_0(f"Weight of the first linear layer: {self.dense_1.weight.transpose(0, 1).shape}")
        self.activation = torch.nn.GELU()
        self.dense_2 = col_nn.Linear(intermediate_dim, dim)
        print_rank_0(f"Weight of the second linear layer: {self.dense_2.weight.transpose(0, 1).shape}")
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
    m(x)


lines = printed(main)
if torch.distributed.get_rank() == 0:
    assert lines == [
        "Weight of the first linear layer: torch.Size([256, 512])",
        "Weight of the second linear layer: torch.Size([512, 256])",
        "Output of the first linear layer: torch.Size([16, 512])",
        "Output of the second linear layer: torch.Size([16, 256])",
    ]
