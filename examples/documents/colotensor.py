# Example: EX12, ColoTensor concepts
# Repair: none but the device, get_current_device() instead of .cuda(); without GPUs "nccl" becomes
#   gloo
# Run: python examples/documents/colotensor.py  # starts 4 processes
# Shows: a tensor of two ranks' parts, (2, 3, 1) each, is (2, 3, 2) when replicated and (1, 3, 2) when cut
#   along its first dimension
import torch

import gemini.compat as colossalai
from gemini.compat.tensor import (
    ColoTensor,
    ColoTensorSpec,
    ComputePattern,
    ComputeSpec,
    ProcessGroup,
    ShardSpec,
)
from gemini.compat.testing import spawn
from gemini.compat.utils import get_current_device, print_rank_0


def run_dist_tests(rank, world_size, port):
    colossalai.launch(
        config={}, rank=rank, world_size=world_size, host="localhost", port=port, backend="nccl"
    )
    pg = ProcessGroup(tp_degree=2, dp_degree=2)

    torch.manual_seed(0)
    local_tensor = torch.randn(2, 3, 1).to(get_current_device())
    print_rank_0(f"shape {local_tensor.shape}, {local_tensor.data}")

    spec = ColoTensorSpec(
        pg, ShardSpec(dims=[-1], num_partitions=[pg.tp_world_size()]), ComputeSpec(ComputePattern.TP1D)
    )
    t1 = ColoTensor.from_torch_tensor(local_tensor, spec)
    t1 = t1.to_replicate()
    print_rank_0(f"shape {t1.shape}, {t1.data}")
    assert t1.shape == (2, 3, 2)

    spec2 = ShardSpec([0], [pg.tp_world_size()])
    t1.set_dist_spec(spec2)
    print_rank_0(f"shape {t1.shape}, {t1.data}")
    assert t1.shape == (1, 3, 2)
    assert torch.equal(t1.data[..., 0], local_tensor[pg.tp_local_rank() :][:1, :, 0])


def test_dist_cases(world_size):
    spawn(run_dist_tests, world_size)


if __name__ == "__main__":
    test_dist_cases(4)
