"""Whatever the Adam kernels read lives until they have returned, and no longer."""

from __future__ import annotations

import weakref
from pathlib import Path
from typing import Any

import pytest
import torch

from gemini import _C
from gemini.errors import StateError
from gemini.optim import CPUAdam
from gemini.optim.kernels import AdamHyper, AdamRow, KeptAdamTable
from gemini.optim.rule import AdamRule, Part, UpdateStep


def test_a_prepared_update_owns_its_tensors() -> None:
    tensors = {name: torch.ones(8) for name in ("values", "grad", "exp_avg", "exp_avg_sq")}
    states = {name: tensors[name] for name in ("exp_avg", "exp_avg_sq")}
    part = Part(tensors["values"], tensors["grad"], states, None, UpdateStep(AdamHyper(), 1), 0)
    alive = [weakref.ref(tensor) for tensor in tensors.values()]
    run = AdamRule().prepare([part], "cpu")
    del tensors, states, part
    assert all(tensor() is not None for tensor in alive)
    run()
    del run
    assert [tensor() for tensor in alive] == [None] * 4


@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
def test_a_gradient_given_up_within_the_kernel_lives_until_it_returns(
    share: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    step, grads, found = _C.adam_step, [], []
    params = [torch.ones(600).requires_grad_(), torch.ones(6, 5).requires_grad_()]

    def given_up(*arguments: Any, **options: Any) -> bool:
        for param in params:
            param.grad = None  # as another thread may: the kernel runs without the GIL
        found.extend(grad() is not None for grad in grads)
        return step(*arguments, **options)

    options = {"nvme_offload_fraction": share, "nvme_offload_dir": tmp_path} if share else {}
    optimizer = CPUAdam(params, **options)
    monkeypatch.setattr(_C, "adam_step", given_up)
    for _ in range(3):  # the first one makes the rows, the others keep them
        for param in params:
            param.grad = torch.ones_like(param)
        grads[:] = [weakref.ref(param.grad) for param in params]
        optimizer.step()
        assert [grad() for grad in grads] == [None] * 2
    assert len(found) >= 6
    assert all(found)
    optimizer.close()


def test_rows_that_are_kept_do_not_run_without_gradients() -> None:
    param, grad = torch.ones(8), torch.ones(8)
    row = AdamRow(param, grad, {"exp_avg": torch.zeros(8), "exp_avg_sq": torch.zeros(8)})
    table = KeptAdamTable([row])
    table.let_gradients_go()
    with pytest.raises(StateError, match="were released"):
        table.run_on_cpu([], threads=1)
    assert torch.equal(param, torch.ones(8))
