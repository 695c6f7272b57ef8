"""What ranks settle before a model is wrapped: the device and the options, one DEVICE budget for all."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from gemini.chunk import ComputeDevice
from gemini.comm.collectives import ProcessGroupPeers
from gemini.comm.peers import ModelRanks, Peers, Topic
from gemini.runtime.config import GeminiConfig
from gemini.system.device import default_budget_bytes


def prepared(
    peers: ProcessGroupPeers | None,
    open_device: Callable[[], ComputeDevice],
    choose: Callable[[], GeminiConfig],
    model_ranks: ModelRanks | None = None,
) -> tuple[ComputeDevice, GeminiConfig]:
    """Return the device and the options to wrap a model with, once every rank has its own, those that hold
    other parts of the model among them.

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
    return device, _agreed(config, every, device) if every else config


def _agreed(config: GeminiConfig, every: Sequence[Peers], device: ComputeDevice) -> GeminiConfig:
    """Return ``config`` with the DEVICE budget of the rank that has least: chunks are cut alike everywhere.

    Without one each rank takes what is free on its GPU, or its part of what is on its host.
    """
    device_bytes = config.device_bytes
    if device_bytes is None:
        device_bytes = default_budget_bytes(device.free_bytes())
        if not device.has_own_memory:
            device_bytes //= _ranks_on_this_host(every)
    for peers in every:
        device_bytes = min(said[0] for said in peers.exchange(Topic.SETTINGS, [device_bytes]))
    return replace(config, device_bytes=device_bytes)


def _ranks_on_this_host(every: Sequence[Peers]) -> int:
    if "LOCAL_WORLD_SIZE" in os.environ:
        return every[0].ranks_on_this_host
    return math.prod(peers.ranks_on_this_host for peers in every)
