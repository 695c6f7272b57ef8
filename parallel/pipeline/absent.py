"""Stand-ins for the parts of a model that another stage has."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from gemini.errors import ConfigError

_KEPT_ANSWERS = 64  # by the shapes of what is asked


class EndOfStage(Exception):
    """Leaves the model's forward pass where the next stage begins, with what that one is sent."""

    def __init__(self, output: torch.Tensor) -> None:
        super().__init__("the stage ends here")
        self.output = output


class Passage:
    """The forward pass of a stage that is under way: what it has received, and whether it got there."""

    def __init__(self) -> None:
        self.runs = False
        self.received: torch.Tensor | None = None
        self.has_entered = False

    @contextmanager
    def begun(self, received: torch.Tensor | None) -> Iterator[None]:
        """Run the stage within the block: what it gets of the one before is ``received``."""
        self.received, self.has_entered, self.runs = received, False, True
        try:
            yield
        finally:
            self.received, self.runs = None, False

    def enter(self) -> torch.Tensor | None:
        """Return what was received: the stage begins with it."""
        self.has_entered = True
        return self.received

    def refuse_others(self, name: str) -> None:
        """Raise ConfigError where the model is called, and not one of its stages."""
        if not self.runs:
            raise ConfigError(
                f"model(...) gets to {name!r}, which another stage of the pipeline has; call "
                "booster.execute_pipeline(data_iter, model, criterion, optimizer), which runs all of them"
            )


def outline_of(model: nn.Module) -> nn.Module:
    """Return a copy of ``model`` on ``meta``, which takes no memory."""
    memo: dict[int, Any] = {}
    for param in model.parameters():
        values = torch.empty_like(param, device="meta", requires_grad=False)
        memo[id(param)] = nn.Parameter(values, requires_grad=False)
    memo.update((id(buffer), torch.empty_like(buffer, device="meta")) for buffer in model.buffers())
    return copy.deepcopy(model, memo)


class Absent(nn.Module):
    """Stands in for ``outline``, a module on ``meta``, whose attributes it has: it returns tensors of the
    right shapes, in which every number is NaN and takes no memory. Nothing that counts may come of them.
    """

    def __init__(self, name: str, outline: nn.Module, passage: Passage) -> None:
        super().__init__()
        self._held = (outline,)  # in a tuple: it is no submodule
        self._name, self._passage = name, passage
        self._answers: dict[str, Any] = {}

    def __getattr__(self, name: str) -> Any:
        """Return what the module has; its parameters are on ``meta``."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            if "_held" not in self.__dict__:
                raise
        return getattr(self._held[0], name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return what has the shapes of the module's output.

        Raises:
            ConfigError: the module runs behind the blocks, and was taken for one that runs before them.
        """
        self._passage.refuse_others(self._name)
        if self._passage.has_entered:
            raise ConfigError(
                f"{self._name!r} is registered before the blocks and runs behind them; say "
                f"behind=[{self._name!r}] where the model is split"
            )
        return self._answer(args, kwargs)

    def _answer(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        key, device = _shapes(args, kwargs), _device_of(args, kwargs)
        if key not in self._answers:
            if len(self._answers) >= _KEPT_ANSWERS:
                self._answers.clear()
            self._answers[key] = self._run_outline(args, kwargs, device)
        return self._answers[key]

    @torch.no_grad()
    def _run_outline(self, args: tuple[Any, ...], kwargs: dict[str, Any], device: torch.device) -> Any:
        there_args, there_kwargs = tree_map(_on_meta, (args, kwargs))
        try:
            output = self._held[0](*there_args, **there_kwargs)
        except (RuntimeError, NotImplementedError, TypeError, ValueError) as error:
            output = self._assume(args, kwargs, error)
        return tree_map(lambda value: _nothing(value, device), output)

    def _assume(self, args: tuple[Any, ...], kwargs: dict[str, Any], error: Exception) -> Any:
        """Return what has the form of the output, where the module does not run on ``meta``."""
        raise ConfigError(
            f"{self._name!r} is of another stage, and what shape it returns cannot be found by running it on "
            f"'meta' ({type(error).__name__}: {error}); make it the first of the blocks (blocks=)"
        ) from error

    def extra_repr(self) -> str:
        """Say what is not here."""
        return f"{type(self._held[0]).__name__} of another stage"


class AbsentBlock(Absent):
    """Stands in for a block."""

    def _assume(self, args: tuple[Any, ...], kwargs: dict[str, Any], error: Exception) -> Any:
        """Return the first argument: blocks whose forward pass depends on values (routing) rarely change its
        shape, and nothing that counts comes of it."""
        first = _first(self._held[0].forward, args, kwargs)
        return first if isinstance(first, torch.Tensor) else super()._assume(args, kwargs, error)


class Entry(AbsentBlock):
    """Stands in for the block before a stage: it returns what that stage has received."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return it, in the form of the block's output.

        Raises:
            ConfigError: the blocks take something else that the first stage alone can compute.
        """
        self._passage.refuse_others(self._name)
        fresh = _shapes(args, kwargs) not in self._answers
        values, form = tree_flatten(self._answer(args, kwargs))
        if fresh:
            self._refuse_others(args, kwargs)
        first = next(index for index, value in enumerate(values) if isinstance(value, torch.Tensor))
        values[first] = self._passage.enter()
        return tree_unflatten(values, form)

    def _refuse_others(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        for name, value in _all_but_first(self._held[0].forward, args, kwargs).items():
            for tensor in tree_flatten(value)[0]:
                if not isinstance(tensor, torch.Tensor) or not tensor.is_floating_point():
                    continue
                if bool(tensor.isnan().any()):
                    raise ConfigError(
                        f"blocks take {name!r} beside their first argument, and it is computed by what the "
                        f"first stage alone has (seen at {self._name!r}): such a model cannot be cut here"
                    )


class Exit(Absent):
    """Stands in for the block behind a stage: the forward pass ends where it would be called."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Raise EndOfStage with the first argument.

        Raises:
            ConfigError: something else would have to travel with it.
        """
        self._passage.refuse_others(self._name)
        forward = self._held[0].forward
        output = _first(forward, args, kwargs)
        if not isinstance(output, torch.Tensor):
            raise ConfigError(
                f"{self._name!r} takes a {type(output).__name__}, and one tensor goes from stage to stage; "
                "cut the model elsewhere, or wrap blocks so that they return one tensor"
            )
        for name, value in _all_but_first(forward, args, kwargs).items():
            if any(isinstance(t, torch.Tensor) and t.requires_grad for t in tree_flatten(value)[0]):
                raise ConfigError(
                    f"{self._name!r} takes {name!r}, which needs a gradient, beside its first argument; one "
                    "tensor goes from stage to stage: such a model cannot be cut here"
                )
        raise EndOfStage(output)


def _first(forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return the first argument of a call, wherever it stands."""
    return args[0] if args else kwargs.get(_first_name(forward))


def _all_but_first(
    forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> dict[str, Any]:
    """Return the other arguments of a call, by name or place."""
    others = {f"argument {index}": value for index, value in enumerate(args) if index}
    skipped = "" if args else _first_name(forward)
    return others | {name: value for name, value in kwargs.items() if name != skipped}


def _first_name(forward: Callable[..., Any]) -> str:
    return next(iter(inspect.signature(forward).parameters), "")


def _on_meta(value: Any) -> Any:
    return value.to("meta") if isinstance(value, torch.Tensor) else value


def _nothing(value: Any, device: torch.device) -> Any:
    """Return a tensor like one on ``meta``, on ``device``, in one element of memory."""
    if not isinstance(value, torch.Tensor):
        return value
    fill = torch.nan if value.is_floating_point() or value.is_complex() else 0
    return torch.full((), fill, dtype=value.dtype, device=device).expand(value.shape)


def _shapes(args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    """Return what tells calls apart whose answers have other shapes."""
    values, form = tree_flatten((args, kwargs))
    return f"{form} {[_described(value) for value in values]}"


def _described(value: Any) -> object:
    if isinstance(value, torch.Tensor):
        return (tuple(value.shape), value.dtype, value.device)
    return value if isinstance(value, (bool, int, float, str, type(None))) else type(value).__name__


def _device_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.device:
    found = (value.device for value in tree_flatten((args, kwargs))[0] if isinstance(value, torch.Tensor))
    return next(found, torch.device("cpu"))
