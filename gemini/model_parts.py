"""What a managed model consists of beside its module."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar
from weakref import WeakSet

import torch
from torch import nn

from gemini.chunk import ComputeDevice, SearchResult
from gemini.collectives import ProcessGroupPeers
from gemini.runtime import GeminiManager, ModelStorage
from gemini.runtime.compiled import CompiledBlocks
from gemini.runtime.config import GeminiConfig
from gemini.runtime.exchanged import ManagedParameters
from gemini.runtime.gradient_scale import GradientScale
from gemini.runtime.precision import place_buffers
from gemini.runtime.unfollowed import Unfollowed


@dataclass
class ModelParts:
    """Kept in one attribute of the wrapper, ``_gemini``: under names of their own they would hide the
    module's. ``optimizers``: each GeminiOptimizer of a part of the parameters; ``accumulates``: within
    ``no_sync()``."""

    config: GeminiConfig
    device: ComputeDevice
    peers: ProcessGroupPeers | None
    storage: ModelStorage
    manager: GeminiManager
    search: SearchResult
    managed: ManagedParameters
    compiled: CompiledBlocks
    unfollowed: Unfollowed
    optimizers: WeakSet[Any] = field(default_factory=WeakSet)
    accumulates: bool = False
    times_given_up: int = 0

    # What is an attribute of the wrapper, too, where the module has none of that name.
    SHOWN: ClassVar = frozenset(
        ("device", "storage", "manager", "peers", "managed", "compiled", "optimizers", "accumulates")
    )

    def shown(self, name: str) -> Any:
        """Return a part for whoever looks inside; as ``device`` what a module is asked for: where its
        parameters are."""
        return self.device.torch_device if name == "device" else getattr(self, name)

    @classmethod
    def of(
        cls,
        module: nn.Module,
        config: GeminiConfig,
        device: ComputeDevice,
        peers: ProcessGroupPeers | None,
        runtime: tuple[ModelStorage, GeminiManager, SearchResult],
    ) -> ModelParts:
        """Return the parts of ``module``, whose parameters are managed already; place its buffers."""
        storage, manager = runtime[:2]
        mixes_types = config.precision is not None
        manager.mixes_types = mixes_types
        slots, is_fp16 = list(storage.slots.values()), config.precision == torch.float16
        manager.gradient_scale = GradientScale(manager, slots, is_needed=is_fp16)
        parameters, blocks = ManagedParameters(module), CompiledBlocks(manager, module)
        place_buffers(module, device.torch_device, casts=mixes_types)
        unfollowed = Unfollowed(module, *runtime[:2])
        return cls(config, device, peers, *runtime, parameters, blocks, unfollowed)
