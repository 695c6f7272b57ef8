"""Train a GPT over several ranks, each keeping its shards under a budget; go on after a rank has died.

    python examples/ranks_that_restart.py                                             one process
    torchrun --standalone --nproc-per-node 2 --max-restarts 3 examples/ranks_that_restart.py
    torchrun --standalone --nproc-per-node 2 --max-restarts 3 examples/ranks_that_restart.py --kill-at 5

``--kill-at`` kills the last rank in that step, once: torchrun starts all ranks again and they resume from the
last checkpoint. Started again with another number of ranks, it goes on with that.
"""

from __future__ import annotations

import argparse
import os
import signal
from pathlib import Path

import torch
from torch import distributed as dist

import gemini
from gemini.checkpoint import is_complete, load, save
from gemini.jobs.gpt.model import GPT, GPTConfig, language_loss
from gemini.parallel import join_ranks

GLOBAL_BATCH = 4


def own_batch(step: int, config: GPTConfig) -> torch.Tensor:
    """Return this rank's part of the batch of a step: the same for any number of ranks that divides it."""
    numbers = torch.Generator().manual_seed(step)
    tokens = torch.randint(config.vocab, (GLOBAL_BATCH, config.seq + 1), generator=numbers)
    return tokens.chunk(dist.get_world_size())[dist.get_rank()] if dist.is_initialized() else tokens


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--run-dir", type=Path, default=Path("ranks-run"), help="where checkpoints are")
    parser.add_argument("--device-bytes", default="64MiB", help="budget of each rank")
    parser.add_argument("--kill-at", type=int, help="the step in which a rank dies, once")
    options = parser.parse_args()

    join_ranks("gloo")
    first = not dist.is_initialized() or dist.get_rank() == 0
    last = not dist.is_initialized() or dist.get_rank() == dist.get_world_size() - 1
    options.run_dir.mkdir(parents=True, exist_ok=True)

    torch.manual_seed(0)
    config = GPTConfig(vocab=256, layers=options.layers, hidden=options.hidden, heads=4, seq=32)
    with gemini.GeminiDDP(
        GPT(config), device_bytes=options.device_bytes, disk_dir=str(options.run_dir), min_chunk_size_mb=1
    ) as model:
        optimizer = gemini.GeminiAdamOptimizer(model, lr=1e-3, max_norm=1.0)
        begin = load(options.run_dir, model, optimizer)["step"] if is_complete(options.run_dir) else 0
        for step in range(begin, options.steps):
            tokens = own_batch(step, config)
            loss = language_loss(model(tokens[:, :-1]), tokens[:, 1:])
            optimizer.backward(loss)
            if step == options.kill_at and last and os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0":
                os.kill(os.getpid(), signal.SIGKILL)
            optimizer.step()
            save(options.run_dir, model, optimizer, extra={"step": step + 1})
            mean = loss.detach().clone()
            if dist.is_initialized():
                dist.all_reduce(mean)
                mean /= dist.get_world_size()
            if first:
                print(f"step {step} loss {mean.item():.6f}", flush=True)
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
