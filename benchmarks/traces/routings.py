"""Write the routings of this directory: ``python benchmarks/traces/routings.py [NAME ...]``.

``trained``: a small Qwen3-MoE learns the bytes of Python's standard library, on one thread. Then it reads
modules that it has not seen, in windows of 128 bytes, the next byte always given. A causal model chooses the
same experts if it reads a text at once or one token per pass, so one forward pass records many.
``local`` and ``skewed`` come from generators (``gemini_bench/routing.py``).
"""

from __future__ import annotations

import hashlib
import sys
import sysconfig
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from gemini_bench.routing import (
    GENERATED_PASSES,
    LAYERS,
    ROUTINGS,
    SEED,
    SEQUENCES,
    Local,
    Routing,
    Skewed,
    generate,
)

_BYTES = 256  # the vocabulary
_STEPS, _BATCH, _SEQ = 800, 16, 128
_PASSES = 1024
_HELD_OUT = 8  # one module in so many is read, not learned

CONFIG = Qwen3MoeConfig(
    vocab_size=_BYTES,
    hidden_size=128,
    num_hidden_layers=LAYERS,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=32,
    moe_intermediate_size=64,
    num_experts=32,
    num_experts_per_tok=4,
    norm_topk_prob=True,
    router_aux_loss_coef=0.001,
    output_router_logits=True,
    max_position_embeddings=_PASSES,
    tie_word_embeddings=True,
)


def texts() -> tuple[bytes, bytes]:
    """Return what is learned, and what is read: the top modules of the standard library in order of name."""
    learned, read = [], []
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        held_out = hashlib.sha256(path.name.encode()).digest()[0] % _HELD_OUT == 0
        (read if held_out else learned).append(path.read_bytes())
    return b"".join(learned), b"".join(read)


def tensor(text: bytes) -> Tensor:
    """Return the bytes of a text as tokens."""
    return torch.from_numpy(np.frombuffer(text, dtype=np.uint8).astype(np.int64))


def train(learned: Tensor, steps: int) -> Qwen3MoeForCausalLM:
    """Train for so many steps on pieces of the text at seeded places."""
    torch.manual_seed(SEED)
    model = Qwen3MoeForCausalLM(CONFIG)
    model.set_experts_implementation("grouped_mm")
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, betas=(0.9, 0.95), weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, total_steps=steps, pct_start=0.1)
    began = time.monotonic()
    for step in range(steps):
        starts = torch.randint(len(learned) - _SEQ, (_BATCH, 1))
        batch = learned[starts + torch.arange(_SEQ)]
        loss = model(batch, labels=batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if step % 50 == 0 or step == steps - 1:
            print(f"step {step}: loss {loss.item():.3f}, {time.monotonic() - began:.0f} s", flush=True)
    return model


@torch.no_grad()
def record(model: Qwen3MoeForCausalLM, read: Tensor) -> np.ndarray:
    """Return the experts of every token, ``[sequences, passes, layers, experts per token]``; sequences begin
    at equal distances in the text."""
    model.eval()
    stride = (len(read) - _PASSES - 1) // SEQUENCES
    chosen, losses = [], []
    for sequence in range(SEQUENCES):
        text = read[sequence * stride :][: _PASSES + 1]
        parts = []
        for begin in range(0, _PASSES, _SEQ):  # windows of the length that was trained
            tokens = text[begin : begin + _SEQ]
            out = model(tokens[None], output_router_logits=True)
            losses.append(F.cross_entropy(out.logits[0, :-1], tokens[1:]).item())
            layers = [logits.topk(CONFIG.num_experts_per_tok).indices for logits in out.router_logits]
            parts.append(torch.stack(layers, dim=1))
        chosen.append(torch.cat(parts))
    print(f"held-out loss {sum(losses) / len(losses):.3f} per byte", flush=True)
    return torch.stack(chosen).sort(dim=-1).values.to(torch.uint8).numpy()


def trained() -> Routing:
    """Train and record."""
    torch.set_num_threads(1)
    learned, read = texts()
    print(f"{len(learned)} bytes learned, {len(read)} held out", flush=True)
    model = train(tensor(learned), _STEPS)
    print(f"{sum(parameter.numel() for parameter in model.parameters())} parameters", flush=True)
    return Routing(record(model, tensor(read)), CONFIG.num_experts)


RECORDINGS: dict[str, Callable[[], Routing]] = {
    "trained": trained,
    "local": lambda: generate([Local()] * LAYERS, GENERATED_PASSES),
    "skewed": lambda: generate([Skewed()] * LAYERS, GENERATED_PASSES),
}


def main(names: list[str]) -> None:
    """Write the named routings, all of them if none is named."""
    ROUTINGS.mkdir(exist_ok=True)
    for name in names or RECORDINGS:
        path = ROUTINGS / f"{name}.npz"
        routing = RECORDINGS[name]()
        routing.save(path)
        print(
            f"{name}: {routing.experts.shape} of {routing.num_experts}, {path.stat().st_size} bytes",
            flush=True,
        )


if __name__ == "__main__":
    main(sys.argv[1:])
