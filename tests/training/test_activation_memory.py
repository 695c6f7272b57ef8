"""What saved tensors hold is given back by itself, and what cannot work is refused."""

from __future__ import annotations

import gc
import re
from multiprocessing import get_context
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
import torch.nn.functional as F
from activation_harness import Net, activation_bytes, net_loss, offloaded, store_small_tensors
from torch import Tensor, nn
from training_harness import (
    KIB,
    assert_within_budgets,
    managed_optimizer,
    random_batch,
    seeded,
    tight,
)

from gemini import GeminiDDP
from gemini._C import malloc_trim
from gemini.errors import ConfigError, OutOfBudgetError
from gemini.memstats.monitor import ProcessMonitor

pytestmark = pytest.mark.usefixtures(store_small_tensors.__name__)


class Keeps(torch.autograd.Function):
    """Saves a view, an expanded tensor and one that is not contiguous; leaves what it got in ``seen``."""

    seen: ClassVar[list[Tensor]] = []

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        """Save three tensors over the memory of one."""
        ctx.save_for_backward(x.t(), x[1:3], x[:1].expand(5, 32))
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        """Hand out what was saved."""
        Keeps.seen = list(ctx.saved_tensors)
        return grad


class Views(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        """Save views of one tensor."""
        out: Tensor = Keeps.apply(self.fc(x))
        return out


class Attention(nn.Module):
    """Saves query, key and value of one projection: views with gaps, each of which spans nearly all of it."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(32, 96)

    def forward(self, x: Tensor) -> Tensor:
        """Attend within ``x`` of shape ``[batch, seq, 32]`` with two heads."""
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, 16)).permute(2, 0, 3, 1, 4)
        mixed: Tensor = F.scaled_dot_product_attention(q, k, v)
        return mixed


def test_query_key_and_value_of_one_projection_are_stored_once(tmp_path: Path) -> None:
    with GeminiDDP(seeded(Attention), **offloaded(tmp_path, 400 * KIB)) as model:
        x = random_batch(0, 8, 64, 32)  # 64 KiB
        out = model(x)
        # The input, its projection, the result and a sum of exponentials per row and head.
        assert activation_bytes(model) < 1.1 * (1 + 3 + 1 + 1 / 8) * x.nbytes
        out.sum().backward()


def test_views_keep_their_strides_and_share_one_chunk(tmp_path: Path) -> None:
    x = random_batch(0, 4, 32)
    with GeminiDDP(seeded(Views), **offloaded(tmp_path)) as model:
        before = len(model.manager.chunks.chunks)
        loss = model(x).sum()
        stored = len(model.manager.chunks.chunks) - before
        loss.backward()
        turned, row, wide = Keeps.seen
        assert (row.stride(), wide.stride(), turned.stride()) == ((32, 1), (0, 1), (1, 32))
        assert torch.equal(row, turned.t()[1:3])
        assert torch.equal(wide[4], turned.t()[0])
        assert stored == 2  # the input of the layer, and its result once for all three
        Keeps.seen = row = wide = turned = None  # type: ignore[assignment]


class Fails(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = Net()
        self.fails = True

    def forward(self, x: Tensor) -> Tensor:
        """Fail after half of the work."""
        x = self.net(x)
        if self.fails:
            raise ValueError("half-way")
        out: Tensor = self.net(x)
        return out


def test_a_forward_that_raises_gives_everything_back(tmp_path: Path) -> None:
    with GeminiDDP(seeded(Fails), **offloaded(tmp_path, 300 * KIB)) as model:
        with pytest.raises(ValueError, match="half-way"):
            model(random_batch(0, 8, 16, 32))
        gc.collect()
        assert activation_bytes(model) == 0


def test_a_graph_that_is_dropped_gives_everything_back(tmp_path: Path) -> None:
    with GeminiDDP(seeded(Net), **offloaded(tmp_path, 300 * KIB)) as model:
        loss = net_loss(model, 0)
        assert activation_bytes(model) > 100 * KIB
        del loss
        assert activation_bytes(model) == 0


def test_backward_frees_what_it_has_used(tmp_path: Path) -> None:
    with GeminiDDP(seeded(Net), **offloaded(tmp_path, 300 * KIB)) as model:
        loss = net_loss(model, 0)
        loss.backward()
        assert activation_bytes(model) == 0


def test_nothing_is_stored_without_gradients(tmp_path: Path) -> None:
    with GeminiDDP(seeded(Net), **offloaded(tmp_path, 300 * KIB)) as model, torch.no_grad():
        before = len(model.manager.chunks.chunks)
        model(random_batch(0, 8, 16, 32))
        assert len(model.manager.chunks.chunks) == before


def test_a_tensor_kept_beyond_backward_stays_readable(tmp_path: Path) -> None:
    x = random_batch(0, 4, 32)
    with GeminiDDP(seeded(Views), **offloaded(tmp_path)) as model:
        optimizer = managed_optimizer(model)
        model(x).sum().backward()
        kept, want = Keeps.seen[0], Keeps.seen[0].clone()
        optimizer.step()
        for step in range(3):
            model(random_batch(step, 4, 32)).sum().backward()
            optimizer.step()
        assert torch.equal(kept, want)
        del kept
        Keeps.seen = []


def peak_bytes_of_a_step(offload: bool, tmp_path: Path) -> int:
    """Return how much resident memory the second step of a deep model adds to what was there before."""
    layers = [module for _ in range(24) for module in (nn.Linear(256, 256), nn.GELU())]
    options = {**tight(tmp_path, "32MiB", disk_bytes="1GiB"), "min_chunk_size_mb": 1}
    with GeminiDDP(nn.Sequential(*layers), activation_offload=offload, **options) as model:
        optimizer = managed_optimizer(model)
        for step in range(2):
            monitor = ProcessMonitor()
            malloc_trim()
            before = monitor.resident_bytes()
            monitor.start_period()
            loss = model(random_batch(step, 2048, 256)).square().mean()
            optimizer.backward(loss)
            optimizer.step()
            peak = monitor.end_period() - before
            monitor.close()
        return peak


@pytest.mark.dear("activations of hundreds of MiB are made in processes of their own")
def test_resident_memory_falls_by_what_leaves_device(tmp_path: Path) -> None:
    saved_bytes = 24 * 2 * 2 * 2**20  # the inputs of every linear layer and every GELU
    # Each in a process of its own: what earlier tests have left in the heap would be used first.
    with get_context("spawn").Pool(1, maxtasksperchild=1) as processes:
        given = [(False, tmp_path), (True, tmp_path)]
        plain, offloaded_peak = processes.starmap(peak_bytes_of_a_step, given, chunksize=1)
    assert plain > saved_bytes
    assert offloaded_peak < plain - saved_bytes * 3 // 4


def test_activations_that_fit_no_tier_are_refused(tmp_path: Path) -> None:
    options = tight(tmp_path, 200 * KIB, disk_bytes=500 * KIB, activation_offload=True)
    with GeminiDDP(seeded(Net), **options) as model:
        with pytest.raises(OutOfBudgetError, match="disk_bytes"):
            net_loss(model, 0)
        gc.collect()
        assert activation_bytes(model) == 0
        assert_within_budgets(model.stats())


class Wide(nn.Module):
    """A layer whose input is saved while its weights are pinned."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Linear(96, 96)

    def forward(self, x: Tensor) -> Tensor:
        """Run the layer."""
        out: Tensor = self.one(x * 2)
        return out


class Product(nn.Module):
    """Two tensors that are saved one after the other and used together."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        """Multiply ``x + 1`` by its sine."""
        y = x * self.scale + 1
        out: Tensor = y * y.sin().mul_(1.5)
        return out


@pytest.mark.parametrize(
    ("build", "kib", "pinned"), [(Wide, 240, r"\d\d[.]\d KiB of model"), (Product, 150, "0 B of model")]
)
def test_an_activation_too_large_beside_what_is_pinned_is_named(
    build: type[nn.Module], kib: int, pinned: str, tmp_path: Path
) -> None:
    batch = torch.ones(kib * KIB // (4 * 96), 96)
    with GeminiDDP(seeded(build), **offloaded(tmp_path, 240 * KIB)) as model:
        with pytest.raises(
            OutOfBudgetError, match=f"{pinned}.* raise device_bytes to .*checkpoint"
        ) as raised:
            model(batch).sum().backward()
        (enough,) = re.findall(r"raise device_bytes to ([\d.]+\wiB)", str(raised.value))
        del raised
        gc.collect()
        assert activation_bytes(model) == 0
        assert_within_budgets(model.stats())
    with GeminiDDP(seeded(build), **offloaded(tmp_path, enough)) as model:
        model(batch).sum().backward()


def test_offload_needs_a_tier_below_device() -> None:
    with pytest.raises(ConfigError, match="disk_dir"):
        GeminiDDP(nn.Linear(4, 4), device_bytes="1MiB", activation_offload=True)


def test_an_unknown_mode_is_refused() -> None:
    with pytest.raises(ConfigError, match="choose False, True or 'auto'"):
        GeminiDDP(nn.Linear(4, 4), activation_offload="always")
