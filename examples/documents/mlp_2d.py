# Example: EX14, a simple 2D parallel model
# Repair: a launch in the mode 2d and a run, at a sixteenth of the sizes; compared with the whole model
# Run: gemini run --nproc-per-node 4 examples/documents/mlp_2d.py
# Shows: two layers Linear2D hold a quarter of their weights each and compute what the whole layers would
import torch
from torch import nn

import gemini.compat as colossalai
from gemini.compat.core import global_context as gpc
from gemini.compat.nn import Linear2D
from gemini.parallel.tensor.nn import partition_of


class MLP_2D(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear_1 = Linear2D(in_features=64, out_features=1024)
        self.linear_2 = Linear2D(in_features=1024, out_features=64)

    def forward(self, x):
        x = self.linear_1(x)
        x = self.linear_2(x)
        return x


colossalai.launch_from_torch(config=dict(parallel=dict(tensor=dict(size=4, mode="2d"))))
model = MLP_2D()
assert model.linear_1.weight.shape == (32, 512)
assert model.linear_2.weight.shape == (512, 32)

whole = nn.Sequential(nn.Linear(64, 1024), nn.Linear(1024, 64))
state = partition_of(model).gather_state(model.state_dict())
whole.load_state_dict({name.replace("linear_1", "0").replace("linear_2", "1"): state[name] for name in state})
x = torch.randn(8, 64, generator=torch.Generator().manual_seed(0))
torch.testing.assert_close(gpc.grid.whole(model(gpc.grid.own_part(x))), whole(x), rtol=1e-4, atol=1e-5)
