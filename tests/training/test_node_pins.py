"""A backward pass needs no more room than the operator that runs, whatever else hooks its nodes."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import gemini

SIDE = 64
LAYER_BYTES = 4 * SIDE * SIDE
SIZES = {"non_model_bytes": 0, "min_chunk_size_mb": 0.01, "search_range_mb": 0.01}
Forward = Callable[[nn.ModuleList, Tensor], Tensor]


class Frozen(nn.Module):
    """Layers that do not train, so that a pass needs one of them at a time, behind a vector that does."""

    def __init__(self, forward: Forward) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(SIDE, SIDE, bias=False) for _ in range(4)).requires_grad_(False)
        self.scale = nn.Parameter(torch.ones(SIDE))
        self._forward = forward

    def forward(self, x: Tensor) -> Tensor:
        return self._forward(self.layers, x * self.scale)


def in_threads(layers: nn.ModuleList, x: Tensor) -> Tensor:
    """Run every layer on a thread of its own, whose nodes have the numbers of the others'."""

    def run(layer: nn.Module, x: Tensor, out: list[Tensor]) -> None:
        out.append(layer(x))

    for layer in layers:
        out: list[Tensor] = []
        thread = threading.Thread(target=run, args=(layer, x, out))
        thread.start()
        thread.join()
        (x,) = out
    return x


def with_passes(layers: nn.ModuleList, x: Tensor) -> Tensor:
    """Have a hook of a result run a backward pass over another layer, as implicit layers do."""
    start = x.detach().requires_grad_()
    kept = torch.tanh(layers[0](start))
    for layer in layers[1:]:
        x = torch.tanh(layer(x))
        x.register_hook(lambda grad: grad + torch.autograd.grad(kept, start, grad, retain_graph=True)[0])
        x = x * 1
    return x


def with_hooks(layers: nn.ModuleList, x: Tensor) -> Tensor:
    """Have a hook of each result use the weights of another layer."""
    for layer, other in zip(layers, [*layers[1:], layers[0]], strict=True):
        x = torch.tanh(layer(x))
        x.register_hook(lambda grad, other=other: grad + 0.1 * (grad @ other.weight))
        x = x * 1
    return x


def trained(model: nn.Module, module: Frozen) -> Tensor:
    for _ in range(3):
        model(torch.linspace(-1, 1, 8 * SIDE).view(8, SIDE)).square().sum().backward()
    assert module.scale.grad is not None
    return module.scale.grad.clone()


@pytest.mark.parametrize("forward", [in_threads, with_hooks, with_passes])
def test_a_pass_needs_room_for_one_operator(forward: Forward) -> None:
    plain, module = Frozen(forward), Frozen(forward)
    outside = forward is in_threads  # operators of other threads are for outside of a forward pass
    with gemini.GeminiDDP(module, device_bytes=int(1.1 * LAYER_BYTES), host_bytes="1MiB", **SIZES) as model:
        got = trained(module if outside else model, module)
    assert torch.equal(got, trained(plain, plain))


def test_a_node_that_does_not_run_needs_nothing() -> None:
    module = Frozen(lambda layers, x: layers[0](x))
    with gemini.GeminiDDP(module, device_bytes=int(1.1 * LAYER_BYTES), host_bytes="1MiB", **SIZES) as model:
        middle = model(torch.ones(8, SIDE))
        result = torch.tanh(middle)
    (grad,) = torch.autograd.grad(result, middle, torch.ones_like(result))
    assert torch.allclose(grad, 1 - result.detach().square())


def test_a_pass_that_is_over_keeps_no_node() -> None:
    module = Frozen(lambda layers, x: layers[1](layers[0](x)))
    with gemini.GeminiDDP(module, device_bytes=int(1.1 * LAYER_BYTES), host_bytes="1MiB", **SIZES) as model:
        gone: list[bool] = []

        class Watched(torch.autograd.Function):
            @staticmethod
            def forward(context: object, x: Tensor) -> Tensor:
                return x * 1

            @staticmethod
            def backward(context: object, grad: Tensor) -> Tensor:
                return grad

        out = Watched.apply(model(torch.ones(8, SIDE)))
        node = out.grad_fn.next_functions[0][0]
        node.metadata["note"] = _Noted(gone)
        out.sum().backward()
        del out, node
        assert gone == [True]


class _Noted:
    def __init__(self, gone: list[bool]) -> None:
        self._gone = gone

    def __del__(self) -> None:
        self._gone.append(True)
