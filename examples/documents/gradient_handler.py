# Example: EX24, Gradient handler
# Repair: an all-reduce instead of do_something(); a model and a step
# Run: gemini run --nproc-per-node 2 examples/documents/gradient_handler.py
# Shows: a registered handler, named in the configuration, shares gradients instead of
#   DistributedDataParallel
import torch
import torch.distributed as dist

import gemini.compat as colossalai
from gemini.compat.engine.gradient_handler import BaseGradientHandler
from gemini.compat.registry import GRADIENT_HANDLER


@GRADIENT_HANDLER.register_module
class MyGradientHandler(BaseGradientHandler):
    def handle_gradient(self):
        for param in model.parameters():
            dist.all_reduce(param.grad)


gradient_handler = [dict(type="MyGradientHandler")]

colossalai.launch_from_torch(config=dict(gradient_handler=gradient_handler))
model = torch.nn.Linear(4, 1, bias=False)
optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
engine, *_ = colossalai.initialize(model, optimizer, lambda output, label: (output * label).sum())

before = model.weight.detach().clone()
engine.zero_grad()
output = engine(torch.ones(1, 4))
engine.backward(engine.criterion(output, torch.tensor(float(dist.get_rank() + 1))))
engine.step()
# Summed as the handler does: a mean over ranks, which DistributedDataParallel would take, is 1.5.
total = sum(range(1, dist.get_world_size() + 1))
assert torch.equal(before - model.weight, torch.full((1, 4), float(total)))
