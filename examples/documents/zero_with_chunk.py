# Example: EX5, Zero Redundancy Optimizer with chunk-based memory management
# Repair: what the document imports and parses elsewhere is here; the dead branches for versions up to
#   0.1.10 are left out; a GPT-2 of a few thousand parameters, on the device there is; the batch stays, so
#   that the loss falls
# Run: gemini run --nproc-per-node 2 examples/documents/zero_with_chunk.py --tp_degree 2 --shardinit
# Shows: a GPT-2 cut over ranks by ShardSpec, then wrapped by GeminiDDP, trains with recomputed blocks; each
#   rank has half of the first layer of an MLP
import argparse
from functools import partial

import torch
from packaging import version
from stand_ins import small_gpt2
from torch import nn
from transformers import GPT2LMHeadModel

import gemini.compat as colossalai
from gemini.compat.nn.parallel import GeminiDDP
from gemini.compat.tensor import (
    ColoParameter,
    ComputePattern,
    ComputeSpec,
    ProcessGroup,
    ReplicaSpec,
    ShardSpec,
)
from gemini.compat.utils import get_current_device
from gemini.compat.utils.model.colo_init_context import ColoInitContext
from gemini.compat.zero import GeminiAdamOptimizer


def parse_args():
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--tp_degree", type=int, default=1)
    parser.add_argument("--placement", default="cpu")
    parser.add_argument("--shardinit", action="store_true")
    return parser.parse_args()


class GPTLMModel(nn.Module):
    def __init__(
        self,
        hidden_size=768,
        num_layers=12,
        num_attention_heads=12,
        max_seq_len=1024,
        vocab_size=50257,
        checkpoint=False,
    ):
        super().__init__()
        self.checkpoint = checkpoint
        self.model = GPT2LMHeadModel(
            small_gpt2(
                n_embd=hidden_size,
                n_layer=num_layers,
                n_head=num_attention_heads,
                n_positions=max_seq_len,
                n_ctx=max_seq_len,
                vocab_size=vocab_size,
            )
        )
        if checkpoint:
            self.model.gradient_checkpointing_enable()

    def forward(self, input_ids, attention_mask):
        return self.model(input_ids=input_ids, attention_mask=attention_mask, use_cache=not self.checkpoint)[
            0
        ]


def gpt2_medium(checkpoint=False):
    return GPTLMModel(
        hidden_size=64,
        num_layers=2,
        num_attention_heads=4,
        max_seq_len=SEQ_LEN,
        vocab_size=VOCAB_SIZE,
        checkpoint=checkpoint,
    )


class GPTLMLoss(nn.Module):
    def __init__(self):
        super().__init__()
        self.loss_fn = nn.CrossEntropyLoss()

    def forward(self, logits, labels):
        shift_logits = logits[..., :-1, :].contiguous()
        shift_labels = labels[..., 1:].contiguous()
        return self.loss_fn(shift_logits.view(-1, shift_logits.size(-1)), shift_labels.view(-1))


def tensor_parallelize(model: torch.nn.Module, pg: ProcessGroup):
    for mn, module in model.named_modules():
        for pn, param in module.named_parameters(recurse=False):
            if hasattr(param, "visited"):
                continue
            param.set_dist_spec(ReplicaSpec())
            if "mlp.c_fc" in mn:
                if "weight" in pn or "bias" in pn:
                    split_param_col_tp1d(param, pg)
                    param.compute_spec.set_output_replicate(False)
                else:
                    param.set_dist_spec(ReplicaSpec())
            elif "mlp.c_proj" in mn:
                if "weight" in pn:
                    split_param_row_tp1d(param, pg)
                else:
                    param.set_dist_spec(ReplicaSpec())
            elif "wte" in mn or "wpe" in mn or "c_attn" in mn or "c_proj" in mn:
                split_param_col_tp1d(param, pg)
            else:
                param.set_dist_spec(ReplicaSpec())
            param.visited = True


def split_param_single_dim_tp1d(dim: int, param: ColoParameter, pg: ProcessGroup):
    spec = (ShardSpec([dim], [pg.tp_world_size()]), ComputeSpec(ComputePattern.TP1D))
    param.set_tensor_spec(*spec)


def split_param_row_tp1d(param: ColoParameter, pg: ProcessGroup):
    split_param_single_dim_tp1d(0, param, pg)


def split_param_col_tp1d(param: ColoParameter, pg: ProcessGroup):
    split_param_single_dim_tp1d(-1, param, pg)


def gemini_zero_dpp(model: torch.nn.Module, pg: ProcessGroup, placement_policy: str = "auto"):
    cai_version = colossalai.__version__
    assert version.parse(cai_version) > version.parse("0.1.10")
    return GeminiDDP(
        model,
        device=get_current_device(),
        placement_policy=placement_policy,
        pin_memory=True,
        search_range_mb=32,
    )


def get_data(batch_size, seq_len, vocab_size):
    input_ids = torch.randint(0, vocab_size, (batch_size, seq_len), device=get_current_device())
    attention_mask = torch.ones_like(input_ids)
    return input_ids, attention_mask


def get_tflops(numel, batch_size, seq_len, step_time):
    return numel * batch_size * seq_len * 8 / 1e12 / (step_time + 1e-12)


BATCH_SIZE = 4
SEQ_LEN = 32
VOCAB_SIZE = 512
NUM_STEPS = 5


def main():
    args = parse_args()
    colossalai.launch_from_torch(config={})

    # build criterion
    criterion = GPTLMLoss()

    torch.manual_seed(123)
    default_pg = ProcessGroup(tp_degree=args.tp_degree)
    default_dist_spec = ShardSpec([-1], [args.tp_degree]) if args.shardinit else None
    # build GPT model
    with ColoInitContext(device="cpu", default_dist_spec=default_dist_spec, default_pg=default_pg):
        model = gpt2_medium(checkpoint=True)

    pg = default_pg
    # Tensor Parallelism (TP)
    tensor_parallelize(model, pg)
    # Gemini + ZeRO DP, Note it must be used after TP
    model = gemini_zero_dpp(model, pg, args.placement)
    # build optimizer
    optimizer = GeminiAdamOptimizer(model, lr=1e-3, initial_scale=2**5)
    numel = sum([p.numel() for p in model.parameters()])
    get_tflops_func = partial(get_tflops, numel, BATCH_SIZE, SEQ_LEN)
    assert get_tflops_func(1.0) > 0
    first_of_mlp = model.state_dict()["model.transformer.h.0.mlp.c_fc.weight"]
    assert first_of_mlp.shape == (64, 256 // args.tp_degree)

    model.train()
    losses = []
    input_ids, attn_mask = get_data(BATCH_SIZE, SEQ_LEN, VOCAB_SIZE)
    for _ in range(NUM_STEPS):
        # we just use randomly generated data here
        optimizer.zero_grad()
        outputs = model(input_ids, attn_mask)
        loss = criterion(outputs, input_ids)
        optimizer.backward(loss)
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] - 0.5, losses
    model.close()


main()
