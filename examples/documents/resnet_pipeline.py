# Example: EX15, Use pipeline parallelism in training
# Repair: stages are made by HybridParallelPlugin from the whole model, not built by hand, and run by
#   execute_pipeline; the sequence of execution is an nn.Sequential; a small ResNet, HybridAdam for Adam,
#   generated pictures
# Run: gemini run --nproc-per-node 2 examples/documents/resnet_pipeline.py
# Shows: a ResNet in two stages over four micro-batches trains, and its loss falls
import torch
from stand_ins import pictures, resnet50
from torch import nn

import gemini.compat as colossalai
import gemini.compat.nn as col_nn
from gemini.compat.booster import Booster
from gemini.compat.core import global_context as gpc
from gemini.compat.logging import disable_existing_loggers, get_dist_logger
from gemini.compat.nn.optimizer import HybridAdam
from gemini.parallel import HybridParallelPlugin

# Define some config
BATCH_SIZE = 64
NUM_EPOCHS = 3
CONFIG = dict(NUM_MICRO_BATCHES=4, parallel=dict(pipeline=2))

# Train
disable_existing_loggers()
parser = colossalai.get_default_parser()
args = parser.parse_args()
colossalai.launch_from_torch(backend=args.backend, config=CONFIG)
logger = get_dist_logger()

# build model
torch.manual_seed(0)
resnet = resnet50(num_classes=10)
exec_seq = ["conv1", "bn1", "relu", "maxpool", "layer1", "layer2", "layer3", "layer4", "avgpool"]
model = nn.Sequential(*(getattr(resnet, name) for name in exec_seq), nn.Flatten(1), resnet.fc)
plugin = HybridParallelPlugin(
    pp_size=gpc.pipeline_parallel_size, num_microbatches=gpc.config.NUM_MICRO_BATCHES
)
booster = Booster(plugin=plugin)

# build criterion
criterion = nn.CrossEntropyLoss()

# optimizer
optimizer = HybridAdam(model.parameters(), lr=1e-2)

# build dataloader
train_dataloader = plugin.prepare_dataloader(pictures(), batch_size=BATCH_SIZE, shuffle=True, drop_last=True)

lr_scheduler = col_nn.lr_scheduler.LinearWarmupLR(optimizer, NUM_EPOCHS, warmup_steps=1)
model, optimizer, criterion, _, lr_scheduler = booster.boost(
    model, optimizer, criterion, lr_scheduler=lr_scheduler
)

losses = []
for _ in range(NUM_EPOCHS):
    batches = iter(train_dataloader)
    total = 0.0
    for _ in range(len(train_dataloader)):
        done = booster.execute_pipeline(
            batches, model, lambda output, batch: criterion(output, batch[1]), optimizer
        )
        optimizer.step()
        optimizer.zero_grad()
        total += float(done["loss"])
    lr_scheduler.step()
    losses.append(total / len(train_dataloader))
assert losses[-1] < losses[0], losses
model.close()
