"""DTensors, whose operators take the memory of what they are made of, beside managed models."""

from __future__ import annotations

import pytest
import torch
from processes import run_on_ranks
from sharded_harness import SMALL_CHUNKS, mlp
from torch import distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from gemini import ConfigError, GeminiDDP


def _within_dtensor(own_model: bool) -> list[str]:
    """Make a DTensor of a managed parameter, of a view of one, and of a copy."""
    mesh = init_device_mesh("cpu", (2,))
    alone = [dist.new_group([rank]) for rank in range(2)]
    group = alone[dist.get_rank()] if own_model else None
    with GeminiDDP(mlp(), process_group=group, **SMALL_CHUNKS) as model:
        weight = next(model.parameters())
        said = []
        for tensor in (weight, weight.t(), weight.detach()):
            with pytest.raises(ConfigError) as caught:
                DTensor.from_local(tensor, mesh)
            said.append(str(caught.value))
        whole = DTensor.from_local(weight.detach().clone(), mesh).full_tensor()
        assert torch.equal(whole, model.state_dict()["0.weight"])
        model.zero_grad()
        return said


@pytest.mark.parametrize("own_model", [True, False])
def test_dtensors_of_managed_parameters_are_refused_at_once(own_model: bool) -> None:
    for said in run_on_ranks(_within_dtensor, 2, own_model):
        assert ["param.detach().clone()" in each for each in said] == [True] * 3
