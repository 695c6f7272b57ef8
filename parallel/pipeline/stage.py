"""Stage: runs the whole model's forward pass with all other stages absent.

A stage can also run only to find its inputs; all changes to modules are undone then.
"""

from __future__ import annotations

import inspect
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from gemini.errors import ConfigError, GeminiError
from gemini.parallel.pipeline.containers import (
    Path,
    containers_in_context,
    nested_in,
    plain_values,
    restore_plain_values,
)
from gemini.parallel.pipeline.numbers import Draws
from gemini.parallel.pipeline.remote_modules import LocalBlock, RemoteModule
from gemini.parallel.pipeline.stage_pass import EndOfStage, FirstBlock, StageInputs, StagePass
from gemini.system.device import current_device

_LARGEST_BYTES = 2**23  # larger tensors are assumed to be tables, which forward passes only read
_COLLECTIONS = (list, dict, set, deque, OrderedDict)


@contextmanager
def unchanged(modules: Sequence[nn.Module], beside: Sequence[object] = ()) -> Iterator[None]:
    """Undo changes to the buffers and attributes of ``modules`` that happen inside the block: replaced
    values, writes into tensors of up to 8 MiB, and changes of lists, dicts and sets, also of those in
    ``beside``. Parameters are not checked.

    Raises:
        ConfigError: a larger tensor was written to.
    """
    states = [(module, dict(module.__dict__), dict(module._buffers)) for module in modules]
    values = [*beside, *(value for _, *both in states for each in both for value in each.values())]
    collections = {id(value): (value, value.copy()) for value in values if type(value) in _COLLECTIONS}
    tensors = {id(value): value for value in values if _is_state(value)}
    small = [(each, each.detach().clone()) for each in tensors.values() if each.nbytes <= _LARGEST_BYTES]
    large = [(each, each._version) for each in tensors.values() if each.nbytes > _LARGEST_BYTES]
    try:
        yield
    finally:
        for tensor, content in small:  # all of them: batch norm does not change the version
            tensor.data.copy_(content)
        for module, attributes, buffers in states:
            _put_back(module.__dict__, attributes)
            _put_back(module._buffers, buffers)
        for collection, members in collections.values():
            _fill(collection, members)
    for tensor, version in large:
        if tensor._version != version:
            raise ConfigError(
                f"the forward pass writes to {_name_of(tensor, states)} of {tensor.nbytes / 2**20:.0f} "
                f"MiB, but in stages it may write only to buffers of up to {_LARGEST_BYTES // 2**20} MiB; "
                "divide the buffer into several, or train without pp"
            )


def _is_state(value: Any) -> bool:
    if not isinstance(value, torch.Tensor) or isinstance(value, nn.Parameter) or value.requires_grad:
        return False
    # Expanded tensors, such as placeholders, cannot be written to.
    return not value.is_meta and not value.is_inference() and 0 not in value.stride()


def _put_back(now: dict[Any, Any], before: dict[Any, Any]) -> None:
    """Restore the items of ``now``; unchanged ones are not touched."""
    for key in [key for key in now if key not in before]:
        del now[key]
    for key, value in before.items():
        if key not in now or now[key] is not value:
            now[key] = value


def _fill(collection: Any, members: Any) -> None:
    """Restore the members of a list, dict or set: the same objects."""
    if isinstance(collection, (list, deque)):
        collection.clear()
        collection.extend(members)
    elif isinstance(collection, dict):
        _put_back(collection, members)
    else:
        collection.intersection_update(members)
        collection.update(members)


def _name_of(tensor: torch.Tensor, states: Sequence[tuple[nn.Module, dict[str, Any], dict[str, Any]]]) -> str:
    for module, attributes, buffers in states:
        for name, value in (*buffers.items(), *attributes.items()):
            if value is tensor:
                return f"the buffer {name!r} of {type(module).__name__}"
    raise AssertionError("a tensor of no module")


# Parts of torch's messages about tensors without memory.
_SIGNS_OF_PLACEHOLDERS = ("tensor subclasses", "FakeTensor", "doesn't have storage", "data is not allocated")
# Attributes that each copy keeps for itself.
_OWN = ("_modules", "_parameters", "_buffers", "_compiled_call_impl", "named_parameters")


@dataclass
class Stage:
    """One stage of this rank. ``tree`` is the model with all other stages absent; ``mirrored`` has pairs of
    the copies of modules around the blocks and their originals.
    """

    index: int
    tree: nn.Module
    stage_pass: StagePass
    mirrored: list[tuple[nn.Module, nn.Module]] = field(default_factory=list)
    # The stage of this rank that writes to a buffer around the blocks, by the buffer's name.
    writers: dict[str, int] = field(default_factory=dict)
    of_rank: list[Stage] = field(default_factory=list)  # all stages of this rank
    outside: StagePass | None = None  # for stand-ins in the model itself, which a criterion may read
    _is_looked_at: bool = False
    _followed: dict[int, dict[str, Any]] = field(default_factory=dict)  # by index in ``mirrored``

    @property
    def is_training(self) -> bool:
        """Whether the model trains."""
        return (self.mirrored[0][1] if self.mirrored else self.tree).training

    def takes(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> StageInputs:
        """Return the inputs of the stage. ``args`` and ``kwargs`` are those of the whole model.

        Raises:
            ConfigError: the model decides on a value of another stage before its first block, or takes the
                output of a block of another stage, which is unknown, for something else than its input.
        """
        begin, before = self._reach_first_block(args, kwargs)
        places: dict[int, int] = {}
        for place, value in reversed([*enumerate(begin.values)]):
            if self.stage_pass.placeholders.stands_for(value):
                places[id(value)] = place
        held = (
            path
            for path, value in begin.held.items()
            if id(value) not in places and before.get(path) is not value
        )
        return StageInputs(tuple(sorted(places.values())), len(begin.values), tuple(held))

    def _reach_first_block(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[FirstBlock, dict[Path, torch.Tensor]]:
        """Return the arguments of the first block, and the placeholders that existed before the pass."""
        with self._without_a_trace(), self.stage_pass.begun(None, (args, kwargs)):
            self._follow()
            self.stage_pass.set_training(self.is_training)
            before = self.stage_pass.held()
            try:
                with _named():
                    self.tree(*args, **kwargs)
            except FirstBlock as begin:
                return begin, before
            except (TypeError, ValueError, LookupError, AttributeError) as error:
                if isinstance(error, GeminiError) or self.stage_pass.assumed is None:
                    raise
                raise self._assumed_wrongly(*self.stage_pass.assumed, error) from error
        raise ConfigError(
            f"the model's forward pass ended without a call of any block of stage {self.index}: blocks must "
            "run one after another, once each; name them with blocks=['layer1', 'layer2', ...]"
        )

    def _assumed_wrongly(self, name: str, reason: Exception, error: Exception) -> ConfigError:
        """Return the error for a pass that fails where the output of block ``name`` is assumed."""
        return ConfigError(
            f"the block {name!r} of another stage does not run on 'meta' ({type(reason).__name__}: "
            f"{reason}), so stage {self.index} takes its output for a tensor like its input, and with that "
            f"the model's forward pass fails ({type(error).__name__}: {error}); let the block return one "
            "tensor of its input's shape, or train without pp (pp_size=1)"
        )

    def run(
        self,
        received: Sequence[torch.Tensor],
        takes: StageInputs,
        gives: StageInputs,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        draws: Draws | None = None,
    ) -> Any:
        """Run the forward pass of this stage.

        Args:
            received: the received tensors; ``takes`` says where they belong.
            gives: the inputs of the next stage.
            args, kwargs: the arguments of the whole model.
            draws: the seeds of random numbers.

        Returns:
            A tuple of the tensors for the next stage; for the last stage, the model's output.
        """
        self._follow()
        self.stage_pass.set_training(self.is_training)
        before = self._versions_around()
        with self.stage_pass.begun(takes, (args, kwargs), received, gives, draws):
            try:
                with _named():
                    outputs = self.tree(*args, **kwargs)
            except EndOfStage as end:
                outputs = end.outputs
        self._note_writes(before)
        self._count_on()
        return outputs

    def _versions_around(self) -> dict[str, tuple[int, int]]:
        """Return the identity and version of buffers of the modules around blocks, to detect writes."""
        return {
            f"{place}.{name}": (id(buffer), buffer._version)
            for place, (here, _) in enumerate(self.mirrored)
            for name, buffer in here._buffers.items()
            if buffer is not None and not buffer.is_inference()
        }

    def _note_writes(self, before: dict[str, tuple[int, int]]) -> None:
        """Raise ConfigError if two stages of this rank write to the same buffer around the blocks, or one
        writes a placeholder into a buffer.
        """
        stands_for = self.stage_pass.placeholders.stands_for
        for here, _ in self.mirrored:
            for name, buffer in here._buffers.items():
                if stands_for(buffer):
                    raise ConfigError(
                        "the model writes a value computed from another stage's values into the buffer "
                        f"{name!r}; let a block write to it, or train without pp"
                    )
        for name, version in self._versions_around().items():
            if before.get(name) != version and self.writers.setdefault(name, self.index) != self.index:
                raise ConfigError(
                    f"the model writes to the buffer {name.partition('.')[2]!r} in each forward pass, so "
                    f"both stages of this rank, {self.writers[name]} and {self.index}, would write to it; "
                    "use a pp_style with one stage on a rank ('1f1b'), or let a block write to it"
                )

    def judge(self, call: Callable[[], torch.Tensor]) -> torch.Tensor:
        """Return the loss that ``call`` computes from the result of :meth:`run`.

        Raises:
            ConfigError: it depends on a value of another stage.
        """
        shown = nullcontext() if self.outside is None else self.outside.judged()
        with self.stage_pass.watched(), shown, _named():
            loss = call()
        if loss.is_meta or self.stage_pass.placeholders.stands_for(loss):
            raise ConfigError(
                "the loss depends on a value that only another stage has: code in front of the blocks or a "
                "weight there is used after a block, or a block left a value behind; only the arguments of "
                "one block after another pass from stage to stage, and the model's lists and dicts; let the "
                "blocks pass it on, or train without pp"
            )
        return loss

    def _own_modules(self) -> list[nn.Module]:
        return [
            module for module in self.tree.modules() if not isinstance(module, (RemoteModule, LocalBlock))
        ]

    @contextmanager
    def _without_a_trace(self) -> Iterator[None]:
        """Undo all changes of a run inside the block: random generators, and statistics and counters in
        buffers and attributes of the stage's modules. Raises ConfigError as :func:`unchanged`.
        """
        devices = [device] if (device := current_device()).type == "cuda" else []
        followed = {place: dict(seen) for place, seen in self._followed.items()}
        self._is_looked_at = True
        absent = [each for each in self.tree.modules() if isinstance(each, RemoteModule)]
        modules, held = self._own_modules(), list(self.stage_pass.containers.values())
        held += [each for value in containers_in_context().values() for each in nested_in(value)]
        held += [hooks for each in absent for inner in each.stand_ins() for hooks in inner.hooks()]
        known = {id(inner) for each in absent for inner in each.stand_ins()}
        classes = [self.tree, *(each.meta_copy for each in absent)]
        counters = plain_values(classes)
        with torch.no_grad(), torch.random.fork_rng(devices), unchanged(modules, held):
            try:
                yield
            finally:
                restore_plain_values(classes, counters)
                for inner in [inner for each in absent for inner in each.stand_ins()]:
                    for hooks in inner.hooks() if id(inner) not in known else ():
                        hooks.clear()
                self._followed, self._is_looked_at = followed, False

    def _follow(self) -> None:
        """Copy attributes that were set on the originals since the last time to the copies of modules, such
        as the training mode. Attributes that a copy's own forward pass has set are kept.
        """
        for place, (here, there) in enumerate(self.mirrored):
            seen = self._followed.setdefault(place, {})
            for key, value in there.__dict__.items():
                if key in _OWN or (key in seen and seen[key] is value):
                    continue
                seen[key] = value
                is_method = inspect.ismethod(value) and value.__self__ is there
                here.__dict__[key] = value.__func__.__get__(here) if is_method else value

    def _count_on(self) -> None:
        """Copy the attributes that the forward pass of the rank's last stage has set back to the model, and
        to the other stages: the program and its criterion may read and set them.
        """
        if self._is_looked_at or not self.of_rank or self.of_rank[-1] is not self:
            return
        for place, (here, there) in enumerate(self.mirrored):
            seen = self._followed[place]
            for key, value in here.__dict__.items():
                if key not in _OWN and seen.get(key, seen) is not value and not inspect.ismethod(value):
                    there.__dict__[key] = value
                    for stage in self.of_rank:
                        stage._followed.setdefault(place, {})[key] = value


@contextmanager
def _named() -> Iterator[None]:
    """Raise ConfigError if the model reads the memory of a placeholder, as numpy() and extensions do."""
    try:
        yield
    except (RuntimeError, TypeError) as error:
        if not any(sign in str(error) for sign in _SIGNS_OF_PLACEHOLDERS):
            raise
        raise ConfigError(
            f"the model reads the memory of a value that only another stage has ({error}), but only torch's "
            "operators can run without it; let a block read it, or train without pp"
        ) from error
