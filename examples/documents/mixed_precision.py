# Example: EX20, AMP training with booster
# Repair: enumerate() around the loader is gone and the loader has one name; three channels need no
#   Gray2RGB; pictures are generated, the ViT is a small one
# Run: gemini run --nproc-per-node 2 examples/documents/mixed_precision.py
# Shows: a ViT trains under torch's AMP, and its learning rate warms up past the end of its schedule
import torch
from stand_ins import pictures, vit_base_patch16_224

import gemini.compat as colossalai
from gemini.compat.booster import Booster
from gemini.compat.booster.plugin import TorchDDPPlugin
from gemini.compat.mixed_precision import FP16TorchMixedPrecision
from gemini.compat.nn.lr_scheduler import LinearWarmupLR
from gemini.compat.utils import get_current_device

# initialize distributed setting
parser = colossalai.get_default_parser()
args = parser.parse_args()
# launch from torch
colossalai.launch_from_torch(config=dict())

# define the constants
NUM_EPOCHS = 2
BATCH_SIZE = 16
# build model
model = vit_base_patch16_224(drop_rate=0.1, num_classes=10)

# build dataloader
train_dataset = pictures(128)

# build optimizer
optimizer = torch.optim.SGD(model.parameters(), lr=1e-2, weight_decay=0.1)

# build loss
criterion = torch.nn.CrossEntropyLoss()

# lr_scheduler
lr_scheduler = LinearWarmupLR(optimizer, warmup_steps=50, total_steps=NUM_EPOCHS)

plugin = TorchDDPPlugin()
train_dataloader = plugin.prepare_dataloader(
    train_dataset, batch_size=BATCH_SIZE, shuffle=True, drop_last=True
)
mixed_precision = FP16TorchMixedPrecision(
    init_scale=2.0**16, growth_factor=2.0, backoff_factor=0.5, growth_interval=2000
)
booster = Booster(mixed_precision=mixed_precision, plugin=plugin)

# boost model, optimizer, criterion, dataloader, lr_scheduler
model, optimizer, criterion, train_dataloader, lr_scheduler = booster.boost(
    model, optimizer, criterion, train_dataloader, lr_scheduler
)

losses, rates = [], []
model.train()
for _ in range(NUM_EPOCHS):
    for img, label in train_dataloader:
        img = img.to(get_current_device())
        label = label.to(get_current_device())
        optimizer.zero_grad()
        output = model(img)
        assert output.dtype == torch.float16
        loss = criterion(output, label)
        booster.backward(loss, optimizer)
        optimizer.step()
        lr_scheduler.step()
        losses.append(loss.item())
        rates.append(lr_scheduler.get_last_lr()[0])
assert all(torch.isfinite(torch.tensor(losses)))
assert rates[0] < rates[1] < rates[-1] <= 1e-2
