"""Updates that run inside a backward pass, each as soon as the gradients of its chunk group are complete."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

from gemini.errors import IoError, OutOfBudgetError, StateError
from gemini.optim.chunk_update import ChunkUpdate, Completeness
from gemini.runtime import ChunkGroup, GeminiManager, ManagedSlot
from gemini.runtime.phases import OPTIMIZER

_UNFINISHED = "a backward pass updated some parameters, and step() has not updated the others"


class BackwardUpdates:
    """Decides when the update of a group runs: once as many gradients of it have arrived as in the pass
    before.

    What it does not run, for the pass before did other things or a chunk could not be had, :meth:`finish`
    leaves to the step. From the first update to the end of the step weights count as incomplete.
    """

    def __init__(
        self,
        manager: GeminiManager,
        slots: set[ManagedSlot],
        make_update: Callable[[ChunkGroup], ChunkUpdate | None],
        completeness: Completeness,
    ) -> None:
        """``make_update``: returns the update of what has a gradient in a group, its step counted."""
        self._manager = manager
        self._make_update = make_update
        self._completeness = completeness
        self._expected: Counter[ManagedSlot] | None = None  # gradients of the last pass; None: there was none
        self._arrived: Counter[ManagedSlot] = Counter()
        self._missing: Counter[int] = Counter()  # gradients yet to come in this pass, by group
        self._updated: set[ManagedSlot] = set()  # since the last step
        self._unfinished: list[ChunkUpdate] = []
        self._may_run = False
        for slot in slots:
            if slot.grad is not None:
                slot.grad.on_arrival = partial(self._note, slot)

    @property
    def wait_for_step(self) -> bool:
        """Whether a backward pass has run to its end and updated parameters, and step() comes next."""
        return bool(self._updated) and not self._may_run and self._completeness.broken == _UNFINISHED

    @contextmanager
    def backward_pass(self, *, last: bool) -> Iterator[None]:
        """Update within the block, a backward pass; ``last`` says that it is the last one before step().

        Raises:
            StateError: a pass since the last step has updated already.
        """
        if self.wait_for_step:
            raise StateError(
                "a backward pass has updated parameters since the last step(): call step() after it, and "
                "accumulate gradients in the passes before it under model.no_sync()"
            )
        self._forget()
        self._may_run = last and self._expected is not None and self._manager.may_put_off
        for slot, count in (self._expected or {}).items():
            self._missing[id(slot.group)] += count
        yield
        # Where it raised, what was updated stays so, and nobody may go on from there.
        self._may_run = False
        self._expected = self._arrived.copy()

    def finish(self, update: Callable[[], None]) -> None:
        """End the step: run what is unfinished, then ``update``, which updates what else has a gradient."""
        while self._unfinished:
            if not all(slot.has_grad for slot in self._unfinished[0].steps):
                raise StateError("gradients that step() was to use were given up since the backward pass")
            self._unfinished[0].run_now()
            del self._unfinished[0]
        update()
        if self._updated:
            self._completeness.clear()
        self._forget()

    def refuse(self, doing: str) -> None:
        """Raise StateError where gradients were used up that ``doing`` is about."""
        if self.wait_for_step:
            raise StateError(f"{doing}: the backward pass has used its gradients up; call step() first")

    def _forget(self) -> None:
        self._arrived.clear()
        self._missing.clear()
        self._updated.clear()
        self._unfinished.clear()
        self._may_run = False

    def _note(self, slot: ManagedSlot) -> None:
        """A gradient has arrived in its chunk."""
        if self._updated and self._completeness.broken != _UNFINISHED:
            self._forget()  # weights and states were loaded since
        if slot in self._updated:
            raise StateError(
                f"parameter {slot.name!r} got another gradient after this backward pass had updated it; with "
                "overlap=True updates wait for the end of all passes"
            )
        self._arrived[slot] += 1
        expected = self._expected
        if not self._may_run or expected is None or self._arrived[slot] > expected[slot]:
            return
        self._missing[id(slot.group)] -= 1
        if self._missing[id(slot.group)] == 0:
            self._run(slot.group)

    def _run(self, group: ChunkGroup) -> None:
        manager, phase = self._manager, self._manager.phase
        update = self._make_update(group)
        if update is None:
            return
        if not self._updated:
            self._completeness.begin(_UNFINISHED)
        self._updated.update(update.steps)
        self._unfinished.append(update)
        manager.phase = OPTIMIZER
        try:
            update.run_now()
            self._unfinished.remove(update)
        except (OutOfBudgetError, IoError):
            pass  # what could not be had now is there once the pass has ended, or step() says why not
        finally:
            manager.phase = phase
