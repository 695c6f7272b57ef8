"""What user code writes to weights while a save is under way is not in the checkpoint, whatever writes it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from checkpoint_models import KIB, Run, start
from pairs import pairs
from torch import Tensor, nn

import gemini
from gemini import checkpoint
from gemini.errors import CheckpointError
from gemini.runtime.intercept import tensors as tensors_module
from gemini.runtime.intercept.tensors import possibly_written

pytestmark = pytest.mark.usefixtures("one_thread")

Writer = Callable[[Run], Any]


def resident(_directory: Path) -> dict[str, Any]:
    return {}


def on_disk(directory: Path) -> dict[str, Any]:
    return {"device_bytes": 160 * KIB, "disk_dir": str(directory)}


def files_of(path: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in path.iterdir() if file.suffix == ".safetensors"}


def params_of(run: Run) -> list[Any]:
    return list(run.model.module.parameters())


def each(change: Callable[[Any], Any]) -> Writer:
    def write(run: Run) -> None:
        for param in params_of(run):
            change(param)

    return write


def sgd(run: Run) -> None:
    optimizer = torch.optim.SGD([run.model.module.scale, run.model.module.unused], lr=0.5)
    for param in optimizer.param_groups[0]["params"]:
        if param.requires_grad:
            param.grad = torch.ones_like(param)
    optimizer.step()
    run.optimizer.zero_grad()


def renormalized(run: Run) -> None:
    F.embedding(torch.arange(17), run.model.module.tokens.weight, max_norm=0.1)


def buffers(run: Run) -> None:
    for buffer in run.model.module.buffers():
        buffer.fill_(3)


def masters(run: Run) -> None:
    """Under bf16 the master follows what was written when somebody looks."""
    each(lambda p: p.mul_(3.0))(run)
    run.model.state_dict()


def vector(run: Run) -> None:
    first, *others = params_of(run)
    params = [first, *(each for each in others if each.dtype == first.dtype)]  # some stay in fp32
    nn.utils.vector_to_parameters(torch.zeros(sum(map(torch.numel, params)), dtype=first.dtype), params)


def across(run: Run) -> None:
    torch.manual_seed(3)
    with gemini.GeminiDDP(nn.Linear(32, 17, bias=False), non_model_bytes=0) as other:
        run.model.module.tokens.weight.add_(next(other.module.parameters()), alpha=0.5)


WRITERS: dict[str, Writer] = {
    "copy_": each(lambda p: p.copy_(torch.zeros(()))),
    "data_assigned": each(lambda p: setattr(p, "data", torch.zeros_like(p.data))),
    "data_method": each(lambda p: p.data.mul_(2.0)),
    "view": each(lambda p: p.view(-1)[:3].fill_(4.0) if p.is_contiguous() else p.t().fill_(4.0)),
    "item": each(lambda p: p.detach().__setitem__(0, 5.0)),
    "operator": each(lambda p: p.detach().__iadd__(1.0)),
    "foreach": lambda run: torch._foreach_mul_([p.detach() for p in params_of(run)], 0.5),
    "out": lambda run: torch.add(torch.ones(40), 1.0, out=run.model.module.unused.detach()),
    "aten": each(lambda p: torch.ops.aten.fill_(p.detach(), 6.0)),
    "init": each(lambda p: nn.init.constant_(p, 7.0)),
    "sgd": sgd,
    "renormalized": renormalized,
    "vector": vector,
    "buffers": buffers,
    "masters": masters,
    "across": across,
}


@pairs(writer=WRITERS, place=[resident, on_disk], precision=[None, "bf16"])
def test_the_checkpoint_is_the_moment_of_the_call(
    writer: str, place: Callable[[Path], dict[str, Any]], precision: str | None, tmp_path: Path
) -> None:
    run = start(mixed_precision=precision, **place(tmp_path)).train(3)
    want = files_of(run.save(tmp_path / "want"))
    handle = checkpoint.save_async(tmp_path / "run", run.model, run.optimizer, scheduler=run.scheduler)
    with torch.no_grad():
        WRITERS[writer](run)
    run.train(2)
    with torch.no_grad():
        WRITERS[writer](run)
    assert files_of(handle.wait()) == want
    run.model.close()


class Taught(nn.Module):
    """A frozen teacher that follows the student within the forward pass, and a parameter that came later."""

    def __init__(self) -> None:
        super().__init__()
        self.student, self.teacher = (nn.Sequential(*[nn.Linear(64, 64) for _ in range(4)]) for _ in range(2))
        self.teacher.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            for mine, theirs in zip(self.teacher.parameters(), self.student.parameters(), strict=True):
                mine.lerp_(theirs, 0.1)
            target = self.teacher(x)
        out: Tensor = self.student(x + 0.1) - target
        return out


@pytest.mark.parametrize("options", [{}, {"device_bytes": 128 * KIB}])
def test_writes_within_a_step_leave_its_order_alone(options: dict[str, Any], tmp_path: Path) -> None:
    options = {"disk_dir": str(tmp_path), "min_chunk_size_mb": 0.02, "search_range_mb": 0, **options}

    def trained(*, save: bool) -> tuple[list[float], bool]:
        torch.manual_seed(0)
        with gemini.GeminiDDP(Taught(), non_model_bytes=0, **options) as model:
            optimizer = gemini.GeminiAdamOptimizer(model, lr=1e-2)
            model.module.late = nn.Parameter(torch.zeros(3))
            losses, handle = [], None
            for index in range(6):
                if save and index == 3:
                    want = files_of(checkpoint.save(tmp_path / "want", model, optimizer))
                    handle = checkpoint.save_async(tmp_path / "run", model, optimizer)
                    with torch.no_grad():
                        model.module.late.fill_(1.0)
                loss = model(torch.ones(2, 64)).square().sum()
                losses.append(loss.item())
                optimizer.backward(loss)
                optimizer.step()
            if handle is not None:
                assert files_of(handle.wait()) == want
            return losses, model.manager.chunks.table.diverged()

    assert trained(save=True) == trained(save=False) == (trained(save=False)[0], False)


@pytest.mark.parametrize("place", [resident, on_disk])
def test_a_write_that_nobody_foresaw_ends_the_save(
    place: Callable[[Path], dict[str, Any]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    run = start(**place(tmp_path)).train(3)
    run.save(tmp_path / "run")
    monkeypatch.setattr(tensors_module, "possibly_written", lambda *_args: ())
    monkeypatch.setattr(checkpoint.SaveHandle, "_is_left", lambda *_args: True)
    written, save = threading.Event(), checkpoint.SaveHandle._run

    def save_late(handle: checkpoint.SaveHandle) -> None:
        assert written.wait(60)
        save(handle)

    monkeypatch.setattr(checkpoint.SaveHandle, "_run", save_late)
    handle = checkpoint.save_async(tmp_path / "run", run.model, run.optimizer)
    with torch.no_grad():
        run.model.module.unused.zero_()
    written.set()
    with pytest.raises(CheckpointError, match=r"'unused' was overwritten before it was saved.*wait\(\)"):
        handle.wait()
    assert len(list((tmp_path / "run").iterdir())) == 1


def test_what_reads_is_told_from_what_writes() -> None:
    a, b = torch.zeros(3), torch.zeros(3)
    reads: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = [
        (torch.add, (a, b), {}),
        (torch.Tensor.add, (a, b), {}),
        (torch.Tensor.__add__, (a, b), {}),
        (torch.Tensor.__rsub__, (a, b), {}),
        (torch.Tensor.T.__get__, (a,), {}),
        (F.linear, (a, b), {}),
        (F.relu, (a,), {"inplace": False}),
        (F.embedding, (a, b), {"max_norm": None}),
        (F.scaled_dot_product_attention, (a, b, b), {}),
        (torch._foreach_add, ([a], [b]), {}),
        (torch.ops.aten.add, (a, b), {}),
        (torch.ops.aten.add.Tensor, (a, b), {}),
    ]
    assert all(possibly_written(*call) == () for call in reads)
    assert possibly_written(torch.Tensor.lerp_, (a, b, 0.1), {})[0] is a
    assert possibly_written(F.relu, (a,), {"inplace": True})[0][0] is a
    assert possibly_written(torch.add, (a, b), {"out": b})[1]["out"] is b
    assert possibly_written(lambda *_args: None, (a,), {})[0][0] is a
