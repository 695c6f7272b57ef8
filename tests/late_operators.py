"""Operators that run late: torch's own on CPU tensors, in the order of a simulated GPU's stream.

A call returns at once, with a tensor that has no values yet; a thread computes them when the stream has come
to it. So memory that is given away too early, or read too early, shows as wrong numbers or as the simulated
GPU's refusal.
"""

from __future__ import annotations

import ctypes
import gc
import queue
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

from gemini import _C

_BELOW_AUTOGRAD = torch._C.DispatchKeySet(torch._C.DispatchKey.ADInplaceOrView)

# What needs values before it can return, and what says on meta that it returns other types than on the CPU.
_NEEDS_VALUES = (
    "native_layer_norm",
    "_local_scalar_dense",
    "item",
    "equal",
    "nonzero",
    "is_nonzero",
    "masked_select",
    "allclose",
)


# What changes where a tensor's memory is and touches none.
_ON_THE_HOST = ("aten::set_",)

_PRODUCTS = ("aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm", "aten::mv", "aten::dot")


class LateOperators(TorchDispatchMode):
    """While entered, operators of this thread run late on ``stream``. Leave it to have them all done.

    Meanwhile Python collects no cycles: it would do so in whichever thread allocates, and the end of a
    model's memory waits for the stream, for ever in the thread that runs it.
    """

    def __init__(self, stream: _C.SimulatedStream) -> None:
        super().__init__()
        self.num_late = 0
        # Where storages begin that no operator keeps: the end of one says that nobody will use it again.
        self.kept_by_nobody: set[int] = set()
        # A GPU's allocator gives memory away in the order of the stream; this one's must wait.
        self._alive: list[torch.Tensor] = []
        self._stream = stream
        self._work: queue.SimpleQueue[tuple[_C.SimulatedTurn, Callable[[], None]] | None] = (
            queue.SimpleQueue()
        )
        self._failed: BaseException | None = None
        # Of as many threads as the caller's: sums depend on how they are shared out.
        self._thread = threading.Thread(target=self._run, args=(torch.get_num_threads(),), daemon=True)
        self._thread.start()

    def __enter__(self) -> LateOperators:
        gc.disable()
        super().__enter__()
        return self

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)
        try:
            self.synchronize()
        finally:
            gc.enable()

    def close(self) -> None:
        """Do what is left and end the thread."""
        self.synchronize()
        self._work.put(None)
        self._thread.join()

    def synchronize(self) -> None:
        """Wait until everything so far has run."""
        done = threading.Event()
        self.launch([], done.set)
        done.wait()
        self._alive.clear()
        if self._failed is not None:
            raise self._failed

    def launch(self, tensors: list[torch.Tensor], work: Callable[[], None]) -> None:
        """Have ``work``, which uses ``tensors``, done in its turn."""
        self._alive += tensors
        ranges = [(t.untyped_storage().data_ptr(), t.untyped_storage().nbytes()) for t in tensors]
        self._work.put((self._stream.turn([each for each in ranges if each[1]]), work))

    def _run(self, num_threads: int) -> None:
        torch.set_num_threads(num_threads)
        while (item := self._work.get()) is not None:
            turn, work = item
            turn.wait()
            try:
                with (
                    torch._C.DisableTorchFunctionSubclass(),
                    torch._C._AutoDispatchBelowAutograd(),
                    torch._C._ExcludeDispatchKeyGuard(_BELOW_AUTOGRAD),
                ):
                    work()
            except BaseException as error:  # shown by the next synchronize()
                self._failed = self._failed or error
            finally:
                turn.finish()

    def _as_it_is(self, value: Any) -> Any:
        """Return another tensor over the same memory: ``tensor.data = ...`` must not change what was
        launched."""
        if not isinstance(value, torch.Tensor):
            return value
        with torch._C.DisableTorchFunctionSubclass():
            storage = value.untyped_storage()
            if storage.data_ptr() not in self.kept_by_nobody:
                return torch.ops.aten.detach.default(value)
            memory = (ctypes.c_uint8 * storage.nbytes()).from_address(storage.data_ptr())
            same = torch.frombuffer(memory, dtype=torch.uint8).untyped_storage()
            place = value.storage_offset(), value.shape, value.stride()
            return torch.empty(0, dtype=value.dtype).set_(same, *place)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func._schema.name.split("::")[1] in _NEEDS_VALUES:
            self.synchronize()
            return func(*args, **kwargs)
        if _only_views(func) or func._schema.name in _ON_THE_HOST:
            return func(*args, **kwargs)
        self.num_late += 1
        given = (args, kwargs)
        args, kwargs = tree_map(self._as_it_is, given)
        operands = list(_tensors((args, kwargs)))
        written = [
            given[1][arg.name] if arg.name in kwargs else given[0][index]
            for index, arg in enumerate(func._schema.arguments)
            if arg.alias_info is not None and arg.alias_info.is_write
        ]
        if written:
            self.launch(operands, lambda: func(*args, **kwargs))
            returned = written[: len(func._schema.returns)]
            return returned[0] if len(returned) == 1 else tuple(returned) or None
        results = _without_values(func, args, kwargs)

        def compute() -> None:
            for place, value in zip(_tensors(results), _tensors(func(*args, **kwargs)), strict=True):
                place.copy_(value)

        self.launch(operands + list(_tensors(results)), compute)
        return results


def _only_views(func: Any) -> bool:
    returns = func._schema.returns
    return bool(returns) and all(
        each.alias_info is not None and not each.alias_info.is_write for each in returns
    )


def _without_values(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return tensors like those that the operator returns, with memory of their own and no values."""
    if func._schema.name in ("aten::empty", "aten::empty_strided", "aten::empty_like"):
        return func(*args, **kwargs)

    def on_meta(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
        return value

    on_device = {**kwargs, "device": "meta"} if "device" in kwargs else kwargs
    _require_one_type(func, args)
    found = func(*tree_map(on_meta, args), **tree_map(on_meta, on_device))
    return tree_map(
        lambda t: (
            torch.empty_strided(t.shape, t.stride(), dtype=t.dtype) if isinstance(t, torch.Tensor) else t
        ),
        found,
    )


def _require_one_type(func: Any, args: tuple[Any, ...]) -> None:
    """Refuse products of several types when they are called, as CUDA does; ``meta`` lets them pass."""
    types = {each.dtype for each in _tensors(args)}
    if func._schema.name in _PRODUCTS and len(types) > 1:
        raise RuntimeError(f"expected operands of {func} to have the same dtype, but got: {types}")


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    return (each for each in tree_flatten(value)[0] if isinstance(each, torch.Tensor))
