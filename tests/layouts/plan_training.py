"""Trains as a plan says, and looks at what each rank holds and sends meanwhile."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any
from unittest.mock import patch

import layout_trainer
import torch
from layout_cases import STEPS, Case
from layout_training import ADAM_RULES, Run, Trained, make_batches
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from gemini import _C, GeminiDDP, GeminiError, handle_of

Sent = dict[tuple[str, str], tuple[int, int]]  # calls and bytes by axis and collective


@dataclass
class Ran:
    """What a rank of a plan did. ``stage``: its place along pp; ``device_bytes``: by step, the most of chunks
    and of other tensors on DEVICE at one moment; ``lower_bytes``: the most on HOST and on DISK;
    ``model_bytes``: parameters, gradients and states, where they are no chunks; ``sent``: along tp and sp,
    forward and backward of a step."""

    trained: Trained = field(default_factory=Trained)
    stage: int = 0
    device_bytes: list[int] = field(default_factory=list)
    lower_bytes: dict[str, int] = field(default_factory=dict)
    model_bytes: dict[str, int] = field(default_factory=dict)
    sent: Sent = field(default_factory=dict)


class LiveBytes(TorchDispatchMode):
    """Counts the memory of tensors that operators make within it, as long as somebody holds them.

    It is a MemoryMonitor, too: of small models the memory of a process tells nothing.
    """

    method = "tensors"

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.chunk_bytes: Callable[[], int] = lambda: 0  # on DEVICE, which count, too
        self.now = self.most = self._period = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(hasattr(kind, "__tensor_flatten__") for kind in types):
            return NotImplemented  # a wrapper answers by operators on plain tensors, which come here
        for tensor in _tensors((args, kwargs)):
            self._know(tensor, is_new=False)
        out = func(*args, **(kwargs or {}))
        for tensor in _tensors(out):
            self._know(tensor, is_new=True)
        self.most = max(self.most, self.now + self.chunk_bytes())
        self._period = max(self._period, self.resident_bytes())
        return out

    def _know(self, tensor: torch.Tensor, *, is_new: bool) -> None:
        storage = tensor.untyped_storage()
        if tensor.device.type == "meta" or storage._cdata in self._known:
            return
        nbytes = storage.nbytes() if is_new else 0
        self._known.add(storage._cdata)
        self.now += nbytes
        weakref.finalize(storage, self._forget, storage._cdata, nbytes)

    def _forget(self, key: int, nbytes: int) -> None:
        self._known.discard(key)
        self.now -= nbytes

    # -- as a MemoryMonitor ----------------------------------------------------------------------

    def resident_bytes(self) -> int:
        return self.now + _C.arena_process_bytes()

    def start_period(self) -> None:
        self._period = self.resident_bytes()

    def end_period(self) -> int:
        return max(self._period, self.resident_bytes())

    def close(self) -> None:
        pass


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    return (each for each in tree_leaves(value) if isinstance(each, torch.Tensor))


def train_planned(case: Case, directory: str) -> Ran:
    """Train over the ranks of the default group as the plan of the case's layout says."""
    ran = Ran()
    if case.layouts[0].program == "trainer":  # whose batches and steps are its own
        ran.trained = layout_trainer.train_on_ranks(case, directory)
        return ran
    make_batches(case, case.layouts[0])
    try:
        with ExitStack() as closing:
            live = LiveBytes()
            if dict(case.layouts[0].options)["zero_stage"] < 3:  # model data are tensors as others
                closing.enter_context(live)
            run = Run(case, case.layouts[0], Path(directory), closing, 0)
            axis = run.booster.plugin.mesh.axis("pp") if run.booster.plugin.mesh else None
            ran.stage = 0 if axis is None else axis.rank
            if isinstance(run.model, GeminiDDP):
                chunks = handle_of(run.model).manager.chunks
                live.chunk_bytes = lambda: chunks.table.usage(_C.Tier.DEVICE)
                closing.enter_context(patch.object(type(chunks.device), "monitor", lambda _: live))
                closing.enter_context(live)
            for step in range(STEPS):
                _step(run, step, live, ran)
            _look(run, ran)
    except GeminiError as error:
        ran.trained.refused = f"{type(error).__name__}: {error}"
    return ran


def _step(run: Run, step: int, live: LiveBytes, ran: Ran) -> None:
    live.most = 0
    before = _totals(run)
    loss = run.run_batch(step, 0, trains=True)
    for key, (calls, nbytes) in _totals(run).items():
        calls_before, bytes_before = before.get(key, (0, 0))
        ran.sent[key] = calls - calls_before, nbytes - bytes_before
    if dict(run.layout.options)["zero_stage"] < 2:  # of the mean a rank has its part
        ran.model_bytes["gradient_bytes"] = sum(run.optimizer.gradient_bytes())
    run.update(loss, ran.trained)
    ran.device_bytes.append(live.most)


def _totals(run: Run) -> Sent:
    mesh, found = run.booster.plugin.mesh, {}
    for name in ("tp", "sp") if mesh is not None else ():
        if (axis := mesh.axis(name)) is not None:
            calls, sent = axis.totals()
            found |= {(name, each): (calls[each], sent[each]) for each in calls}
    return found


def _look(run: Run, ran: Ran) -> None:
    """Note what a rank holds behind the last step."""
    if isinstance(run.model, GeminiDDP):
        stats = run.model.stats()
        ran.lower_bytes = {name: stats[name]["peak_bytes"] for name in ("host", "disk")}
        ran.device_bytes.append(stats["device"]["peak_bytes"])
        return
    ran.model_bytes["parameter_bytes"] = sum(param.nbytes for param in run.model.parameters())
    if run.case.rule not in ADAM_RULES or run.case.precision:
        return
    states = chain.from_iterable(state.values() for state in run.optimizer.optim.state.values())
    ran.model_bytes["state_bytes"] = sum(each.nbytes for each in _tensors(list(states)) if each.dim())
