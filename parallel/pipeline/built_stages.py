"""BuiltStages: pipeline stages that a program has built itself."""

from __future__ import annotations

import inspect
import json
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from gemini.errors import ConfigError
from gemini.parallel.mesh import Axis
from gemini.parallel.pipeline.numbers import Draws
from gemini.parallel.pipeline.split import StagedModel, aliases_in
from gemini.parallel.pipeline.stage import Stage
from gemini.parallel.pipeline.stage_pass import StageInputs, StagePass
from gemini.parallel.pipeline.tied_weights import shared_in
from gemini.parallel.pipeline.units import Units


class BuiltStages(nn.Module):
    """This rank's stages of a model that no rank has whole, for HybridParallelPlugin or ``initialize``::

        stage = PipelineGPT(first=rank == 0, last=rank == size - 1)
        optimizer = HybridAdam(stage.parameters())
        model, optimizer, *_ = booster.boost(BuiltStages(stage), optimizer)

    Several ``chunks`` are the stages of an interleaved pipeline, in the order in which they run; :meth:`of`
    takes them as builders return them. The first stage is called with the model's inputs. Others are called
    with the output of the previous stage, one tensor, and with those keyword inputs that their ``forward()``
    names. Parameters are named ``stage0.`` and so on, by the stage's index in the model; a parameter of
    :class:`SharedParameters` is one weight.

    Raises:
        ConfigError: there are no chunks.
    """

    def __init__(self, *chunks: nn.Module) -> None:
        super().__init__()
        if not chunks:
            raise ConfigError("BuiltStages() got no stages; pass the stages of this rank, BuiltStages(stage)")
        self._is_whole = True
        self._name(chunks, range(len(chunks)))

    @classmethod
    def of(cls, stages: nn.Module) -> BuiltStages:
        """Return ``stages`` as BuiltStages; a ModuleList is taken as a list of chunks."""
        if isinstance(stages, BuiltStages):
            return stages
        return cls(*(stages if isinstance(stages, nn.ModuleList) else [stages]))

    @property
    def num_chunks(self) -> int:
        """The number of stages on this rank."""
        return len(self._modules)

    def place(self, indices: Sequence[int]) -> None:
        """Set the indices of these stages in the model; other ranks have the others."""
        self._is_whole = False
        self._name(list(self.children()), indices)

    def _name(self, chunks: Sequence[nn.Module], indices: Sequence[int]) -> None:
        self._modules.clear()
        for index, chunk in zip(indices, chunks, strict=True):
            self.add_module(f"stage{index}", chunk)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run all stages, if this rank has all of them.

        Raises:
            ConfigError: other ranks have some.
        """
        if not self._is_whole:
            raise ConfigError(
                "other ranks have stages of the model, so this rank cannot run all of it; call "
                "engine.execute_schedule(data_iter) or booster.execute_pipeline(data_iter, model, "
                "criterion, optimizer)"
            )
        first, *others = self.children()
        output = first(*args, **kwargs)
        for chunk in others:
            output = chunk(output, **_named_by(chunk, kwargs))
        return output


@dataclass
class BuiltStage(Stage):
    """A stage that its program has built: a module from one tensor to the next."""

    is_last: bool = False

    def takes(self, _args: tuple[Any, ...], _kwargs: dict[str, Any]) -> StageInputs:
        """See :class:`Stage`: it receives its first argument."""
        return StageInputs((0,), 1)

    def run(
        self,
        received: Sequence[torch.Tensor],
        _takes: StageInputs,
        _gives: StageInputs,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        _draws: Draws | None = None,
    ) -> Any:
        """See :class:`Stage`. Raises ConfigError if the next stage would not get exactly one tensor."""
        output = self.tree(*(received or args), **_named_by(self.tree, kwargs))
        if self.is_last:
            return output
        if not isinstance(output, torch.Tensor):
            raise ConfigError(
                f"stage {self.index} returned a {type(output).__name__}, but a built stage passes exactly "
                "one tensor to the next; return that tensor alone from its forward()"
            )
        return (output,)


def join_stages(built: BuiltStages, axis: Axis, rank_of: Sequence[int]) -> StagedModel:
    """Join the stages that the ranks along ``axis`` have built to one model. Collective. ``rank_of``: for
    each stage, its rank.

    Raises:
        ConfigError: on all ranks, if their numbers of stages differ, or they do not share the same weights.
    """
    own = [stage for stage, rank in enumerate(rank_of) if rank == axis.rank]
    if built.num_chunks == len(own):
        built.place(own)
    said = {
        "chunks": built.num_chunks,
        "aliases": list(aliases_in(built).values()),
        "shared": shared_in(built),
        "state": list(built.state_dict(keep_vars=True)),
    }
    every = [json.loads(text) for text in axis.say(json.dumps(said))]
    counts = [each["chunks"] for each in every]
    if set(counts) != {len(own)}:
        raise ConfigError(
            f"ranks along the pipeline built {counts} stages, but each needs {len(own)}; build the same "
            "number on all of them, and set num_model_chunks (NUM_CHUNKS) to that number"
        )
    aliases = {names[0]: tuple(names) for each in every for names in each["aliases"]}
    shared = {}
    for names in _shared_names([each["shared"] for each in every]):
        together = sorted(names, key=_stage_of)
        merged = [name for first in together for name in aliases.pop(first)]
        aliases[merged[0]] = tuple(merged)
        shared[merged[0]] = tuple(sorted({_stage_of(name) for name in merged}))
    count = len(rank_of)
    units = Units(tuple(f"stage{index}" for index in range(count)), (), ())
    stages = tuple(
        BuiltStage(index, chunk, StagePass(), is_last=index == count - 1)
        for index, chunk in zip(own, built.children(), strict=True)
    )
    state = tuple(name for each in every for name in each["state"])
    ranges = tuple((index, index + 1) for index in range(count))
    return StagedModel(built, units, ranges, stages, shared, aliases, state)


def _shared_names(every: Sequence[Sequence[tuple[Sequence[int], str]]]) -> list[list[str]]:
    """Return the names of each weight that several ranks have; ``every`` has the result of :func:`shared_in`
    of each rank. Raises ConfigError if one of the ranks lacks the weight.
    """
    found: dict[tuple[tuple[int, ...], int], dict[int, str]] = defaultdict(dict)
    for rank, said in enumerate(every):
        counts: dict[tuple[int, ...], int] = defaultdict(int)
        for ranks, name in said:
            members = tuple(ranks)
            found[members, counts[members]][rank] = name
            counts[members] += 1
    for (members, number), names in found.items():
        if lacking := [rank for rank in members if rank not in names]:
            raise ConfigError(
                f"ranks {list(members)} of the pipeline share {next(iter(names.values()))!r} (their shared "
                f"parameter number {number}), but on ranks {lacking} no parameter of the stages is "
                "registered for it; register one there, in the same order"
            )
    return [list(names.values()) for names in found.values()]


def _stage_of(name: str) -> int:
    return int(name.partition(".")[0].removeprefix("stage"))


def _named_by(module: nn.Module, kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return the keywords that ``module.forward`` takes."""
    known = inspect.signature(module.forward).parameters.values()
    if any(each.kind is inspect.Parameter.VAR_KEYWORD for each in known):
        return kwargs
    names = {each.name for each in known}
    return {name: value for name, value in kwargs.items() if name in names}
