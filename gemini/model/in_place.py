"""``gemini.manage``: manages a module in place; it is then called, trained and saved as before."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from torch import nn

from gemini.chunk.memory import ComputeDevice
from gemini.comm.peers import ModelRanks
from gemini.comm.ranks import ProcessGroupPeers, make_peers
from gemini.errors import ConfigError
from gemini.model.ddp import GeminiDDP, called_by_torch_checkpoint, refuse_assign
from gemini.model.entries import ModuleOfModel, class_on_top, plain_class
from gemini.model.handle import ManagedModel
from gemini.model.retry import retry_step
from gemini.model.tiled_heads import fit_heads
from gemini.model.weights import export_shards, export_weights, import_weights
from gemini.runtime.build import Built, build_runtime
from gemini.runtime.config import GeminiConfig, open_device, prepared
from gemini.runtime.gate.guards import in_one_thread
from gemini.runtime.intercept.tensors import ManagedTensor
from gemini.system.config import keyword_names, refuse_unknown

T = TypeVar("T")

_OWN_OPTIONS = frozenset(("device", "process_group", "model_ranks", "pin_memory", "config"))
_OPTIONS = keyword_names(GeminiDDP) - _OWN_OPTIONS - {"module", "experts"}


def manage(
    module: nn.Module,
    *,
    device: torch.device | str | int | None = None,
    pin_memory: bool | None = None,
    process_group: object | None = None,
    model_ranks: ModelRanks | None = None,
    config: GeminiConfig | None = None,
    **options: Any,
) -> InPlace:
    """Manage ``module`` in place, as ``fully_shard`` does, and return its handle::

        handle = gemini.manage(model, device_bytes="8GiB", disk_dir="/mnt/nvme")
        optimizer = gemini.GeminiAdamOptimizer(model, lr=1e-4)
        loss = model(inputs).sum()  # the module itself: recorded, planned, prefetched
        loss.backward()
        optimizer.step()
        print(handle.stats())
        handle.release()  # an ordinary model again, with its weights

    The module's class becomes a subclass of the same name, so that every call of the module is a forward pass
    of a step. Its ``load_state_dict``, ``zero_grad``, ``compile`` and ``to`` become those of a managed model.
    Copies and pickles of the module are ordinary modules. :func:`gemini.handle_of` finds the handle again.

    Args:
        device, pin_memory, process_group, model_ranks, config, options: as :class:`gemini.GeminiDDP`.

    Raises:
        OutOfBudgetError: the model cannot fit the budgets; nothing was changed.
        ConfigError, IoError: see the message.
        TypeError: an option that GeminiDDP does not have.
    """
    refuse_unknown("manage()", options, _OPTIONS)
    opened = _open(module, (device, pin_memory), process_group, model_ranks, (config, options))
    return opened.finish(opened.build())


def manage_without_values(
    module: nn.Module, name: str, *, reads_files: bool = False, **options: Any
) -> tuple[Opened, Built]:
    """Begin :func:`manage` for a module on ``meta``: its parameters become managed but have no values. The
    caller writes them and the buffers, then calls ``finish``, or closes the manager. ``name``: the function
    that took the options, for error messages; ``reads_files``: as in :class:`GeminiConfig`. Raises as
    :func:`manage`."""
    refuse_unknown(name, options, _OPTIONS | _OWN_OPTIONS)
    own = {key: options.pop(key, None) for key in sorted(_OWN_OPTIONS)}
    opened = _open(
        module,
        (own["device"], own["pin_memory"]),
        own["process_group"],
        own["model_ranks"],
        (own["config"], options),
    )
    is_alone = opened.peers is None and opened.model_ranks is None
    reads_files = reads_files and is_alone and not opened.computing.has_own_memory
    opened = replace(opened, config=replace(opened.config, reads_files=reads_files))
    return opened, opened.build(without_values=True)


@dataclass(frozen=True)
class Opened:
    """A module that is about to be managed, with its configuration, device and ranks."""

    module: nn.Module
    config: GeminiConfig
    peers: ProcessGroupPeers | None
    computing: ComputeDevice
    model_ranks: ModelRanks | None

    def build(self, *, without_values: bool = False) -> Built:
        """Make the parameters managed. Raises as :func:`manage`."""
        return build_runtime(
            self.module,
            self.config,
            self.peers,
            self.computing,
            self.model_ranks,
            without_values=without_values,
        )

    def finish(self, built: Built) -> InPlace:
        """Change the module's class so that its calls go to a new handle; return the handle."""
        handle = InPlace(self.module, self.config, self.computing, self.peers, built)
        kind = class_on_top(ManagedModule, type(self.module), shared=self.peers is not None)
        self.module.__dict__["_gemini"] = handle
        self.module.__class__ = kind
        handle.follow_calls()
        return handle


def _open(
    module: nn.Module,
    device: tuple[torch.device | str | int | None, bool | None],
    process_group: object | None,
    model_ranks: ModelRanks | None,
    config: tuple[GeminiConfig | None, dict[str, Any]],
) -> Opened:
    """Resolve the configuration, device and ranks for ``module``. ``device``: the device and whether to pin
    memory; ``config``: a config or None, and the options."""
    if not isinstance(module, nn.Module):
        raise ConfigError(f"manage() takes an nn.Module, not {type(module).__name__}")
    if "_gemini" in vars(module):
        raise ConfigError(
            f"this {type(module).__name__} is already managed; gemini.handle_of() returns its handle"
        )
    peers = make_peers(process_group)
    computing, chosen = prepared(
        peers,
        lambda: open_device(device[0], pin_memory=device[1]),
        lambda: GeminiConfig.choose(config[0], **config[1]),
        model_ranks,
    )
    if chosen.tiled_loss:
        fit_heads(module, chosen.tiled_loss)  # before anything changes
    return Opened(module, chosen, peers, computing, model_ranks)


class InPlace(ManagedModel):
    """The handle of a module that is managed in place, with the same methods as GeminiDDP."""

    @in_one_thread("state_dict")
    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Return full tensors, fp32 for managed weights; as :meth:`gemini.GeminiDDP.state_dict`. In contrast,
        ``state_dict()`` of the module returns the managed tensors, in their compute dtype."""
        return export_weights(self, *args, **kwargs)

    def state_dict_shard(
        self, max_shard_size: int | str = "1GiB", *, only_rank_0: bool = False
    ) -> Iterator[tuple[dict[str, Any], int]]:
        """Yield :meth:`state_dict` in shards; as :meth:`gemini.GeminiDDP.state_dict_shard`."""
        return export_shards(self, max_shard_size, only_rank_0)

    @in_one_thread("load_state_dict")
    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        """Copy weights into the chunks; as :meth:`gemini.GeminiDDP.load_state_dict`."""
        refuse_assign(assign)
        return import_weights(self, state_dict, strict=strict)

    def retry_step(self, step: Callable[[], T]) -> T:
        """Call ``step``, and once more if memory runs out; as :meth:`gemini.GeminiDDP.retry_step`."""
        return retry_step(self, step)

    def release(self) -> None:
        """Release the model as :meth:`ManagedModel.release`, and give the module its original class back."""
        super().release()
        managed: type[nn.Module] = type(self.module)
        if issubclass(managed, ManagedModule):
            self.module.__class__ = plain_class(managed)
            del self.module.__dict__["_gemini"]


class ManagedModule(ModuleOfModel):
    """Mixin for the class of a module that is managed in place."""

    _gemini: InPlace
    _held = ("_gemini",)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._gemini.forward(super().__call__, args, kwargs)

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        """Copy weights into the chunks; as :meth:`gemini.GeminiDDP.load_state_dict`."""
        return self._gemini.load_state_dict(state_dict, strict, assign)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Return the managed tensors by name. torch.distributed.checkpoint gets the handle's full tensors
        instead if parameters have masters, or if ranks would have to read the tensors together."""
        handle = self._gemini
        partial = handle.config.precision is not None or handle.peers is not None
        if partial and called_by_torch_checkpoint():
            return handle.state_dict(*args, **kwargs)
        return super().state_dict(*args, **kwargs)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Discard all gradients; as :meth:`gemini.GeminiDDP.zero_grad`."""
        self._gemini.zero_grad(set_to_none)

    def no_sync(self) -> AbstractContextManager[None]:
        """Accumulate gradients without an exchange; as :meth:`gemini.GeminiDDP.no_sync`."""
        return self._gemini.no_sync()

    def compile(self, *args: Any, **options: Any) -> None:
        """Compile each block of the model; as :meth:`gemini.GeminiDDP.compile`."""
        self._gemini.compiled.compile(*args, **options)

    def extra_repr(self) -> str:
        """Return the module's own text and the fill of each tier."""
        own = super().extra_repr()
        return "\n".join(part for part in (own, f"managed: {self._gemini.summary()}") if part)

    def _repr_html_(self) -> str:
        return self._gemini._repr_html_()

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> ManagedModule:
        self._gemini.refuse_move(fn)
        super()._apply(  # type: ignore[no-untyped-call]
            lambda tensor: tensor if isinstance(tensor, ManagedTensor) else fn(tensor), recurse
        )
        return self
