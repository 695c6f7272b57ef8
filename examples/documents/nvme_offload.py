# Example: EX3 and EX4, NVMe offload
# Repair: a seed, so that runs can be compared; a GPT-2 of a few thousand parameters; get_current_device()
#   instead of torch.cuda.current_device()
# Run: gemini run examples/documents/nvme_offload.py
# Shows: equal losses with and without NVMe, on the CPU and under Gemini, which prints the three lines of
#   its chunk search; launch may be called again
import os
import re
import time

import psutil
import torch
from stand_ins import printed, small_gpt2
from torch import nn
from transformers.models.gpt2.modeling_gpt2 import GPT2LMHeadModel

import gemini.compat as colossalai
from gemini.compat.nn.optimizer import HybridAdam
from gemini.compat.utils import get_current_device
from gemini.compat.utils.model.colo_init_context import ColoInitContext
from gemini.compat.zero import zero_model_wrapper, zero_optim_wrapper


class GPTLMLoss(nn.Module):
    def __init__(self):
        super().__init__()
        self.loss_fn = nn.CrossEntropyLoss()

    def forward(self, logits, labels):
        shift_logits = logits[..., :-1, :].contiguous()
        shift_labels = labels[..., 1:].contiguous()
        # Flatten the tokens
        return self.loss_fn(shift_logits.view(-1, shift_logits.size(-1)), shift_labels.view(-1))


def get_data(batch_size, seq_len, vocab_size, device=None):
    device = get_current_device() if device is None else device
    input_ids = torch.randint(vocab_size, (batch_size, seq_len), device=device)
    attn_mask = torch.ones_like(input_ids)
    return dict(input_ids=input_ids, attention_mask=attn_mask)


def get_model_numel(model):
    return sum(p.numel() for p in model.parameters())


def get_mem_usage():
    proc = psutil.Process(os.getpid())
    return proc.memory_info().rss


def train_cpu(nvme_offload_fraction=0.0):
    torch.manual_seed(0)
    config = small_gpt2()
    model = GPT2LMHeadModel(config)
    criterion = GPTLMLoss()
    optimizer = HybridAdam(model.parameters(), nvme_offload_fraction=nvme_offload_fraction)
    print(f"Model numel: {get_model_numel(model) / 1024**3:.3f} B")

    start = time.time()
    for step in range(3):
        data = get_data(4, 64, config.vocab_size, device="cpu")
        outputs = model(**data)
        loss = criterion(outputs.logits, data["input_ids"])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(f"[{step}] loss: {loss.item():.3f}")

    print(f"Time: {time.time() - start:.3f} s")
    print(f"Mem usage: {get_mem_usage() / 1024**2:.3f} MB")


def train_gemini_cpu(nvme_offload_fraction=0.0):
    colossalai.launch_from_torch({})
    torch.manual_seed(0)
    config = small_gpt2()
    with ColoInitContext(device=get_current_device()):
        model = GPT2LMHeadModel(config)
    criterion = GPTLMLoss()
    optimizer = HybridAdam(model.parameters(), nvme_offload_fraction=nvme_offload_fraction)
    print(f"Model numel: {get_model_numel(model) / 1024**3:.3f} B")

    gemini_config = dict(
        strict_ddp_mode=True,
        device=get_current_device(),
        placement_policy="cpu",
        pin_memory=True,
        hidden_dim=config.n_embd,
    )
    model = zero_model_wrapper(model, zero_stage=3, gemini_config=gemini_config)
    optimizer = zero_optim_wrapper(model, optimizer, initial_scale=2**5)

    start = time.time()
    for step in range(3):
        data = get_data(4, 64, config.vocab_size)
        outputs = model(**data)
        loss = criterion(outputs.logits, data["input_ids"])
        optimizer.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        print(f"[{step}] loss: {loss.item():.3f}")

    print(f"Time: {time.time() - start:.3f} s")
    print(f"Mem usage: {get_mem_usage() / 1024**2:.3f} MB")
    model.close()


SEARCH = (
    r"searching chunk configuration is completed in [\d.]+ s\.",
    r"used number: [\d.]+ MB, wasted number: [\d.]+ MB",
    r"total wasted percentage is [\d.]+%",
)

for train in (train_cpu, train_gemini_cpu):
    without, with_nvme = (printed(train, fraction) for fraction in (0.0, 1.0))
    losses = [line for line in without if "loss" in line]
    assert len(losses) == 3
    assert losses == [line for line in with_nvme if "loss" in line]
    for line in SEARCH if train is train_gemini_cpu else ():
        assert any(re.fullmatch(line, found) for found in without), line
