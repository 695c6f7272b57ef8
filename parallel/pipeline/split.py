"""Leaving a rank its stages of a model: the whole model, with the rest absent, under its own names."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn

from gemini.errors import ConfigError, GeminiError
from gemini.parallel.pipeline.absent import Absent, AbsentBlock, Exit, Present, is_nothing, outline_of
from gemini.parallel.pipeline.numbers import Draws
from gemini.parallel.pipeline.partition import partition_balanced
from gemini.parallel.pipeline.passage import EndOfStage, FirstBlock, Nothing, Passage, Taken
from gemini.parallel.pipeline.units import Units, block_bytes
from gemini.runtime.storage.initialize import Initialization, children_first
from gemini.system.device import current_device

Split = str | Sequence[str]

# And whether some rows are zeros. A mask of two tokens is the same by chance, hardly so three times; one of
# padding is, wherever there is none.
_SEEDS = {1: False, 2: False, 3: True}
_SAME = 1e-5  # of a number
_SHARED_ELEMENT = "single memory location"  # what torch says where an operator writes to an expanded tensor
_NUMBERS = (bool, int, float, complex, str)
_LARGEST_STATISTICS_BYTES = 2**23  # larger buffers are taken for tables, which forward passes only read


@dataclass
class Stage:
    """One stage of this rank: ``tree`` is the model as it runs, with all other stages absent."""

    index: int
    tree: nn.Module
    passage: Passage
    mirrored: list[tuple[nn.Module, nn.Module]] = field(default_factory=list)
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
        with self._without_a_trace(), self.passage.begun(None, (args, kwargs)):
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
        with self.passage.begun(takes.places, (args, kwargs), received, gives, draws):
            try:
                return self.tree(*args, **kwargs)
            except EndOfStage as end:
                return end.outputs

    def depends_on_nothing(
        self, values: Sequence[torch.Tensor], again: Callable[[], Sequence[torch.Tensor]]
    ) -> bool:
        """Say whether ``values``, which came of a run of this stage, are made of what another stage has: with
        other numbers in the place of that, and :meth:`run` within it, ``again`` returns other ones."""
        if any(value.is_meta for value in values):  # an attribute of what another stage has
            return True
        if not self.passage.nothing:
            return False
        for seed, has_zeros in _SEEDS.items():
            others: Sequence[torch.Tensor] = ()
            at_random = self.passage.nothing.at_random(seed, has_zeros=has_zeros)
            with self._without_a_trace(), at_random, _numbers_may_fail():
                others = again()
            if not all(map(_are_alike, values, others)):
                with self._without_a_trace():  # from the same state: a model may count its passes
                    values = again()
                if not all(map(_are_alike, values, others)):
                    return True
        return False

    @contextmanager
    def _without_a_trace(self) -> Iterator[None]:
        """Undo what a run within the block changes: random numbers, statistics and counters in buffers, and
        attributes of the modules around blocks.

        Raises:
            ConfigError: it has written to a buffer that is too large to be copied for this.
        """
        devices = [device] if (device := current_device()).type == "cuda" else []
        small = [buffer for buffer in self.tree.buffers() if buffer.nbytes <= _LARGEST_STATISTICS_BYTES]
        buffers = [(buffer, buffer.detach().clone()) for buffer in small]
        tables = {
            name: (buffer, buffer._version)
            for name, buffer in self.tree.named_buffers()
            if buffer.nbytes > _LARGEST_STATISTICS_BYTES and not buffer.is_inference()
        }
        attributes = [(here, dict(here.__dict__)) for here, _ in self.mirrored]
        followed = {place: dict(seen) for place, seen in self._followed.items()}
        with torch.no_grad(), torch.random.fork_rng(devices):
            try:
                yield
            finally:
                for buffer, values in buffers:  # all: batch norm leaves the version as it is
                    buffer.data.copy_(values)
                for here, kept in attributes:
                    here.__dict__.clear()
                    here.__dict__.update(kept)
                self._followed = followed
        for name, (buffer, version) in tables.items():
            if buffer._version != version:
                raise ConfigError(
                    f"the forward pass writes to the buffer {name!r} of {buffer.nbytes / 2**20:.0f} MiB; in "
                    f"stages it may write to buffers of up to {_LARGEST_STATISTICS_BYTES // 2**20} MiB: make "
                    "several of it, or train without pp"
                )

    def _follow(self) -> None:
        """Have copies be as what they are copies of: trained or evaluated, and whatever was set there since
        the last time. What a copy's own forward pass sets stays."""
        own = ("_modules", "_parameters", "_compiled_call_impl")
        for place, (here, there) in enumerate(self.mirrored):
            seen = self._followed.setdefault(place, {})
            for key, value in there.__dict__.items():
                if key in own or (key in seen and seen[key] is value):
                    continue
                seen[key] = value
                is_method = inspect.ismethod(value) and value.__self__ is there
                here.__dict__[key] = value.__func__.__get__(here) if is_method else value


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


@dataclass(frozen=True)
class StagedModel:
    """What :func:`split` made of a model on this rank.

    ``ranges[stage]`` are the blocks of a stage. ``shared`` are parameters that several stages have (tied), by
    the first of their names, with those stages ascending; ``aliases`` are all names of a parameter, by the
    first, and ``names`` those of the whole model's state.
    """

    module: nn.Module
    units: Units
    ranges: tuple[tuple[int, int], ...]
    stages: tuple[Stage, ...]
    shared: dict[str, tuple[int, ...]]
    aliases: dict[str, tuple[str, ...]]
    names: tuple[str, ...]

    @classmethod
    def undivided(cls, model: nn.Module) -> StagedModel:
        """Return a model as one stage."""
        stage = Stage(0, model, Passage())
        names = tuple(model.state_dict(keep_vars=True))
        return cls(model, Units(("",), (), ()), ((0, 1),), (stage,), {}, aliases_in(model), names)

    def owner_of(self, names: Iterable[str]) -> int:
        """Return the first stage that has a parameter or buffer, under any of its ``names``. All have buffers
        of the modules around blocks; there it is the last, which runs all that writes to them: what is in
        front of the blocks runs on every stage."""
        last = len(self.ranges) - 1
        for stage, (start, stop) in enumerate(self.ranges if last else ()):
            if any(_is_within(name, self.units.of_stage(start, stop)) for name in names):
                return stage
        return last

    def names_of(self, name: str) -> tuple[str, ...]:
        """Return all names of what has this one, the first one first."""
        return next((names for names in self.aliases.values() if name in names), (name,))


def choose_ranges(
    model: nn.Module,
    units: Units,
    num_stages: int,
    split: Split = "bytes",
    costs: Sequence[float] | None = None,
) -> tuple[tuple[int, int], ...]:
    """Return the blocks ``[start, stop)`` of each stage.

    Args:
        split: ``"bytes"`` of parameters, ``"layers"``, or the names of the blocks that stages begin with,
            but the first.
        costs: of each block, in any unit, in the place of ``split``.

    Raises:
        ConfigError: there are fewer blocks than stages, or the names are no such blocks.
    """
    count = len(units.blocks)
    if costs is not None and len(costs) != count:
        raise ConfigError(f"there are {len(costs)} costs, and the model has {count} blocks")
    if costs is None and not isinstance(split, str):
        starts = [0, *(units.blocks.index(name) for name in split if name in units.blocks)]
        if len(starts) != len(split) + 1 or len(starts) != num_stages or sorted(set(starts)) != starts:
            raise ConfigError(
                f"split={list(split)}: for {num_stages} stages name {num_stages - 1} blocks in ascending "
                f"order, without the first; there are {count}, {units.blocks[0]!r} to {units.blocks[-1]!r}"
            )
        return tuple(zip(starts, [*starts[1:], count], strict=True))
    if costs is None and split not in ("bytes", "layers"):
        raise ConfigError(f"split is {split!r}; give 'bytes', 'layers', names of blocks, or costs=")
    if costs is None:
        costs = block_bytes(model, units) if split == "bytes" else [1.0] * count
    return tuple(partition_balanced(costs, num_stages))


def split(
    model: nn.Module,
    units: Units,
    ranges: Sequence[tuple[int, int]],
    own: Iterable[int],
    outline: nn.Module | None = None,
) -> StagedModel:
    """Leave ``model``, in place, the stages ``own``; what others have is given up, and what is on ``meta``
    gets the first values that one process would draw.

    ``outline`` is that of the whole model where its layers have been cut since (tensor parallelism): what is
    absent must not take part in collectives.

    Raises:
        ConfigError: the model leaves out layers at random, or takes a loss from all of them.
    """
    _refuse_random_depth(model, units)
    _refuse_router_losses(model)
    own = tuple(sorted(own))
    outline = outline if outline is not None else outline_of(model)
    names = tuple(model.state_dict(keep_vars=True))
    aliases = aliases_in(model)
    shared = _shared_parameters(aliases, units, ranges)
    every = frozenset().union(*(units.of_stage(*each) for each in ranges))
    kept = frozenset().union(*(units.of_stage(*ranges[stage]) for stage in own))
    _give_first_values(model, every - kept)
    stages = []
    around = {name for name, _ in model.named_modules() if _holds_units(name, every)}
    nothing = Nothing()
    for index in own:
        passage, mirrored = Passage(nothing), []  # type: ignore[var-annotated]
        tree = _mirror(model, "", around, mirrored)
        _replace_absent(tree, units, ranges[index], outline, passage)
        _put_before(tree, units.blocks[slice(*ranges[index])], passage)
        _show_absent([here for here, _ in mirrored], passage)
        stages.append(Stage(index, tree, passage, mirrored))
    for name in every - kept:
        _put(model, name, outline, Passage(nothing), Absent)
    for config in (getattr(module, "config", None) for module in model.modules()):
        if getattr(config, "use_cache", False):
            config.use_cache = False  # type: ignore[union-attr]  # keys of the stage alone; nothing is generated
    return StagedModel(model, units, tuple(ranges), tuple(stages), shared, aliases, names)


def _refuse_random_depth(model: nn.Module, units: Units) -> None:
    """Raise ConfigError where transformers' ``layerdrop`` is on: each stage would draw for itself whether the
    next one begins."""
    for name, module in model.named_modules():
        if _holds_units(name, units.blocks):
            said = getattr(module, "layerdrop", None) or getattr(
                getattr(module, "config", None), "layerdrop", 0
            )
            if isinstance(said, float) and said > 0:
                own = name or type(module).__name__
                raise ConfigError(
                    f"{own!r} leaves out layers at random while it trains (layerdrop = {said}), and each "
                    "stage of a pipeline would draw for itself; set layerdrop (encoder_layerdrop and "
                    "decoder_layerdrop) to 0 in the configuration before the model is built"
                )


def _refuse_router_losses(model: nn.Module) -> None:
    """Raise ConfigError where transformers adds up a loss of what the routers of all layers return: a stage
    has those of its own layers."""
    for module in model.modules():
        if getattr(getattr(module, "config", None), "output_router_logits", False) is True:
            raise ConfigError(
                f"{type(module).__name__} adds a loss of the routers of all its layers (config."
                "output_router_logits), and a stage of a pipeline has its own layers alone; set it to False, "
                "which trains without that loss, or train without pp"
            )


def _holds_units(name: str, units: Collection[str]) -> bool:
    return not name or any(unit.startswith(f"{name}.") for unit in units)


def _is_within(name: str, units: Collection[str]) -> bool:
    """Say whether a parameter, or a module, is one of ``units`` or lies in one."""
    parts = name.split(".")
    return any(".".join(parts[:count]) in units for count in range(1, len(parts) + 1))


def _mirror(
    module: nn.Module, name: str, around: Collection[str], mirrored: list[tuple[nn.Module, nn.Module]]
) -> nn.Module:
    """Return a copy of the modules around units, which has the same units and everything else."""
    mirror = copy.copy(module)
    mirror._modules = dict(module._modules)
    mirror._parameters = dict(module._parameters)
    mirrored.append((mirror, module))
    for key, child in module._modules.items():
        full = f"{name}.{key}".lstrip(".")
        if child is not None and full in around:
            mirror._modules[key] = _mirror(child, full, around, mirrored)
    return mirror


def _replace_absent(
    tree: nn.Module, units: Units, blocks: tuple[int, int], outline: nn.Module, passage: Passage
) -> None:
    start, stop = blocks
    have = units.of_stage(start, stop)
    for name in (*units.blocks, *units.beside):
        if name in have:
            continue
        kind: type[Absent] = AbsentBlock if name in units.blocks else Absent
        if stop < len(units.blocks) and name == units.blocks[stop]:
            kind = Exit
        _put(tree, name, outline, passage, kind)


def _put_before(tree: nn.Module, blocks: Sequence[str], passage: Passage) -> None:
    """Put before each block of the stage what gives it what was received."""
    for name in blocks:
        around, _, key = name.rpartition(".")
        owner = tree.get_submodule(around)
        block = owner._modules[key]
        assert block is not None
        owner._modules[key] = Present(name, block, passage, is_last=name == blocks[-1])


def _put(tree: nn.Module, name: str, outline: nn.Module, passage: Passage, kind: type[Absent]) -> None:
    """Put a stand-in in the place of a module, or of a parameter that a module around blocks holds."""
    around, _, key = name.rpartition(".")
    owner = tree.get_submodule(around)
    if key in owner._modules:
        owner._modules[key] = kind(name, outline.get_submodule(name), passage)
        return
    param = owner._parameters.pop(key)
    assert param is not None
    owner.__dict__[key] = passage.nothing.like(param, torch.device("cpu"))  # no buffer: in no state dict


def _show_absent(mirrors: Sequence[nn.Module], passage: Passage) -> None:
    """Have the forward passes of ``mirrors`` see parameters of other stages behind their own, as nothing: the
    type of the first one is asked for where a stage has none, and a sum over all is refused."""

    def named_parameters(here: nn.Module, prefix: str = "", *args: Any, **kwargs: Any) -> Iterator[Any]:
        yield from nn.Module.named_parameters(here, prefix, *args, **kwargs)
        for name, module in here.named_modules(prefix=prefix) if passage.runs else ():
            if isinstance(module, Absent):
                yield from module.named_parameters(name)

    for here in mirrors:
        here.__dict__["named_parameters"] = partial(named_parameters, here)


def aliases_in(model: nn.Module) -> dict[str, tuple[str, ...]]:
    """Return all names of each parameter, by the first of them."""
    found: dict[int, list[str]] = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        found.setdefault(id(param), []).append(name)
    return {names[0]: tuple(names) for names in found.values()}


def _shared_parameters(
    aliases: dict[str, tuple[str, ...]], units: Units, ranges: Sequence[tuple[int, int]]
) -> dict[str, tuple[int, ...]]:
    """Return the parameters that several stages have, by the first of their names."""
    have = [units.of_stage(*blocks) for blocks in ranges]
    stages = {
        first: tuple(stage for stage, own in enumerate(have) if any(_is_within(name, own) for name in names))
        for first, names in aliases.items()
    }
    return {first: found for first, found in stages.items() if len(found) > 1}


def _give_first_values(model: nn.Module, absent: Collection[str]) -> None:
    """Initialize what is on ``meta`` in the order of one process, and keep nothing of what is ``absent``.

    Raises:
        ConfigError: nothing gives a weight its values.
    """
    if not any(param.is_meta for param in model.parameters()):
        return
    initialization = Initialization(model)
    kept = {id(p) for n, p in model.named_parameters(remove_duplicate=False) if not _is_within(n, absent)}
    for name, owner in list(children_first(model)):
        initialization.run(name, owner)
        if name in absent:
            for param in owner.parameters():
                if id(param) not in kept:
                    # Modules around it may draw it again. Memory that nobody writes to takes no room.
                    param.data = torch.empty_like(param)
    if initialization.unset:
        raise ConfigError(
            f"{len(initialization.unset)} weights that were built on 'meta' have no values (first: "
            f"{initialization.unset[0]!r}): no reset_parameters() or _init_weights() gives them any; build "
            "the model on 'cpu'"
        )
