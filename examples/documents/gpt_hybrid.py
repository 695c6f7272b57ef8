# Example: EX7, Fine-tune GPT-2 using hybrid parallelism
# Repair: stages are made by HybridParallelPlugin from the whole model, not built by hand, and run by
#   execute_pipeline; embedding and head stay one weight by themselves, without PipelineSharedModuleWrapper;
#   HybridAdam for Adam; GPT-2 of transformers, generated text
# Run: gemini run --nproc-per-node 4 examples/documents/gpt_hybrid.py
# Shows: pipeline 2 x tensor 2 with tied weights has the loss of the whole model, and it falls
import torch
from stand_ins import Webtext, small_gpt2
from torch import nn
from transformers import GPT2LMHeadModel

import gemini.compat as colossalai
from gemini.compat.booster import Booster
from gemini.compat.builder.pipeline import partition_uniform
from gemini.compat.context.parallel_mode import ParallelMode
from gemini.compat.core import global_context as gpc
from gemini.compat.logging import disable_existing_loggers, get_dist_logger
from gemini.compat.nn.optimizer import HybridAdam
from gemini.parallel import HybridParallelPlugin


class GPTLMLoss(nn.Module):
    def __init__(self):
        super().__init__()
        self.loss_fn = nn.CrossEntropyLoss()

    def forward(self, logits, labels):
        shift_logits = logits[..., :-1, :].contiguous()
        shift_labels = labels[..., 1:].contiguous()
        return self.loss_fn(shift_logits.view(-1, shift_logits.size(-1)), shift_labels.view(-1))


NUM_EPOCHS = 3
BATCH_SIZE = 16
# pipeline + 1D model parallel
CONFIG = dict(NUM_MICRO_BATCHES=4, parallel=dict(pipeline=2, tensor=dict(mode="1d", size=2)))


def train():
    disable_existing_loggers()
    parser = colossalai.get_default_parser()
    args = parser.parse_args()
    colossalai.launch_from_torch(config=CONFIG, backend=args.backend)
    logger = get_dist_logger()
    assert partition_uniform(4, 2, 1) == [[(0, 2)], [(2, 4)]]

    torch.manual_seed(0)
    model = GPT2LMHeadModel(small_gpt2(n_layer=4, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0))
    plugin = HybridParallelPlugin(
        tp_size=gpc.get_world_size(ParallelMode.TENSOR),
        pp_size=gpc.get_world_size(ParallelMode.PIPELINE),
        num_microbatches=gpc.config.NUM_MICRO_BATCHES,
    )
    booster = Booster(plugin=plugin)
    train_dataloader = plugin.prepare_dataloader(Webtext(), batch_size=BATCH_SIZE, drop_last=True)
    criterion = GPTLMLoss()
    first = next(iter(train_dataloader))
    with torch.no_grad():
        wanted = criterion(model(**first).logits, first["input_ids"]).item()

    optimizer = HybridAdam(model.parameters(), lr=0.0015)
    model, optimizer, criterion, *_ = booster.boost(model, optimizer, criterion)
    global_batch_size = BATCH_SIZE * gpc.get_world_size(ParallelMode.DATA)
    logger.info(f"Init done, global batch size = {global_batch_size}", ranks=[0])

    losses = []
    for _ in range(NUM_EPOCHS):
        batches = iter(train_dataloader)
        for _ in range(len(train_dataloader)):
            done = booster.execute_pipeline(
                batches, model, lambda output, batch: criterion(output.logits, batch["input_ids"]), optimizer
            )
            optimizer.step()
            optimizer.zero_grad()
            losses.append(float(done["loss"]))
    assert abs(losses[0] - wanted) < 1e-4, (losses[0], wanted)
    assert losses[-1] < losses[0]
    model.close()


train()
