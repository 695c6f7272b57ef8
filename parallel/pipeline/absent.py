"""Stand-ins for the parts of a model that another stage has."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from gemini.errors import ConfigError
from gemini.parallel.pipeline.numbers import Draws, drawn

_KEPT_ANSWERS = 64  # by the shapes of what is asked
_ZERO = 0.5  # of rows


class EndOfStage(BaseException):  # a model that catches exceptions around its blocks lets it through
    """Leaves the model's forward pass where the next stage begins, with what that one is sent."""

    def __init__(self, outputs: tuple[torch.Tensor, ...]) -> None:
        super().__init__("the stage ends here")
        self.outputs = outputs


class FirstBlock(BaseException):
    """Leaves the forward pass at the first block of a stage, with the values that it is called with."""

    def __init__(self, name: str, values: Sequence[Any]) -> None:
        super().__init__("the stage begins here")
        self.name, self.values = name, values


class Taken(NamedTuple):
    """What a stage is sent: ``places`` of the values that its first block is called with, and how many those
    are."""

    places: tuple[int, ...] = ()
    among: int = 0


class Nothing:
    """What stands for tensors that another stage has: NaN, or zeros of a type without NaN, in one element of
    memory by type and device, or in whole tensors where the model writes to them (``is_written``). Within
    :meth:`at_random` it is other numbers: what changes with them is made of what is not there, although NaN
    may not show in it (masks, indices, branches)."""

    def __init__(self) -> None:
        self.is_written = False
        self._elements: dict[tuple[torch.dtype, torch.device], torch.Tensor] = {}
        self._generator: torch.Generator | None = None
        self._has_zeros = False

    def __bool__(self) -> bool:
        return bool(self._elements)

    def expect_writes(self) -> None:
        """From now on give out whole tensors."""
        self.is_written = True

    @property
    def is_random(self) -> bool:
        """Whether it is random numbers now."""
        return self._generator is not None

    def like(self, tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
        """Return what stands for ``tensor``, on ``device``."""
        if self._generator is not None:
            numbers = _numbers(tensor.shape, tensor.dtype, self._generator)
            if self._has_zeros and tensor.dim():
                rows = torch.rand(
                    tensor.shape[:-1], generator=self._generator, dtype=torch.float32, device="cpu"
                )
                numbers[rows < _ZERO] = 0
            return numbers.to(device)
        element = self._elements.get((tensor.dtype, device))
        if element is None:
            fill = torch.nan if tensor.is_floating_point() or tensor.is_complex() else 0
            element = torch.full((), fill, dtype=tensor.dtype, device=device)
            self._elements[tensor.dtype, device] = element
        whole = element.expand(tensor.shape)
        return whole.clone() if self.is_written else whole

    @contextmanager
    def at_random(self, seed: int, *, has_zeros: bool = False) -> Iterator[None]:
        """Have all of it be random numbers within the block, unseen by autograd; ``has_zeros``: some rows of
        zeros among them, as padding has."""
        self._generator, self._has_zeros = torch.Generator().manual_seed(seed), has_zeros
        before = [(element, element.clone()) for element in self._elements.values()]
        for element, _ in before:
            element.data.copy_(_numbers(element.shape, element.dtype, self._generator))
        try:
            yield
        finally:
            self._generator = None
            for element, values in before:
                element.data.copy_(values)


def _numbers(shape: Sequence[int], dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
    """Return random numbers on the CPU; whole ones are 0 and 1, which are in reach of most tables."""
    if dtype.is_floating_point or dtype.is_complex:
        numbers = torch.randn(tuple(shape), generator=generator, dtype=torch.float32, device="cpu")
        return numbers.to(dtype)
    return torch.randint(2, tuple(shape), generator=generator, dtype=torch.int64, device="cpu").to(dtype)


class Passage:
    """The forward pass of a stage that is under way: what it has received, and whether it got there.

    Places count the values that a block is called with, arguments and keywords flattened. Both stages at a
    cut call the same block with as many: the one before sends what is at some places, and the one behind,
    where nothing is there but NaN, puts it in.
    """

    def __init__(self, nothing: Nothing | None = None) -> None:
        """``nothing``: of what stand-ins are made, where stages share it."""
        self.nothing = Nothing() if nothing is None else nothing
        self.runs, self.has_entered = False, False
        self.device = torch.device("cpu")  # of the batch
        self._takes: Sequence[int] | None = None
        self._gives = Taken()
        self._received: Sequence[torch.Tensor] = ()
        self._draws: Draws | None = None
        self._in_blocks = ExitStack()
        # By the id of a tensor of NaN, which is kept for that: what was received in its place.
        self._known: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    @contextmanager
    def begun(
        self,
        takes: Sequence[int] | None,
        batch: object,
        received: Sequence[torch.Tensor] = (),
        gives: Taken = Taken(),  # noqa: B008  # a tuple
        draws: Draws | None = None,
    ) -> Iterator[None]:
        """Run the stage on ``batch`` within the block: ``received`` comes in at the places ``takes`` of its
        first block, and what the next stage is to be given, ``gives``, goes out. ``takes`` None: it gets to
        its first block, and raises FirstBlock. ``draws`` None: random numbers are those of one process."""
        self._takes, self._received, self._gives = takes, received, gives
        self.has_entered, self.runs = False, True
        self.device, self._draws = _device_of(batch) or self.device, draws
        try:
            with nullcontext() if draws is None else drawn(draws.around, self.device), ExitStack() as blocks:
                self._in_blocks = blocks
                yield
        finally:
            self._received, self.runs = (), False
            self._known.clear()

    def replaced(self, name: str, values: Sequence[Any]) -> list[Any]:
        """Return what the block ``name`` is called with: what was received in the place of what stands for
        it."""
        if not self.has_entered:
            self._enter(name, values)
        return [self._known[id(value)][1] if id(value) in self._known else value for value in values]

    def given(self, name: str, values: Sequence[Any]) -> tuple[torch.Tensor, ...]:
        """Return what of the ``values`` that ``name``, the next stage's first block, is called with goes
        there.

        Raises:
            ConfigError: there it is called with more or fewer.
        """
        if len(values) != self._gives.among:
            raise ConfigError(
                f"{name!r} is called with {len(values)} values behind the blocks before it, and with "
                f"{self._gives.among} on the stage that has it: blocks put tensors into a list or dict, "
                "which stays behind where the model is cut; have them return those tensors and take them as "
                "arguments, or cut the model elsewhere (split=)"
            )
        return tuple(values[place] for place in self._gives.places)

    def _enter(self, name: str, values: Sequence[Any]) -> None:
        self.has_entered = True
        if self._takes is None:
            raise FirstBlock(name, values)
        for place, tensor in zip(self._takes, self._received, strict=True):
            self._known[id(values[place])] = (values[place], tensor)
        if self._draws is not None:
            self._in_blocks.enter_context(drawn(self._draws.inside, self.device))

    def leave_blocks(self) -> None:
        """Go on behind the last block of the stage."""
        self._in_blocks.close()

    def stands_for(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return what stands for a tensor that another stage has."""
        return self.nothing.like(tensor, self.device)

    def refuse_others(self, name: str) -> None:
        """Raise ConfigError where the model is called, and not one of its stages."""
        if not self.runs:
            raise ConfigError(
                f"model(...) gets to {name!r}, which another stage of the pipeline has; call "
                "booster.execute_pipeline(data_iter, model, criterion, optimizer), which runs all of them"
            )


def outline_of(model: nn.Module, types: Mapping[int, torch.dtype] | None = None) -> nn.Module:
    """Return a copy of ``model`` on ``meta``, which takes no memory. ``types``: those in which its parameters
    will compute, by their ids."""
    memo: dict[int, Any] = {}
    for param in model.parameters():
        dtype = (types or {}).get(id(param), param.dtype) if param.is_floating_point() else param.dtype
        values = torch.empty_like(param, dtype=dtype, device="meta", requires_grad=False)
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
        self._inner: dict[str, tuple[Absent]] = {}  # by name, each in a tuple: they are no submodules

    def __getattr__(self, name: str) -> Any:
        """Return what the module has; its own modules are absent too, and its parameters, and what a forward
        pass has left there, are nothing."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            if "_held" not in self.__dict__:
                raise
        value = getattr(self._held[0], name)
        if isinstance(value, nn.Module):
            return self._inside(name, value)
        if self._passage.runs and inspect.ismethod(value) and value.__self__ is self._held[0]:
            return lambda *args, **kwargs: self._answer(args, kwargs, name)
        return self._passage.stands_for(value) if isinstance(value, torch.Tensor) else value

    def __getitem__(self, key: Any) -> Any:
        """Return what stands for a member of a list or dict of modules."""
        held: Any = self._held[0]
        return self._inside(str(key), held[key])

    def __iter__(self) -> Iterator[Any]:
        """Yield what stands for the members of a list of modules, or the names of those of a dict."""
        held: Any = self._held[0]
        for index, value in enumerate(held):
            yield self._inside(str(index), value) if isinstance(value, nn.Module) else value

    def __len__(self) -> int:
        """Return how many members a list or dict of modules has."""
        held: Any = self._held[0]
        return len(held)

    def __bool__(self) -> bool:
        """Whether the module is taken for true."""
        return bool(self._held[0])

    def _inside(self, name: str, module: nn.Module) -> Absent:
        if name not in self._inner:
            self._inner[name] = (Absent(f"{self._name}.{name}", module, self._passage),)
        return self._inner[name][0]

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield what stands for the module's parameters within a forward pass, which may look for a type or
        add up all weights; else nothing."""
        if self._passage.runs:
            for name, param in self._held[0].named_parameters(prefix, recurse, remove_duplicate):
                yield name, self._passage.stands_for(param)  # type: ignore[misc]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return what has the shapes of the module's output.

        Raises:
            ConfigError: the module runs behind a block, and was taken for one that runs before it.
        """
        self._passage.refuse_others(self._name)
        if self._passage.has_entered:
            raise ConfigError(
                f"{self._name!r} is on another stage, for it counts as running where it is registered, and "
                f"it is called behind a block of this one; where the model is split, say "
                f"behind=[{self._name!r}] if it runs behind all blocks, before=[{self._name!r}] if before "
                "those of the module that it is in"
            )
        return self._answer(args, kwargs)

    def _answer(self, args: tuple[Any, ...], kwargs: dict[str, Any], method: str = "") -> Any:
        """Return what has the shapes of the module's output, or of what a ``method`` of it returns."""
        key = f"{method} {_shapes(args, kwargs)}"
        device = _device_of((args, kwargs)) or self._passage.device
        if key not in self._answers:
            if len(self._answers) >= _KEPT_ANSWERS:
                self._answers.clear()
            self._answers[key] = self._run_outline(args, kwargs, method, device)
        return tree_map(self._anew, self._answers[key])

    def _anew(self, value: Any) -> Any:
        """Return a tensor of its own for each call: what was received is put in by which of them it stands
        for."""
        if not isinstance(value, torch.Tensor):
            return value
        nothing = self._passage.nothing
        if nothing.is_random:
            return nothing.like(value, value.device)
        return value.clone() if nothing.is_written else value.detach()

    @torch.no_grad()
    def _run_outline(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], method: str, device: torch.device
    ) -> Any:
        there_args, there_kwargs = tree_map(_on_meta, (args, kwargs))
        call = getattr(self._held[0], method) if method else self._held[0]
        try:
            output = self._run(call, there_args, there_kwargs)
        except (RuntimeError, NotImplementedError, TypeError, ValueError) as error:
            output = self._assume(args, kwargs, error)
        return tree_map(lambda value: self._nothing(value, device), output)

    def _nothing(self, value: Any, device: torch.device) -> Any:
        return self._passage.nothing.like(value, device) if isinstance(value, torch.Tensor) else value

    def _run(self, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the outline; inputs of another type, which a wrapper casts before they get here, are cast."""
        try:
            return call(*args, **kwargs)
        except RuntimeError:
            dtype = next((p.dtype for p in self._held[0].parameters() if p.is_floating_point()), None)
            if dtype is None:
                raise
            args, kwargs = tree_map(lambda value: _cast(value, dtype), (args, kwargs))
            return call(*args, **kwargs)

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


class Present(nn.Module):
    """Stands before a block of the stage itself, and calls it with what the stage has received. Outside of
    the block, so that computing it again in backward does not run this."""

    def __init__(self, name: str, block: nn.Module, passage: Passage, *, is_last: bool) -> None:
        """``is_last``: of the stage."""
        super().__init__()
        self.block = block
        self._name, self._passage, self._is_last = name, passage, is_last
        self._seen: set[tuple[bool, ...]] = set()

    def __getattr__(self, name: str) -> Any:
        """Return what the block has."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            if "block" not in self.__dict__.get("_modules", {}):
                raise
        return getattr(self._modules["block"], name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the block. Raises ConfigError where something that it takes is nowhere to be had."""
        args, kwargs = _really(self._name, self._passage, self._seen, args, kwargs)
        output = self.block(*args, **kwargs)
        if self._is_last:
            self._passage.leave_blocks()
        return output


class Exit(Absent):
    """Stands in for the block behind a stage: the forward pass ends where it would be called."""

    def __init__(self, name: str, outline: nn.Module, passage: Passage) -> None:
        super().__init__(name, outline, passage)
        self._seen: set[tuple[bool, ...]] = set()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Raise EndOfStage with what the next stage takes. Raises ConfigError as :class:`Present`."""
        self._passage.refuse_others(self._name)
        values = tree_flatten(_really(self._name, self._passage, self._seen, args, kwargs))[0]
        raise EndOfStage(self._passage.given(self._name, values))


def _really(
    name: str, passage: Passage, seen: set[tuple[bool, ...]], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return what a block is called with, received tensors in their places.

    Raises:
        ConfigError: the first time that it is called with tensors in such places: there is NaN in another
            one, so it was computed of what another stage has, and is not what that stage calls blocks with.
    """
    values, form = tree_flatten((args, kwargs))
    replaced = passage.replaced(name, values)
    # Else as they are: blocks may write to a list that they share.
    if any(new is not value for new, value in zip(replaced, values, strict=True)):
        args, kwargs = tree_unflatten(replaced, form)
    tensors = tuple(isinstance(value, torch.Tensor) for value in values)
    if tensors not in seen:
        seen.add(tensors)
        named = {f"argument {index}": value for index, value in enumerate(args)} | kwargs
        for label, value in named.items():
            if any(is_nothing(each) for each in tree_flatten(value)[0]):
                raise ConfigError(
                    f"{name!r} is called with {label!r} in which there is NaN: what comes between the blocks "
                    "makes it of something that another stage has (only what one block after another is "
                    "called with goes from stage to stage, as it is); cut the model elsewhere (split=), have "
                    "the blocks do that themselves or, where it is a weight that is used before the blocks "
                    "of its module, name that in before="
                )
    return args, kwargs


def _first(forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return the first argument of a call, wherever it stands."""
    return args[0] if args else kwargs.get(_first_name(forward))


def _first_name(forward: Callable[..., Any]) -> str:
    return next(iter(inspect.signature(forward).parameters), "")


def _on_meta(value: Any) -> Any:
    return value.to("meta") if isinstance(value, torch.Tensor) else value


def _cast(value: Any, dtype: torch.dtype) -> Any:
    return value.to(dtype) if isinstance(value, torch.Tensor) and value.is_floating_point() else value


def is_nothing(value: Any) -> bool:
    """Say whether a tensor was computed of what is absent, or is a weight of it."""
    if not isinstance(value, torch.Tensor) or not value.is_floating_point():
        return False
    return value.is_meta or bool(value.isnan().any())


def _shapes(args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    """Return what tells calls apart whose answers have other shapes."""
    values, form = tree_flatten((args, kwargs))
    return f"{form} {[_described(value) for value in values]}"


def _described(value: Any) -> object:
    if isinstance(value, torch.Tensor):
        return (tuple(value.shape), value.dtype, value.device)
    return value if isinstance(value, (bool, int, float, str, type(None))) else type(value).__name__


def _device_of(values: object) -> torch.device | None:
    """Return the device of the first tensor that is on one; a model may bring its input to where the weights
    of another stage seem to be."""
    tensors = (value for value in tree_flatten(values)[0] if isinstance(value, torch.Tensor))
    return next((tensor.device for tensor in tensors if not tensor.is_meta), None)
