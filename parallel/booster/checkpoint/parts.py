"""Files of a model in stages and parts. They hold whole tensors, like the files of any other model."""

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
from gemini.parallel.booster.checkpoint.writing import FileLayout, save_tensors
from gemini.parallel.booster.checkpoint.zero import copy_to_masters
from gemini.parallel.booster.ranks import Ranks
from gemini.parallel.expert_ranks import DividedExperts, ExpertRanks
from gemini.parallel.mesh import Axis, Mesh
from gemini.parallel.moe.divide import divide_experts, divided_experts
from gemini.parallel.partition import Partition
from gemini.parallel.pipeline.remote_modules import RemoteModule
from gemini.parallel.pipeline.split import StagedModel
from gemini.parallel.pipeline.stage_messages import Incoming, StageMessages, ValueForm
from gemini.parallel.pipeline.tied_weights import TiedWeights
from gemini.parallel.zero import LowLevelZeroOptimizer
from gemini.system.files import parse_json

_Path = str | os.PathLike[str]
_PART = "_part_of_model"  # an attribute of boosted models and of the modules in them


@dataclass(frozen=True)
class WholeModel:
    """The description of a model before it was cut: its tensors on ``meta``, by name; its config file, if it
    has one; which of the tensors are ``parameters``; and the names of those in each group of its optimizer.
    """

    tensors: Mapping[str, torch.Tensor]
    companions: Mapping[str, str]
    parameters: frozenset[str]
    members: Sequence[Sequence[str]] = ()

    @classmethod
    def of(cls, model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> WholeModel:
        """Describe ``model``. Weights get the dtype of files: fp32, or their own if it is wider. Raises
        ConfigError if ``optimizer`` has parameters that do not belong to the model.
        """
        params = {name for name, _ in model.named_parameters(remove_duplicate=False)}
        experts = divided_experts(model)  # divided by the launch, if not None
        tensors = {}
        for name, value in model.state_dict(keep_vars=True).items():
            if isinstance(value, torch.Tensor):
                widened = name in params and value.dtype.itemsize <= 4
                dtype = torch.float32 if widened else value.dtype
                has_some = experts is not None and experts.has(value)
                shape = experts.ranks.cut_of(value).shape if experts and has_some else value.shape
                tensors[name] = torch.empty(shape, dtype=dtype, device="meta")
        members = () if optimizer is None else group_members(optimizer, parameter_names(model))
        return cls(tensors, config_file(model), frozenset(params & tensors.keys()), members)

    def joined(self, axis: Axis | None, partition: Partition) -> WholeModel:
        """Return the description of the whole model from the descriptions of all ranks along ``axis``, with
        the shapes that tensors had before ``partition`` cut them. Collective over ``axis``.
        """
        cuts = partition.cuts
        shapes = {
            name: cuts[name].shape if name in cuts else like.shape for name, like in self.tensors.items()
        }
        own: dict[str, Any] = {
            "tensors": [
                [name, str(like.dtype).removeprefix("torch."), list(shapes[name])]
                for name, like in self.tensors.items()
            ],
            "parameters": sorted(self.parameters),
            "members": [list(group) for group in self.members],
        }
        every = [json.loads(text) for text in axis.say(json.dumps(own))] if axis is not None else [own]
        tensors = {
            name: torch.empty(shape, dtype=getattr(torch, dtype), device="meta")
            for said in every
            for name, dtype, shape in said["tensors"]
        }
        groups = zip_longest(*(said["members"] for said in every), fillvalue=[])
        parameters = frozenset(name for said in every for name in said["parameters"])
        return WholeModel(tensors, self.companions, parameters, [list(chain(*group)) for group in groups])


class Parts:
    """The part of a model that this rank has, and its relation to the whole model."""

    def __init__(
        self,
        staged: StagedModel,
        partition: Partition,
        tied: TiedWeights,
        whole: WholeModel,
        mesh: Mesh | None,
        rank_of: Sequence[int],
    ) -> None:
        """``mesh``: None for one process; ``rank_of``: for each stage, its rank along ``pp``."""
        self.experts: DividedExperts | None = None  # set if ranks of data parallelism divide them
        self.staged, self.partition, self.tied, self.whole = staged, partition, tied, whole
        self.axis = mesh.axis("pp") if mesh is not None else None
        self.is_first_column = mesh is None or all(
            mesh[axis].get_local_rank() == 0 for axis in ("dp", "sp", "tp")
        )
        self._mesh, self._rank_of = mesh, rank_of

    @classmethod
    def undivided(cls, model: nn.Module, optimizer: torch.optim.Optimizer | None) -> Parts:
        """Return the parts of a model that is whole on every rank until its experts are divided."""
        staged = StagedModel.undivided(model)
        partition = Partition(None, dict(model.named_parameters(remove_duplicate=False)))
        tied = TiedWeights(staged, None, (0,))
        return cls(staged, partition, tied, WholeModel.of(model, optimizer), None, (0,))

    @property
    def is_whole(self) -> bool:
        """Whether every rank has the whole model."""
        alone = self._mesh is None or (self._mesh.axis("pp", "tp") is None and self._mesh.axis("sp") is None)
        return alone and self.experts is None

    @property
    def place(self) -> int:
        """The index of this rank along ``pp``."""
        return self.axis.rank if self.axis is not None else 0

    @property
    def model_ranks(self) -> ModelRanks | None:
        """The value for ``model_ranks=`` of GeminiDDP."""
        if self._mesh is None or (every := self._mesh.axis("pp", "tp")) is None:
            return None
        layers, elsewhere = self._mesh.axis("tp"), {id(param) for param in self.tied.owned_elsewhere}

        def counts(param: torch.Tensor) -> bool:
            return id(param) not in elsewhere and self.partition.counts(param)

        return ModelRanks(every, counts, [layers] if layers is not None else [], self.partition.filling)

    def divide_experts(self, ranks: ExpertRanks) -> None:
        """Keep only this rank's experts in this part of the model."""
        self.experts = divide_experts(self.staged.module, ranks)
        for param in () if self.experts is None else self.experts.params:
            self.partition.note(param, ranks.cut_of(param), over=ranks.sharing)

    def refuse_as_whole(self, boosted: nn.Module) -> None:
        """Make calls that would save a part of the model as if it were whole raise ConfigError.

        These are ``state_dict()`` (and callers such as ``save_pretrained()``) of the ``boosted`` model, of
        the module in it, and of every module with a part of a tensor or without layers that another stage
        has; and ``torch.save`` of the boosted model or its module. ``state_dict(keep_vars=True)`` returns the
        parts.
        """
        module = self.staged.module
        cut = {id(param) for param in module.parameters() if self.partition.cut_of(param) is not None}
        if not cut and len(self._rank_of) == 1:
            return
        for part in {boosted, module, *module.modules()}:
            holds_part = any(id(param) in cut for param in part.parameters(recurse=False))
            if holds_part or part in (boosted, module) or isinstance(part, RemoteModule):
                part.register_state_dict_pre_hook(_Refusal(self))
        for whole in (
            boosted,
            module,
        ):  # pickling comes to it first, before process groups in hooks and layers
            held = dict(vars(whole))
            vars(whole).clear()
            vars(whole).update({_PART: _Refusal(self), **held})

    def owner_of(self, name: str) -> int:
        """Return the rank along ``pp`` that saves a tensor."""
        return self._rank_of[self.staged.owner_of(self.staged.names_of(name))]


def parts_of(model: nn.Module) -> Parts | None:
    """Return the :class:`Parts` of a boosted model that is cut, of the module in it, or of a copy of either;
    None for other modules.
    """
    found = vars(model).get(_PART)
    return found.parts if isinstance(found, _Refusal) else None


def save_parts(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    parts: Parts,
    checkpoint: _Path,
    layout: FileLayout,
    ranks: Ranks,
) -> None:
    """Write the whole model, with one tensor at a time in memory. Collective; the first rank writes. Raises
    as :func:`gemini.parallel.booster.checkpoint.writing.save_tensors`.
    """
    contents = whole_contents(model, optimizer, parts, ranks)
    metadata = contents.metadata()
    save_tensors(checkpoint, "model", contents.sources, metadata, layout, ranks, parts.whole.companions)


def whole_contents(
    model: nn.Module, optimizer: torch.optim.Optimizer | None, parts: Parts, ranks: Ranks
) -> ModelContents:
    """Return the contents of the whole model from the ranks' parts. Collective. All ranks must also run the
    streams of all sources in order; only the first rank's streams pass tensors to their sinks.
    """
    held = model_contents(model, optimizer)
    local = {source.spec.name: source for source in held.sources}
    local.update({alias: local[first] for alias, first in held.aliases.items()})
    messages = StageMessages(parts.axis) if parts.axis is not None else None
    sources, aliases = [], {}
    for name, like in parts.whole.tensors.items():
        first, *_ = names = parts.staged.names_of(name)
        if name != first:
            aliases[name] = first
            continue
        own = next(((each, local[each]) for each in names if each in local), None)
        spec = TensorSpec(name, like.dtype, tuple(like.shape))
        sources.append(TensorSource(spec, partial(stream, parts, messages, (name, spec), own)))
    return ModelContents(sources, aliases, _extra_of_all(held.extra, parts, ranks))


def _extra_of_all(own: Mapping[str, Any], parts: Parts, ranks: Ranks) -> dict[str, Any]:
    """Return the extra states of all modules, each from the rank that saves it. Collective."""

    def say() -> str:
        mine = {name: value for name, value in own.items() if parts.owner_of(name) == parts.place}
        return json.dumps(plain_data.encode(mine if parts.is_first_column else {}, "a module's extra state"))

    every = [plain_data.decode(parse_json(text)) for text in ranks.collect(say)]
    return {name: value for each in every for name, value in each.items()}


def stream(
    parts: Parts,
    messages: StageMessages | None,
    what: tuple[str, TensorSpec],
    own: tuple[str, TensorSource] | None,
    sink: Sink,
) -> None:
    """Pass a whole tensor to ``sink`` on the first rank, from the stage that owns it. Collective.

    Args:
        parts: this rank's part of the model.
        messages: sends tensors between stages; None with one stage.
        what: the name of the tensor in the whole model, and the spec to write: of this tensor or of a state
            of it.
        own: the tensor's name on this rank, and the source of this rank's part; None on other stages.
        sink: gets the tensor.
    """
    (name, spec), place = what, parts.place
    owner = parts.owner_of(name)
    value: torch.Tensor | None = None
    if place == owner:
        assert own is not None
        value = _whole(*own, spec.dtype, parts)
    if not parts.is_first_column:
        return
    if owner != 0 and messages is not None:
        if place == owner and value is not None:
            messages.send(value, 0, 0)
            messages.finish()
        elif place == 0:
            coming = Incoming(messages, owner, 0, ValueForm(spec.dtype, tuple(spec.shape)))
            value = coming.wait(f"waits for {spec.name} of another stage (a save)")
    if place == 0 and value is not None:
        sink(value)


def _whole(name: str, source: TensorSource, dtype: torch.dtype, parts: Parts) -> torch.Tensor:
    """Assemble a whole tensor, in ``dtype``, from the ranks' parts. ``source`` is this rank's part, cut like
    the parameter ``name``. Collective over ``dp`` and ``tp``.
    """
    value = torch.empty(source.spec.shape, dtype=source.spec.dtype, device="cpu")
    flat, place = value.view(-1), 0

    def collect(piece: torch.Tensor) -> None:
        nonlocal place
        flat[place : place + piece.numel()].copy_(piece.reshape(-1))
        place += piece.numel()

    source.stream(collect)
    if value.dtype == torch.int16:  # gloo does not send int16
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
    """Read this rank's part of the whole model. Collective.

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
            copy_to_masters(optimizer, parameter_names(model), known)


def _own_part(parts: Parts, files: TensorFiles, checkpoint: _Path, *, strict: bool) -> dict[str, Any]:
    """Return the state that this rank loads. Raises CheckpointError if names or shapes do not match."""
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
            f"{missing[:3]}, and {len(unexpected)} of its names are not in the model {unexpected[:3]}; pass "
            "strict=False to load the names that both have"
        )
    own, extra = parts.staged.module.state_dict(keep_vars=True), extra_in(files.metadata)
    lacking = [name for name, value in own.items() if not isinstance(value, torch.Tensor)]
    lacking = [name for name in lacking if name not in extra]
    if strict and lacking:
        raise CheckpointError(
            f"{checkpoint} was made for another model: it has no extra state {lacking[0]!r}; pass "
            "strict=False to load the names that both have"
        )
    state: dict[str, Any] = {name: value for name, value in extra.items() if name in own}
    for name in own.keys() & stored.keys():
        value, shape = files[stored[name]], tuple(parts.whole.tensors[name].shape)
        if tuple(value.shape) != shape:
            raise CheckpointError(
                f"{checkpoint} was made for another model: {name!r} has shape {tuple(value.shape)} in the "
                f"checkpoint and {shape} in the model"
            )
        state.update(parts.partition.cut_state({name: value}))
    return state


class _Refusal:
    """A hook of a module that is part of a model; also an attribute, so that pickling reaches it."""

    def __init__(self, parts: Parts) -> None:
        self.parts = parts

    def __call__(self, _module: nn.Module, _prefix: str, keep_vars: bool) -> None:
        """Raise ConfigError unless the caller asks for the parts (``keep_vars``)."""
        if not keep_vars:
            _refuse()

    def __reduce_ex__(self, _protocol: Any) -> NoReturn:
        """Raise ConfigError: something pickles the module, for example ``torch.save(model)``."""
        _refuse()

    def __deepcopy__(self, _memo: Any) -> _Refusal:
        """Return this hook: a copy of the module is the same part."""
        return self


def _refuse() -> NoReturn:
    raise ConfigError(
        "this rank holds a part of the model, and state_dict(), save_pretrained() and torch.save would "
        "write the part under the names of the whole; call booster.save_model(model, path) on all ranks, "
        "with shard=True for a directory that from_pretrained() reads, or state_dict(keep_vars=True) for "
        "the part itself"
    )
