"""Wherever a call comes into a managed model, it is a pass: recorded, planned, with the same numbers."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from training_harness import KIB, managed_optimizer, tight

import gemini
from gemini import CPUAdam, GeminiDDP, GeminiOptimizer
from gemini.model.entries import Entry


class Body(nn.Module):
    """A decoder: what a loss of one's own calls."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(12))

    def forward(self, x: Tensor) -> Tensor:
        """Run all layers."""
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


class Net(nn.Module):
    """A model with a body and a head, which calls itself as ``generate()`` does."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = Body(), nn.Linear(32, 8)

    def forward(self, x: Tensor) -> Tensor:
        """Return eight scores."""
        return self.head(self.body(x))

    @torch.no_grad()
    def generate(self, x: Tensor, passes: int) -> Tensor:
        """Call the model again and again."""
        for _ in range(passes):
            x = torch.cat([self(x)] * 4, -1)
        return x


class Wrapped(nn.Module):
    """What an adapter library puts around a model: its ``generate`` calls the model within."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model, self.adapter = model, nn.Parameter(torch.zeros(32))

    def forward(self, x: Tensor) -> Tensor:
        """Call the model."""
        return self.model(x + self.adapter)

    def generate(self, x: Tensor, passes: int) -> Tensor:
        """Have the model within call itself."""
        return self.model.generate(x, passes)  # type: ignore[no-any-return, operator]


def net(kind: type[nn.Module] = Net) -> nn.Module:
    torch.manual_seed(0)
    return Wrapped(Net()) if kind is Wrapped else kind()


def inputs() -> Tensor:
    return torch.randn(2, 32, generator=torch.Generator().manual_seed(1))


def read_bytes(model: Any) -> int:
    return int(model.stats()["disk_read"]["bytes"])


@pytest.mark.parametrize("kind", [Net, Wrapped])
def test_passes_that_a_module_begins_itself_are_planned_and_read_as_little(
    tmp_path: Path, kind: type[nn.Module]
) -> None:
    want = net(kind).generate(inputs(), 12)
    read = []
    for wrap in (gemini.manage, GeminiDDP):
        module = net(kind)
        handle = wrap(module, **tight(tmp_path, 32 * KIB))
        module.generate(inputs(), 6)
        before = read_bytes(handle)
        assert torch.equal(module.generate(inputs(), 12), want)
        read.append(read_bytes(handle) - before)
        whole = 12 * sum(chunk.spec.nbytes for chunk in handle.manager.chunks.chunks)
        assert read[-1] < 0.85 * whole  # without an order all of it
        handle.close()
    assert read[1] == pytest.approx(read[0], rel=0.15)  # what is prefetched depends on time


@pytest.mark.parametrize("entry", ["module", "body"])
def test_training_through_a_part_is_planned_and_has_the_bits(tmp_path: Path, entry: str) -> None:
    def loss_of(model: nn.Module) -> Tensor:
        out = model(inputs()) if entry == "module" else model.head(model.body(inputs()))  # type: ignore
        return out.square().mean()  # type: ignore[no-any-return]

    plain = net()
    plain_optimizer = CPUAdam(plain.parameters(), lr=1e-2)
    with GeminiDDP(net(), **tight(tmp_path, 40 * KIB)) as model:
        optimizer = GeminiOptimizer(CPUAdam(model.parameters(), lr=1e-2), model)
        for _ in range(6):
            want, got = loss_of(plain), loss_of(model.module)
            assert torch.equal(got, want)
            want.backward()
            plain_optimizer.step()
            plain_optimizer.zero_grad()
            optimizer.backward(got)
            optimizer.step()
        assert not model.stats()["warmup"]
        trace = model.memstats()
        assert trace is not None
        assert {"forward", "backward"} <= set(trace.phases)


def test_a_part_that_backward_computes_again_stays_in_the_backward_pass(tmp_path: Path) -> None:
    with GeminiDDP(net(), **tight(tmp_path, 40 * KIB)) as model:
        optimizer = managed_optimizer(model)
        phases = []
        for _ in range(3):
            hidden = checkpoint(model.module.body, inputs(), use_reentrant=False)
            optimizer.backward(model.module.head(hidden).square().mean())
            optimizer.step()
            trace = model.memstats()
            assert trace is not None
            phases.append(trace.phases)
        ends = "".join(phase[0] for phase in phases[-1] if phase != "optimizer")
        assert "bf" not in ends
        assert ends.count("b") > ends.count("f")


def test_copies_and_pickles_of_entries_are_ordinary_and_release_gives_the_class_back(tmp_path: Path) -> None:
    module = net()
    with GeminiDDP(module, **tight(tmp_path)) as model:
        assert isinstance(module, Entry)
        assert isinstance(module, Net)
        assert isinstance(module.body, Entry)
        for twin in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
            assert type(twin) is Net
            assert type(twin.body) is Body
            assert not [name for name in vars(twin) if "gemini" in name]
            assert torch.equal(twin(inputs()), model(inputs()))
        model._gemini.release()
        assert type(module) is Net
        assert type(module.body) is Body
        assert torch.equal(module(inputs()), net()(inputs()))


def test_ctrl_c_in_a_pass_that_a_part_began_leaves_the_model_usable(tmp_path: Path) -> None:
    def interrupt(*_arguments: Any) -> None:
        raise KeyboardInterrupt

    with GeminiDDP(net(), **tight(tmp_path, 32 * KIB)) as model:
        hook = model.module.body.layers[6].register_forward_pre_hook(interrupt)
        with pytest.raises(KeyboardInterrupt), torch.no_grad():
            model.module(inputs())
        hook.remove()
        assert not model._gemini.in_pass
        assert torch.equal(model.module.generate(inputs(), 4), net().generate(inputs(), 4))  # type: ignore


def test_a_class_that_may_have_no_subclasses_is_wrapped_and_trains(tmp_path: Path) -> None:
    class Final(Net):
        def __init_subclass__(cls) -> None:
            raise TypeError("this class is final")

    with GeminiDDP(net(Final), **tight(tmp_path, 40 * KIB)) as model, torch.no_grad():
        assert type(model.module) is Final
        for called in (model, model.module):
            assert torch.equal(called(inputs()), net()(inputs()))
