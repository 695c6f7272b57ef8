"""Engine: carries out a schedule on the stages of this rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import torch

from gemini.errors import ConfigError
from gemini.parallel.pipeline.batches import call_arguments, form_of
from gemini.parallel.pipeline.halves import Unfinished, backward_input, backward_weights
from gemini.parallel.pipeline.orders import SCHEDULES, Action, Kind, Order
from gemini.parallel.pipeline.passing import Form, Incoming, Passing
from gemini.parallel.pipeline.split import Stage, StagedModel

T = TypeVar("T")
Criterion = Callable[[Any, Any], torch.Tensor]

_AHEAD = 2  # actions whose inputs may be on their way
_WORDS = {
    Kind.FORWARD: "forward",
    Kind.BACKWARD: "backward",
    Kind.INPUT: "backward (input)",
    Kind.WEIGHT: "backward (weights)",
}


class Trained(Protocol):
    """A model that is trained, whichever wrapper it has."""

    def forward(self, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return what ``call``, a part of the model's forward pass, returns."""
        ...

    def run_backward(self, call: Callable[[float | None], T]) -> T:
        """Return what ``call`` does, a part of a backward pass, of losses times the number it is given."""
        ...

    def no_sync(self) -> AbstractContextManager[None]:
        """Return a context in which gradients accumulate on this rank."""
        ...

    def leave(self, why: str) -> None:
        """Tell the ranks that train it together that this one makes no more calls, and ``why``."""
        ...


@dataclass
class Done:
    """``losses`` by micro-batch, and ``outputs`` of the model, where the last stage is; else nothing."""

    losses: list[torch.Tensor]
    outputs: list[Any]


@dataclass
class _Held:
    """What a stage keeps of a micro-batch from forward to backward."""

    received: torch.Tensor | None
    output: torch.Tensor
    grad: torch.Tensor | None = None
    unfinished: Unfinished | None = None


class Engine:
    """The stages that this rank has of a model, and the ranks that have the others.

    ``passing`` is None where one rank has all stages; ``rank`` is this one's place among them.
    """

    def __init__(self, staged: StagedModel, trained: Trained, passing: Passing | None, rank: int) -> None:
        self.stages = {stage.index: stage for stage in staged.stages}
        self.trained, self.passing, self._rank = trained, passing, rank
        self.forms: dict[tuple[int, str], Form] = {}  # of what a stage receives, by the form of the batch
        self._place = ""  # what is being done, for an error

    @property
    def place(self) -> str:
        """What this rank does, or did when it raised: stage, micro-batch, part of the pass."""
        return self._place

    def begin(self, place: str) -> None:
        """Say what this rank begins to do."""
        self._place = place

    def leave(self, why: str) -> None:
        """Tell the ranks that share the parameters of this one that it makes no more calls, and ``why``."""
        self.trained.leave(why)

    def run(
        self,
        order: Order,
        batches: Sequence[Any],
        criterion: Criterion | None,
        weights: Sequence[float],
        *,
        keep_outputs: bool = False,
    ) -> Done:
        """Carry out ``order`` on micro-batches, the same ones on all ranks; ``weights`` are by what their
        losses count. Without gradients enabled its forward passes alone."""
        run = _Run(self, order, batches, criterion, weights, keep_outputs)
        actions = order.by_rank[self._rank]
        if not torch.is_grad_enabled():
            actions = tuple(
                Action(Kind.FORWARD, stage, number)
                for stage in order.stages_of(self._rank)
                for number in range(len(batches))
            )
        for index, action in enumerate(actions):
            self._place = f"stage {action.stage}, micro-batch {action.micro_batch}, {_WORDS[action.kind]}"
            run.expect(actions[index : index + _AHEAD])
            run.perform(action)
        if self.passing is not None:
            self._place = "the end of a pass through the pipeline"
            self.passing.finish()
        return run.done


class _Run:
    """One pass of all micro-batches through the stages."""

    def __init__(
        self,
        engine: Engine,
        order: Order,
        batches: Sequence[Any],
        criterion: Criterion | None,
        weights: Sequence[float],
        keep_outputs: bool,
    ) -> None:
        self.done = Done([], [])
        self._engine, self._order = engine, order
        self._batches, self._forms = batches, [form_of(batch) for batch in batches]
        self._criterion, self._weights, self._keeps = criterion, weights, keep_outputs
        self._held: dict[tuple[int, int], _Held] = {}
        self._coming: dict[tuple[int, int, bool], Incoming | torch.Tensor] = {}
        self._last = {stage: order.last_backward(stage) for stage in engine.stages}
        self._splits = SCHEDULES[order.schedule].splits

    # -- what goes from stage to stage -----------------------------------------------------------

    def expect(self, actions: Sequence[Action]) -> None:
        """Have received what ``actions`` need, as far as its form is known."""
        for action in actions:
            source = self._source(action)
            if source is None or source in self._engine.stages:
                continue
            forward = action.kind is Kind.FORWARD
            key = (action.stage, action.micro_batch, forward)
            if key in self._coming:
                continue
            form = self._form(action)
            if form is not None:
                rank = self._order.rank_of[source]
                assert self._engine.passing is not None
                self._coming[key] = Incoming(self._engine.passing, rank, self._tag(action), form)

    def _source(self, action: Action) -> int | None:
        """Return the stage that an action gets its input of, None: it needs none."""
        if action.kind is Kind.WEIGHT:
            return None
        source = action.stage + (-1 if action.kind is Kind.FORWARD else 1)
        return source if 0 <= source < self._order.num_stages else None

    def _form(self, action: Action) -> Form | None:
        """Return the form of what an action receives; None: not known yet."""
        if action.kind is not Kind.FORWARD:
            held = self._held.get((action.stage, action.micro_batch))
            return None if held is None else (held.output.dtype, tuple(held.output.shape))
        return self._engine.forms.get((action.stage, self._forms[action.micro_batch]))

    def _tag(self, action: Action, *, of_form: bool = False) -> int:
        """Return the tag of what an action receives."""
        place = action.micro_batch * self._order.num_stages + action.stage
        return 4 * place + 2 * (action.kind is Kind.FORWARD) + of_form

    def _take(self, action: Action) -> torch.Tensor | None:
        """Return what an action receives, on the computing device; None: the stage begins with it."""
        source = self._source(action)
        if source is None:
            return None
        forward = action.kind is Kind.FORWARD
        key, passing = (action.stage, action.micro_batch, forward), self._engine.passing
        doing = f"waits for stage {source} ({self._engine.place})"
        if key not in self._coming:
            assert passing is not None
            if forward and self._form(action) is None:
                rank = self._order.rank_of[source]
                form = passing.receive_form(rank, self._tag(action, of_form=True), doing)
                self._engine.forms[action.stage, self._forms[action.micro_batch]] = form
            self.expect([action])
        found = self._coming.pop(key)
        return found if isinstance(found, torch.Tensor) else found.wait(doing)

    def _give(self, action: Action, tensor: torch.Tensor) -> None:
        """Hand ``tensor`` to the stage whose ``action`` receives it."""
        forward = action.kind is Kind.FORWARD
        if action.stage in self._engine.stages:
            self._coming[action.stage, action.micro_batch, forward] = tensor.detach()
            return
        passing, rank = self._engine.passing, self._order.rank_of[action.stage]
        assert passing is not None
        if forward:
            form, batch = (tensor.dtype, tuple(tensor.shape)), self._forms[action.micro_batch]
            known = self._engine.forms.setdefault((action.stage, batch), form)
            if known is form:
                passing.send_form(form, rank, self._tag(action, of_form=True))
            elif known != form:
                raise ConfigError(
                    f"the stage has returned {form[0]} of {form[1]}, and {known[0]} of {known[1]} for the "
                    f"same inputs before, which stage {action.stage} waits for; shapes may depend on those "
                    "of inputs alone"
                )
        passing.send(tensor, rank, self._tag(action))

    # -- what is computed ------------------------------------------------------------------------

    def perform(self, action: Action) -> None:
        """Compute an action, and send what comes of it."""
        stage = self._engine.stages[action.stage]
        if action.kind is Kind.FORWARD:
            self._forward(action, stage)
            return
        accumulates = action != self._last[action.stage]
        with self._engine.trained.no_sync() if accumulates else nullcontext():
            self._engine.trained.run_backward(lambda scale: self._backward(action, stage, scale))

    def _forward(self, action: Action, stage: Stage) -> None:
        number, received = action.micro_batch, self._take(action)
        args, kwargs = call_arguments(self._batches[number])
        training = torch.is_grad_enabled()
        if received is not None and training and received.is_floating_point():
            received.requires_grad_()
        output = self._engine.trained.forward(stage.run, (received, args, kwargs), {})
        if action.stage == self._order.num_stages - 1:
            if self._keeps:
                self.done.outputs.append(_detached(output))
            if self._criterion is None:
                return
            output = self._criterion(output, self._batches[number])
            if not isinstance(output, torch.Tensor) or output.numel() != 1:
                raise ConfigError(f"the criterion returned {_described(output)}; it is to return one number")
            output = output.float() if output.dtype in (torch.float16, torch.bfloat16) else output
            self.done.losses.append(output.detach())
        else:
            self._give(Action(Kind.FORWARD, action.stage + 1, number), output)
        if training:
            if self._splits and output._is_view():
                output = output.clone()  # the halves detach it in place, which no view can be
            self._held[action.stage, number] = _Held(received, output)

    def _backward(self, action: Action, stage: Stage, scale: float | None) -> None:
        key = (action.stage, action.micro_batch)
        held = self._held[key]
        if action.kind is not Kind.WEIGHT:
            held.grad = self._gradient(action, held, scale)
        if action.kind is Kind.INPUT:
            self._input_half(action, held, stage)
            return
        if held.unfinished is not None:
            backward_weights(held.unfinished)
        elif held.output.requires_grad:
            torch.autograd.backward(held.output, held.grad)
        del self._held[key]
        if action.kind is Kind.BACKWARD and held.received is not None:
            self._send_gradient(action, held.received, held.received.grad)

    def _gradient(self, action: Action, held: _Held, scale: float | None) -> torch.Tensor:
        """Return the gradient of a stage's output."""
        grad = self._take(action)
        if grad is not None:
            return grad
        value = self._weights[action.micro_batch] * (1.0 if scale is None else scale)
        return torch.full_like(held.output, value)

    def _input_half(self, action: Action, held: _Held, stage: Stage) -> None:
        """Compute the gradient of the input; in the first stage nothing: its weights' half is all of it."""
        if held.received is None or held.grad is None:
            return
        found: torch.Tensor | None = None
        if held.output.requires_grad:
            weights = [param for param in stage.tree.parameters() if param.requires_grad]
            found, held.unfinished = backward_input(held.output, held.grad, held.received, weights)
        self._send_gradient(action, held.received, found)

    def _send_gradient(self, action: Action, received: torch.Tensor, grad: torch.Tensor | None) -> None:
        received.grad = None
        grad = torch.zeros_like(received) if grad is None else grad
        self._give(Action(Kind.BACKWARD, action.stage - 1, action.micro_batch), grad)


def _detached(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach()
    return torch.utils._pytree.tree_map(lambda x: x.detach() if isinstance(x, torch.Tensor) else x, value)


def _described(value: object) -> str:
    return (
        f"a tensor of {tuple(value.shape)}"
        if isinstance(value, torch.Tensor)
        else f"a {type(value).__name__}"
    )
