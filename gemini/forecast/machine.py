"""MachineSpeeds: the speeds of a machine and the sizes of its tiers, stored as a small JSON file. Measuring
takes a few seconds of typical training operators."""

from __future__ import annotations

import json
import math
import platform
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import nn

from gemini.comm.groups import alone
from gemini.errors import ConfigError
from gemini.memstats.collectives import CollectiveSpeeds
from gemini.memstats.trace import LinkSpeed
from gemini.model.ddp import GeminiDDP
from gemini.optim import CPUAdam, GeminiOptimizer
from gemini.optim.kernels import AdamHyper, adam_update
from gemini.placement.problem import CPU_TRANSFERS_TAKE
from gemini.system.durable import write_text
from gemini.system.files import parse_json, read_regular
from gemini.system.input_files import why_unread
from gemini.system.threads import usable_processors

_FORMAT = "gemini-machine-1"
_MAX_BYTES = 2**20
DTYPE_NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}


@dataclass(frozen=True)
class MachineSpeeds:
    """The speeds and budgets of a machine, for forecasts.

    Attributes:
        matmul_flops: floating-point operations per second of large matrix products, by dtype (``fp32``,
            ``bf16``, ``fp16``).
        memory_bytes_per_second: bytes read and written by memory-bound operators.
        adam_bytes_per_second: bytes read and written by the optimizer's kernel.
        moment_seconds: overhead of an operator: Python, autograd, PreOp and PostOp.
        links: speeds between the tiers.
        transfers_take: as in :class:`gemini.placement.problem.Machine`.
        device_bytes, host_bytes, disk_bytes: budgets that apply unless the command line sets others.
        collectives: speeds of collectives among ranks.

    Raises:
        ConfigError: a field has an impossible value.
    """

    name: str
    matmul_flops: Mapping[str, float]
    memory_bytes_per_second: float
    adam_bytes_per_second: float
    moment_seconds: float = 0.0
    links: tuple[LinkSpeed, ...] = field(default=())
    device_bytes: int | None = None
    host_bytes: int | None = None
    disk_bytes: int | None = None
    transfers_take: float = 0.0
    collectives: CollectiveSpeeds = field(default=CollectiveSpeeds())

    def __post_init__(self) -> None:
        rates = {f"matmul_flops {dtype}": rate for dtype, rate in self.matmul_flops.items()}
        rates["memory_bytes_per_second"] = self.memory_bytes_per_second
        rates["adam_bytes_per_second"] = self.adam_bytes_per_second
        for name, rate in rates.items():
            if not (isinstance(rate, (int, float)) and 0 < rate < math.inf):
                raise ConfigError(f"machine {self.name!r}: {name} is {rate!r}; it must be a positive number")
        unknown = set(self.matmul_flops) - set(DTYPE_NAMES.values())
        if unknown or not self.matmul_flops:
            raise ConfigError(
                f"machine {self.name!r}: matmul_flops names {sorted(unknown) or 'no dtype'}; "
                f"it has one or more of {', '.join(DTYPE_NAMES.values())}"
            )
        if not 0 <= self.moment_seconds < math.inf:
            raise ConfigError(f"machine {self.name!r}: moment_seconds is {self.moment_seconds}")
        if not 0 <= self.transfers_take <= 1:
            raise ConfigError(
                f"machine {self.name!r}: transfers_take is {self.transfers_take}; it is a share, 0 to 1"
            )
        for name in ("device_bytes", "host_bytes", "disk_bytes"):
            budget = getattr(self, name)
            if budget is not None and not (type(budget) is int and 0 <= budget < 2**63):
                raise ConfigError(
                    f"machine {self.name!r}: {name} is {budget!r}; it must be a number of bytes"
                )

    def flops_of(self, dtype: torch.dtype) -> float:
        """Return the rate for ``dtype``; if it is unknown, the highest known rate."""
        rate = self.matmul_flops.get(DTYPE_NAMES.get(dtype, ""))
        return rate if rate is not None else max(self.matmul_flops.values())

    def save(self, path: Path) -> None:
        """Write the file that :meth:`load` reads. Raises IoError."""
        document = {"format": _FORMAT, **asdict(self), "collectives": self.collectives.to_json()}
        write_text(path, json.dumps(document, indent=2) + "\n", "write the machine")

    @classmethod
    def load(cls, path: Path) -> MachineSpeeds:
        """Return the machine that a file describes.

        Raises:
            ConfigError: the file cannot be read, or does not describe a machine.
        """
        try:
            document = parse_json(read_regular(path, _MAX_BYTES))
        except OSError as error:
            raise ConfigError(f"cannot read the machine {path}: {why_unread(error)}") from error
        except ValueError as error:
            raise ConfigError(f"{path} describes no machine: {error}") from error
        if not isinstance(document, dict) or document.pop("format", None) != _FORMAT:
            raise ConfigError(
                f'{path} is no machine description: it needs "format": "{_FORMAT}"; '
                "gemini plan MODEL --save-machine FILE writes one to start from"
            )
        return cls._of(document, path)

    @classmethod
    def _of(cls, document: dict[str, Any], path: Path) -> MachineSpeeds:
        unknown = document.keys() - {item.name for item in fields(cls)}
        if unknown:
            raise ConfigError(f"{path}: unknown fields {', '.join(sorted(unknown))}")
        try:
            links = tuple(LinkSpeed(**link) for link in document.pop("links", []))
            collectives = CollectiveSpeeds.from_json(document.pop("collectives", []))
            return cls(**document, links=links, collectives=collectives)
        except (TypeError, AttributeError, OverflowError) as error:
            raise ConfigError(f"{path}: {error}; see docs/plan.md for the fields") from error


_MATMUL_SIZE = 768
_STREAM_NUMEL = 1 << 23
_REPEATS = 5
_TINY_LAYERS = 24
_KIB = 1024


def own_name() -> str:
    """Return the name of this machine for its description."""
    return f"{platform.node() or 'this machine'}, {len(usable_processors())} cores"


def measure_machine(dtype: torch.dtype | None, links: tuple[LinkSpeed, ...]) -> MachineSpeeds:
    """Measure this machine for models that compute in ``dtype``, in a second or two and with 200 MB of
    memory. Not collective: a single rank may call it."""
    return MachineSpeeds(
        name=own_name(),
        matmul_flops={
            DTYPE_NAMES[kind]: _matmul_flops(kind) for kind in {torch.float32, dtype or torch.float32}
        },
        memory_bytes_per_second=_memory_rate(),
        adam_bytes_per_second=_adam_rate(),
        moment_seconds=_moment_seconds(),
        transfers_take=CPU_TRANSFERS_TAKE,
        links=links,
        host_bytes=0,
        device_bytes=None,
        disk_bytes=None,
    )


@contextmanager
def threads_of_a_rank(ranks: int) -> Iterator[None]:
    """Context manager that sets torch's number of threads to one rank's part of the processors."""
    before = torch.get_num_threads()
    if ranks > 1:
        torch.set_num_threads(max(1, len(usable_processors()) // ranks))
    try:
        yield
    finally:
        torch.set_num_threads(before)


def seconds_of(call: Callable[[], object], *, repeats: int = _REPEATS, limit_seconds: float = 1.0) -> float:
    """Return the median time of ``call`` after one warm-up call. Stops repeating after ``limit_seconds``."""
    call()
    begin = time.perf_counter()
    times: list[float] = []
    while len(times) < repeats and (not times or time.perf_counter() - begin < limit_seconds):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return median(times)


def _matmul_flops(dtype: torch.dtype) -> float:
    left = torch.full((_MATMUL_SIZE, _MATMUL_SIZE), 0.5, dtype=dtype, device="cpu")
    return 2.0 * _MATMUL_SIZE**3 / seconds_of(lambda: left @ left, limit_seconds=0.5)


def _memory_rate() -> float:
    left, right = (torch.ones(_STREAM_NUMEL, dtype=torch.float32, device="cpu") for _ in range(2))
    return 3.0 * left.nbytes / seconds_of(lambda: left + right)


def _adam_rate() -> float:
    param, grad, exp_avg, exp_avg_sq = (
        torch.zeros(_STREAM_NUMEL, dtype=torch.float32, device="cpu") for _ in range(4)
    )
    seconds = seconds_of(lambda: adam_update(param, grad, exp_avg, exp_avg_sq, AdamHyper(), 1))
    return 7.0 * param.nbytes / seconds


def _moment_seconds() -> float:
    """Time a managed model that computes almost nothing, and return its seconds per moment."""
    model = nn.Sequential(
        *(nn.Linear(16, 16, device="cpu", dtype=torch.float32) for _ in range(_TINY_LAYERS))
    )
    total = 4 * 4 * _TINY_LAYERS * 4 * _KIB
    with (
        alone() as group,
        GeminiDDP(
            model,
            process_group=group,
            device_bytes=total // 2,
            host_bytes=total,
            non_model_bytes=0,
            min_chunk_size_mb=4 * _KIB / 2**20,
            search_range_mb=0,
        ) as managed,
    ):
        optimizer = GeminiOptimizer(CPUAdam(managed.parameters()), managed)
        inputs = torch.ones(1, 16, dtype=torch.float32, device="cpu")

        def step() -> None:
            optimizer.backward(managed(inputs).sum())
            optimizer.step()

        seconds = seconds_of(step)
        return seconds / max(len(managed.timeline()), 1)
