"""The grid of ranks: who is beside whom, and what an axis adds up, counts and refuses."""

from __future__ import annotations

import pytest
import torch
from processes import run_on_ranks
from tensor_harness import LANGUAGE_PLAN, Language, make_mesh
from torch import Tensor
from torch import distributed as dist

from gemini import ConfigError
from gemini.parallel import Layout, Mesh, parallelize
from gemini.parallel.mesh import counted


def places() -> dict[str, list[int]]:
    mesh = make_mesh(dp=2, tp=2)
    return {name: mesh[name].mesh.tolist() for name in ("pp", "dp", "sp", "tp")}


def test_ranks_of_a_tensor_parallel_group_are_neighbours() -> None:
    said = run_on_ranks(places, 4)
    assert [said[rank]["tp"] for rank in range(4)] == [[0, 1], [0, 1], [2, 3], [2, 3]]
    assert [said[rank]["dp"] for rank in range(4)] == [[0, 2], [1, 3], [0, 2], [1, 3]]
    assert [said[rank]["pp"] for rank in range(4)] == [[0], [1], [2], [3]]


def collect() -> tuple[Tensor, Tensor, Tensor, dict[str, int], dict[str, int]]:
    axis = make_mesh(tp=4).axis("tp")
    assert axis is not None
    rank = dist.get_rank()
    with counted(axis) as (calls, sent):
        total = torch.full((8,), float(rank))
        axis.all_reduce(total)
        every = torch.cat(axis.all_gather(torch.full((2,), float(rank))))
        part = axis.reduce_scatter([torch.full((2,), float(rank * 10 + other)) for other in range(4)])
    return total, every, part, dict(calls), dict(sent)


def test_axis_counts_what_it_sends() -> None:
    for rank, (total, every, part, calls, sent) in enumerate(run_on_ranks(collect, 4)):
        assert total.tolist() == [6.0] * 8
        assert every.tolist() == [0.0, 0.0, 1.0, 1.0, 2.0, 2.0, 3.0, 3.0]
        assert part.tolist() == [60.0 + 4 * rank] * 2
        assert calls == {"all_reduce": 1, "all_gather": 1, "reduce_scatter": 1}
        assert sent == {"all_reduce": 2 * 32 * 3 // 4, "all_gather": 8 * 3, "reduce_scatter": 8 * 3}


def refuse() -> list[str]:
    said = []
    for make in (
        lambda: make_mesh(tp=4),
        lambda: make_mesh(tp=2)["cp"],
        lambda: parallelize(Language(), Mesh(Layout(tp=2, mode="2.5d", depth=2)), LANGUAGE_PLAN),
    ):
        with pytest.raises(ConfigError) as caught:
            make()
        said.append(str(caught.value))
    return said


def test_what_is_no_layout_of_these_ranks_is_refused() -> None:
    for world, axis, mode in run_on_ranks(refuse, 2):
        assert world.endswith("needs 4 processes, but there are 2")
        assert axis == "there is no axis 'cp'; the axes are pp, dp, sp, tp, ep, moe_dp"
        assert "gemini.parallel.tensor.nn" in mode


def test_mesh_without_ranks_says_how_to_start_some() -> None:
    with pytest.raises(ConfigError, match=r"call join_ranks\(\)"):
        Mesh(Layout())


def count_on_axes() -> int:
    if dist.get_rank() < 2:
        dist.new_group([0, 1], use_local_synchronization=True)
    axis = make_mesh(tp=3).axis("tp")
    assert axis is not None
    total = torch.ones(1)
    for each in (axis, axis.among(range(3))):
        each.all_reduce(total)
    return int(total)


def test_ranks_may_be_in_different_numbers_of_groups_of_the_program() -> None:
    """Torch names a group after that number, and would let them wait for each other."""
    assert run_on_ranks(count_on_axes, 3) == [9] * 3


def gather_on_the_first() -> tuple[int, list[tuple[int, ...]]]:
    model = Language()
    partition = parallelize(model, make_mesh(tp=2), LANGUAGE_PLAN)
    state = partition.gather_state(model.state_dict(), everywhere=False)
    return len(state), [tuple(state["embedding.weight"].shape)] if state else []


def test_state_may_be_gathered_on_the_first_rank_alone() -> None:
    names = len(Language().state_dict())
    assert run_on_ranks(gather_on_the_first, 2) == [(names, [(37, 32)]), (0, [])]
