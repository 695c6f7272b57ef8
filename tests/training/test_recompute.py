"""activation_recompute: blocks that compute their activations again change no number, and save less."""

from __future__ import annotations

import copy
import gc
import itertools
import pickle
import random
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch
from activation_harness import Block, Net, activation_bytes, both, net_loss, offloaded, store_small_tensors
from pairs import pairs
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from training_harness import Recipe, managed_optimizer, managed_step, random_batch, seeded
from training_models import TinyGPT, gpt_loss

from gemini import GeminiDDP
from gemini.errors import ConfigError, StateError
from gemini.memstats import Trace
from gemini.memstats.trace import LinkSpeed
from gemini.placement.problem import Machine
from gemini.placement.recompute import BlockCall, RecomputeChoice
from gemini.runtime.activation import recompute
from gemini.runtime.step import order

pytestmark = pytest.mark.usefixtures(store_small_tensors.__name__)

Chooser = Callable[..., RecomputeChoice]


def options(tmp_path: Path, device_bytes: int | str = "16MiB") -> dict[str, Any]:
    found = offloaded(tmp_path, **{"activation_offload": "auto", "non_model_bytes": None})
    return {**found, "device_bytes": device_bytes, "disk_bytes": "256MiB", "activation_recompute": True}


def choosing(pick: Callable[[int], bool]) -> Chooser:
    """Return a chooser of the blocks that ``pick`` says, of those that it is offered."""

    def choose(_trace: Trace, calls: Sequence[BlockCall], _machine: Machine, **_how: Any) -> RecomputeChoice:
        return RecomputeChoice(frozenset(call.block for call in calls if pick(call.block)), 1, 2, 3, 4)

    return choose


def every(_block: int) -> bool:
    return True


def second(block: int) -> bool:
    return block % 2 == 1


def large_loss(model: nn.Module, index: int) -> Tensor:
    torch.manual_seed(index)
    loss: Tensor = model(random_batch(index, 256, 16, 32)).square().mean()  # 512 KiB
    return loss


def trained(build: Callable[[], nn.Module], keywords: dict[str, Any], steps: int = 6) -> GeminiDDP:
    """Return a model after some steps."""
    model = GeminiDDP(seeded(build), **keywords)
    optimizer = managed_optimizer(model)
    for step in range(steps):
        managed_step(model, optimizer, large_loss, Recipe(), step)
    return model


@pairs(
    kind=["none", "non-reentrant", "reentrant"],
    recipe=[Recipe(steps=11), Recipe(steps=10, accumulate=2, clip=("norm", 0.01))],
    pick=[every, second],
)
def test_recomputed_blocks_never_change_the_numbers(
    kind: str, recipe: Recipe, pick: Callable[[int], bool], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recompute, "choose_blocks", choosing(pick))
    both(lambda: Net(kind), net_loss, recipe, options(tmp_path))


@pytest.mark.parametrize("precision", [None, "bf16"])
def test_a_gpt_trains_alike_with_recomputed_blocks(
    precision: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recompute, "choose_blocks", choosing(every))
    keywords = options(tmp_path)
    if precision is not None:
        keywords["mixed_precision"] = precision
    model = GeminiDDP(seeded(TinyGPT), **keywords)
    model.close()
    recipe = Recipe(steps=11, precision=precision)
    keywords.pop("mixed_precision", None)
    both(TinyGPT, gpt_loss, recipe, keywords)


def test_a_recomputed_block_saves_its_input_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved = []
    for pick in (lambda _: False, second, every):
        monkeypatch.setattr(recompute, "choose_blocks", choosing(pick))
        with trained(Net, options(tmp_path)) as model:
            keep = model.manager.activations._keep  # type: ignore[union-attr]
            monkeypatch.setattr(keep, "next_stays", lambda _nbytes: False)
            out = model(random_batch(0, 256, 16, 32))
            saved.append(activation_bytes(model))
            del out
    none, half, all_ = saved
    assert half < 0.75 * none
    assert all_ < 0.25 * none


def test_the_choice_is_made_by_simulating_this_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = tuple(LinkSpeed(name, 1e6, 0.0) for name in ("disk_read", "disk_write"))
    monkeypatch.setattr(order.LinkMeter, "speeds", lambda _self: slow)
    with trained(Net, options(tmp_path, "10MiB"), steps=5) as model:
        report = model.plan().recompute
        assert report is not None
        assert report.choice is not None
        assert report.names
        assert report.choice.seconds < report.choice.seconds_without
        assert f"({', '.join(report.names)})" in str(model.plan())


def test_nothing_is_recomputed_where_everything_fits(tmp_path: Path) -> None:
    with trained(Net, options(tmp_path, "1GiB")) as model:
        report = model.plan().recompute
        assert report is not None
        assert (report.num_blocks, report.names, report.refused) == (4, (), ())
        assert model.manager.resident
        assert "no step would be shorter" in str(model.plan())


class Cache:
    """Grows with every call that is given it."""

    def __init__(self) -> None:
        self.calls: list[int] = []


_HIDDEN = torch.Generator().manual_seed(1)


class Odd(Block):
    """A block that something is wrong with."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.what = what
        self.count = 0
        self.register_buffer("seen", torch.zeros(1))
        if what == "hook":
            self.two.register_forward_hook(lambda *_: None)
        self.deep = SimpleNamespace(inner={"list": [1]})
        self.array = numpy.zeros(2)
        self.batch_norm = nn.BatchNorm1d(32)
        if what == "lstm":
            self.lstm = nn.LSTM(32, 32, batch_first=True)
        if what == "iterator":
            self.iterator = itertools.count()
        self.generators = [torch.Generator().manual_seed(1)]

    def forward(self, x: Tensor, given: object = None) -> Tensor:
        """Run the block, and do what makes it odd."""
        if isinstance(given, Cache):
            given.calls.append(self.count)
        if isinstance(given, list):
            given.append(x.mean().item())
        if self.what == "attribute":
            self.count += 1
        if self.what == "deep attribute":
            self.deep.inner["list"].append(1)
        if self.what == "array":
            self.array += 1
        if self.what == "iterator":
            next(self.iterator)
        if self.what == "neutral":
            self.count += 1
        if self.what == "buffer":
            self.seen += 1  # type: ignore[has-type]
        if self.what == "hooks its input" and x.requires_grad:
            x.register_hook(lambda grad: grad * 2)
        out = super().forward(x.add_(1) if self.what == "writes" else x * 1)
        if self.what == "writes weight":
            with torch.no_grad():
                self.two.bias.mul_(0.5)
        if self.what == "lstm":
            out = self.lstm(out)[0]
        if self.what == "neutral":
            self.count -= 1
        if self.what == "batch norm":
            out = self.batch_norm(out.flatten(0, 1)).view_as(out)
        if self.what == "grad within":
            probe = torch.ones(3, requires_grad=True)
            out = out + torch.autograd.grad(probe.square().sum(), probe)[0].sum()
        if self.what in ("generator", "hidden"):
            generator = self.generators[0] if self.what == "generator" else _HIDDEN
            out = out + torch.rand(out.shape, generator=generator)
        return out * random.random() if self.what == "python" else out


class OddNet(nn.Module):
    """Two ordinary blocks and two odd ones."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.what = what
        self.weight = nn.Parameter(torch.ones(2))
        self.blocks = nn.ModuleList([*(Odd("") for _ in range(2)), *(Odd(what) for _ in range(2))])

    def forward(self, x: Tensor) -> Tensor:
        """Run the blocks."""
        cache, filled = Cache(), []
        for block in self.blocks:
            givens: dict[str, object] = {"cache": cache, "filled list": filled, "weight": self.weight}
            givens["sparse"] = torch.eye(2).to_sparse()
            given = givens.get(self.what) if block.what else None
            before = x * 1
            x = block(before, given)
            if block.what == "input":
                before.add_(1)
            if block.what == "afterwards":
                block.count += 1
            if block.what == "comes later":
                block.iterator = itertools.count()
        assert len(cache.calls) in (0, 2)
        return x


def odd_loss(model: nn.Module, index: int) -> Tensor:
    random.seed(index)
    return net_loss(model, index)


@pytest.mark.parametrize(
    ("what", "reason"),
    [
        ("cache", "an object of type Cache"),
        ("filled list", "an object of type list"),
        ("weight", "an object of type ManagedParameter"),
        ("sparse", "an object of type Tensor"),
        ("attribute", "attributes or buffers"),
        ("deep attribute", "attributes or buffers"),
        ("array", "attributes or buffers"),
        ("afterwards", "changed afterwards"),
        ("buffer", "attributes or buffers"),
        ("generator", "attributes or buffers"),
        ("iterator", "type count"),
        ("comes later", "changed afterwards"),
        ("writes", "its arguments"),
        ("writes weight", "its parameters"),
        ("python", "Python or numpy"),
        ("input", "written afterwards"),
        ("hook", "forward hooks"),
    ],
)
def test_a_block_that_cannot_be_repeated_is_left_alone_and_named(
    what: str, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recompute, "choose_blocks", choosing(every))
    with trained(lambda: OddNet(what), options(tmp_path)) as model:
        report = model.plan().recompute
        assert report is not None
        assert report.names == ("blocks.0", "blocks.1")
        assert [name for name, _ in report.refused] == ["blocks.2", "blocks.3"]
        assert all(reason in why for _, why in report.refused)
    both(lambda: OddNet(what), odd_loss, Recipe(steps=9), options(tmp_path))


def test_other_results_in_backward_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recompute, "choose_blocks", choosing(every))
    with pytest.raises(StateError, match=r"block 'blocks.3' gave other results"):
        trained(lambda: OddNet("hidden"), options(tmp_path))


@pytest.mark.parametrize("what", ["grad within", "hooks its input", "neutral", "lstm"])
def test_blocks_may_do_more_than_compute(what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recompute, "choose_blocks", choosing(every))
    both(lambda: OddNet(what), odd_loss, Recipe(steps=9), options(tmp_path))
    with trained(lambda: OddNet(what), options(tmp_path)) as model:
        assert model.plan().recompute.names[-1] == "blocks.3"  # type: ignore[union-attr]


def test_a_block_that_is_in_another_mode_than_when_it_was_watched_is_not_recomputed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recompute, "choose_blocks", choosing(every))

    def loss(model: nn.Module, index: int) -> Tensor:
        model.train(index >= 6)
        return odd_loss(model, index)

    both(lambda: OddNet("batch norm"), loss, Recipe(steps=11), options(tmp_path))


@pytest.mark.parametrize("build", [lambda: nn.Sequential(nn.Linear(32, 32)), lambda: Net("non-reentrant")])
def test_what_stays_is_decided_where_no_block_can_be_recomputed(
    build: Callable[[], nn.Module], tmp_path: Path
) -> None:
    def checkpointed() -> nn.Module:
        model = build()
        if isinstance(model, Net):
            model.blocks = nn.ModuleList([model.blocks[0], model.blocks[2]])
            model.forward = lambda x: checkpoint(  # type: ignore[method-assign]
                lambda y: model.blocks[1](model.blocks[0](y)), x, use_reentrant=False
            )
        return model

    with trained(checkpointed, options(tmp_path, "1GiB")) as model:
        assert model.manager.resident


def test_a_closed_model_is_freed(tmp_path: Path) -> None:
    with trained(Net, options(tmp_path), steps=2) as model:
        manager = weakref.ref(model.manager)
    del model
    gc.collect()
    assert manager() is None


def test_a_copy_of_the_module_has_its_own_forward(tmp_path: Path) -> None:
    with GeminiDDP(seeded(Net), **options(tmp_path)) as model:
        duplicate = copy.deepcopy(model.module)
        block = duplicate.blocks[0]
        assert block.forward.__self__ is block
        again = pickle.loads(pickle.dumps(duplicate))
        x = random_batch(0, 2, 16, 32)
        torch.manual_seed(0)
        want = duplicate(x)
        torch.manual_seed(0)
        torch.testing.assert_close(again(x), want, rtol=0, atol=0)


def test_all_that_keeps_from_offloading_and_recomputing_is_said_at_once() -> None:
    with pytest.raises(ConfigError) as refusal:
        GeminiDDP(nn.Linear(4, 4), activation_offload=True, activation_recompute=True, non_model_bytes=0)
    for way_out in ("activation_offload='auto'", "disk_dir", "no non_model_bytes"):
        assert way_out in str(refusal.value)


def test_recompute_needs_activation_offload_auto(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="activation_offload='auto'"):
        GeminiDDP(nn.Linear(4, 4), **{**options(tmp_path), "activation_offload": True})


def test_blocks_are_the_outermost_members_that_are_alike_and_have_children() -> None:
    model = nn.ModuleDict(
        {
            "h": nn.ModuleList([Net(), Net()]),
            "layers": nn.Sequential(Block(), Block(), nn.ReLU()),
            "mlp": nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2)),
            "one": nn.ModuleList([Block()]),
        }
    )
    assert [name for name, _ in recompute.find_blocks(model)] == ["h.0", "h.1", "layers.0", "layers.1"]


def test_a_link_that_cannot_be_measured_is_no_reason_to_raise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(order.LinkMeter, "speeds", lambda _self: ())
    with trained(Net, options(tmp_path, "12MiB")) as model:
        report = model.plan().recompute
        assert report is not None
        assert report.names == ()
        assert "is unknown" in report.why_none
