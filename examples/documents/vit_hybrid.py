# Example: EX10 and EX11, Hybrid parallelism with ViT
# Repair: stages are made by HybridParallelPlugin from the whole model, not built by hand, and run by
#   execute_pipeline; sizes are set before they are used, and one loader is gone through in each epoch; the
#   ViT of transformers, generated pictures
# Run: gemini run --nproc-per-node 4 examples/documents/vit_hybrid.py
# Shows: two stages of two ranks each that share layers (1d) train in fp16 with clipping, and the loss falls
import torch
from stand_ins import Pictures, small_vit
from transformers import ViTForImageClassification

import gemini.compat as colossalai
from gemini.compat.booster import Booster
from gemini.compat.context import ParallelMode
from gemini.compat.core import global_context as gpc
from gemini.compat.logging import get_dist_logger
from gemini.compat.nn.lr_scheduler import CosineAnnealingWarmupLR
from gemini.compat.nn.optimizer import HybridAdam
from gemini.parallel import HybridParallelPlugin

# hyper parameters
# BATCH_SIZE is as per GPU
# global batch size = BATCH_SIZE x data parallel size
BATCH_SIZE = 16
LEARNING_RATE = 3e-3
WEIGHT_DECAY = 0.3
NUM_EPOCHS = 3
WARMUP_EPOCHS = 1

# parallel setting
TENSOR_PARALLEL_SIZE = 2
TENSOR_PARALLEL_MODE = "1d"

parallel = dict(pipeline=2, tensor=dict(mode=TENSOR_PARALLEL_MODE, size=TENSOR_PARALLEL_SIZE))
clip_grad_norm = 1.0

# pipeline config
NUM_MICRO_BATCHES = parallel["pipeline"]

colossalai.launch_from_torch(
    config=dict(parallel=parallel, clip_grad_norm=clip_grad_norm, NUM_MICRO_BATCHES=NUM_MICRO_BATCHES)
)
logger = get_dist_logger()
torch.manual_seed(0)
model = ViTForImageClassification(small_vit())
plugin = HybridParallelPlugin(
    tp_size=gpc.get_world_size(ParallelMode.TENSOR),
    pp_size=gpc.get_world_size(ParallelMode.PIPELINE),
    num_microbatches=gpc.config.NUM_MICRO_BATCHES,
    max_norm=gpc.config.clip_grad_norm,
    initial_scale=2**10,
)
booster = Booster(mixed_precision="fp16_naive", plugin=plugin)
train_dataloader = plugin.prepare_dataloader(Pictures(), batch_size=BATCH_SIZE, drop_last=True)
optimizer = HybridAdam(model.parameters(), lr=LEARNING_RATE, weight_decay=WEIGHT_DECAY)
lr_scheduler = CosineAnnealingWarmupLR(
    optimizer=optimizer, total_steps=NUM_EPOCHS, warmup_steps=WARMUP_EPOCHS
)
model, optimizer, _, _, lr_scheduler = booster.boost(model, optimizer, lr_scheduler=lr_scheduler)

losses = []
for epoch in range(NUM_EPOCHS):
    data_iter = iter(train_dataloader)
    for _ in range(len(train_dataloader)):
        done = booster.execute_pipeline(data_iter, model, lambda output, batch: output.loss, optimizer)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(done["loss"]))
    lr_scheduler.step()
    logger.info(f"Epoch {epoch} - train loss: {losses[-1]:.5}", ranks=[0])
assert losses[-1] < losses[0], losses
model.close()
