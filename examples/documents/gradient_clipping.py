# Example: EX18, Gradient clipping with booster
# Repair: generated pictures, fewer epochs; the norm is looked at after it was clipped
# Run: gemini run --nproc-per-node 2 examples/documents/gradient_clipping.py
# Shows: in fp16 with a loss scale the norm of the whole gradient is at most 0.1 when the optimizer steps
import torch
from stand_ins import pictures, resnet34

import gemini.compat as colossalai
from gemini.compat.booster import Booster
from gemini.compat.booster.plugin import TorchDDPPlugin
from gemini.compat.logging import get_dist_logger
from gemini.compat.nn.lr_scheduler import CosineAnnealingLR
from gemini.compat.utils import get_current_device

colossalai.launch_from_torch(config=dict())
logger = get_dist_logger()

# define training hyperparameters
NUM_EPOCHS = 200
BATCH_SIZE = 16
GRADIENT_CLIPPING = 0.1
# build resnet
model = resnet34(num_classes=10)
# build dataloaders
train_dataset = pictures()
# build criterion
criterion = torch.nn.CrossEntropyLoss()

# optimizer
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-4)

# lr_scheduler
lr_scheduler = CosineAnnealingLR(optimizer, total_steps=NUM_EPOCHS)

plugin = TorchDDPPlugin()
booster = Booster(mixed_precision="fp16", plugin=plugin)
train_dataloader = plugin.prepare_dataloader(
    train_dataset, batch_size=BATCH_SIZE, shuffle=True, drop_last=True
)
model, optimizer, criterion, train_dataloader, lr_scheduler = booster.boost(
    model, optimizer, criterion, train_dataloader, lr_scheduler
)

# verify gradient clipping
model.train()
for idx, (img, label) in enumerate(train_dataloader):
    img = img.to(get_current_device())
    label = label.to(get_current_device())

    model.zero_grad()
    output = model(img)
    train_loss = criterion(output, label)
    booster.backward(train_loss, optimizer)
    optimizer.clip_grad_by_norm(max_norm=GRADIENT_CLIPPING)
    norm = torch.nn.utils.get_total_norm([param.grad for param in model.parameters()]).item()
    assert norm <= GRADIENT_CLIPPING * 1.001, norm
    optimizer.step()
    lr_scheduler.step()

    ele_1st = next(model.parameters()).flatten()[0]
    logger.info(f"iteration {idx}, loss: {train_loss}, 1st element of parameters: {ele_1st.item()}")

    # only run for 4 iterations
    if idx == 3:
        break
