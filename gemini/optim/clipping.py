"""Clipping: what is to be done to the gradients that are there, on their way into the update."""

from __future__ import annotations

from gemini.errors import StateError
from gemini.model.managed_model import ManagedModel
from gemini.optim.kernels import GradScale
from gemini.optim.loss_scale import LossScale


class Clipping:
    """The loss scale to take out of a model's gradients, and how they were clipped; of these ones alone."""

    measured: float | None  # their norm, before they were clipped by it

    def __init__(self, model: ManagedModel, loss_scale: LossScale | None) -> None:
        self._model, self._loss_scale = model, loss_scale
        self._seen = model.gradient_state()
        self.forget()

    @property
    def scale(self) -> GradScale:
        """The pending transform, with the loss scale taken out first."""
        in_gradients = self._model.manager.gradient_scale.value
        if in_gradients is None and self._loss_scale is not None:  # they were assigned
            in_gradients = self._loss_scale.scale
        return self._scale if self.done or in_gradients is None else GradScale(pre_scale=1.0 / in_gradients)

    def note(self, scale: GradScale) -> None:
        """Apply ``scale``, in which no loss scale is left, to the gradients that are there now."""
        self._scale, self.done, self._seen = scale, True, self._model.gradient_state()

    def note_norm(self, norm: float) -> None:
        """``norm`` is that of the gradients before they are clipped by it."""
        self.measured = norm

    def note_overflow(self, overflowed: bool) -> None:
        """The gradients have ``overflowed``, or not, before a clamp that hides it."""
        self.overflowed |= overflowed

    def check(self) -> None:
        """Forget the clipping of gradients that were given up; refuse to mix clipped and newer ones."""
        if not self.done or self._seen == self._model.gradient_state():
            return
        (given_up, _), (given_up_then, _) = self._model.gradient_state(), self._seen
        if given_up == given_up_then:
            raise StateError("gradients arrived after they were clipped; clip once, right before step()")
        self.forget()

    def forget(self) -> None:
        """Begin anew, with gradients to come."""
        self._scale = GradScale()
        self.measured = None
        self.done = False
        self.overflowed = False  # seen before a clamp hid it
