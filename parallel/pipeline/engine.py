"""Engine: runs a schedule on the stages of this rank."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeVar

import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge

from gemini.errors import ConfigError
from gemini.parallel.pipeline.batches import (
    Criterion,
    call_arguments,
    form_of,
    kind_of,
    loss_of,
    without_weight,
)
from gemini.parallel.pipeline.numbers import Draws
from gemini.parallel.pipeline.orders import Action, Kind, Order
from gemini.parallel.pipeline.split import StagedModel
from gemini.parallel.pipeline.split_backward import (
    PendingWeights,
    backward_input,
    backward_weights,
    checkpoints_noted,
)
from gemini.parallel.pipeline.stage import Stage
from gemini.parallel.pipeline.stage_messages import Incoming, StageMessages, ValueForm
from gemini.parallel.pipeline.stage_pass import StageInputs

T = TypeVar("T")

_MOST = 512  # tensors between two stages
_MOST_KINDS = 8  # of batches told apart by texts and numbers, which may also be step counters
_AHEAD = 2  # actions with inputs that may be in flight
_WORDS = {
    Kind.FORWARD: "forward",
    Kind.BACKWARD: "backward",
    Kind.INPUT: "backward (input)",
    Kind.WEIGHT: "backward (weights)",
}


class Trained(Protocol):
    """The interface of a model in training, for any wrapper."""

    def forward(self, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run ``call``, a part of the model's forward pass, and return its result."""
        ...

    def run_backward(self, call: Callable[[float | None], T]) -> T:
        """Run ``call(scale)``, a part of a backward pass of losses times ``scale``, and return its result."""
        ...

    def no_sync(self) -> AbstractContextManager[None]:
        """Return a context in which gradients accumulate on this rank."""
        ...

    def passes_in_a_row(self) -> AbstractContextManager[None]:
        """Return a context for several backward passes; their gradients are not used before its end."""
        ...

    def leave(self, why: str) -> None:
        """Tell the ranks that train the same part that this rank makes no further calls, and ``why``."""
        ...


@dataclass
class Done:
    """The results of a run by micro-batch: ``losses`` and ``outputs``; empty without the last stage."""

    losses: list[torch.Tensor]
    outputs: list[Any]


@dataclass
class _Held:
    """What a stage keeps of a micro-batch for backward: the received tensors and outputs with gradients."""

    received: tuple[torch.Tensor, ...]
    outputs: tuple[torch.Tensor, ...]
    grads: tuple[torch.Tensor, ...] = ()
    pending: PendingWeights | None = None


class Engine:
    """The stages of a model on this rank, and the connection to the ranks with the others.

    ``messages`` is None if one rank has all stages; ``rank`` is the index of this rank.
    """

    def __init__(
        self, staged: StagedModel, trained: Trained, messages: StageMessages | None, rank: int
    ) -> None:
        self.stages = {stage.index: stage for stage in staged.stages}
        self.trained, self.messages, self._rank = trained, messages, rank
        # What a stage receives, by the key of the batch; and the forms of these tensors, with gradients and
        # without.
        self.takes: dict[tuple[int, str], StageInputs] = {}
        self.forms: dict[tuple[int, str, bool], tuple[ValueForm, ...]] = {}
        self._learned: set[str] = set()  # keys of batches for which ``takes`` is known
        self._kinds: set[str] = set()
        self._trainable = ""
        self._place = ""  # the current activity, for errors

    @property
    def place(self) -> str:
        """The current activity of this rank, or the last one before an error: stage, micro-batch, pass."""
        return self._place

    def begin(self, place: str) -> None:
        """Set the current activity of this rank."""
        self._place = place

    def leave(self, why: str) -> None:
        """Tell the ranks that share this rank's parameters that it makes no further calls, and ``why``."""
        self.trained.leave(why)

    def trainable(self) -> list[list[bool]]:
        """Return, for each stage, which of its parameters need a gradient."""
        found: list[list[nn.Parameter]] = [[] for _ in self.stages]
        for stage, own in zip(self.stages.values(), found, strict=True):
            _add_parameters(stage.tree, own)
        with torch._C.DisableTorchFunctionSubclass():
            return [[param.requires_grad for param in each] for each in found]

    def follow(self, trainable: str) -> None:
        """Forget forms if other parameters need a gradient than before, on any rank."""
        if trainable != self._trainable:
            self.forms.clear()
        self._trainable = trainable

    def kind_of(self, batch: Any) -> str:
        """Return the kind of a batch. Texts and numbers distinguish kinds as long as there are few."""
        exact = kind_of(batch, exact=True)
        if len(self._kinds) < _MOST_KINDS:
            self._kinds.add(exact)
        return exact if exact in self._kinds else kind_of(batch)

    def form_of(self, batch: Any) -> str:
        """Return the key of a batch under which its inputs of stages are remembered."""
        is_training = any(stage.is_training for stage in self.stages.values())
        return f"{self.kind_of(batch)} {form_of(batch)} {is_training}"

    def learn(self, batches: Sequence[Any], say: Callable[[str], list[str]]) -> None:
        """Find the inputs of all stages for such batches, if unknown. ``say`` sends a text to all ranks with
        stages, and returns theirs. Collective.
        """
        forms = {self.form_of(batch): batch for batch in batches}
        fresh = {form: batch for form, batch in forms.items() if form not in self._learned}
        if not fresh:
            return
        self._place = "finding what goes from stage to stage"
        own = {
            index: [stage.takes(*call_arguments(batch)) for batch in fresh.values()] if index else []
            for index, stage in self.stages.items()
        }
        for said in say(json.dumps(own)):
            for index, taken in json.loads(said).items():
                for form, (places, among, held) in zip(fresh, taken, strict=False):
                    self.takes[int(index), form] = StageInputs(tuple(places), among, tuple(map(tuple, held)))
        self._learned.update(fresh)

    def run(
        self,
        order: Order,
        batches: Sequence[Any],
        criterion: Criterion | None,
        weights: Sequence[float],
        *,
        keep_outputs: bool = False,
        seed: int | None = None,
    ) -> Done:
        """Run ``order`` on micro-batches, which are the same on all ranks. If gradients are disabled, run
        only forward passes.

        Args:
            weights: the weights of the micro-batches' losses.
            seed: the seed for all stages.
        """
        run = _Run(self, order, batches, criterion, weights, keep_outputs, seed)
        actions = order.by_rank[self._rank]
        if not torch.is_grad_enabled():
            actions = tuple(
                Action(Kind.FORWARD, stage, number)
                for stage in order.stages_of(self._rank)
                for number in range(len(batches))
            )
        with self.trained.passes_in_a_row() if torch.is_grad_enabled() else nullcontext():
            for index, action in enumerate(actions):
                self._place = f"stage {action.stage}, micro-batch {action.micro_batch}, {_WORDS[action.kind]}"
                run.expect(actions[index : index + _AHEAD])
                run.perform(action)
        if self.messages is not None:
            self._place = "the end of a pass through the pipeline"
            self.messages.finish()
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
        seed: int | None,
    ) -> None:
        self.done = Done([], [])
        self._engine, self._order = engine, order
        self._batches, self._forms = batches, [engine.form_of(batch) for batch in batches]
        self._criterion, self._weights, self._keeps = criterion, weights, keep_outputs
        self._seed = seed
        self._held: dict[tuple[int, int], _Held] = {}
        self._coming: dict[tuple[int, int, bool], Sequence[Incoming | torch.Tensor]] = {}
        self._last = {stage: order.last_backward(stage) for stage in engine.stages}
        self._is_whole: dict[int, bool] = {}  # by stage that has run forward: backward does not split

    # -- tensors between stages ------------------------------------------------------------------

    def expect(self, actions: Sequence[Action], *, ahead: bool = True) -> None:
        """Post the receives for ``actions``, if the forms of their inputs are known. ``ahead``: the inputs
        are taken later, in the order of these calls.
        """
        for action in actions:
            source = self._source(action)
            if source is None or source in self._engine.stages:
                continue
            key = (action.stage, action.micro_batch, action.kind is Kind.FORWARD)
            if key in self._coming:
                continue
            forms = self._expected(action)
            if forms is not None:
                rank, messages = self._order.rank_of[source], self._engine.messages
                assert messages is not None
                self._coming[key] = [
                    Incoming(messages, rank, self._tag(action, index), form, in_order=ahead)
                    for index, form in enumerate(forms)
                ]

    def _source(self, action: Action) -> int | None:
        """Return the stage that sends an action its input; None if it needs none."""
        if action.kind is Kind.WEIGHT:
            return None
        source = action.stage + (-1 if action.kind is Kind.FORWARD else 1)
        return source if 0 <= source < self._order.num_stages else None

    def _expected(self, action: Action) -> Sequence[ValueForm] | None:
        """Return the forms of the tensors that an action receives; None if unknown yet."""
        if action.kind is Kind.FORWARD:
            return self._engine.forms.get(self._key(action))
        held = self._held.get((action.stage, action.micro_batch))
        return None if held is None else [ValueForm(each.dtype, tuple(each.shape)) for each in held.outputs]

    def _key(self, action: Action) -> tuple[int, str, bool]:
        """Return the key under which the engine remembers the forms of a forward pass's inputs."""
        return (action.stage, self._forms[action.micro_batch], torch.is_grad_enabled())

    def _takes(self, stage: int, micro_batch: int) -> StageInputs:
        """Return what ``stage`` receives; nothing for the first stage or one that does not exist."""
        return self._engine.takes.get((stage, self._forms[micro_batch]), StageInputs())

    def _tag(self, action: Action, index: int, *, of_form: bool = False) -> int:
        """Return the message tag of tensor number ``index`` that an action receives."""
        place = action.micro_batch * self._order.num_stages + action.stage
        return 2 * (_MOST * (2 * place + (action.kind is Kind.FORWARD)) + index) + of_form

    def _take(self, action: Action) -> tuple[torch.Tensor, ...]:
        """Return the tensors that an action receives, on the computing device; () for the first action."""
        source = self._source(action)
        if source is None:
            return ()
        key, messages = (action.stage, action.micro_batch, action.kind is Kind.FORWARD), self._engine.messages
        doing = f"waits for stage {source} ({self._engine.place})"
        if key not in self._coming:
            assert messages is not None
            if self._expected(action) is None:
                rank, taken = self._order.rank_of[source], self._takes(action.stage, action.micro_batch)
                self._engine.forms[self._key(action)] = tuple(
                    messages.receive_form(rank, self._tag(action, index, of_form=True), doing)
                    for index in range(taken.num_tensors)
                )
            self.expect([action], ahead=False)
        coming = self._coming.pop(key)
        found = tuple(each if isinstance(each, torch.Tensor) else each.wait(doing) for each in coming)
        if source not in self._engine.stages and torch.is_grad_enabled():  # evaluations have no such order
            assert messages is not None
            sent_at = self._order.places[source, action.micro_batch, action.kind is Kind.FORWARD]
            messages.release(self._order.rank_of[source], sent_at)
        return found

    def _give(self, action: Action, tensors: Sequence[torch.Tensor]) -> None:
        """Send ``tensors`` to the stage that receives them in ``action``."""
        is_here = action.stage in self._engine.stages
        if action.kind is Kind.FORWARD:
            self._announce(action, tensors, is_here=is_here)
        if is_here:
            key = (action.stage, action.micro_batch, action.kind is Kind.FORWARD)
            # Copy activations: the next stage may write to them, and this one needs its own.
            is_copied = action.kind is Kind.FORWARD
            own = [tensor.detach() for tensor in tensors]
            self._coming[key] = [tensor.clone() for tensor in own] if is_copied else own
            return
        messages, rank = self._engine.messages, self._order.rank_of[action.stage]
        assert messages is not None
        place = self._order.places[action.stage, action.micro_batch, action.kind is Kind.FORWARD]
        for index, tensor in enumerate(tensors):
            messages.send(tensor, rank, self._tag(action, index), place)

    def _announce(self, action: Action, tensors: Sequence[torch.Tensor], *, is_here: bool) -> None:
        """Send the forms of ``tensors`` when the stage of ``action`` gets such tensors for the first time.

        Raises:
            ConfigError: there are too many, or their forms differ from earlier ones for such a batch.
        """
        if len(tensors) > _MOST:
            raise ConfigError(
                f"stage {action.stage} needs {len(tensors)} tensors of earlier stages, but a stage can "
                f"receive at most {_MOST}; cut the model elsewhere (split=)"
            )
        # The first always gets a gradient back: recomputation of blocks may depend on it.
        forms = tuple(
            ValueForm(t.dtype, tuple(t.shape), t.is_floating_point() and (t.requires_grad or not index))
            for index, t in enumerate(tensors)
        )
        known = self._engine.forms.setdefault(self._key(action), forms)
        if known is forms and not is_here:
            messages, rank = self._engine.messages, self._order.rank_of[action.stage]
            assert messages is not None
            place = self._order.places[action.stage, action.micro_batch, True]
            for index, form in enumerate(forms):
                messages.send_form(form, rank, self._tag(action, index, of_form=True), place)
        elif known != forms:
            raise ConfigError(
                f"the stage returned {_listed(forms)}, but returned {_listed(known)} for the same input "
                f"shapes before, and stage {action.stage} waits for those; make output shapes depend on "
                "input shapes only"
            )

    # -- computation -----------------------------------------------------------------------------

    def perform(self, action: Action) -> None:
        """Compute an action, and send its results."""
        stage = self._engine.stages[action.stage]
        if action.kind is Kind.FORWARD:
            self._forward(action, stage)
            return
        accumulates = action != self._last[action.stage]
        if self._is_whole[action.stage]:
            if action.kind is Kind.WEIGHT:
                return
            action = replace(action, kind=Kind.BACKWARD)
        with self._engine.trained.no_sync() if accumulates else nullcontext():
            self._engine.trained.run_backward(lambda scale: self._backward(action, stage, scale))

    def _forward(self, action: Action, stage: Stage) -> None:
        number, received = action.micro_batch, self._take(action)
        args, kwargs = call_arguments(self._batches[number])
        training = torch.is_grad_enabled()
        returns = [each.returns and training for each in self._expected(action) or ()]
        takes, gives = self._takes(action.stage, number), self._takes(action.stage + 1, number)
        entered = [_entered(*each) for each in zip(received, returns, strict=True)]
        draws = Draws.of(self._seed, number, action.stage) if self._seed is not None else None
        call = ([inside for _, inside in entered], takes, gives, args, kwargs, draws)
        outputs = self._run_forward(stage, call, received)
        if action.stage == self._order.num_stages - 1:
            if self._keeps:
                self.done.outputs.append(_detached(outputs))
            if self._criterion is None:
                return
            outputs = (self._loss(stage, outputs, number),)
        if action.stage < self._order.num_stages - 1:
            following = Action(Kind.FORWARD, action.stage + 1, number)
            self._give(following, outputs)
            known = self._engine.forms[self._key(following)]
            outputs = tuple(each for each, form in zip(outputs, known, strict=True) if form.returns)
        if training:
            kept = tuple(outside for outside, _ in entered if outside is not None)
            self._held[action.stage, number] = _Held(kept, outputs)

    def _run_forward(self, stage: Stage, call: tuple[Any, ...], received: Sequence[torch.Tensor]) -> Any:
        """Run a stage's forward pass; the first one shows whether its backward pass can be split. The first
        stage, which receives nothing, never has an input's half."""
        forward, index = self._engine.trained.forward, stage.index
        if index in self._is_whole or not (self._order.splits and received and torch.is_grad_enabled()):
            self._is_whole.setdefault(index, False)
            return forward(stage.run, call, {})
        found: list[None] = []
        with checkpoints_noted(lambda: found.append(None)):
            outputs = forward(stage.run, call, {})
        self._is_whole[index] = bool(found)
        self._last[index] = self._order.last_backward(index, whole=bool(found))
        return outputs

    def _loss(self, stage: Stage, output: Any, number: int) -> torch.Tensor:
        """Compute the loss of a micro-batch from the model's output, and keep it."""
        criterion, batch = self._criterion, self._batches[number]
        assert criterion is not None
        loss = stage.judge(lambda: loss_of(criterion, output, batch))
        self.done.losses.append(loss.detach())
        return loss if self._weights[number] else without_weight(output, loss)

    def _backward(self, action: Action, stage: Stage, scale: float | None) -> None:
        key = (action.stage, action.micro_batch)
        held = self._held[key]
        if action.kind is not Kind.WEIGHT:
            held.grads = self._gradients(action, held, scale)
        if action.kind is Kind.INPUT:
            self._input_half(action, held, stage)
            return
        if held.pending is not None:
            backward_weights(held.pending)
        else:
            pairs = [
                (get_gradient_edge(output), grad)
                for output, grad in zip(held.outputs, held.grads, strict=True)
                if output.requires_grad
            ]
            held.outputs = held.grads = ()  # frees outputs that the graph does not use
            if pairs:
                torch.autograd.backward([edge for edge, _ in pairs], [grad for _, grad in pairs])
        del self._held[key]
        if action.kind is Kind.BACKWARD:
            self._send_gradients(action, held.received, [each.grad for each in held.received])

    def _gradients(self, action: Action, held: _Held, scale: float | None) -> tuple[torch.Tensor, ...]:
        """Return the gradients of a stage's outputs."""
        if self._source(action) is not None:
            return self._take(action)
        value = self._weights[action.micro_batch] * (1.0 if scale is None else scale)
        return tuple(torch.full_like(each, value) for each in held.outputs)

    def _input_half(self, action: Action, held: _Held, stage: Stage) -> None:
        """Compute the gradients of the received tensors. In the first stage do nothing: all its work is in
        the weights' half.
        """
        if not held.received:
            return
        weights = [param for param in stage.tree.parameters() if param.requires_grad]
        found, held.pending = backward_input(held.outputs, held.grads, held.received, weights)
        held.outputs = held.grads = ()  # frees the parts of the graph that the weights' half does not use
        self._send_gradients(action, held.received, found)

    def _send_gradients(
        self, action: Action, received: Sequence[torch.Tensor], grads: Sequence[torch.Tensor | None]
    ) -> None:
        if not received:
            return
        given = [torch.zeros_like(t) if g is None else g for t, g in zip(received, grads, strict=True)]
        for tensor in received:
            tensor.grad = None
        self._give(Action(Kind.BACKWARD, action.stage - 1, action.micro_batch), given)


def _add_parameters(module: nn.Module, found: list[nn.Parameter]) -> None:
    """Add the parameters of a module and its submodules to ``found``, without building their names."""
    found += (param for param in module._parameters.values() if param is not None)
    for child in module._modules.values():
        if child is not None:
            _add_parameters(child, found)


class _Enter(torch.autograd.Function):
    """Puts a received tensor into the stage's graph; blocks may write to it like to any other tensor."""

    @staticmethod
    def forward(ctx: Any, outside: torch.Tensor, received: torch.Tensor) -> torch.Tensor:
        """Return ``received``, with its gradient going to ``outside``."""
        ctx.mark_dirty(received)
        return received

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        """Pass the gradient on."""
        return grad, None


def _entered(received: torch.Tensor, returned: bool) -> tuple[torch.Tensor | None, torch.Tensor]:
    """Return the leaf that gets the gradient of a received tensor (None if no gradient is sent back), and the
    tensor for the stage. The leaf takes no memory before it has a gradient.
    """
    if not returned:
        return None, received
    outside = received.new_empty(()).expand(received.shape).requires_grad_()
    entered: torch.Tensor = _Enter.apply(outside, received)  # type: ignore[no-untyped-call]
    return outside, entered


def _listed(forms: Sequence[ValueForm]) -> str:
    return " and ".join(f"{form.dtype} of {form.shape}" for form in forms) or "nothing"


def _detached(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach()
    return torch.utils._pytree.tree_map(lambda x: x.detach() if isinstance(x, torch.Tensor) else x, value)
