"""One training program for every way to train: choose a plugin, run it on one process or under torchrun.

python examples/booster_gemini.py
python examples/booster_gemini.py --plugin gemini --device-bytes 3MiB --mixed-precision bf16
torchrun --nproc_per_node=2 examples/booster_gemini.py --plugin gemini
torchrun --nproc_per_node=2 examples/booster_gemini.py --plugin zero
torchrun --nproc_per_node=2 examples/booster_gemini.py --plugin ddp --mixed-precision bf16
"""

from __future__ import annotations

import argparse
import os
import shutil
import tempfile
from pathlib import Path

import torch
from torch import distributed as dist
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR
from torch.utils.data import TensorDataset

import gemini
from gemini.parallel import Booster, GeminiPlugin, LowLevelZeroPlugin, TorchDDPPlugin
from gemini.parallel.booster import Plugin

ACCUMULATE = 2  # micro-batches per step


def build(hidden: int) -> nn.Sequential:
    """Return a plain network; nothing in it knows about the booster."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(hidden, 4 * hidden), nn.GELU(), nn.Linear(4 * hidden, hidden))


def make_booster(options: argparse.Namespace) -> Booster:
    """Return the booster that the command line asks for; everything else is the same for all of them."""
    plugins: dict[str, Plugin] = {
        "gemini": GeminiPlugin(device_bytes=options.device_bytes, min_chunk_size_mb=0.1),
        "zero": LowLevelZeroPlugin(stage=2),
        "ddp": TorchDDPPlugin(),
    }
    return Booster(mixed_precision=options.mixed_precision, plugin=plugins[options.plugin])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--plugin", default="gemini", choices=("gemini", "zero", "ddp"))
    parser.add_argument("--mixed-precision", choices=("bf16",))
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--device-bytes", default="16MiB", help="budget of GeminiPlugin")
    options = parser.parse_args()

    booster = make_booster(options)
    model = build(options.hidden)
    optimizer = gemini.HybridAdam(model.parameters(), lr=1e-3)
    scheduler = CosineAnnealingLR(optimizer, T_max=16)
    data = TensorDataset(torch.randn(128, options.hidden))
    loader = booster.plugin.prepare_dataloader(data, batch_size=8, shuffle=True, drop_last=True)
    model, optimizer, criterion, loader, scheduler = booster.boost(
        model, optimizer, nn.MSELoss(), loader, scheduler
    )

    for number, (batch,) in enumerate(loader):
        ends_step = (number + 1) % ACCUMULATE == 0
        if ends_step:
            loss = criterion(model(batch).float(), batch)
            booster.backward(loss, optimizer)
            optimizer.clip_grad_by_norm(1.0)
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
            print(f"step {number // ACCUMULATE}  loss {loss.item():.4f}  lr {scheduler.get_last_lr()[0]:.2e}")
        else:
            with booster.no_sync(model, optimizer):
                booster.backward(criterion(model(batch).float(), batch), optimizer)

    # A name that all processes of a run know.
    directory = Path(tempfile.gettempdir(), f"booster-{os.environ.get('MASTER_PORT', os.getpid())}")
    booster.save_model(model, directory / "model", shard=True, size_per_shard=1)
    booster.save_optimizer(optimizer, directory / "optimizer.safetensors")
    booster.save_lr_scheduler(scheduler, directory / "scheduler.json")

    plain = build(options.hidden)  # not boosted: the files are those of transformers
    booster.load_model(plain, directory / "model")
    want = model.state_dict()  # under zero in the precision of the model; the files hold the fp32 weights
    if any(
        not torch.equal(value.to(want[name].dtype), want[name]) for name, value in plain.state_dict().items()
    ):
        raise SystemExit("the loaded weights differ")
    print(f"identical weights from {sorted(path.name for path in (directory / 'model').iterdir())}")

    if dist.is_initialized():
        dist.barrier()
    shutil.rmtree(directory, ignore_errors=True)
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
