"""How many files of the package a walk through it enters, and how many of them for next to nothing.

A file that is entered only to find nothing to do costs a reader a look and a call its time. The bars hold
what there is: they may sink, not rise.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import pytest
import torch
from torch import nn

import gemini
from gemini import CPUAdam, GeminiDDP, GeminiOptimizer, checkpoint

PACKAGE = f"{Path(gemini.__file__).parent}/"
IMPORT_HOOK = f"{PACKAGE}compat/modules.py"  # sees every import once a test of the other names has run
FEW_LINES = 6  # of a file that is entered for next to nothing
FEW_LINES_OF_ONE = 10  # where only one function of it runs

# Files that each walk may enter, and how many of those for next to nothing.
BARS = {
    "wrap": (38, 9),
    "optimizer": (29, 11),
    "forward": (9, 3),
    "backward": (9, 6),
    "step": (21, 6),
    "save": (30, 13),
    "load": (35, 14),
}


@dataclass
class Walk:
    """The functions and lines of the package that ran, by file."""

    functions: dict[str, set[CodeType]] = field(default_factory=lambda: defaultdict(set))
    lines: dict[str, set[int]] = field(default_factory=lambda: defaultdict(set))

    @property
    def stays(self) -> list[str]:
        """The files, for next to nothing, that were entered."""
        return sorted(
            file
            for file, functions in self.functions.items()
            if len(self.lines[file]) <= (FEW_LINES_OF_ONE if len(functions) == 1 else FEW_LINES)
        )

    @contextmanager
    def taken_down(self) -> Iterator[None]:
        """Take down what runs in this thread within the block."""
        before = sys.gettrace()
        sys.settrace(self._enter)
        try:
            yield
        finally:
            sys.settrace(before)

    def _enter(self, frame: FrameType, _event: str, _argument: Any) -> Callable[..., Any] | None:
        name = frame.f_code.co_filename
        if not name.startswith(PACKAGE) or name == IMPORT_HOOK:
            return None
        self.functions[name.removeprefix(PACKAGE)].add(frame.f_code)
        return self._step

    def _step(self, frame: FrameType, event: str, _argument: Any) -> Callable[..., Any]:
        if event == "line":
            self.lines[frame.f_code.co_filename.removeprefix(PACKAGE)].add(frame.f_lineno)
        return self._step


@pytest.fixture(scope="module")
def walks(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Walk]:
    """The walks of eight linear layers on the CPU: those of a step are of the third one."""
    found: dict[str, Walk] = defaultdict(Walk)
    net = nn.Sequential(*(nn.Linear(16, 16) for _ in range(8)))
    x = torch.randn(2, 16)
    with found["wrap"].taken_down():
        model = GeminiDDP(net)
    adam = CPUAdam(net.parameters())
    with found["optimizer"].taken_down():
        optimizer = GeminiOptimizer(adam, model)
    for number in range(3):
        of_step = found if number == 2 else defaultdict(Walk)
        with of_step["forward"].taken_down():
            loss = model(x).sum()
        with of_step["backward"].taken_down():
            optimizer.backward(loss)
        with of_step["step"].taken_down():
            optimizer.step()
        optimizer.zero_grad()
    path = tmp_path_factory.mktemp("walk") / "checkpoint"
    for _ in range(2):  # the first one imports
        with (walk := Walk()).taken_down():
            checkpoint.save(path, model, optimizer)
        found["save"] = walk
    with found["load"].taken_down():
        checkpoint.load(path, model, optimizer)
    return found


@pytest.mark.parametrize("name", BARS)
def test_a_walk_enters_no_more_files_than_before(name: str, walks: dict[str, Walk]) -> None:
    files, stays = BARS[name]
    walk = walks[name]
    assert len(walk.functions) <= files, f"{name} enters {len(walk.functions)}: {sorted(walk.functions)}"
    assert len(walk.stays) <= stays, f"{name} enters for next to nothing: {walk.stays}"
