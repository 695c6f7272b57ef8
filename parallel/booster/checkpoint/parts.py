"""Weights of a model that is in stages and parts: files have whole tensors, as those of any other model."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from itertools import chain, zip_longest
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import nn

from gemini.checkpoint import plain_data
from gemini.checkpoint.sealed_file import making_sense_of
from gemini.checkpoint.tensor_file import TensorSpec
from gemini.comm.peers import ModelRanks
from gemini.errors import CheckpointError, ConfigError
from gemini.parallel.booster.checkpoint.optimizer_files import group_members
from gemini.parallel.booster.checkpoint.sources import (
    ModelContents,
    TensorFiles,
    config_file,
    extra_in,
    model_contents,
    parameter_names,
)
from gemini.parallel.booster.checkpoint.tensor_source import Sink, TensorSource
from gemini.parallel.booster.checkpoint.writing import Layout, save_tensors
from gemini.parallel.booster.checkpoint.zero import take_weights
from gemini.parallel.booster.ranks import Ranks
from gemini.parallel.expert_ranks import DividedExperts, ExpertRanks
from gemini.parallel.mesh import Axis, Mesh
from gemini.parallel.moe.divide import divide_experts, divided_experts
from gemini.parallel.partition import Partition
from gemini.parallel.pipeline import StagedModel
from gemini.parallel.pipeline.absent import Absent
from gemini.parallel.pipeline.passing import Incoming, Passing, ValueForm
from gemini.parallel.pipeline.tied import TiedWeights
from gemini.parallel.zero import LowLevelZeroOptimizer
from gemini.system.files import parse_json

_Path = str | os.PathLike[str]
_PART = "_part_of_model"  # an attribute of modules


@dataclass(frozen=True)
class WholeModel:
    """What a model was before ranks took their parts: its tensors on ``meta``, by name, its config file,
    where it has one, and the names of the parameters in each group of its optimizer."""

    tensors: Mapping[str, torch.Tensor]
    companions: Mapping[str, str]
    members: Sequence[Sequence[str]] = ()

    @classmethod
    def of(cls, model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> WholeModel:
        """Describe ``model``. Weights count in the type of files: fp32, unless they are wider. Raises
        ConfigError where ``optimizer`` has parameters that are none of the model's."""
        params = {name for name, _ in model.named_parameters(remove_duplicate=False)}
        experts = divided_experts(model)  # before, by the launch
        tensors = {}
        for name, value in model.state_dict(keep_vars=True).items():
            if isinstance(value, torch.Tensor):
                widened = name in params and value.dtype.itemsize <= 4
                dtype = torch.float32 if widened else value.dtype
                has_some = experts is not None and experts.has(value)
                shape = experts.ranks.cut_of(value).shape if experts and has_some else value.shape
                tensors[name] = torch.empty(shape, dtype=dtype, device="meta")
        members = () if optimizer is None else group_members(optimizer, parameter_names(model))
        return cls(tensors, config_file(model), members)

    def joined(self, axis: Axis | None, partition: Partition) -> WholeModel:
        """Return the whole of what the ranks along ``axis`` have each described, of tensors that were cut as
        ``partition`` has it; all of them call this."""
        cuts = partition.cuts
        shapes = {
            name: cuts[name].shape if name in cuts else like.shape for name, like in self.tensors.items()
        }
        own: dict[str, Any] = {
            "tensors": [
                [name, str(like.dtype).removeprefix("torch."), list(shapes[name])]
                for name, like in self.tensors.items()
            ],
            "members": [list(group) for group in self.members],
        }
        every = [json.loads(text) for text in axis.say(json.dumps(own))] if axis is not None else [own]
        tensors = {
            name: torch.empty(shape, dtype=getattr(torch, dtype), device="meta")
            for said in every
            for name, dtype, shape in said["tensors"]
        }
        groups = zip_longest(*(said["members"] for said in every), fillvalue=[])
        return WholeModel(tensors, self.companions, [list(chain(*group)) for group in groups])


class Parts:
    """What one model became on this rank."""

    def __init__(
        self,
        staged: StagedModel,
        partition: Partition,
        tied: TiedWeights,
        whole: WholeModel,
        mesh: Mesh | None,
        rank_of: Sequence[int],
    ) -> None:
        """``mesh``: None where there is one process; ``rank_of``: which rank along ``pp`` has which stage."""
        self.experts: DividedExperts | None = None  # those that ranks of data parallelism have divided
        self.staged, self.partition, self.tied, self.whole = staged, partition, tied, whole
        self.axis = mesh.axis("pp") if mesh is not None else None
        self.is_first_column = mesh is None or all(
            mesh[axis].get_local_rank() == 0 for axis in ("dp", "sp", "tp")
        )
        self._mesh, self._rank_of = mesh, rank_of

    @classmethod
    def undivided(cls, model: nn.Module, optimizer: torch.optim.Optimizer | None) -> Parts:
        """Return the parts of a model that every rank has whole, until experts are divided."""
        staged = StagedModel.undivided(model)
        partition = Partition(None, dict(model.named_parameters(remove_duplicate=False)))
        tied = TiedWeights(staged, None, (0,))
        return cls(staged, partition, tied, WholeModel.of(model, optimizer), None, (0,))

    @property
    def is_whole(self) -> bool:
        """Whether every rank has all of the model."""
        alone = self._mesh is None or (self._mesh.axis("pp", "tp") is None and self._mesh.axis("sp") is None)
        return alone and self.experts is None

    @property
    def place(self) -> int:
        """Which rank along ``pp`` this one is."""
        return self.axis.rank if self.axis is not None else 0

    @property
    def model_ranks(self) -> ModelRanks | None:
        """What GeminiDDP takes as ``model_ranks=``."""
        if self._mesh is None or (every := self._mesh.axis("pp", "tp")) is None:
            return None
        layers, elsewhere = self._mesh.axis("tp"), {id(param) for param in self.tied.owned_elsewhere}

        def counts(param: torch.Tensor) -> bool:
            return id(param) not in elsewhere and self.partition.counts(param)

        return ModelRanks(every, counts, [layers] if layers is not None else [], self.partition.filling)

    def divide_experts(self, ranks: ExpertRanks) -> None:
        """Leave of the experts of this part those that are this rank's own."""
        self.experts = divide_experts(self.staged.module, ranks)
        for param in () if self.experts is None else self.experts.params:
            self.partition.note(param, ranks.cut_of(param), over=ranks.sharing)

    def refuse_as_whole(self, boosted: nn.Module) -> None:
        """Have ``state_dict()`` of a ``boosted`` model, of the module in it, and of every module with a part
        of a tensor, or without layers that another stage has, raise ConfigError, and with it all that calls
        it, such as ``save_pretrained()``; and ``torch.save`` of both. ``state_dict(keep_vars=True)`` gives
        the parts."""
        module = self.staged.module
        cut = {id(param) for param in module.parameters() if self.partition.cut_of(param) is not None}
        if not cut and len(self._rank_of) == 1:
            return
        for part in {boosted, module, *module.modules()}:
            holds_part = any(id(param) in cut for param in part.parameters(recurse=False))
            if holds_part or part in (boosted, module) or isinstance(part, Absent):
                part.register_state_dict_pre_hook(_Refusal(self))
        for whole in (
            boosted,
            module,
        ):  # pickling comes to it first, before process groups in hooks and layers
            held = dict(vars(whole))
            vars(whole).clear()
            vars(whole).update({_PART: _Refusal(self), **held})

    def owner_of(self, name: str) -> int:
        """Return which rank along ``pp`` saves a tensor."""
        return self._rank_of[self.staged.owner_of(self.staged.names_of(name))]


def parts_of(model: nn.Module) -> Parts | None:
    """Return of what ``model`` is a part: a boosted model that is no whole one, the module in it, or a copy
    of either; None for others."""
    found = vars(model).get(_PART)
    return found.parts if isinstance(found, _Refusal) else None


def save_parts(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    parts: Parts,
    checkpoint: _Path,
    layout: Layout,
    ranks: Ranks,
) -> None:
    """Write the whole model, a tensor at a time in memory; all ranks call it and the first one writes. Raises
    as :func:`gemini.parallel.booster.checkpoint.writing.save_tensors`."""
    contents = whole_contents(model, optimizer, parts, ranks)
    metadata = contents.metadata()
    save_tensors(checkpoint, "model", contents.sources, metadata, layout, ranks, parts.whole.companions)


def whole_contents(
    model: nn.Module, optimizer: torch.optim.Optimizer | None, parts: Parts, ranks: Ranks
) -> ModelContents:
    """Return the whole model of which each rank has a part. All ranks call this, and run the streams of all
    sources in their order; those of the first rank hand out what they have."""
    held = model_contents(model, optimizer)
    local = {source.spec.name: source for source in held.sources}
    local.update({alias: local[first] for alias, first in held.aliases.items()})
    passing = Passing(parts.axis) if parts.axis is not None else None
    sources, aliases = [], {}
    for name, like in parts.whole.tensors.items():
        first, *_ = names = parts.staged.names_of(name)
        if name != first:
            aliases[name] = first
            continue
        own = next(((each, local[each]) for each in names if each in local), None)
        spec = TensorSpec(name, like.dtype, tuple(like.shape))
        sources.append(TensorSource(spec, partial(stream, parts, passing, (name, spec), own)))
    return ModelContents(sources, aliases, _extra_of_all(held.extra, parts, ranks))


def _extra_of_all(own: Mapping[str, Any], parts: Parts, ranks: Ranks) -> dict[str, Any]:
    """Return the extra states of all modules, each of the rank that saves it; all ranks call this."""

    def say() -> str:
        mine = {name: value for name, value in own.items() if parts.owner_of(name) == parts.place}
        return json.dumps(plain_data.encode(mine if parts.is_first_column else {}, "a module's extra state"))

    every = [plain_data.decode(parse_json(text)) for text in ranks.collect(say)]
    return {name: value for each in every for name, value in each.items()}


def stream(
    parts: Parts,
    passing: Passing | None,
    what: tuple[str, TensorSpec],
    own: tuple[str, TensorSource] | None,
    sink: Sink,
) -> None:
    """Hand a tensor, whole, to ``sink`` on the first rank, from the stage that owns it; all ranks call it.

    ``what``: the tensor of the whole model that it is, or is a state of, and what the whole of it is.
    ``own``: the name of the former here, and this rank's part of the latter; None: on other stages.
    """
    (name, spec), place = what, parts.place
    owner = parts.owner_of(name)
    value: torch.Tensor | None = None
    if place == owner:
        assert own is not None
        value = _whole(*own, spec.dtype, parts)
    if not parts.is_first_column:
        return
    if owner != 0 and passing is not None:
        if place == owner and value is not None:
            passing.send(value, 0, 0)
            passing.finish()
        elif place == 0:
            coming = Incoming(passing, owner, 0, ValueForm(spec.dtype, tuple(spec.shape)))
            value = coming.wait(f"waits for {spec.name} of another stage (a save)")
    if place == 0 and value is not None:
        sink(value)


def _whole(name: str, source: TensorSource, dtype: torch.dtype, parts: Parts) -> torch.Tensor:
    """Return the whole, in the type of files, of a tensor of which this rank has a part, cut as the parameter
    ``name`` is; ranks along ``dp`` and ``tp`` together."""
    value = torch.empty(source.spec.shape, dtype=source.spec.dtype, device="cpu")
    flat, place = value.view(-1), 0

    def collect(piece: torch.Tensor) -> None:
        nonlocal place
        flat[place : place + piece.numel()].copy_(piece.reshape(-1))
        place += piece.numel()

    source.stream(collect)
    if value.dtype == torch.int16:  # which gloo does not send
        value = value.int()
    found: torch.Tensor = parts.partition.gather_state({name: value})[name]
    return found.to(dtype)


def load_parts(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    parts: Parts,
    checkpoint: _Path,
    ranks: Ranks,
    *,
    strict: bool,
) -> None:
    """Read this rank's part of the whole model; all ranks call it.

    Raises:
        CheckpointError: it is damaged, or made for another model, here or on another rank; nothing was
            changed.
    """
    with ExitStack() as stack:

        def read() -> dict[str, Any]:
            files = stack.enter_context(TensorFiles(checkpoint))
            with making_sense_of(Path(checkpoint)):
                return _own_part(parts, files, checkpoint, strict=strict)

        known = ranks.together(read)
        with torch.no_grad():
            model.load_state_dict(known, strict=False)
        if isinstance(optimizer, LowLevelZeroOptimizer):
            take_weights(optimizer, parameter_names(model), known)


def _own_part(parts: Parts, files: TensorFiles, checkpoint: _Path, *, strict: bool) -> dict[str, Any]:
    """Return the state that this rank loads. Raises CheckpointError unless it was made for such a model."""
    stored = {
        name: found
        for name in parts.whole.tensors
        if (found := files.first_of(parts.staged.names_of(name))) is not None
    }
    missing = sorted(parts.whole.tensors.keys() - stored.keys())
    unexpected = sorted(files.keys() - parts.whole.tensors.keys())
    if strict and (missing or unexpected):
        raise CheckpointError(
            f"{checkpoint} was made for another model: {len(missing)} names of the model are not in it "
            f"{missing[:3]}, and {len(unexpected)} of its names are not in the model {unexpected[:3]}; "
            "pass strict=False to load what both have"
        )
    own, extra = parts.staged.module.state_dict(keep_vars=True), extra_in(files.metadata)
    lacking = [name for name, value in own.items() if not isinstance(value, torch.Tensor)]
    lacking = [name for name in lacking if name not in extra]
    if strict and lacking:
        raise CheckpointError(
            f"{checkpoint} was made for another model: it has no extra state {lacking[0]!r}; pass "
            "strict=False to load what both have"
        )
    state: dict[str, Any] = {name: value for name, value in extra.items() if name in own}
    for name in own.keys() & stored.keys():
        value, shape = files[stored[name]], tuple(parts.whole.tensors[name].shape)
        if tuple(value.shape) != shape:
            raise CheckpointError(
                f"{checkpoint} was made for another model: {name!r} has shape {tuple(value.shape)} there and "
                f"{shape} here"
            )
        state.update(parts.partition.cut_state({name: value}))
    return state


class _Refusal:
    """The hook of a module that is part of a model. As such it is among what pickling the module writes."""

    def __init__(self, parts: Parts) -> None:
        self.parts = parts

    def __call__(self, _module: nn.Module, _prefix: str, keep_vars: bool) -> None:
        """Raise ConfigError unless the parts themselves are wanted."""
        if not keep_vars:
            _refuse()

    def __reduce_ex__(self, _protocol: Any) -> NoReturn:
        """Raise ConfigError: the module is pickled, by ``torch.save(model)`` for example."""
        _refuse()

    def __deepcopy__(self, _memo: Any) -> _Refusal:
        """Return what a copy of the module has: it is the same part."""
        return self


def _refuse() -> NoReturn:
    raise ConfigError(
        "this rank has a part of the model, and state_dict(), save_pretrained() and torch.save would write "
        "it under the names of the whole; call booster.save_model(model, path) on all ranks, with shard=True "
        "for a directory that from_pretrained() reads, or state_dict(keep_vars=True) for the parts themselves"
    )
