"""Loads a model for an engine and divides the budget between weights and keys and values."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gemini.errors import ConfigError
from gemini.inference.passes import default_kv_bytes
from gemini.inference.tensor_ranks import TensorRanks
from gemini.model.handle import ManagedModel, handle_of
from gemini.system.config import format_bytes, parse_bytes
from gemini.system.device import default_budget_bytes

SHARE_OF_KV = 0.25  # the default kv_bytes is at most this share of the budget


@dataclass(frozen=True)
class Loaded:
    """A managed model, and its engine's budgets for keys and values."""

    model: Any
    handle: ManagedModel
    kv_bytes: int
    kv_device_bytes: int | None


def load(
    directory: str | os.PathLike[str],
    *,
    device: str = "cpu",
    device_bytes: int | str | None = None,
    host_bytes: int | str | None = None,
    disk_dir: str | None = None,
    kv_bytes: int | str | None = None,
    kv_device_bytes: int | str | None = None,
    adapter: str | os.PathLike[str] | None = None,
    max_batch: int = 16,
    ranks: TensorRanks | None = None,
) -> Loaded:
    """Load a model for :meth:`gemini.inference.Engine.from_pretrained`; over ``ranks`` this rank's part, with
    this rank's budgets. Raises like that method.
    """
    from gemini.integrations.transformers_loading import config_of

    budget = parse_bytes(device_bytes, name="device_bytes")
    count = 1 if ranks is None else ranks.count
    if budget is None and device == "cpu":
        budget = default_budget_bytes() // count
    kv = parse_bytes(kv_bytes, name="kv_bytes")
    if kv is None:
        most = int((budget or default_budget_bytes()) * SHARE_OF_KV)
        kv = default_kv_bytes(config_of(Path(directory)), max_batch, most)
        kv = kv if ranks is None else ranks.smallest(max(1, kv // count))
    on_device = parse_bytes(kv_device_bytes, name="kv_device_bytes")
    is_below = on_device is not None and on_device < kv
    taken = on_device if on_device is not None and is_below else kv
    if budget is not None and taken >= budget:
        raise ConfigError(
            f"{'kv_device_bytes' if is_below else 'kv_bytes'} is {format_bytes(taken)} of device_bytes "
            f"{format_bytes(budget)}; nothing is left for weights: raise device_bytes, or lower "
            "kv_device_bytes, which leaves the rest of kv_bytes to host_bytes or disk_dir"
        )
    options: dict[str, Any] = {
        "device": device,
        "device_bytes": budget if budget is None or is_below else budget - kv,
        "host_bytes": host_bytes,
        "disk_dir": disk_dir,
    }
    path = Path(directory).absolute()
    if ranks is not None:
        model = ranks.load(path, adapter=adapter, **options)
        return Loaded(model, handle_of(model), kv, on_device)
    return Loaded(*_whole(path, adapter, options), kv, on_device)


def _whole(
    path: Path, adapter: str | os.PathLike[str] | None, options: dict[str, Any]
) -> tuple[Any, ManagedModel]:
    from gemini.integrations.adapters import with_saved_adapters
    from gemini.integrations.pretrained import from_pretrained

    model = from_pretrained(path, "AutoModelForCausalLM", trains=False, local_files_only=True, **options)
    handle = handle_of(model)
    if adapter is None:
        return model, handle
    try:
        return with_saved_adapters(model, Path(adapter)), handle
    except BaseException:
        handle.close()
        raise
