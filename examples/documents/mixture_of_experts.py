# Example: EX22, Integrate mixture of experts into your model
# Repair: the fragments put together; VanillaFFN, moe_mlp_args and MoeLoss are imported, Widenet is ours;
#   MOE_MODEL_PARALLEL_SIZE is 2, so each process has half of the experts; small sizes, generated pictures,
#   few steps
# Run: gemini run --nproc-per-node 2 examples/documents/mixture_of_experts.py
# Shows: a Widenet trains, and the loss has the routers' balance loss in it; a layer built by hand sends
#   tokens to two experts each
import torch
from stand_ins import pictures
from torch import nn

import gemini.compat as colossalai
from gemini.compat.context.random import moe_set_seed
from gemini.compat.global_variables import moe_env
from gemini.compat.nn.layer.moe import (
    Experts,
    MoeLayer,
    MoeLoss,
    NormalNoiseGenerator,
    Top2Router,
    VanillaFFN,
    moe_mlp_args,
)
from gemini.compat.utils import get_current_device, get_dataloader
from gemini.parallel.moe import Widenet

MOE_MODEL_PARALLEL_SIZE = 2
parallel = dict(moe=dict(size=MOE_MODEL_PARALLEL_SIZE))

colossalai.launch_from_torch(config=dict(parallel=parallel))
assert moe_env.model_parallel_size == MOE_MODEL_PARALLEL_SIZE

moe_set_seed(42)
img, _ = pictures()[0]
model = Widenet(
    num_experts=4, capacity_factor=1.2, num_classes=10, img_size=img.shape[-1], in_chans=img.shape[0],
    patch_size=img.shape[-1] // 4, d_model=32, d_ff=64, depth=2, num_heads=4,
)  # fmt: skip

# from the model zoo: a layer by hand
d_model, d_ff, drop_rate, num_experts, capacity_factor = 16, 32, 0.1, 4, 1.2
noisy_func = NormalNoiseGenerator(num_experts)
shared_router = Top2Router(capacity_factor, noisy_func=noisy_func)
shared_experts = Experts(
    expert=VanillaFFN,
    num_experts=num_experts,
    **moe_mlp_args(d_model=d_model, d_ff=d_ff, drop_rate=drop_rate),
)
ffn = MoeLayer(dim_model=d_model, num_experts=num_experts, router=shared_router, experts=shared_experts)
assert ffn(torch.randn(2, 8, d_model)).shape == (2, 8, d_model)

# training
criterion = MoeLoss(aux_weight=0.01, loss_fn=nn.CrossEntropyLoss, label_smoothing=0.1)
optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
train_dataloader = get_dataloader(dataset=pictures(), shuffle=True, batch_size=16)
engine, train_dataloader, _, _ = colossalai.initialize(model, optimizer, criterion, train_dataloader)

engine.train()
losses = []
for _epoch in range(4):
    for img, label in train_dataloader:
        img, label = img.to(get_current_device()), label.to(get_current_device())
        engine.zero_grad()
        output = engine(img)
        loss = engine.criterion(output, label)
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
        without = nn.functional.cross_entropy(output, label, label_smoothing=0.1)
        assert 0.015 < loss - without < 0.04  # of each of the two layers 0.01 where the experts are balanced
count = len(losses) // 4
assert sum(losses[-count:]) < sum(losses[:count])
