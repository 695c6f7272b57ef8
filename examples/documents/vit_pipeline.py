# Example: EX8, Pipeline parallelism with ViT
# Repair: stages are made by HybridParallelPlugin from the whole model, not built by hand, and run by
#   execute_pipeline; the ViT of transformers in the place of timm 0.5.4; generated pictures
# Run: gemini run --nproc-per-node 2 examples/documents/vit_pipeline.py
# Shows: two stages over four micro-batches have the loss of the whole model, and it falls
import torch
from stand_ins import Pictures, small_vit
from transformers import ViTForImageClassification

import gemini.compat as colossalai
from gemini.compat.booster import Booster
from gemini.compat.core import global_context as gpc
from gemini.compat.nn.optimizer import HybridAdam
from gemini.parallel import HybridParallelPlugin

BATCH_SIZE = 16
NUM_EPOCHS = 3
CONFIG = dict(NUM_MICRO_BATCHES=4, parallel=dict(pipeline=2))

colossalai.launch_from_torch(config=CONFIG)
torch.manual_seed(0)
model = ViTForImageClassification(small_vit())
plugin = HybridParallelPlugin(
    pp_size=gpc.config.parallel.pipeline, num_microbatches=gpc.config.NUM_MICRO_BATCHES
)
booster = Booster(plugin=plugin)
train_dataloader = plugin.prepare_dataloader(Pictures(), batch_size=BATCH_SIZE)
first = next(iter(train_dataloader))
with torch.no_grad():
    wanted = model(**first).loss.item()
optimizer = HybridAdam(model.parameters(), lr=3e-3)
model, optimizer, *_ = booster.boost(model, optimizer)

losses = []
for _ in range(NUM_EPOCHS):
    batches = iter(train_dataloader)
    for _ in range(len(train_dataloader)):
        done = booster.execute_pipeline(batches, model, lambda output, batch: output.loss, optimizer)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(done["loss"]))
assert abs(losses[0] - wanted) < 1e-4, (losses[0], wanted)
assert losses[-1] < losses[0]
model.close()
