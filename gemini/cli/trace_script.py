"""Running a user's script with every managed model in it recorded."""

from __future__ import annotations

import runpy
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook

from gemini.model.ddp import GeminiDDP
from gemini.timeline import TimelineRecorder


class ScriptRecording:
    """While entered: records ``steps`` steps of every GeminiDDP that trains, after ``warmup`` of its steps.

    It learns of forward passes by torch's own hook for all modules, so the script needs no change. A model
    that is being recorded by the script itself is left alone; where it begins to be, what was recorded until
    then is kept. ``recorders``: each with its model's class.
    """

    def __init__(self, *, warmup: int, steps: int) -> None:
        self.recorders: list[tuple[TimelineRecorder, str]] = []
        self._warmup = warmup
        self._steps = steps
        self._first_step: WeakKeyDictionary[GeminiDDP, int] = WeakKeyDictionary()
        self._recorded: WeakKeyDictionary[GeminiDDP, bool] = WeakKeyDictionary()

    def __enter__(self) -> ScriptRecording:
        self._hook = register_module_forward_pre_hook(self._before_forward)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._hook.remove()
        for recorder, _ in self.recorders:
            recorder.stop()

    def _before_forward(self, module: nn.Module, _inputs: Any) -> None:
        if not isinstance(module, GeminiDDP) or not torch.is_grad_enabled() or module in self._recorded:
            return
        first = self._first_step.setdefault(module, module.manager.step)
        if module.manager.step - first >= self._warmup and module.manager.observer is None:
            recorder = TimelineRecorder(module.storage, module.manager, steps=self._steps, gives_way=True)
            recorder.start()
            self._recorded[module] = True
            self.recorders.append((recorder, type(module.module).__name__))


def run_script(path: str, arguments: Sequence[str]) -> int:
    """Run ``path`` as ``python path arguments...`` does and return its exit code.

    What it raises is shown as Python does, with the lines of the script; an error of ours too, for the way
    out is in the script. KeyboardInterrupt passes. SIGTERM ends it as ``sys.exit`` does.
    """
    argv, search = sys.argv, list(sys.path)
    sys.argv = [path, *arguments]
    sys.path.insert(0, str(Path(path).resolve().parent))
    try:
        with _sigterm_exits():
            runpy.run_path(path, run_name="__main__")
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            return end.code or 0
        print(end.code, file=sys.stderr)
        return 1
    except Exception as error:  # as the interpreter does where a script ends by one
        frames = _frames_of_script(error.__traceback__)
        sys.excepthook(type(error), error.with_traceback(frames), frames)
        return 1
    finally:
        sys.argv, sys.path[:] = argv, search
    return 0


def _frames_of_script(traceback: TracebackType | None) -> TracebackType | None:
    """Return ``traceback`` from the script's own first line on."""
    ours = (__file__, runpy.run_path.__code__.co_filename)
    while traceback is not None and traceback.tb_frame.f_code.co_filename in ours:
        traceback = traceback.tb_next
    return traceback


@contextmanager
def _sigterm_exits() -> Iterator[None]:
    """While entered SIGTERM raises SystemExit, unless it has been given another meaning."""
    is_ours = threading.current_thread() is threading.main_thread()
    if not is_ours or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return
    signal.signal(signal.SIGTERM, _exit)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _exit(signum: int, _frame: FrameType | None) -> None:
    raise SystemExit(128 + signum)
