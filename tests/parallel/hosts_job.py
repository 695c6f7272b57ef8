"""What each rank of ``test_hosts.py`` runs, on hosts of their own or in the tests' workers."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from hosts import BOOT_ID, WIRE
from sharded_harness import Recipe, train_step, wrap
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from gemini import GeminiDDP
from gemini.checkpoint import is_complete, load, save, save_async, saving
from gemini.checkpoint.tensor_file import TensorFile
from gemini.comm.ranks import ProcessGroupPeers

RECIPE = Recipe(clip=0.05, adam={"lr": 1e-3, "weight_decay": 0.01, "eps": 1e-5})
# What may happen to a save: the wire is cut, or a rank is killed.
SPOILED = ("cut when published", "last rank killed", "cut", "cut beside training", "first rank killed")
_START_SECONDS = 120.0  # until all ranks have imported torch, on a busy machine
_REPORT_SECONDS = 60.0  # in which the last rank of a host reports after the first one
_SENT = Path("/sys/class/net", WIRE, "statistics", "tx_bytes")


@dataclass(frozen=True)
class Order:
    """What to train, in a directory that all ranks see. ``copies`` rows of ranks hold a copy each. After
    ``save_after`` steps a checkpoint is saved; in the middle of step ``cut_in`` the wire is cut. A step after
    ``save_after`` another checkpoint is saved if something, ``spoil``, is to happen to it."""

    directory: str
    copies: int = 1
    steps: int = 5
    save_after: int | None = None
    cut_in: int | None = None
    spoil: str = ""
    timeout: float = 120.0

    @property
    def checkpoints(self) -> Path:
        return Path(self.directory, "checkpoints")

    @property
    def offloaded(self) -> Path:
        return Path(self.directory, "offloaded")

    def report(self, rank: int) -> Path:
        return Path(self.directory, f"rank{rank}.pt")


def wide() -> nn.Module:
    """Enough parameters that what ranks say in rounds is little beside them."""
    torch.manual_seed(8)
    return nn.Sequential(
        nn.Linear(64, 512), nn.GELU(), nn.Linear(512, 512), nn.GELU(), nn.Linear(512, 512), nn.Linear(512, 64)
    )


def train(order: Order, seen: dict[str, Any] | None = None) -> dict[str, Any]:
    """Go on from the last checkpoint, if there is any; return what this rank has seen, as far as it came in
    ``seen`` too: losses by step, bytes on the wire per step, weights when they were saved and at the end."""
    seen = {} if seen is None else seen
    seen |= {"losses": {}, "crossed": []}
    group = None
    if order.copies > 1:
        shape = (order.copies, dist.get_world_size() // order.copies)
        group = init_device_mesh("cpu", shape, mesh_dim_names=("copy", "shard"))
    order.offloaded.mkdir(parents=True, exist_ok=True)
    tight = {"device_bytes": "8MiB", "non_model_bytes": 0, "disk_dir": str(order.offloaded)}
    model, optimizer = wrap(wide, RECIPE, process_group=group, **tight)
    with model:
        assert model.peers is not None
        seen["several"] = model.peers.on_several_hosts()
        begin = load(order.checkpoints, model, optimizer)["step"] if is_complete(order.checkpoints) else 0
        for step in range(begin, order.steps):
            before = _sent()
            if step == order.cut_in:
                _cut_later(model, seen)
            (seen["losses"][step],) = train_step(model, optimizer, RECIPE, step)
            seen["crossed"].append(_sent() - before)
            if step + 1 == order.save_after:
                save(order.checkpoints, model, optimizer, extra={"step": step + 1})
                seen["saved"] = _weights(model)
            if order.save_after is not None and step == order.save_after and order.spoil:
                _spoil_later(order, seen)
                save_again = save_async if order.spoil == "cut beside training" else save
                save_again(order.checkpoints, model, optimizer, extra={"step": step + 1})
        return {**seen, "weights": _weights(model)}


def _weights(model: GeminiDDP) -> dict[str, Tensor]:
    return {key: value.clone() for key, value in model.state_dict().items()}


def _sent() -> int:
    """Return what this host had sent over the wire when all ranks were here."""
    if not _SENT.exists():
        return 0
    dist.barrier()
    sent = int(_SENT.read_text())
    dist.barrier()
    return sent


def _cut(seen: dict[str, Any]) -> None:
    """Have the first rank's host lose the wire, once."""
    if dist.get_rank() == 0 and "cut" not in seen:
        seen["cut"] = time.monotonic()
        subprocess.run(["ip", "link", "set", WIRE, "down"], check=True)


def _cut_later(model: GeminiDDP, seen: dict[str, Any]) -> None:
    """Lose the wire in the step that comes: in the middle of backward, or, where copies are trained, when
    they are about to take their mean."""
    peers = model.peers
    assert isinstance(peers, ProcessGroupPeers)
    swap_copies = peers.swap_copies

    def cut_and_swap(messages: Sequence[tuple[int, Tensor, Tensor]]) -> None:
        _cut(seen)
        swap_copies(messages)

    if peers.share.replicas > 1:
        peers.swap_copies = cut_and_swap  # type: ignore[method-assign]
    else:
        model.module[2].register_full_backward_hook(lambda *_: _cut(seen))


def _spoil_later(order: Order, seen: dict[str, Any]) -> None:
    """Lose the wire or a rank while the next checkpoint is saved: after the first values were written, or
    when it was published."""
    lend, publish = TensorFile.lend, saving.publish
    killed = {"first rank killed": 0, "last rank killed": dist.get_world_size() - 1}.get(order.spoil)

    def lend_and_lose(*arguments: Any) -> None:
        lend(*arguments)
        if killed is None:
            _cut(seen)
        elif killed == dist.get_rank():
            torch.save({**seen, "cut": time.monotonic()}, order.report(dist.get_rank()))
            os.kill(os.getpid(), signal.SIGKILL)

    def publish_and_lose(*arguments: Any) -> Path:
        published = publish(*arguments)
        _cut(seen)
        return published

    if order.spoil == "cut when published":
        saving.publish = publish_and_lose
    else:
        TensorFile.lend = lend_and_lose  # type: ignore[method-assign]


def _join(timeout: float) -> None:
    """Make the default group, whose short timeout begins when all ranks are there."""
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = dist.TCPStore(address, port, is_master=False, timeout=timedelta(seconds=_START_SECONDS))
    store.set(f"started {rank}", "")
    store.wait([f"started {rank}" for rank in range(world)])
    own = dist.PrefixStore("ranks", store)
    dist.init_process_group(
        "gloo", store=own, rank=rank, world_size=world, timeout=timedelta(seconds=timeout)
    )


def main(order: Order) -> None:
    """Train as ``order`` says; write what was seen, an error included, to the rank's report."""
    seen: dict[str, Any] = {"boot_id": Path(BOOT_ID).read_text(), "synchronous": []}

    def note(event: str, details: Any) -> None:
        if event == "open" and str(details[0]).endswith("model-00001-of-00001.safetensors"):
            seen["synchronous"].append(details[2] & os.O_DSYNC == os.O_DSYNC)

    sys.addaudithook(note)
    torch.set_num_threads(1)
    _join(order.timeout)
    try:
        seen.update(train(order, seen))
        dist.destroy_process_group()
    except Exception as error:
        seen["error"] = repr(error)
        raise
    finally:
        seen["ended"] = time.monotonic()
        torch.save(seen, order.report(int(os.environ["RANK"])))
        _stay_for_neighbours(order)


def _stay_for_neighbours(order: Order) -> None:
    """Wait until all ranks of this host have reported: they are killed when the first one has failed."""
    first = int(os.environ["RANK"]) - int(os.environ["LOCAL_RANK"])
    reports = [order.report(first + rank) for rank in range(int(os.environ["LOCAL_WORLD_SIZE"]))]
    ends = time.monotonic() + _REPORT_SECONDS
    while not all(report.exists() for report in reports) and time.monotonic() < ends:
        time.sleep(0.1)
