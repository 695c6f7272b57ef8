"""Placeholders by themselves: when operators are looked at, and what a cheap one is like."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode

from gemini.errors import ConfigError
from gemini.parallel.pipeline.placeholders import Placeholders

CPU = torch.device("cpu")


class OfProgram(TorchDispatchMode):
    """A mode that a program enters."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


@pytest.fixture
def placeholders() -> Iterator[Placeholders]:
    yield Placeholders()
    assert _get_current_dispatch_mode() is None


def test_one_is_what_torch_makes(placeholders: Placeholders) -> None:
    shape = torch.empty_strided((2, 3), (1, 2), dtype=torch.bfloat16, device="meta")
    for _ in range(2):
        mine, whole = placeholders.like(shape, CPU), FakeTensor(placeholders, shape, CPU)
        assert vars(mine) == vars(whole)
        assert type(mine) is FakeTensor
        for what in ("shape", "dtype", "device", "requires_grad", "is_leaf"):
            assert getattr(mine, what) == getattr(whole, what)
        assert mine.stride() == (1, 2)
        with pytest.raises(RuntimeError, match="data"):
            mine.data_ptr()
    assert placeholders.like(shape, CPU) is not placeholders.like(shape, CPU)


def test_operators_on_real_tensors_are_looked_at_from_the_first_write_on(placeholders: Placeholders) -> None:
    real, other = torch.zeros(4), torch.ones(4)
    with placeholders.watched():
        assert _get_current_dispatch_mode() is None
        real[1:] = placeholders.like(torch.empty(3), CPU)
        assert _get_current_dispatch_mode() is not None
        assert placeholders.stands_for(real)
        assert placeholders.stands_for(real + other)
        assert not placeholders.stands_for(other + other)


def test_a_write_within_a_mode_of_the_program_is_followed_behind_that_too(placeholders: Placeholders) -> None:
    real = torch.zeros(4)
    with OfProgram() as outer, placeholders.watched():
        with OfProgram() as inner:
            real.copy_(placeholders.like(real, CPU))
            assert _get_current_dispatch_mode() is inner
            assert placeholders.stands_for(real * 2)
        assert placeholders.stands_for(real * 2)
        before = placeholders.begin_block()
        assert _get_current_dispatch_mode() is outer
        assert not placeholders.stands_for(real * 2)
        placeholders.end_block(before)
        assert placeholders.stands_for(real * 2)
    assert not placeholders.stands_for(real * 2)


def test_what_a_stand_in_has_written_to_is_followed_within_a_mode_of_the_program(
    placeholders: Placeholders,
) -> None:
    real = torch.zeros(4)
    with placeholders.watched():
        with OfProgram():
            placeholders.mark(real)
            assert placeholders.stands_for(real.view(2, 2) + 1)
        assert placeholders.stands_for(real + 1)


def test_a_block_may_not_write_one_into_a_real_tensor(placeholders: Placeholders) -> None:
    real, given = torch.zeros(4), placeholders.like(torch.empty(4), CPU)
    with placeholders.watched():
        before = placeholders.begin_block()
        with pytest.raises(ConfigError, match="writes a value of another stage into a tensor"):
            real.copy_(given)
        placeholders.end_block(before)
        assert not placeholders.stands_for(torch.ones_like(given))  # around blocks: it reads no numbers
