# Example: EX15, Use pipeline parallelism in training
# Repair: ResNet and CIFAR10 of the stand-ins, 4 epochs for 2; what is imported and not used is left out
# Run: gemini run --nproc-per-node 2 examples/documents/resnet_pipeline.py
# Shows: a ResNet noted by PipelinableContext, in two stages over four micro-batches, trains with a
#   trainer; its loss falls
import os

import torch
import torch.nn as nn
from stand_ins import Losses, build_cifar, resnet50

import gemini.compat as colossalai
import gemini.compat.nn as col_nn
from gemini.compat.context import ParallelMode
from gemini.compat.core import global_context as gpc
from gemini.compat.engine.schedule import PipelineSchedule
from gemini.compat.logging import disable_existing_loggers, get_dist_logger
from gemini.compat.pipeline.pipelinable import PipelinableContext
from gemini.compat.trainer import Trainer, hooks
from gemini.compat.utils import MultiTimer

# Define some config
BATCH_SIZE = 64
NUM_EPOCHS = 4
NUM_CHUNKS = 1
CONFIG = dict(NUM_MICRO_BATCHES=4, parallel=dict(pipeline=2))

# Train
disable_existing_loggers()
parser = colossalai.get_default_parser()
args = parser.parse_args()
colossalai.launch_from_torch(backend=args.backend, config=CONFIG)
logger = get_dist_logger()
pipelinable = PipelinableContext()

# build model
with pipelinable:
    model = resnet50()

exec_seq = [
    "conv1", "bn1", "relu", "maxpool", "layer1", "layer2", "layer3", "layer4", "avgpool",
    (lambda x: torch.flatten(x, 1), "behind"), "fc",
]  # fmt: skip
pipelinable.to_layer_list(exec_seq)

model = pipelinable.partition(
    NUM_CHUNKS, gpc.pipeline_parallel_size, gpc.get_local_rank(ParallelMode.PIPELINE)
)

# build criterion
criterion = nn.CrossEntropyLoss()

# optimizer
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

# build dataloader
root = os.environ.get("DATA", "./data")
train_dataloader, test_dataloader = build_cifar(BATCH_SIZE, root, padding=4, crop=32, resize=32)
lr_scheduler = col_nn.lr_scheduler.LinearWarmupLR(optimizer, NUM_EPOCHS, warmup_steps=1)
engine, train_dataloader, test_dataloader, lr_scheduler = colossalai.initialize(
    model, optimizer, criterion, train_dataloader, test_dataloader, lr_scheduler
)
timer = MultiTimer()
trainer = Trainer(engine=engine, timer=timer, logger=logger)
losses = Losses()
hook_list = [
    hooks.LossHook(),
    hooks.AccuracyHook(col_nn.metric.Accuracy()),
    hooks.LogMetricByEpochHook(logger),
    hooks.LRSchedulerHook(lr_scheduler, by_epoch=True),
    losses,
]
trainer.fit(
    train_dataloader=train_dataloader,
    epochs=NUM_EPOCHS,
    test_dataloader=test_dataloader,
    test_interval=1,
    hooks=hook_list,
    display_progress=True,
)

assert isinstance(engine.schedule, PipelineSchedule)
own = {name.partition(".")[0] for name, _ in model.named_children()}
assert 0 < len(own) < len(exec_seq), "a stage has some of the layers"
epochs = [sum(losses.seen[at : at + 4]) for at in range(0, 4 * NUM_EPOCHS, 4)]
assert epochs[-1] < epochs[0], epochs
