"""TimelineRecorder: records events of steps with little overhead; a Timeline is built from them later."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from types import TracebackType

from gemini import _C
from gemini.errors import StateError
from gemini.memstats import Trace
from gemini.runtime import GeminiManager
from gemini.runtime.gate.pending_work import PendingUpdate
from gemini.runtime.storage.model_storage import ModelStorage
from gemini.timeline.chrome import save_chrome
from gemini.timeline.events import Timeline, name_model
from gemini.timeline.page import save_html
from gemini.timeline.summary import StepSummary, summarize
from gemini.timeline.timeline_builder import Context, RawEvent, build_timeline

_LINK_OF = {
    _C.ActionKind.FETCH: ("fetch", "h2d"),
    _C.ActionKind.EVICT: ("evict", "d2h"),
    _C.ActionKind.LOAD: ("load", "disk_read"),
    _C.ActionKind.SPILL: ("spill", "disk_write"),
}
_now = time.perf_counter


class TimelineRecorder:
    """Records one model within a ``with`` block; its results can be read and saved during and after it.

    Outside the block it costs nothing, inside about half a microsecond and some hundred bytes per event.
    Training results do not change. Afterwards it has labels and times, but no reference to the model. Only
    for the training thread.
    """

    def __init__(
        self,
        storage: ModelStorage,
        manager: GeminiManager,
        *,
        steps: int | None = None,
        gives_way: bool = False,
    ) -> None:
        """``steps``: stop automatically after this many complete steps. ``gives_way``: also stop if another
        recorder of the model starts.
        """
        if steps is not None and steps < 1:
            raise StateError(f"steps is {steps}; a recording has at least one, or None until it is left")
        self._manager: GeminiManager | None = manager
        self._storage: ModelStorage | None = storage
        self._steps_left = steps
        self._gives_way = gives_way
        self._started = False
        self._raw: list[RawEvent] = []
        self._late = False  # True inside a deferred update
        self._in_step = False
        self._context = Context()
        self._built: tuple[int, Timeline] | None = None  # (number of raw events, timeline)
        self._trace: Trace | None = None

    # -- the user's side -------------------------------------------------------------------------

    def start(self) -> None:
        """Start recording; entering the ``with`` block calls it.

        Raises:
            StateError: the model is already being recorded, or this recorder was used before.
        """
        if self._started or self._manager is None or self._storage is None:
            raise StateError("a recorder records once; call record_timeline() again")
        before = self._manager.observer
        if isinstance(before, TimelineRecorder) and before._gives_way:
            before.stop()
        chunks = self._manager.chunks
        tiers = {"device": _C.Tier.DEVICE, "host": _C.Tier.HOST, "disk": _C.Tier.DISK}
        budgets = {name: chunks.table.budget(tier) for name, tier in tiers.items()}
        if chunks.file_backed is not None:
            budgets["disk"] += chunks.file_backed.usage()["budget_bytes"]
        self._context = Context(
            origin_s=_now(),
            names=name_model(self._storage),
            budget_bytes=budgets,
            model_data_bytes=self._manager.context.size.total_bytes,
        )
        self._manager.observe(self)
        self._started = True

    def stop(self) -> None:
        """End the recording and release the model; leaving the block calls it. Idempotent."""
        if self._manager is not None and self._manager.observer is self:
            self._trace = self._manager.trace
            self._manager.observe(None)
        self._manager = self._storage = None

    def __enter__(self) -> TimelineRecorder:
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.stop()

    @property
    def is_recording(self) -> bool:
        """Whether events are being recorded."""
        return self._started and self._manager is not None

    @property
    def trace(self) -> Trace | None:
        """The trace of a step, which ``gemini simulate`` reads once it is saved; None before one was
        recorded.
        """
        return self._manager.trace if self._manager is not None else self._trace

    def timeline(self) -> Timeline:
        """Return the timeline recorded so far."""
        if self._built is None or self._built[0] != len(self._raw):
            self._built = (len(self._raw), build_timeline(self._raw, self._context))
        return self._built[1]

    def summary(self) -> list[StepSummary]:
        """Return for each recorded step how its time was spent."""
        return summarize(self.timeline())

    def save_chrome(self, path: str | os.PathLike[str]) -> None:
        """Write a trace for https://ui.perfetto.dev or chrome://tracing. Raises IoError."""
        save_chrome(self.timeline(), path)

    def save_html(self, path: str | os.PathLike[str], *, title: str = "gemini timeline") -> None:
        """Write one HTML page that works in any browser without a network. Raises IoError."""
        save_html(self.timeline(), path, title=title)

    # -- the runtime's side: StepObserver --------------------------------------------------------
    # Events are plain tuples, the kind first: objects would cost more time than the events that are measured.

    def acquired(self, tensors: Sequence[int], asked_s: float, *, traced: bool) -> None:
        """Record the start of an operator."""
        manager = self._manager
        assert manager is not None
        self._raw.append(
            (
                "acquired",
                asked_s,
                _now(),
                tuple(tensors),
                manager.phase,
                self._late,
                traced,
                *self._fill(),
            )
        )

    def released(self, tensors: Sequence[int]) -> None:
        """Record the end of an operator."""
        self._raw.append(("released", _now(), tuple(tensors)))

    def prefetched(self, begin_s: float) -> None:
        """Record that prefetching delayed the last operator until now."""
        self._raw.append(("prefetched", begin_s, _now()))

    def waited(self, tensors: Sequence[int], begin_s: float, end_s: float) -> None:
        """Record a wait."""
        self._raw.append(("waited", begin_s, end_s, tuple(tensors)))

    def submitted(self, action: _C.Action) -> None:
        """Record the submission of a transfer."""
        self._raw.append(("submitted", _now(), action.id, *self._fill()))

    def ended(self, action: _C.Action, result: _C.TransferResult) -> None:
        """Record a finished transfer."""
        what = (*_LINK_OF[action.kind], action.chunk, action.nbytes)
        times = (result.begin_s, result.end_s)
        self._raw.append(("ended", _now(), action.id, what, times, result.ok, *self._fill()))

    def step_begins(self, number: int) -> None:
        """Record the beginning of a step."""
        self._in_step = True
        self._raw.append(("step begins", _now(), number))

    def step_ended(self) -> None:
        """Record the end of a step."""
        if not self._in_step:
            return
        self._in_step = False
        self._raw.append(("step ended", _now()))
        if self._steps_left is not None:
            self._steps_left -= 1

    def step_settled(self) -> None:
        """Stop after the last requested step."""
        if self._steps_left == 0:
            self.stop()

    def run_update(self, update: PendingUpdate, run: Callable[[], None]) -> None:
        """Call ``run``, a part of a deferred update, and record it."""
        begin_s = _now()
        outer, self._late = self._late, True
        try:
            run()
        finally:
            self._late = outer
            self._raw.append(("updated", begin_s, _now(), tuple(update.tensors)))

    def _fill(self) -> tuple[tuple[int, int, int], int]:
        """Return the bytes on each tier, and the current limit of model data on DEVICE."""
        assert self._manager is not None
        chunks = self._manager.chunks
        return chunks.usages(), chunks.table.limit()
