# Example: EX35, Gradient accumulation and clipping by configuration
# Repair: a number instead of <int>; the engine's loop that the document keeps elsewhere
# Run: gemini run --nproc-per-node 2 examples/documents/engine_settings.py
# Shows: the parameters stay for three iterations and change in the fourth, by a gradient of norm 1.0 at
#   most
from itertools import pairwise

import torch
from stand_ins import pictures, resnet18

import gemini.compat as colossalai
from gemini.compat.utils import get_current_device, get_dataloader

gradient_accumulation = 4
clip_grad_norm = 1.0

colossalai.launch_from_torch(
    config=dict(gradient_accumulation=gradient_accumulation, clip_grad_norm=clip_grad_norm)
)
model = resnet18(num_classes=10)
optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
criterion = torch.nn.CrossEntropyLoss()
train_dataloader = get_dataloader(dataset=pictures(), shuffle=True, batch_size=16)
engine, train_dataloader, _, _ = colossalai.initialize(model, optimizer, criterion, train_dataloader)

history = [[param.detach().clone() for param in model.parameters()]]
engine.train()
for iteration, (img, label) in enumerate(train_dataloader):
    engine.zero_grad()
    output = engine(img.to(get_current_device()))
    engine.backward(engine.criterion(output, label.to(get_current_device())))
    engine.step()
    history.append([param.detach().clone() for param in model.parameters()])
    print(f"iteration {iteration}, first 10 elements of param: {history[-1][0].flatten()[:10]}")
    if iteration == 3:
        break

changes = [
    torch.cat([(new - old).flatten() for old, new in zip(*pair, strict=True)]).norm().item()
    for pair in pairwise(history)
]
assert changes[:3] == [0.0, 0.0, 0.0]
assert 0.0 < changes[3] <= 1.001  # the rate is 1: the change is the clipped gradient
