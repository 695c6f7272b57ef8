"""Managed parameters: every operator on one is bracketed by the runtime's PreOp and PostOp.

A parameter keeps its identity when it becomes managed (its class changes, its data moves into a chunk's
window), so optimizers, tied modules and user code that hold it keep working. Every torch operator on a
managed tensor arrives in ``__torch_function__`` and runs with the chunks of its operands pinned on DEVICE.

The tensors that an operator writes to follow from its schema, its name and its keywords. torch moves the
version counters of tensors that its operators write to *and* return. Other written tensors, such as the
parameters of a fused optimizer, and all that operators of libraries write to, appear only in the schema. A
write that is neither declared nor counted cannot be detected. :func:`possibly_written` tells before an
operator runs what it may write to.

Tensors that custom autograd functions saved come back managed (:func:`restore_saved_weights`).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn
from torch._C import DisableTorchFunctionSubclass as PlainTensors
from torch._C import _DisableFuncTorch as OutsideTransforms
from torch._C import _FunctionBase
from torch._C._functorch import peek_interpreter_stack as in_transform
from torch._ops import OpOverload, OpOverloadPacket
from torch.autograd.function import BackwardCFunction

from gemini.errors import ConfigError
from gemini.runtime.gate.gate import (
    NO_SNAPSHOT,
    CutRef,
    Gate,
    TensorRef,
    parameter_at,
    when_last_gate_ends,
)
from gemini.runtime.gate.gradients import Slot
from gemini.runtime.intercept.adapted_rows import lazy_sum
from gemini.runtime.intercept.backward import (
    hook_backward,
    next_node_number,
    node_of,
    nodes_so_far,
    tensors_of_result,
)
from gemini.runtime.intercept.functions import (
    ALIASING_FUNCTIONS,
    METADATA_FUNCTIONS,
    SPECIAL,
    is_view,
    set_data,
    set_memory,
    write_items,
)
from gemini.runtime.intercept.nested import exchange_tensors, map_tensors
from gemini.runtime.intercept.precision import run_in_one_dtype
from gemini.runtime.intercept.row_leaves import count_whole_uses, leaves_of
from gemini.runtime.intercept.rows import is_view_of_rows, run_by_rows

# Places of arguments: position (None if keyword-only) and name.
Places = tuple[tuple[int | None, str], ...]

_IN_PLACE = frozenset(
    f"__i{name}__"
    for name in (
        *("add", "sub", "mul", "matmul", "truediv", "floordiv", "div"),
        *("mod", "pow", "and", "or", "xor", "lshift", "rshift"),
    )
) | {"__setitem__", "__set__"}
# Keywords with which some of torch's functions write to an operand.
_KEYWORDS = ("out", "inplace", "max_norm")
_STATISTICS = frozenset(("batch_norm", "instance_norm"))  # these write to their second and third argument


def silent_places(func: Callable[..., Any]) -> Places:
    """Return the arguments that ``func`` writes to possibly without moving their version counters; () if it
    has no schema, like a Python function."""
    places: dict[tuple[int | None, str], None] = {}
    for schema in _schemas(func):
        aliases = [returned.alias_info for returned in schema.returns if returned.alias_info is not None]
        announces = schema.name.startswith("aten::") and bool(aliases)
        announced = set().union(*(alias.before_set for alias in aliases))
        for position, argument in enumerate(schema.arguments):
            if not _is_written(argument) or "Tensor" not in str(argument.type):
                continue
            # Before_set of a list is empty.
            if not announces or not argument.alias_info.before_set <= announced:
                places[None if argument.kwarg_only else position, argument.name] = None
    return tuple(places)


def _schemas(func: Callable[..., Any]) -> Iterable[Any]:
    if isinstance(func, OpOverload):
        return [func._schema]
    if isinstance(func, OpOverloadPacket):
        return [getattr(func, name)._schema for name in func.overloads()]
    name = getattr(func, "__name__", "")
    if not name or hasattr(func, "__code__") or name.startswith("__"):
        return []
    return torch._C._jit_get_schemas_for_operator(f"aten::{name}")


def arguments_in(places: Places, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    """Return the arguments given at these places."""
    found = [args[at] for at, _ in places if at is not None and at < len(args)]
    return found + [kwargs[name] for _, name in places if name in kwargs]


class SilentPlaces(dict[Any, Places]):
    """Cache of :func:`silent_places` by function."""

    def __missing__(self, func: Callable[..., Any]) -> Places:
        places = self[func] = silent_places(func)
        return places


def possibly_written(
    func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Any, ...]:
    """Return the arguments that ``func`` may write to, or containers of such arguments.

    For torch's own functions this follows from names, keywords and schemas; of any other function all
    arguments are returned.
    """
    name = getattr(func, "__name__", "")
    everything = (args, kwargs)
    if isinstance(func, (OpOverload, OpOverloadPacket)) and _is_mutable(func):
        return everything
    if name in _IN_PLACE or (name.endswith("_") and not name.endswith("__")):
        single = args and not name.startswith("_fused")
        return (args[0], kwargs.get("out")) if single else everything
    given = [kwargs.get(keyword) for keyword in _KEYWORDS]
    if any(value is not None and value is not False for value in given):
        return everything
    if name in _STATISTICS:
        return (args[1:3], kwargs.get("running_mean"), kwargs.get("running_var"))
    return () if _is_torch_function(func) else everything


def _is_mutable(func: Callable[..., Any]) -> bool:
    arguments = [argument for schema in _schemas(func) for argument in schema.arguments]
    return any(_is_written(each) and not each.is_out for each in arguments)


def _is_written(argument: Any) -> bool:
    return argument.alias_info is not None and argument.alias_info.is_write


def _is_torch_function(func: Callable[..., Any]) -> bool:
    owner = getattr(func, "__module__", None) or getattr(func, "__objclass__", type(func)).__module__
    return owner in ("builtins", "_operator") or owner.partition(".")[0] == "torch"


class ManagedTensor(torch.Tensor):
    """A view into a chunk's window, such as ``param.detach()`` or ``param.grad``; a use fetches the chunk."""

    _ref: TensorRef
    set_ = set_memory
    __create_write_items__ = property(write_items)

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        return dispatch(func, args, kwargs or {})

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        """Return a plain, unmanaged copy."""
        if id(self) not in memo:
            memo[id(self)] = plain_copy(self)
        copied: torch.Tensor = memo[id(self)]
        return copied

    def __reduce_ex__(self, proto: Any) -> Any:
        return plain_copy(self).__reduce_ex__(proto)


class ManagedParameter(torch.nn.Parameter):
    """A parameter with data in a chunk. Created by wrapping a module, never constructed."""

    _ref: TensorRef
    _slot: Slot
    _name_again: Callable[[Any, torch.Tensor], torch.nn.Parameter]
    set_ = set_memory
    __create_write_items__ = property(write_items)

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        return dispatch(func, args, kwargs or {})

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.nn.Parameter:
        """Return a plain, unmanaged parameter with a copy of the data."""
        if id(self) not in memo:
            memo[id(self)] = torch.nn.Parameter(plain_copy(self), requires_grad=self.requires_grad)
        copied: torch.nn.Parameter = memo[id(self)]
        return copied

    def __reduce_ex__(self, proto: Any) -> Any:
        return torch.nn.Parameter(plain_copy(self), requires_grad=self.requires_grad).__reduce_ex__(proto)


class ResidentParameter(ManagedParameter):
    """The temporary class of a managed parameter while its memory stays on DEVICE, whole, and the runtime
    need not see its uses: operators take it without calling ``__torch_function__``."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]
    data = property(torch.Tensor.data.__get__, set_data)  # type: ignore[attr-defined]


# Classes of managed parameters, and of all managed tensors; quantized_operators.py adds those of quantized
# weights.
MANAGED_PARAMETERS: set[type] = {ManagedParameter, ResidentParameter}
MANAGED: set[type] = {ManagedTensor, ManagedParameter, ResidentParameter}
_NUM_PLAIN = len(MANAGED)
_SILENT_PLACES = SilentPlaces()
_NEW_PARAMETER = torch.nn.Parameter.__new__.__code__
_LEAVES = frozenset((type(None), bool, int, float, str))  # types that contain no managed tensor; for speed
# These only read their operands and return new memory; for speed.
_ONLY_READ: frozenset[Any] = frozenset(
    (torch.nn.functional.linear, torch.nn.functional.layer_norm, torch.nn.functional.rms_norm)
)


def plain_copy(tensor: torch.Tensor) -> torch.Tensor:
    """Return a clone of a managed tensor as an ordinary tensor in memory of its own."""
    with torch.no_grad():
        return torch.clone(tensor)


OWN_ATTRIBUTES = ("_ref", "_slot", "_name_again")  # of a managed parameter


def make_managed(
    param: torch.nn.Parameter,
    ref: TensorRef,
    slot: Slot,
    name_again: Callable[[Any, torch.Tensor], torch.nn.Parameter],
) -> None:
    """Turn ``param``, which already views its chunk's window, into a managed parameter. ``name_again`` makes
    a second parameter of ``slot`` from a plain view of its memory."""
    param.__class__ = ManagedParameter
    param._ref = ref  # type: ignore[attr-defined]
    param._slot = slot  # type: ignore[attr-defined]
    param._name_again = name_again  # type: ignore[attr-defined]


@contextmanager
def resident(params: Sequence[torch.nn.Parameter]) -> Iterator[None]:
    """Let operators take ``params``, of one model that stays on DEVICE, without interception within the
    block; then record the ones that it wrote."""
    if not params:
        yield
        return
    managed: Sequence[Any] = params
    manager: Gate = managed[0]._ref.manager
    with PlainTensors():
        versions = [param._version for param in managed]
    for param in managed:
        param.__class__ = ResidentParameter

    def end() -> None:
        for param in managed:
            kind: type = type(param)
            if kind is ResidentParameter:
                param.__class__ = ManagedParameter

    manager.on_residence_end(end)
    try:
        yield
    finally:
        manager.on_residence_end(None)
        end()
        with PlainTensors():
            pairs = zip(managed, versions, strict=True)
            written = [param for param, version in pairs if param._version != version]
        for param in written:
            manager.written.note(param._ref.tensors)
            manager.pre_op(param._ref.tensors)
            manager.post_op(param._ref.tensors, True)


def make_plain(param: torch.nn.Parameter, values: torch.Tensor) -> None:
    """Turn a managed parameter back into an ordinary one with ``values`` as its data."""
    param.__class__ = torch.nn.Parameter
    for name in OWN_ATTRIBUTES:
        delattr(param, name)
    param.data = values


def as_managed(view: torch.Tensor, ref: TensorRef) -> torch.Tensor:
    """Turn a plain view of a window into a managed view; a use fetches its chunk."""
    view.__class__ = ManagedTensor
    view._ref = ref  # type: ignore[attr-defined]
    return view


def make_plain_view(view: torch.Tensor, values: torch.Tensor) -> None:
    """Turn a managed view back into an ordinary tensor or parameter with ``values`` as its data."""
    view.__class__ = torch.nn.Parameter if isinstance(view, torch.nn.Parameter) else torch.Tensor
    del view._ref  # type: ignore[attr-defined]
    view.data = values


def dispatch(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run a torch function on operands with managed tensors.

    Raises:
        ConfigError: the function cannot run on these operands.
        OutOfBudgetError, IoError, StateError, EvictedAccessError: as a PreOp.
    """
    if func in METADATA_FUNCTIONS:
        with PlainTensors():
            return func(*args, **kwargs)
    if func in _ONLY_READ and _need_no_pin(args, kwargs):
        with PlainTensors():
            return func(*args, **kwargs)
    special = SPECIAL.get(func)
    if special is not None:
        return special(*args, **kwargs)
    given: list[Any] | None = [] if torch.is_grad_enabled() else None
    operands = operands_of(args, kwargs, given)
    if not operands:
        raise ConfigError(
            f"{getattr(func, '__name__', func)}() was given a managed parameter inside an object "
            "that is not a list, tuple or dict; pass the parameters themselves, or a list of them"
        )
    if len(MANAGED) > _NUM_PLAIN:
        for operand in operands:
            if hasattr(operand, "run_on_twins"):
                return operand.run_on_twins(func, args, kwargs)
    if in_transform() is not None:
        return _operate_on_copies(func, args, kwargs)
    if func in ALIASING_FUNCTIONS:
        with PlainTensors():
            out = func(*args, **kwargs)
            if type(args[0]) is ManagedParameter and _for_parameter(func):
                return args[0]._name_again(args[0]._slot, out)
            return adopt(out, operands)
    if operands[0]._ref.manager.cuts_tensors:
        if is_view_of_rows(func, args):
            with PlainTensors():
                return adopt(leaves_of(operands[0], func, func(*args, **kwargs)), operands)

        def operate(args: Any, kwargs: dict[str, Any], cut: CutRef, tensors: tuple[int, ...]) -> Any:
            given: list[Any] | None = [] if torch.is_grad_enabled() else None
            return _operate(func, args, kwargs, operands_of(args, kwargs, given), given, (cut, tensors))

        out = lazy_sum(func, args, kwargs, operate)
        if out is NotImplemented:
            out = run_by_rows(func, args, kwargs, operands, operate)
        if out is not NotImplemented:
            return out
    return _operate(func, args, kwargs, operands, given)


def _need_no_pin(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Say whether a function in ``_ONLY_READ`` can run directly: all its operands are whole and permanently
    on DEVICE, and none needs another dtype."""
    for given in (args, kwargs.values()) if kwargs else (args,):
        for value in given:
            kind = type(value)
            if kind is ManagedParameter or kind is ManagedTensor:
                manager = value._ref.manager
                if not manager.resident or manager.mixes_dtypes or manager.cuts_tensors:
                    return False
            elif kind in MANAGED:
                return False
    return in_transform() is None


def _for_parameter(func: Callable[..., Any]) -> bool:
    """Say whether ``nn.Parameter(managed)`` is the caller: the tensor that it detaches must keep its class,
    and becomes a parameter."""
    return func is torch.Tensor.detach and sys._getframe(3).f_code is _NEW_PARAMETER


def _operate(
    func: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    operands: list[Any],
    given: list[Any] | None,
    cut: tuple[CutRef, tuple[int, ...]] | None = None,
) -> Any:
    """Run one operator with its managed operands pinned, and hook its backward nodes to do the same.
    ``given``: the nodes that made its other operands; None if gradients are disabled. ``cut``: a cut operand,
    and the tensors of it that the operator reads; None: all of each."""
    ref = operands[0]._ref
    manager, tensors = ref.manager, _used(ref, cut)
    for operand in operands[1:]:
        ref = operand._ref
        if ref.manager is not manager:
            return _operate_across(func, args, kwargs, operands)
        tensors += _used(ref, cut)
    pinned = bool(tensors) and not manager.resident
    turn = manager.threads.take_turn() if pinned and not manager.threads.holder else None
    try:
        with PlainTensors():
            versions = [operand._version for operand in operands]
            places = _SILENT_PLACES[func]
            silent = operands_of(arguments_in(places, args, kwargs), {}) if places else ()
            if pinned and manager.raw_uses and is_view(func, args):
                pinned = False  # a PreOp would invalidate raw addresses that are being compared
            if given is not None and pinned:
                for operand in operands:
                    if type(operand) is ManagedTensor:
                        given.append(operand.grad_fn)
                first_node = next_node_number()
            unsaved: frozenset[int] = frozenset()
            if manager.snapshot is not NO_SNAPSHOT:
                copy_before(func, args, kwargs, operands)
                unsaved = manager.snapshot.unsaved(tensors)
            if pinned:
                manager.pre_op(tensors)
            try:
                out = func(*args, **kwargs)
            except RuntimeError as refusal:
                if not manager.mixes_dtypes:
                    raise
                out = run_in_one_dtype(func, args, kwargs, operands, refusal)
            finally:
                written = silent or [operand._version for operand in operands] != versions
                if written:
                    _note(manager, _written(operands, versions, silent), unsaved)
                    if not pinned:
                        manager.pre_op(tensors)
                if pinned or written:
                    manager.post_op(tensors, bool(written))
            if given is not None and pinned:
                hook_backward(out, (first_node, given), manager, tensors, (args, kwargs))
                if manager.cuts_tensors:
                    count_whole_uses(operands, None if cut is None else cut[0], list(tensors_of_result(out)))
            return adopt(out, operands)
    finally:
        if turn is not None:
            turn.release()


def _used(ref: TensorRef, cut: tuple[CutRef, tuple[int, ...]] | None) -> tuple[int, ...]:
    return cut[1] if cut is not None and ref is cut[0] else ref.tensors


def _operate_across(
    func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], operands: list[Any]
) -> Any:
    """Run an operator with operands of several managed models: pin the operands of each model in turn."""
    shares: dict[Gate, list[Any]] = {}
    for operand in operands:
        shares.setdefault(operand._ref.manager, []).append(operand)
    with PlainTensors():
        copy_before(func, args, kwargs, operands)
        nodes = nodes_so_far((args, kwargs)) if torch.is_grad_enabled() else None
        with ExitStack() as stack:
            # One order for all threads and ranks prevents deadlocks.
            for manager, share in sorted(shares.items(), key=lambda of: of[0].number):
                stack.enter_context(pinned(manager, share, _written_without_version(func, args, kwargs)))
            out = func(*args, **kwargs)
        if nodes is not None:
            for manager, share in shares.items():
                pins = tuple([tensor for operand in share for tensor in operand._ref.tensors])
                hook_backward(out, nodes, manager, pins, (args, kwargs))
        return adopt(out, operands)


def _operate_on_copies(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an operator inside a torch.func transform on copies of its managed operands. Each level of a
    transform has a graph of its own; with copies these graphs save no memory that would have to be fetched
    again.

    Raises:
        ConfigError: the operator wrote to a copy instead of the parameter.
    """
    copies: list[torch.Tensor] = []

    def copied(tensor: torch.Tensor) -> torch.Tensor:
        if type(tensor) not in MANAGED:
            return tensor
        # Outside the transform: its levels would treat the copy as a captured tensor.
        with PlainTensors(), OutsideTransforms(), pinned(tensor._ref.manager, [tensor]):  # type: ignore[attr-defined]
            copies.append(torch.clone(tensor))
        return copies[-1]

    args, kwargs = map_tensors((args, kwargs), copied)
    versions = [copy._version for copy in copies]
    out = func(*args, **kwargs)
    if [copy._version for copy in copies] != versions:
        raise ConfigError(
            f"{getattr(func, '__name__', func)}() writes to a managed parameter inside a transform "
            "of torch.func; write to it before or after"
        )
    return out


@contextmanager
def pinned(manager: Gate, operands: list[Any], silent: Sequence[Any] = ()) -> Iterator[None]:
    """Pin the operands, all of one model, for the block. Those that it writes to count as written, and so do
    those in ``silent``."""
    tensors = [tensor for operand in operands for tensor in operand._ref.tensors]
    with manager.threads.turn():
        versions = [operand._version for operand in operands]
        unsaved = manager.snapshot.unsaved(tensors)
        manager.pre_op(tensors)
        try:
            yield
        finally:
            written = _written(operands, versions, silent)
            _note(manager, written, unsaved)
            manager.post_op(tensors, bool(written))


def copy_before(
    func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], operands: list[Any]
) -> None:
    """Let snapshots copy the operands that ``func`` may write to, as far as they still need them."""
    if any(each._ref.manager.snapshot.unsaved(each._ref.tensors) for each in operands):
        for each in operands_of(possibly_written(func, args, kwargs), {}):
            each._ref.manager.snapshot.before_change(each._ref.tensors)


def _note(manager: Gate, written: list[int], unsaved: frozenset[int]) -> None:
    """Note that user code has written to the tensors; a snapshot that still needed those in ``unsaved`` is
    spoiled."""
    manager.written.note(written)
    lost = unsaved.intersection(written)
    if lost:
        manager.snapshot.spoil(lost)


def _written(operands: list[Any], versions: list[int], silent: Sequence[Any]) -> list[int]:
    """Return the ids of the operands with another version than given, or that are in ``silent``."""
    certain = {id(tensor) for tensor in silent}
    return [
        tensor
        for o, version in zip(operands, versions, strict=True)
        if o._version != version or id(o) in certain
        for tensor in o._ref.tensors
    ]


def _written_without_version(
    func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Sequence[Any]:
    """Return the managed operands that ``func`` writes to without moving their version counters."""
    places = _SILENT_PLACES[func]
    return operands_of(arguments_in(places, args, kwargs), {}) if places else ()


def operands_of(args: Iterable[Any], kwargs: dict[str, Any], given: list[Any] | None = None) -> list[Any]:
    """Return the managed tensors among the arguments, also inside lists, tuples and dicts. The autograd nodes
    of the other tensors are appended to ``given``."""
    found: list[Any] = []
    for arg in args:
        kind = type(arg)
        if kind in MANAGED:
            found.append(arg)
        elif kind in _LEAVES:
            continue
        elif isinstance(arg, torch.Tensor):
            if given is not None and (node := node_of(arg)) is not None:
                given.append(node)
        elif isinstance(arg, (list, tuple)):
            found.extend(operands_of(arg, {}, given))
        elif isinstance(arg, dict):
            found.extend(operands_of(arg.values(), {}, given))
    if kwargs:
        found.extend(operands_of(kwargs.values(), {}, given))
    return found


def adopt(out: Any, operands: list[Any]) -> Any:
    """Make results that view a window managed, so that a later use fetches the chunk."""
    kind = type(out)
    if kind is torch.Tensor:
        if out.layout is torch.strided:
            address = out.data_ptr()
            for operand in operands:
                manager = operand._ref.manager
                if address in manager.windows:
                    ref = manager.viewed(operand._ref, out)
                    if ref is not None:
                        return as_managed(out, ref)
    elif kind is list or kind is tuple:
        return kind([adopt(item, operands) for item in out])
    return out


# Without hooks on saved tensors ``ctx.saved_tensors`` returns the very objects that were saved. With hooks,
# which activation offloading and non-reentrant checkpointing set, autograd makes new tensors of the hooks'
# results: plain tensors over a window. An operator on one would read a chunk that may be evicted, and a
# gradient added to its ``grad`` would be lost.
_SAVED = "saved_tensors"


def restore_saved_weights() -> None:
    """Patch ``saved_tensors`` of custom functions to return managed memory as managed, until the last managed
    model is gone."""
    if _SAVED not in BackwardCFunction.__dict__:
        setattr(BackwardCFunction, _SAVED, property(_saved_tensors))
        when_last_gate_ends(lambda: delattr(BackwardCFunction, _SAVED))


def _saved_tensors(ctx: Any) -> tuple[Any, ...]:
    """The tensors that were passed to ``save_for_backward()``."""
    saved: tuple[Any, ...] = getattr(_FunctionBase, _SAVED).__get__(ctx)
    return tuple([_same_or_managed(tensor) for tensor in saved])


def _same_or_managed(tensor: Any) -> Any:
    if type(tensor) is not torch.Tensor or tensor.layout is not torch.strided or tensor.is_nested:
        return tensor
    param = parameter_at(tensor.data_ptr())
    if param is None:
        return tensor
    with PlainTensors():
        is_whole = tensor.is_leaf and (tensor.shape, tensor.stride()) == (param.shape, param.stride())
        same = is_whole and (tensor.dtype, tensor.requires_grad) == (param.dtype, param.requires_grad)
    return param if same else as_managed(tensor, param._ref)  # type: ignore[attr-defined]


class PlainViews:
    """Plain views of managed tensors, one for each, for compiled code; gradients flow to the managed
    tensors."""

    def __init__(self, managed: Sequence[torch.Tensor]) -> None:
        # Slow to import; already loaded if anything was compiled.
        from torch._dynamo import mark_static_address

        self._operands = list(managed)
        with PlainTensors():
            self._views = {id(each): plain_view(each) for each in managed}
        self._managed = {id(self._views[id(tensor)]): tensor for tensor in managed}
        for view in self._views.values():
            # A window's address never changes, and CUDA graphs may rely on it.
            mark_static_address(view, guard=False)

    @contextmanager
    def replacing(self, module: nn.Module) -> Iterator[None]:
        """Replace the module's managed parameters by the plain views for the block. Plain views that the
        block leaves in attributes of the module become managed again."""
        places = list(managed_places(module))
        for held, name, param in places:
            held[name] = self.plain(param)
        try:
            yield
        finally:
            for held, name, param in places:
                held[name] = param
            for part in module.modules():
                attributes = vars(part)
                for name, value in attributes.items():
                    if type(value) is torch.Tensor:
                        attributes[name] = self._managed_again(value)

    def plain(self, value: Any) -> Any:
        """Return ``value`` with managed tensors replaced by plain views, see
        :func:`gemini.runtime.intercept.nested.exchange_tensors`."""
        return exchange_tensors(value, lambda tensor: self._views.get(id(tensor), tensor))

    def managed(self, value: Any) -> Any:
        """Return ``value`` with plain views, and views of these, replaced by managed tensors."""
        return exchange_tensors(value, self._managed_again)

    def _managed_again(self, tensor: torch.Tensor) -> torch.Tensor:
        found = self._managed.get(id(tensor))
        if found is not None:
            return found
        with PlainTensors():
            return adopt(tensor, self._operands)  # type: ignore[no-any-return]


def managed_places(module: nn.Module) -> Iterator[tuple[dict[str, Any], str, ManagedParameter]]:
    """Yield the dict and key of each managed parameter in the module and its submodules."""
    for part in module.modules():
        held: dict[str, Any] = part._parameters
        for name, param in held.items():
            if type(param) in MANAGED_PARAMETERS:
                yield held, name, param


def plain_view(managed: torch.Tensor) -> torch.Tensor:
    """Return a plain tensor over the same memory; its gradients flow to ``managed``."""
    view: torch.Tensor = _Plain.apply(managed)  # type: ignore[no-untyped-call]
    return view


class _Plain(torch.autograd.Function):
    """Identity over the same memory and version. Not a view, because a compiler would inspect the base of a
    view and its gradient."""

    @staticmethod
    def forward(_ctx: Any, managed: torch.Tensor) -> torch.Tensor:
        return managed.detach()

    @staticmethod
    def backward(_ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad
