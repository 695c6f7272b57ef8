"""Operands of tensor classes that answer operators themselves: managed weights beside them are read right."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from programs import run_python
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from training_harness import KIB, Recipe, assert_trains_alike, random_batch, seeded, tight

from gemini import GeminiDDP

ROWS = torch.tensor([0, 3, 7, 11])


class AnswersItself(Tensor):
    """Runs every operator without asking the classes of its other operands."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        """Run the operator on plain tensors."""
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


class Inherits(AnswersItself):
    """Answers as its base does."""


class Counts(AnswersItself):
    """Asks its base in turn, and runs torch functions on the way."""

    calls = 0

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        """Count the operator, and run it as the base does."""
        cls.calls += 1
        return super().__torch_function__(func, types, args, kwargs)


class LeavesIt(Tensor):
    """Leaves operands of other classes to these."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        """Do what torch does by default."""
        return super().__torch_function__(func, types, args, kwargs or {})


def through(kind: type[Tensor]) -> Callable[[nn.Module, Tensor], Tensor]:
    """Return what runs a layer on an input of a class."""
    return lambda layer, x: layer(x.as_subclass(kind)).as_subclass(Tensor)


def jagged(layer: nn.Module, x: Tensor) -> Tensor:
    out: Tensor = layer(torch.nested.nested_tensor_from_jagged(x, ROWS)).values()
    return out


def checkpointed(layer: nn.Module, x: Tensor) -> Tensor:
    out: Tensor = checkpoint(lambda y: jagged(layer, y), x, use_reentrant=False)
    return out


class Mix(nn.Module):
    """Layers that get plain tensors and others in turn; 520 KiB of model data in fp32."""

    def __init__(self, call: Callable[[nn.Module, Tensor], Tensor]) -> None:
        super().__init__()
        self.call = call
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(8))

    def forward(self, x: Tensor) -> Tensor:
        """Run the layers."""
        for index, layer in enumerate(self.layers):
            x = x + torch.tanh(self.call(layer, x) if index % 2 else layer(x))
        return x


def loss_of(model: nn.Module, index: int) -> Tensor:
    out: Tensor = model(random_batch(index, 11, 64))
    return out.square().mean()


CALLS = {
    "jagged": jagged,
    "checkpointed": checkpointed,
    **{kind.__name__: through(kind) for kind in (AnswersItself, Inherits, Counts, LeavesIt)},
}


# At 520 KiB all chunks are on DEVICE, and updates wait there: nothing but the wrong numbers would tell.
@pytest.mark.parametrize("device_kib", [100, 520])
@pytest.mark.parametrize("call", CALLS)
def test_a_class_that_answers_itself_changes_no_training(call: str, device_kib: int, tmp_path: Path) -> None:
    options = tight(tmp_path, device_kib * KIB)
    assert_trains_alike(lambda: Mix(CALLS[call]), loss_of, options, Recipe(steps=5))


def test_gradients_of_a_loss_of_such_a_class_need_no_memory_of_the_parameters(tmp_path: Path) -> None:
    plain = seeded(lambda: Mix(jagged))
    want = torch.autograd.grad(loss_of(plain, 0), list(plain.parameters()))
    with GeminiDDP(seeded(lambda: Mix(jagged)), **tight(tmp_path, 100 * KIB)) as model:
        loss = loss_of(model, 0).as_subclass(AnswersItself)
        got = torch.autograd.grad(loss, list(model.parameters()))
    assert all(map(torch.equal, got, want))


def test_an_operator_of_such_a_class_that_fails_leaves_nothing_pinned(tmp_path: Path) -> None:
    with GeminiDDP(seeded(lambda: Mix(jagged)), **tight(tmp_path, 100 * KIB)) as model:
        weight = model.module.layers[0].weight
        with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
            torch.mm(torch.ones(3, 5).as_subclass(AnswersItself), weight)
        for index in range(2):
            loss_of(model, index).backward()


def test_the_compiler_still_traces_such_a_class(tmp_path: Path) -> None:
    layer = nn.Linear(8, 8)
    x = torch.ones(2, 8).as_subclass(LeavesIt)
    with GeminiDDP(nn.Linear(8, 8), **tight(tmp_path)) as model:
        model(x)
        compiled = torch.compile(lambda y: layer(y).sin(), backend="eager", fullgraph=True)
        assert torch.equal(compiled(x), layer(x).sin())


AFTERWARDS = """
import gc
import torch
import torch.distributed.tensor
from torch.autograd.function import BackwardCFunction
import gemini

def classes():
    found = [torch.Tensor]
    for cls in found:
        found += type.__subclasses__(cls)
    names = ("__torch_function__", "__new__")
    others = [cls for cls in found if "Managed" not in cls.__name__]
    kept = {(cls, name): vars(cls).get(name) for cls in others for name in names}
    return kept | {(BackwardCFunction, "saved_tensors"): vars(BackwardCFunction).get("saved_tensors")}

rows = torch.nested.nested_tensor_from_jagged(torch.ones(11, 8), torch.tensor([0, 3, 7, 11]))
before = classes()
for _ in range(2):
    first, second = (gemini.GeminiDDP(torch.nn.Linear(8, 8)) for _ in range(2))
    first(rows).values().sum().backward()
    assert classes() != before
    weight = first.module.weight
    first.close()
    del first
    second(rows)
    second.close()
    del second
    gc.collect()
    try:
        rows @ weight
        raise SystemExit("the weight of a closed model was used")
    except gemini.errors.StateError as error:
        assert "was closed" in str(error), error
    del weight
    gc.collect()
    now = classes()  # some more: more was imported
    assert all(now[key] is value for key, value in before.items())
    assert "_Intercepted" not in {type(value).__name__ for value in now.values()}
print("as before")
"""


def test_classes_are_what_they_were_once_no_managed_tensor_is_left() -> None:
    done = run_python(["-c", AFTERWARDS])
    assert done.stdout.strip() == "as before", done.stderr
