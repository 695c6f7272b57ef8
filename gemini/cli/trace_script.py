"""Running a user's script with every managed model in it recorded."""

from __future__ import annotations

import runpy
import sys
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook

from gemini.ddp import GeminiDDP
from gemini.timeline import TimelineRecorder


class ScriptRecording:
    """While entered: records ``steps`` steps of every GeminiDDP that trains, after ``warmup`` of its steps.

    It learns of forward passes by torch's own hook for all modules, so the script needs no change. A model
    that is being recorded by the script itself is left alone. ``recorders``: each with its model's class.
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
            recorder = module.record_timeline(steps=self._steps)
            recorder.start()
            self._recorded[module] = True
            self.recorders.append((recorder, type(module.module).__name__))


def run_script(path: str, arguments: Sequence[str]) -> int:
    """Run ``path`` as ``python path arguments...`` does and return its exit code. Let pass what it raises."""
    argv, search = sys.argv, list(sys.path)
    sys.argv = [path, *arguments]
    sys.path.insert(0, str(Path(path).resolve().parent))
    try:
        runpy.run_path(path, run_name="__main__")
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            return end.code or 0
        print(end.code, file=sys.stderr)
        return 1
    finally:
        sys.argv, sys.path[:] = argv, search
    return 0
