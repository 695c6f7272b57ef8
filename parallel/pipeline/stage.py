"""One stage of a pipeline, as it runs: the whole model's forward pass, with all other stages absent."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from gemini.errors import ConfigError, GeminiError
from gemini.parallel.pipeline.absent import Absent, Present, is_nothing
from gemini.parallel.pipeline.numbers import Draws
from gemini.parallel.pipeline.passage import EndOfStage, FirstBlock, Passage, Taken
from gemini.parallel.pipeline.unchanged import unchanged
from gemini.system.device import current_device

# And whether some rows are zeros. A mask of two tokens is the same by chance, hardly so three times; one of
# padding is, wherever there is none.
_SEEDS = {1: False, 2: False, 3: True}
_SAME = 1e-5  # of a number
_SHARED_ELEMENT = "single memory location"  # what torch says where an operator writes to an expanded tensor
_NUMBERS = (bool, int, float, complex, str)


@dataclass
class Stage:
    """One stage of this rank: ``tree`` is the model as it runs, with all other stages absent."""

    index: int
    tree: nn.Module
    passage: Passage
    mirrored: list[tuple[nn.Module, nn.Module]] = field(default_factory=list)
    # By name, of buffers around blocks: which stage of this rank writes to them.
    writers: dict[str, int] = field(default_factory=dict)
    of_rank: list[Stage] = field(default_factory=list)  # all stages of this rank
    _is_looked_at: bool = False
    _followed: dict[int, dict[str, Any]] = field(default_factory=dict)  # by place in ``mirrored``

    @property
    def is_training(self) -> bool:
        """Whether the model trains, or is evaluated."""
        return (self.mirrored[0][1] if self.mirrored else self.tree).training

    def takes(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Taken:
        """Return what the stage is sent. ``args`` and ``kwargs`` are those of the whole model.

        Raises:
            ConfigError: the block takes a number, or the like, that another stage computes.
        """
        begin = self._first_block(args, kwargs)
        others: list[Sequence[Any]] = []
        if self.passage.nothing:
            for seed, has_zeros in _SEEDS.items():
                with self.passage.nothing.at_random(seed, has_zeros=has_zeros), _numbers_may_fail():
                    others.append(self._first_block(args, kwargs).values)
        first: dict[int, int] = {}
        for place, value in reversed([*enumerate(begin.values)]):
            if is_nothing(value) or not all(_are_alike(value, other[place]) for other in others):
                if not isinstance(value, torch.Tensor):
                    raise ConfigError(
                        f"{begin.name!r} is called with {value!r}, which is made of something that another "
                        "stage has: tensors alone go from stage to stage; cut the model elsewhere (split=), "
                        "or have the block take a tensor"
                    )
                first[id(value)] = place
        return Taken(tuple(sorted(first.values())), len(begin.values))

    def _first_block(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> FirstBlock:
        """Return what the stage begins with; find out whether the model writes to what is not there."""
        nothing = self.passage.nothing
        try:
            return self._reach_first_block(args, kwargs)
        except RuntimeError as error:
            if nothing.is_written or nothing.is_random or _SHARED_ELEMENT not in str(error):
                raise
        nothing.expect_writes()
        return self._reach_first_block(args, kwargs)

    def _reach_first_block(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> FirstBlock:
        with self._without_a_trace(self._own_modules()), self.passage.begun(None, (args, kwargs)):
            self._follow()
            try:
                self.tree(*args, **kwargs)
            except FirstBlock as begin:
                return begin
        raise ConfigError(
            f"stage {self.index} gets to the end of the model and to none of its blocks: blocks are called "
            "one after another, once each; say which with blocks=['layer1', 'layer2', ...]"
        )

    def run(
        self,
        received: Sequence[torch.Tensor],
        takes: Taken,
        gives: Taken,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        draws: Draws | None = None,
    ) -> Any:
        """Run the forward pass of this stage: from what it has ``received``, as it ``takes`` it, to a tuple
        of what it ``gives`` the next stage, or to what the model returns. ``args`` and ``kwargs`` are those
        of the whole model; ``draws`` says of what random numbers come."""
        self._follow()
        before = self._versions_around()
        with self.passage.begun(takes.places, (args, kwargs), received, gives, draws):
            try:
                outputs = self.tree(*args, **kwargs)
            except EndOfStage as end:
                outputs = end.outputs
        self._note_writes(before)
        self._count_on()
        return outputs

    def _versions_around(self) -> dict[str, tuple[int, int]]:
        """Return what shows whether buffers of the modules around blocks were written to, or replaced."""
        return {
            f"{place}.{name}": (id(buffer), buffer._version)
            for place, (here, _) in enumerate(self.mirrored)
            for name, buffer in here._buffers.items()
            if buffer is not None and not buffer.is_inference()
        }

    def _note_writes(self, before: dict[str, tuple[int, int]]) -> None:
        """Raise ConfigError where two stages of this rank write to one buffer around the blocks."""
        for name, version in self._versions_around().items():
            if before.get(name) != version and self.writers.setdefault(name, self.index) != self.index:
                raise ConfigError(
                    f"the model writes to the buffer {name.partition('.')[2]!r} in each forward pass, and "
                    f"stages {self.writers[name]} and {self.index}, both on this rank, would each do so: use "
                    "a pp_style with one stage on a rank ('1f1b'), or have a block write to it"
                )

    def depends_on_nothing(
        self,
        values: Sequence[torch.Tensor],
        again: Callable[[], Sequence[torch.Tensor]],
        beside: Iterable[nn.Module] = (),
    ) -> bool:
        """Say whether ``values``, which came of a run of this stage, are made of what another stage has: with
        other numbers in the place of that, and :meth:`run` within it, ``again`` returns other ones. Neither
        this stage nor the modules ``beside`` it are left changed."""
        every = [*self._own_modules(), *beside]
        if any(value.is_meta for value in values):  # an attribute of what another stage has
            return True
        if not self.passage.nothing:
            return False
        for seed, has_zeros in _SEEDS.items():
            others: Sequence[torch.Tensor] = ()
            at_random = self.passage.nothing.at_random(seed, has_zeros=has_zeros)
            with self._without_a_trace(every), at_random, _numbers_may_fail():
                others = again()
            if not all(map(_are_alike, values, others)):
                with self._without_a_trace(every):  # from the same state: a model may count its passes
                    values = again()
                if not all(map(_are_alike, values, others)):
                    return True
        return False

    def _own_modules(self) -> list[nn.Module]:
        return [module for module in self.tree.modules() if not isinstance(module, (Absent, Present))]

    @contextmanager
    def _without_a_trace(self, modules: Sequence[nn.Module]) -> Iterator[None]:
        """Undo what a run within the block changes: random numbers, and statistics, counters and the like in
        buffers and attributes of ``modules``. Raises ConfigError as :func:`unchanged`."""
        devices = [device] if (device := current_device()).type == "cuda" else []
        followed = {place: dict(seen) for place, seen in self._followed.items()}
        self._is_looked_at = True
        with torch.no_grad(), torch.random.fork_rng(devices), unchanged(modules):
            try:
                yield
            finally:
                self._followed, self._is_looked_at = followed, False

    def _follow(self) -> None:
        """Have copies be as what they are copies of: trained or evaluated, and whatever was set there since
        the last time. What a copy's own forward pass sets stays, and is told by the rank's last stage."""
        own = ("_modules", "_parameters", "_compiled_call_impl")
        for place, (here, there) in enumerate(self.mirrored):
            seen = self._followed.setdefault(place, {})
            for key, value in there.__dict__.items():
                if key in own or (key in seen and seen[key] is value):
                    continue
                seen[key] = value
                is_method = inspect.ismethod(value) and value.__self__ is there
                here.__dict__[key] = value.__func__.__get__(here) if is_method else value

    def _count_on(self) -> None:
        """Have the model know the numbers that the forward pass of the rank's last stage has set: a program
        may read them, and set them anew."""
        if self._is_looked_at or not self.of_rank or self.of_rank[-1] is not self:
            return
        for place, (here, there) in enumerate(self.mirrored):
            for key, value in here.__dict__.items():
                if isinstance(value, _NUMBERS) and there.__dict__.get(key) is not value:
                    there.__dict__[key] = value
                    for stage in self.of_rank:
                        stage._followed.setdefault(place, {})[key] = value


@contextmanager
def _numbers_may_fail() -> Iterator[None]:
    """Let what models raise for numbers that they do not expect pass in silence."""
    try:
        yield
    except (RuntimeError, ValueError, IndexError) as error:
        if isinstance(error, GeminiError):
            raise


def _are_alike(one: Any, other: Any) -> bool:
    """Say whether two values are the same, tensors but for the last digits."""
    if not isinstance(one, torch.Tensor):
        return type(one) is type(other) and (not isinstance(one, _NUMBERS) or one == other)
    if not isinstance(other, torch.Tensor) or one.shape != other.shape or one.dtype != other.dtype:
        return False
    if not one.is_floating_point():
        return torch.equal(one, other)
    first, second = one.detach().double(), other.detach().double()
    finite = first[first.isfinite()]
    scale = float(finite.abs().mean()) if finite.numel() else 0.0
    near = max(_SAME, 4 * torch.finfo(one.dtype).eps)  # operators may add up in another order each time
    return torch.allclose(first, second, rtol=near, atol=near * scale, equal_nan=True)
