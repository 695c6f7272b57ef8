"""Ranges that torch.profiler shows: what the runtime does between the operators of a model."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch

P = ParamSpec("P")
T = TypeVar("T")

_is_profiled = torch._C._autograd._profiler_enabled


def shown_as(name: str) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Have calls of a function appear as the range ``gemini::name`` while torch.profiler runs; otherwise they
    cost one look at whether it does."""

    def decorate(function: Callable[P, T]) -> Callable[P, T]:
        @functools.wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> T:
            if not _is_profiled():
                return function(*args, **kwargs)
            with torch.profiler.record_function(f"gemini::{name}"):
                return function(*args, **kwargs)

        return call

    return decorate
