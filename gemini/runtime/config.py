"""GeminiConfig: all options of a managed model in one frozen object. Also settles the device, the options and
a common DEVICE budget among ranks before a model is wrapped."""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any

import torch

from gemini.chunk.chunk import StateSpec
from gemini.chunk.cpu_memory import CPU
from gemini.chunk.gpu_memory import CudaDevice
from gemini.chunk.memory import ComputeDevice
from gemini.comm.peers import ModelRanks, Peers, Topic
from gemini.comm.ranks import ProcessGroupPeers
from gemini.errors import ConfigError
from gemini.memstats import Trace
from gemini.placement import PlacementPolicy, TierCapacity
from gemini.system.config import parse_bytes
from gemini.system.device import default_budget_bytes, resolve_device

logger = logging.getLogger(__name__)

_PRECISIONS: dict[object, torch.dtype | None] = {
    None: None,
    "fp32": None,
    torch.float32: None,
    "bf16": torch.bfloat16,
    torch.bfloat16: torch.bfloat16,
    "fp16": torch.float16,
    torch.float16: torch.float16,
}


# States that an optimizer keeps of each parameter, by the name of its rule; Muon keeps only the momentum of a
# hidden matrix.
STATES_OF_RULES = {
    "adam": (StateSpec("exp_avg"), StateSpec("exp_avg_sq")),
    "lion": (StateSpec("exp_avg"),),
    "sgd": (StateSpec("momentum_buffer"),),
    "muon": (StateSpec("exp_avg"), StateSpec("exp_avg_sq")),
    "none": (),
}
# States for which tiers reserve places, whatever the optimizer: none of torch's keeps more per element, and
# Adam with int8 moments keeps no more arrays.
MOST_STATES = (
    *(StateSpec(name) for name in ("first", "second", "third")),
    *(StateSpec(name, per_block=True) for name in ("first_scale", "second_scale")),
)


# Embeddings and heads, which AdamW updates beside Muon: substrings of a name, and whole components of a
# dotted name.
_WITHIN_NAMES = ("embed", "lm_head")
_NAME_PARTS = frozenset(("wte", "wpe", "score", "classifier"))


def is_hidden_matrix(name: str, num_dims: int) -> bool:
    """Say whether Muon updates a parameter: it has two dimensions, and not the name of an embedding or a
    head."""
    low = name.lower()
    is_outer = any(word in low for word in _WITHIN_NAMES) or not _NAME_PARTS.isdisjoint(low.split("."))
    return num_dims == 2 and not is_outer


def states_by_rule(rule: str, name: str, num_dims: int, dtype: torch.dtype) -> tuple[StateSpec, ...]:
    """Return the states that an optimizer keeps of a parameter; ``dtype``: of the values that it updates."""
    states = STATES_OF_RULES[rule]
    if rule != "muon":
        return states
    kept = states[:1] if is_hidden_matrix(name, num_dims) else states
    return tuple(replace(state, dtype=dtype) for state in kept)


@dataclass(frozen=True, kw_only=True)
class GeminiConfig:
    """Options of a managed model. Sizes in bytes; ``None`` if the default depends on machine or model.

    ``precision``: the dtype in which parameters compute; None keeps each as it is. ``reduce_dtype``: the
    dtype in which gradients are sent between ranks; None: fp32. ``keep_fp32``, ``optimizer_rule``: see
    :class:`gemini.GeminiDDP`. ``reads_files``: weights stay in files of the user, which are their DISK tier
    (``gemini.from_pretrained(trains=False)``).
    """

    placement_policy: str | PlacementPolicy = "auto"
    search_range_mb: float = 32
    min_chunk_size_mb: float = 32
    hidden_dim: int | None = None
    precision: torch.dtype | None = None
    device_bytes: int | None = None
    host_bytes: int | None = None
    disk_dir: str | None = None
    disk_bytes: int | None = None
    non_model_bytes: int | None = None
    gather_bytes: int | None = None
    reduce_dtype: torch.dtype | None = None
    strict_ddp_mode: bool = False
    force_outputs_fp32: bool = False
    activation_offload: bool | str = False
    activation_recompute: bool = False
    tiled_loss: bool | str = False
    keep_fp32: tuple[str, ...] = ()
    memstats: Trace | None = None
    optimizer_rule: str | None = None
    verbose: bool = False
    reads_files: bool = False

    @classmethod
    def choose(cls, config: GeminiConfig | None, **options: Any) -> GeminiConfig:
        """Return ``config``, or if it is None the config for the keywords of :meth:`from_options`.

        Raises:
            ConfigError: as :meth:`from_options`, ``config`` is of another class, or an option beside it
                differs from its default.
        """
        if config is None:
            return cls.from_options(**options)
        if not isinstance(config, cls):
            raise ConfigError(
                f"config is a {type(config).__name__}; give a GeminiConfig, or the options as keywords"
            )
        defaults = {field.name: field.default for field in fields(cls)}
        given = [name for name, value in options.items() if value != defaults.get(name)]
        if given:
            raise ConfigError(
                f"{', '.join(given)} and config= are both given; put all options into the config, "
                "for example with dataclasses.replace(config, ...)"
            )
        return config

    @classmethod
    def from_options(
        cls,
        *,
        mixed_precision: str | torch.dtype | None = None,
        device_bytes: int | str | None = None,
        host_bytes: int | str | None = None,
        disk_bytes: int | str | None = None,
        non_model_bytes: int | str | None = None,
        gather_bytes: int | str | None = None,
        reduce_dtype: str | torch.dtype | None = None,
        keep_fp32: Iterable[str] = (),
        **options: object,
    ) -> GeminiConfig:
        """Return the configuration for a user's keywords: sizes may be text such as ``"512MiB"``.

        Raises:
            ConfigError: a value or a combination cannot work.
        """
        if mixed_precision not in _PRECISIONS:
            raise ConfigError(
                f"mixed_precision={mixed_precision!r} is unknown; choose None, 'bf16' or 'fp16'"
            )
        if reduce_dtype not in _PRECISIONS:
            raise ConfigError(f"reduce_dtype={reduce_dtype!r} is unknown; choose None, 'bf16' or 'fp16'")
        config = cls(
            precision=_PRECISIONS[mixed_precision],
            device_bytes=parse_bytes(device_bytes, name="device_bytes"),
            host_bytes=parse_bytes(host_bytes, name="host_bytes"),
            disk_bytes=parse_bytes(disk_bytes, name="disk_bytes"),
            non_model_bytes=parse_bytes(non_model_bytes, name="non_model_bytes"),
            gather_bytes=parse_bytes(gather_bytes, name="gather_bytes"),
            reduce_dtype=_PRECISIONS[reduce_dtype],
            keep_fp32=_names(keep_fp32),
            **options,  # type: ignore[arg-type]
        )
        if config.disk_bytes and config.disk_dir is None:
            raise ConfigError("disk_bytes is given without disk_dir; name the directory for the DISK tier")
        if config.activation_offload not in (False, True, "auto"):
            raise ConfigError(
                f"activation_offload={config.activation_offload!r} is unknown; choose False, True or 'auto'"
            )
        if config.tiled_loss not in (False, True, "auto"):
            raise ConfigError(f"tiled_loss={config.tiled_loss!r} is unknown; choose False, True or 'auto'")
        if config.reduce_dtype == torch.float16 != config.precision:
            raise ConfigError(
                "reduce_dtype='fp16' needs the loss scale of mixed_precision='fp16': without one small "
                "gradients become zero; choose 'bf16'"
            )
        if config.optimizer_rule not in (None, *STATES_OF_RULES):
            raise ConfigError(
                f"optimizer_rule={config.optimizer_rule!r} is unknown; choose "
                f"{', '.join(map(repr, STATES_OF_RULES))} or leave it out"
            )
        _check_kinds(config)
        if config.device_bytes is not None and config.device_bytes <= 0:
            raise ConfigError(f"device_bytes is {config.device_bytes}; it must be positive")
        return config

    def refuse_unbuilt(self, device: ComputeDevice, *, several_ranks: bool) -> None:
        """Raise ConfigError for features that this release has only in one process, or only on the CPU."""
        if several_ranks and self.activation_recompute:
            raise ConfigError(
                "activation_recompute supports only one process, because each rank could choose "
                "differently; with several ranks use torch.utils.checkpoint"
            )
        if not device.has_own_memory:
            return
        if self.activation_recompute:
            raise ConfigError(
                f"activation_recompute supports only the CPU, not {device.name}; use torch.utils.checkpoint"
            )


def _names(keep_fp32: Iterable[str]) -> tuple[str, ...]:
    names = () if isinstance(keep_fp32, str) else tuple(keep_fp32)
    if isinstance(keep_fp32, str) or not all(isinstance(name, str) for name in names):
        raise ConfigError(f"keep_fp32 is {keep_fp32!r}; give a list of names of parameters or modules")
    return names


def _check_kinds(config: GeminiConfig) -> None:
    """Raise ConfigError for options with a value of the wrong kind."""
    for name in ("min_chunk_size_mb", "search_range_mb"):
        size = getattr(config, name)
        if isinstance(size, (int, float)) and not math.isfinite(size):
            raise ConfigError(f"{name} is {size}; give a number of MiB")
    policy = config.placement_policy
    if not isinstance(policy, str) and not callable(getattr(policy, "warmup_plan", None)):
        raise ConfigError(
            f"placement_policy is {policy!r}; choose 'auto', 'cpu', 'cuda', 'const' or an object with their "
            "methods"
        )
    if config.memstats is not None and not isinstance(config.memstats, Trace):
        raise ConfigError(
            f"memstats is of {type(config.memstats).__name__}; give a gemini.memstats.Trace, for example "
            "Trace.load(path)"
        )


def check_offload(config: GeminiConfig, capacity: TierCapacity, *, measured: bool) -> None:
    """Raise ConfigError if ``activation_offload`` or ``activation_recompute`` cannot work, with all reasons
    at once. ``measured``: the first step measures non-model memory.

    Raises:
        ConfigError: there is no tier below DEVICE, tensors that stay on DEVICE would not be counted, or
            blocks cannot choose.
    """
    offload, reasons = config.activation_offload, []
    if config.activation_recompute and offload != "auto":
        reasons.append(
            "activation_recompute chooses among keeping, offloading and recomputing: it needs "
            "activation_offload='auto'; to recompute in any case use torch.utils.checkpoint"
        )
    has_auto = offload == "auto" or config.activation_recompute
    if (offload or has_auto) and not (capacity.host_bytes or capacity.disk_bytes):
        reasons.append(
            "activation_offload needs a tier below DEVICE but HOST and DISK are absent; "
            "give disk_dir, or host_bytes"
        )
    if has_auto and not measured:
        reasons.append(
            "activation_offload='auto' keeps on DEVICE the activations that fit there in a recorded "
            "step: it needs placement_policy='auto' and no non_model_bytes; or choose "
            "activation_offload=True"
        )
    if reasons:
        raise ConfigError(". And ".join(reasons))


def prepared(
    peers: ProcessGroupPeers | None,
    open_device: Callable[[], ComputeDevice],
    choose: Callable[[], GeminiConfig],
    model_ranks: ModelRanks | None = None,
) -> tuple[ComputeDevice, GeminiConfig]:
    """Return the device and the options to wrap a model with, after every rank has its own, including the
    ranks that hold other parts of the model.

    Raises:
        ConfigError: an option cannot work, here or on another rank.
    """

    def prepare() -> tuple[ComputeDevice, GeminiConfig]:
        device, config = open_device(), choose()
        config.refuse_unbuilt(device, several_ranks=peers is not None)
        return device, config

    every = [each for each in (peers, model_ranks.peers if model_ranks is not None else None) if each]
    prepared_here: Callable[[], tuple[ComputeDevice, GeminiConfig]] = prepare
    for each in every:
        prepared_here = partial(each.together, prepared_here)
    device, config = prepared_here()
    if not every:
        return device, config
    alike = every
    if model_ranks is not None and model_ranks.alike is not None:
        alike = [*([peers] if peers is not None else []), *model_ranks.alike]
    return device, _agreed(config, every, alike, device)


def _agreed(
    config: GeminiConfig, every: Sequence[Peers], alike: Sequence[Peers], device: ComputeDevice
) -> GeminiConfig:
    """Return ``config`` with the smallest DEVICE budget among the ranks that lay out chunks ``alike``; other
    pipeline stages may have another.

    The default of each rank is the free memory of its GPU, or its share of the free memory of its host.
    """
    device_bytes = config.device_bytes
    if device_bytes is None:
        device_bytes = default_budget_bytes(device.free_bytes())
        if not device.has_own_memory:
            device_bytes //= _ranks_on_this_host(every)
    for peers in alike:
        device_bytes = min(said[0] for said in peers.exchange(Topic.SETTINGS, [device_bytes]))
    return replace(config, device_bytes=device_bytes)


def _ranks_on_this_host(every: Sequence[Peers]) -> int:
    if "LOCAL_WORLD_SIZE" in os.environ:
        return every[0].ranks_on_this_host
    return math.prod(peers.ranks_on_this_host for peers in every)


def open_device(device: torch.device | str | int | None, *, pin_memory: bool | None = None) -> ComputeDevice:
    """Return the computing device; by default the current GPU, or the CPU if there is none.
    ``pin_memory=False`` leaves HOST memory of a GPU pageable.

    Raises:
        ConfigError: the device cannot be used here.
    """
    resolved = resolve_device(device)
    if resolved.type == "cpu":
        if pin_memory:
            logger.info("pin_memory=True has no effect: there is no GPU to pin HOST memory for")
        return CPU
    return CudaDevice(resolved, pin=pin_memory is not False)
