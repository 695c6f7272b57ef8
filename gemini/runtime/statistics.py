"""What ``GeminiDDP.stats()`` and ``timeline()`` say: usage per tier, traffic per link."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gemini import _C
from gemini.runtime.gate.gradients import LooseBytes
from gemini.runtime.gemini_mgr import GeminiManager
from gemini.runtime.storage.model_storage import ModelStorage

_TIERS = {"device": _C.Tier.DEVICE, "host": _C.Tier.HOST, "disk": _C.Tier.DISK}
_LINKS = ("h2d", "d2h", "disk_read", "disk_write")


def usage_and_traffic(storage: ModelStorage, manager: GeminiManager) -> dict[str, Any]:
    """Return usage per tier and traffic per link so far as a plain dict. Any thread may call it."""
    chunks = manager.chunks
    tiers = _usage_of_tiers(chunks.table, manager.loose)
    links = chunks.link_stats()
    read_bytes = written_bytes = 0
    if chunks.stow is not None:
        for key, nbytes in chunks.stow.usage().items():
            tiers["disk"][key] += nbytes
        read_bytes, written_bytes = chunks.stow.traffic()
    return {
        **tiers,
        **{link: links[link] for link in _LINKS},
        "stowed": {"read_bytes": read_bytes, "written_bytes": written_bytes},
        "stall_seconds": chunks.stall_seconds,
        "step": manager.step,
        "warmup": not manager.order.has_order,
        "num_chunks": len(chunks.chunks),
        "wasted_bytes": storage.wasted_bytes,
        "model_data_bytes": manager.context.size.total_bytes,
        "pending_updates": len(manager.pending.all()),
        "withheld_bytes": manager.shortage.withheld_bytes,
    }


def flattened(stats: Mapping[str, Any]) -> dict[str, float]:
    """Return ``stats`` as loggers take them: one number per name, ``device/bytes`` for what is within
    ``device``."""
    flat: dict[str, float] = {}
    for name, value in stats.items():
        if isinstance(value, Mapping):
            flat |= {f"{name}/{key}": each for key, each in flattened(value).items()}
        else:
            flat[name] = int(value) if isinstance(value, bool) else value
    return flat


def counters(stats: Mapping[str, Any]) -> dict[str, float]:
    """Return the numbers in ``stats`` that only grow, by their names in :func:`flattened`."""
    counted = (*_LINKS, "stowed", "stall_seconds")
    return flattened({name: stats[name] for name in counted})


def without(stats: Mapping[str, Any], before: Mapping[str, float], prefix: str = "") -> dict[str, Any]:
    """Return ``stats`` with what of its counters there was ``before`` taken off."""
    return {
        name: without(value, before, f"{prefix}{name}/")
        if isinstance(value, Mapping)
        else value - before[prefix + name]
        if prefix + name in before
        else value
        for name, value in stats.items()
    }


def moments_of_step(manager: GeminiManager) -> list[dict[str, Any]]:
    """Return the fill of each tier at every moment of the last step; see :meth:`GeminiDDP.timeline`."""
    if not manager.threads.only_looks:
        manager.run_pending()
    trace = manager.trace
    reserve = trace.non_model_bytes if trace is not None else ()
    return [
        {
            "moment": moment,
            "phase": phase,
            "device_bytes": device,
            "host_bytes": host,
            "disk_bytes": disk,
            "non_model_bytes": reserve[moment] if moment < len(reserve) else 0,
        }
        for moment, (phase, device, host, disk) in enumerate(manager.order.timeline)
    ]


def _usage_of_tiers(table: _C.ChunkTable, loose: LooseBytes) -> dict[str, dict[str, int]]:
    """Return what is, was and may be on each tier, at one moment: looked at again while another thread trains
    that has changed it meanwhile."""
    while True:
        fill = table.usages(), loose.now
        tiers = {name: _usage(table, tier) for name, tier in _TIERS.items()}
        peak = loose.peak_device
        if fill == (table.usages(), loose.now):
            break
    device = tiers["device"]
    device["bytes"] += fill[1]
    device["peak_bytes"] = max(device["peak_bytes"], peak, device["bytes"])
    return tiers


def _usage(table: _C.ChunkTable, tier: _C.Tier) -> dict[str, int]:
    return {"bytes": table.usage(tier), "peak_bytes": table.peak(tier), "budget_bytes": table.budget(tier)}
