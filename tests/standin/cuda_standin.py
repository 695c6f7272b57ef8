"""A GPU for a torch that was built without CUDA.

``tests/cpp/standin`` has the driver's library and what torch's own libraries ask of CUDA: tensors whose
device is "cuda", operators that refuse tensors of the CPU and run late, in the order of streams. This gives
``torch.cuda`` what it would call C++ for. Numbers are the CPU's; the kernel of Adam runs from the code that
nvcc made of it. Two GPUs, for two processes (their memory is one of 8 GiB), NCCL over gloo; CUDA graphs
keep nothing.
"""

from __future__ import annotations

import collections
import contextlib
import ctypes
import importlib.abc
import importlib.machinery
import importlib.util
import itertools
import os
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

if "torch" in sys.modules:
    raise ImportError("the stand-in for CUDA must be loaded before torch, which looks for CUDA once")

_DIRECTORY = Path(os.environ["GEMINI_STANDIN_DIR"]).absolute()
_DRIVER = ctypes.CDLL(str(_DIRECTORY / "libcuda.so.1"), mode=ctypes.RTLD_GLOBAL)
_LIBRARY = ctypes.CDLL(str(_DIRECTORY / "libtorch_cuda_standin.so"))

import torch  # noqa: E402 - not before


class OperatorFailed(RuntimeError):
    """What torch raises for an error on the GPU."""


def _call(name: str, *arguments: int) -> int:
    """Call C++ and return its result. Raise for a refusal of the driver."""
    function = getattr(_LIBRARY, f"standin_{name}")
    function.restype = ctypes.c_int64
    result = int(function(*map(ctypes.c_int64, arguments)))
    if result < 0:
        raise OperatorFailed(f"CUDA error {-result} in {name}")
    return result


class Event:
    """Stands in for ``torch.cuda.Event``."""

    def __init__(self, enable_timing: bool = False, **_options: bool) -> None:
        self._handle = _call("make_event")
        self._timed = enable_timing
        self._recorded = False

    def record(self, stream: Stream | None = None) -> None:
        """Be the end of what the stream was given so far."""
        _call("record", self._handle, (stream or current_stream()).cuda_stream)
        self._recorded = True

    def wait(self, stream: Stream | None = None) -> None:
        """Have the stream come after this event."""
        if self._recorded:
            _call("wait", (stream or current_stream()).cuda_stream, self._handle)

    def synchronize(self) -> None:
        """Wait for it."""
        _call("await", self._handle)

    def query(self) -> bool:
        """Say whether it has passed."""
        with contextlib.suppress(OperatorFailed):
            return _call("query", self._handle) == 0
        return False

    def elapsed_time(self, end: Event) -> float:
        """Return the milliseconds to ``end``."""
        if not (self._timed and end._timed):
            raise OperatorFailed("CUDA error: both events must be created with enable_timing=True")
        function = _LIBRARY.standin_elapsed_ms
        function.restype = ctypes.c_double
        milliseconds = float(function(ctypes.c_int64(self._handle), ctypes.c_int64(end._handle)))
        if milliseconds < 0:
            raise OperatorFailed("CUDA error: device not ready")
        return milliseconds

    def __del__(self) -> None:
        _call("destroy_event", self._handle)


class Stream:
    """Stands in for ``torch.cuda.Stream``."""

    def __init__(self, device: Any = None, priority: int = 0, *, handle: int | None = None) -> None:
        self.device = torch.device("cuda", index_of(device))
        self.cuda_stream = _call("make_stream") if handle is None else handle

    def record_event(self, event: Event | None = None) -> Event:
        """Return an event at the end of what it was given."""
        event = event or Event()
        event.record(self)
        return event

    def wait_event(self, event: Event) -> None:
        """Come after the event."""
        event.wait(self)

    def wait_stream(self, other: Stream) -> None:
        """Come after what ``other`` was given."""
        self.wait_event(other.record_event())

    def synchronize(self) -> None:
        """Wait for all it was given."""
        self.record_event().synchronize()

    def query(self) -> bool:
        """Say whether all it was given is done."""
        return self.record_event().query()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Stream) and self.cuda_stream == other.cuda_stream

    def __hash__(self) -> int:
        return hash(self.cuda_stream)


class CurrentDevice:
    """Stands in for ``torch.cuda.device``."""

    def __init__(self, device: Any) -> None:
        self._index = index_of(device)

    def __enter__(self) -> CurrentDevice:
        self._index = _call("exchange_device", self._index)
        return self

    def __exit__(self, *exception: object) -> None:
        _call("exchange_device", self._index)


class Properties:
    """Stands in for what ``torch.cuda.get_device_properties`` returns."""

    name = "stand-in for a GPU"
    major, minor = 9, 0
    multi_processor_count = 2
    warp_size = 32

    @property
    def total_memory(self) -> int:
        """Return its bytes."""
        return memory()[1]


def current_stream(device: Any = None) -> Stream:
    """Return the stream of this thread's operators."""
    return Stream(handle=_call("current_stream"))


@contextlib.contextmanager
def stream(own: Stream | None) -> Iterator[None]:
    """Have operators go to ``own`` inside."""
    if own is None:
        yield
        return
    before = _call("exchange_stream", own.cuda_stream)
    try:
        yield
    finally:
        _call("exchange_stream", before)


_WORK = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
_keys = itertools.count(1)
_given: dict[int, Any] = {}  # what streams are to call, and what that uses
_called: collections.deque[int] = collections.deque()


def run_on_stream(own: Stream, work: Callable[[], None], keep: Any) -> None:
    """Have a stream call ``work``; ``keep`` lives as long. An exception ends the process, as NCCL's."""

    def run(key: int) -> None:
        try:
            work()
        except BaseException:
            traceback.print_exc()
            os.abort()
        _called.append(key)  # it cannot go before it has returned

    while _called:
        del _given[_called.popleft()]
    key = next(_keys)
    function = _WORK(run)
    _given[key] = (function, keep)
    _call("run_on_stream", own.cuda_stream, ctypes.cast(function, ctypes.c_void_p).value or 0, key)


def index_of(device: Any) -> int:
    """Return the index of a device, of the current one for None."""
    index = device if isinstance(device, int) else torch.device(device or "cuda").index
    return _call("current_device") if index is None or index < 0 else index


def memory() -> tuple[int, ...]:
    """Return the bytes that are free, all, allocated and their peak, reserved and their peak."""
    values = (ctypes.c_int64 * 6)()
    _LIBRARY.standin_memory(values)
    return tuple(values)


class Capture:
    """Stands in for ``torch.cuda.graph``: says that operators are captured, and carries them out."""

    under_way = False

    def __init__(self, graph: object, **_options: Any) -> None:
        del graph

    def __enter__(self) -> None:
        Capture.under_way = True

    def __exit__(self, *exception: object) -> None:
        Capture.under_way = False


class Generators:
    """The states of CUDA's generators: kept, and used for nothing. Numbers come from the CPU's generator."""

    def __init__(self) -> None:
        self._state = torch.zeros(16, dtype=torch.uint8)

    def get(self, device: Any = None) -> torch.Tensor:
        """Return the state."""
        return self._state.clone()

    def set(self, state: torch.Tensor, device: Any = None) -> None:
        """Set the state."""
        self._state = state.clone()

    def get_all(self) -> list[torch.Tensor]:
        """Return the states of all GPUs."""
        return [self.get()]

    def set_all(self, states: list[torch.Tensor]) -> None:
        """Set the states of all GPUs."""
        self.set(states[0])


_resize_plain = torch.UntypedStorage.resize_


def resize_storage(storage: torch.UntypedStorage, nbytes: int) -> torch.UntypedStorage:
    """Stand in for ``UntypedStorage.resize_``, which such a torch has for the CPU alone."""
    if storage.device.type != "cuda":
        return _resize_plain(storage, nbytes)
    _LIBRARY.standin_resize_storage(ctypes.c_void_p(storage._cdata), ctypes.c_int64(nbytes))
    return storage


def install() -> None:
    """Put everything in its place; to be called once."""
    generators = Generators()
    in_cuda: dict[str, Any] = {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "_is_compiled": lambda: True,
        "_lazy_init": lambda: None,
        "_is_in_bad_fork": lambda: False,
        "is_current_stream_capturing": lambda: Capture.under_way,
        "graph": Capture,
        "CUDAGraph": object,
        "is_bf16_supported": lambda including_emulation=True: True,
        "device_count": lambda: _call("num_devices"),
        "current_device": lambda: _call("current_device"),
        "set_device": lambda device: _call("exchange_device", index_of(device)),
        "device": CurrentDevice,
        "get_device_name": lambda device=None: Properties.name,
        "get_device_capability": lambda device=None: (Properties.major, Properties.minor),
        "get_device_properties": lambda device=None: Properties(),
        "Stream": Stream,
        "Event": Event,
        "stream": stream,
        "current_stream": current_stream,
        "default_stream": lambda device=None: Stream(handle=0),
        "synchronize": lambda device=None: _call("synchronize"),
        "mem_get_info": lambda device=None: memory()[:2],
        "memory_allocated": lambda device=None: memory()[2],
        "max_memory_allocated": lambda device=None: memory()[3],
        "memory_reserved": lambda device=None: memory()[4],
        "max_memory_reserved": lambda device=None: memory()[5],
        "reset_peak_memory_stats": lambda device=None: _LIBRARY.standin_reset_peaks(),
        "empty_cache": lambda: _LIBRARY.standin_release_cache(),
        "get_rng_state": generators.get,
        "set_rng_state": generators.set,
        "get_rng_state_all": generators.get_all,
        "set_rng_state_all": generators.set_all,
        "manual_seed": lambda seed: None,
        "manual_seed_all": lambda seed: None,
    }
    for name, value in in_cuda.items():
        setattr(torch.cuda, name, value)
    for name in ("range_push", "range_pop", "mark"):
        setattr(torch.cuda.nvtx, name, lambda *arguments: None)
    torch._C._cuda_getCurrentRawStream = lambda index: _call("current_stream")
    torch.Tensor.record_stream = lambda tensor, own: _call(
        "use_on_stream", tensor.untyped_storage().data_ptr(), own.cuda_stream
    )
    torch.UntypedStorage.resize_ = resize_storage
    if ModuleFinder.path.exists():
        sys.meta_path.insert(0, ModuleFinder())
    else:
        _use_cpu_kernel()


class ModuleFinder(importlib.abc.MetaPathFinder):
    """Finds the module whose CUDA runtime is the stand-in's. Without nvcc there is none."""

    path = _DIRECTORY / f"_C{importlib.machinery.EXTENSION_SUFFIXES[0]}"

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: object = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Return where it is."""
        return importlib.util.spec_from_file_location(name, self.path) if name == "gemini._C" else None


def _use_cpu_kernel() -> None:
    """Have the kernel of Adam for the GPU be the CPU's, in the order of the stream."""
    from gemini import _C

    built = {**_C.build_info(), "cuda": "stand-in"}

    def step(address: int, num_rows: int, options: Any, *, stream: int) -> bool:
        Stream(handle=stream).synchronize()
        return bool(_C.adam_step(address, num_rows, options, threads=1, processors=()))

    _C.build_info = lambda: dict(built)
    _C.cuda_adam_step = step
