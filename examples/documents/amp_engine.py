# Example: EX19, AMP training with engine
# Repair: enumerate() around the loader is gone; three channels need no Gray2RGB; generated pictures, a
#   small ViT, two epochs
# Run: gemini run --nproc-per-node 2 examples/documents/amp_engine.py
# Shows: fp16 and clip_grad_norm in the configuration have the engine train under torch's AMP with a
#   gradient of norm 1.0 at most
import torch
from stand_ins import pictures, vit_base_patch16_224

import gemini.compat as colossalai
from gemini.compat.amp import AMP_TYPE
from gemini.compat.core import global_context as gpc
from gemini.compat.nn.lr_scheduler import LinearWarmupLR
from gemini.compat.utils import get_current_device, get_dataloader

CONFIG = dict(BATCH_SIZE=16, DROP_RATE=0.1, NUM_EPOCHS=2, fp16=dict(mode=AMP_TYPE.TORCH), clip_grad_norm=1.0)

# initialize distributed setting
parser = colossalai.get_default_parser()
args = parser.parse_args()
# launch from torch
colossalai.launch_from_torch(config=CONFIG)

# build model
model = vit_base_patch16_224(drop_rate=0.1, num_classes=10)

# build dataloader
train_dataloader = get_dataloader(
    dataset=pictures(128), shuffle=True, batch_size=gpc.config.BATCH_SIZE, pin_memory=True
)

# build optimizer
optimizer = torch.optim.SGD(model.parameters(), lr=1e-2, weight_decay=0.1)

# build loss
criterion = torch.nn.CrossEntropyLoss()

# lr_scheduler
lr_scheduler = LinearWarmupLR(optimizer, warmup_steps=50, total_steps=gpc.config.NUM_EPOCHS)

engine, train_dataloader, _, _ = colossalai.initialize(model, optimizer, criterion, train_dataloader)

norms = []
optimizer.register_step_pre_hook(
    lambda *_: norms.append(torch.nn.utils.get_total_norm([p.grad for p in model.parameters()]).item())
)
engine.train()
for _ in range(gpc.config.NUM_EPOCHS):
    for img, label in train_dataloader:
        img = img.to(get_current_device())
        label = label.to(get_current_device())
        engine.zero_grad()
        output = engine(img)
        assert output.dtype == torch.float16
        loss = engine.criterion(output, label)
        engine.backward(loss)
        engine.step()
        lr_scheduler.step()
assert norms
assert max(norms) <= 1.001, norms
