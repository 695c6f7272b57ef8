# Example: EX6, Parallelize your training like Megatron-LM
# Repair: a launch before the number of processes is asked for; get_current_device imported; a GPT-2 of a
#   few thousand parameters; the same model on one process to compare with
# Run: gemini run --nproc-per-node 2 examples/documents/megatron_gpt.py
# Shows: a GPT-2 with parameters cut as the document says has the losses of the whole one

import torch
import torch.distributed as dist
from stand_ins import small_gpt2
from torch import nn
from transformers import GPT2LMHeadModel

import gemini.compat as colossalai
from gemini.compat.nn.parallel import GeminiDDP
from gemini.compat.tensor import ColoParameter, ComputePattern, ComputeSpec, ProcessGroup, ShardSpec
from gemini.compat.utils import get_current_device
from gemini.compat.utils.model.colo_init_context import ColoInitContext
from gemini.compat.zero import GeminiAdamOptimizer


class GPTLMModel(nn.Module):
    def __init__(self, checkpoint=False):
        super().__init__()
        self.checkpoint = checkpoint
        # No dropout, so that losses compare.
        self.model = GPT2LMHeadModel(small_gpt2(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0))
        if checkpoint:
            self.model.gradient_checkpointing_enable()

    def forward(self, input_ids, attention_mask):
        # Only return lm_logits
        return self.model(input_ids=input_ids, attention_mask=attention_mask, use_cache=not self.checkpoint)[
            0
        ]


class GPTLMLoss(nn.Module):
    def __init__(self):
        super().__init__()
        self.loss_fn = nn.CrossEntropyLoss()

    def forward(self, logits, labels):
        shift_logits = logits[..., :-1, :].contiguous()
        shift_labels = labels[..., 1:].contiguous()
        # Flatten the tokens
        return self.loss_fn(shift_logits.view(-1, shift_logits.size(-1)), shift_labels.view(-1))


def split_param_single_dim_tp1d(dim: int, param: ColoParameter, pg: ProcessGroup):
    spec = (ShardSpec([dim], [pg.tp_world_size()]), ComputeSpec(ComputePattern.TP1D))
    if param.process_group.tp_world_size() == 1:
        param.set_process_group(pg)
    param.set_tensor_spec(*spec)


def split_param_row_tp1d(param: ColoParameter, pg: ProcessGroup):
    split_param_single_dim_tp1d(0, param, pg)


def split_param_col_tp1d(param: ColoParameter, pg: ProcessGroup):
    split_param_single_dim_tp1d(-1, param, pg)


def gemini_zero_dpp(model: torch.nn.Module, pg: ProcessGroup, placement_policy: str = "auto"):
    return GeminiDDP(
        model,
        device=get_current_device(),
        placement_policy=placement_policy,
        pin_memory=True,
        search_range_mb=32,
        mixed_precision=None,  # fp32, so that losses compare
    )


def losses_of(model, optimizer, steps=3):
    criterion, losses = GPTLMLoss(), []
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        input_ids = torch.randint(512, (4, 32), generator=generator).to(get_current_device())
        optimizer.zero_grad()
        loss = criterion(model(input_ids, torch.ones_like(input_ids)), input_ids)
        optimizer.backward(loss) if hasattr(optimizer, "backward") else loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


colossalai.launch_from_torch(config={})
torch.manual_seed(0)
with ColoInitContext(device=torch.device("cpu")):
    model = GPTLMModel()
torch.manual_seed(0)
whole = GPTLMModel().to(get_current_device())
wanted = losses_of(whole, torch.optim.AdamW(whole.parameters(), lr=1e-3, weight_decay=0.0))

pg = ProcessGroup(tp_degree=dist.get_world_size())
for mn, module in model.named_modules():
    for pn, param in module.named_parameters(recurse=False):
        # set process group for all parameters
        param.set_process_group(pg)
        if "mlp.c_fc" in mn:
            if "weight" in pn or "bias" in pn:
                split_param_col_tp1d(param, pg)  # colmn slice
                # keep the shape of the output from c_fc
                param.compute_spec.set_output_replicate(False)
        elif "mlp.c_proj" in mn:
            if "weight" in pn:
                split_param_row_tp1d(param, pg)  # row slice
        elif "wte" in mn or "wpe" in mn or "c_attn" in mn or "c_proj" in mn:
            split_param_col_tp1d(param, pg)  # colmn slice

with gemini_zero_dpp(model, pg) as model:
    losses = losses_of(model, GeminiAdamOptimizer(model, lr=1e-3))
    torch.testing.assert_close(torch.tensor(losses), torch.tensor(wanted), rtol=1e-4, atol=1e-4)
    assert model.state_dict()["model.transformer.h.0.mlp.c_fc.weight"].shape == (
        64,
        256 // dist.get_world_size(),
    )
