"""MemStatsCollector: measures the non-model memory of every period of an iteration."""

from __future__ import annotations

from collections.abc import Callable

from gemini.errors import StateError
from gemini.memstats.monitor import MemoryMonitor


class MemStatsCollector:
    """Measures the peak memory of each period without model data.

    Call ``start()`` when the step begins, ``sample(moment, phase)`` at the start of each PreOp before the
    layout of model data changes, ``note_model_data()`` after the layout has changed, and ``finish()`` when
    the step is over. Because sampling precedes the change, a period contains its own gathers.

    ``non_model(period) = max over its segments of (peak - baseline - model data)``. A segment lies between
    two calls; the baseline is the process memory besides model data at ``start()``; and the model data is

    - while the layout changes (from ``sample`` to the first ``note_model_data``), the *larger* of the values
      before and after: memory above both is a gather's own buffers, and memory that existed before is seen
      again in the next segment;
    - afterwards, the *smaller* of the values at its two ends. The exact time of the peak is unknown, so the
      result is an upper bound as long as model data only grows or only shrinks between two calls. It is exact
      if model data does not change. Too much memory is kept free rather than too little, because budgets are
      hard.

    ``note_model_data()`` may also be called at every later change, which makes the bound tighter; without any
    call the whole period counts as the second kind. The iteration repeats, so the time between ``start()``
    and moment 0 belongs to the last period.

    ``model_data_bytes`` returns the model data that the process *holds* now, in the memory the monitor
    measures: blocks of a pool that are resident but unused count. The collector does not own the monitor. Use
    from one thread.
    """

    def __init__(self, monitor: MemoryMonitor, model_data_bytes: Callable[[], int]) -> None:
        self._monitor = monitor
        self._model_data_bytes = model_data_bytes
        self._collecting = False
        self._reset()

    @property
    def collecting(self) -> bool:
        """Whether a step is being measured."""
        return self._collecting

    @property
    def baseline_bytes(self) -> int:
        """The process memory besides model data at the last ``start()``."""
        return self._baseline_bytes

    @property
    def phases(self) -> tuple[str, ...]:
        """The phase of each moment sampled since the last ``start()``."""
        return tuple(self._phases)

    def start(self) -> None:
        """Begin a step and discard earlier measurements, for example of a step that failed halfway."""
        self._reset()
        self._model_bytes = self._model_data_bytes()
        self._baseline_bytes = max(0, self._monitor.resident_bytes() - self._model_bytes)
        self._collecting = True
        self._monitor.start_period()

    def sample(self, moment: int, phase: str) -> None:
        """Close the previous period and open that of ``moment``, before its layout change.

        Raises StateError before ``start()``, or if ``moment`` is not the next one: periods are indexed by the
        position in the schedule and never by a counter of their own.
        """
        self._require_collecting("sample")
        if moment != len(self._phases):
            raise StateError(f"moment {moment} was sampled, but the next is moment {len(self._phases)}")
        self._end_segment()
        self._phases.append(phase)
        self._peaks.append(0)
        self._layout_changing = True
        self._monitor.start_period()

    def go_on(self) -> None:
        """Note that the layout changes once more within the open period."""
        self._require_collecting("go_on")
        self._end_segment()
        self._layout_changing = True
        self._monitor.start_period()

    def note_model_data(self) -> None:
        """Note that model data has changed and may be read. Raises StateError before ``start()``."""
        self._require_collecting("note_model_data")
        if self._model_data_bytes() != self._model_bytes:
            self._end_segment(layout_change=self._layout_changing)
            self._monitor.start_period()
        self._layout_changing = False

    def finish(self) -> tuple[int, ...]:
        """End the step; return the non-model bytes of each period. Raises StateError before ``start()``."""
        self._require_collecting("finish")
        self._end_segment()
        self._collecting = False
        prelude, *peaks = self._peaks
        if peaks:
            peaks[-1] = max(peaks[-1], prelude)
        return tuple(peaks)

    def _reset(self) -> None:
        self._baseline_bytes = 0
        self._model_bytes = 0  # at the beginning of the open segment
        self._phases: list[str] = []
        self._peaks = [0]  # non-model bytes: before moment 0, then one entry per period
        self._layout_changing = False

    def _end_segment(self, *, layout_change: bool = False) -> None:
        peak_bytes = self._monitor.end_period()
        before, after = self._model_bytes, self._model_data_bytes()
        model_bytes = max(before, after) if layout_change else min(before, after)
        self._peaks[-1] = max(self._peaks[-1], peak_bytes - self._baseline_bytes - model_bytes)
        self._model_bytes = after

    def _require_collecting(self, call: str) -> None:
        if not self._collecting:
            raise StateError(f"{call}() was called outside a step; call start() first")
