"""Several processes launched: the groups of a configuration, layers that follow its mode, who goes first."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from processes import run_on_ranks
from torch import distributed as dist
from torch import nn

from gemini.errors import ConfigError, StateError
from gemini.parallel.launch import (
    DIST_GROUP_INITIALIZER,
    INITIALIZER_MAPPING,
    DistCoordinator,
    ParallelMode,
    ProcessGroupInitializer,
    launch,
    launch_from_openmpi,
    launch_from_slurm,
    launch_from_torch,
    priority_execution,
    shutdown,
    spawn,
)
from gemini.parallel.launch import global_context as gpc
from gemini.parallel.launch.launching import free_port
from gemini.parallel.tensor import nn as tnn

MODES = (ParallelMode.GLOBAL, ParallelMode.DATA, ParallelMode.PIPELINE, ParallelMode.TENSOR)


def groups_of(parallel: dict[str, Any]) -> dict[str, list[int]]:
    launch({"parallel": parallel})
    launch({"parallel": parallel})  # it may be called again
    try:
        for mode in MODES:
            ranks = gpc.get_ranks_in_group(mode)
            assert dist.get_process_group_ranks(gpc.get_group(mode)) == ranks
            assert ranks[gpc.get_local_rank(mode)] == gpc.get_global_rank() == dist.get_rank()
            assert gpc.is_first_rank(mode) == (ranks[0] == dist.get_rank())
            assert gpc.is_last_rank(mode) == (ranks[-1] == dist.get_rank())
            place = ranks.index(dist.get_rank())
            assert gpc.get_next_global_rank(mode) == ranks[(place + 1) % len(ranks)]
            assert gpc.get_prev_global_rank(mode) == ranks[place - 1]
        return {mode.value: gpc.get_ranks_in_group(mode) for mode in ParallelMode if gpc.is_initialized(mode)}
    finally:
        shutdown()
        assert dist.is_initialized()  # the tests' own


def test_data_tensor_and_pipeline_have_their_groups() -> None:
    found = run_on_ranks(groups_of, 4, {"pipeline": 2, "tensor": {"size": 2, "mode": "1d"}})
    everyone = [0, 1, 2, 3]
    assert found[0] == {"global": everyone, "data": [0], "pipe": [0, 2], "tensor": [0, 1], "1d": [0, 1]}
    assert found[3] == {"global": everyone, "data": [3], "pipe": [1, 3], "tensor": [2, 3], "1d": [2, 3]}


def test_what_is_left_is_data_parallel() -> None:
    found = run_on_ranks(groups_of, 4, {"tensor": {"size": 2, "mode": "1d"}})
    assert [ranks["data"] for ranks in found] == [[0, 2], [1, 3], [0, 2], [1, 3]]


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.dense_1, self.dense_2 = tnn.Linear(256, 1024), tnn.Linear(1024, 256)

    def forward(self, x: torch.Tensor) -> tuple[torch.Size, torch.Size]:
        inside = self.dense_1(x)
        return inside.shape, self.dense_2(inside).shape


def shapes_of(tensor: dict[str, Any], cuts: list[tuple[int, ParallelMode]]) -> list[list[int]]:
    launch({"parallel": {"tensor": tensor}})
    model, x = Mlp(), torch.ones(16, 256)
    for dim, mode in cuts:
        x = torch.chunk(x, gpc.get_world_size(mode), dim)[gpc.get_local_rank(mode)]
    assert torch.equal(x, gpc.grid.own_part(torch.ones(16, 256)))
    shapes = [model.dense_1.weight.shape, model.dense_2.weight.shape, x.shape, *model(x)]
    shutdown()
    with pytest.raises(ConfigError, match="build the model within"):
        Mlp()  # what layers followed is gone
    return [list(shape) for shape in shapes]


@pytest.mark.parametrize(
    ("world", "tensor", "cuts", "wanted"),
    [
        (2, {"mode": "1d"}, [], [[512, 256], [256, 512], [16, 256], [16, 512], [16, 256]]),
        (
            4,
            {"mode": "2d"},
            [(0, ParallelMode.PARALLEL_2D_COL), (-1, ParallelMode.PARALLEL_2D_ROW)],
            [[128, 512], [512, 128], [8, 128], [8, 512], [8, 128]],
        ),
    ],
)
def test_layers_follow_the_mode_of_the_configuration(
    world: int, tensor: dict[str, Any], cuts: Any, wanted: Any
) -> None:
    found = run_on_ranks(shapes_of, world, {"size": world, **tensor}, cuts)
    assert found == [wanted] * world


def own_mode(groups: list[list[int]]) -> tuple[list[int], int]:
    class Mine(ProcessGroupInitializer):
        def __init__(self, *sizes: Any, groups: list[list[int]]) -> None:
            super().__init__(*sizes)
            self.groups = groups

        def init_parallel_groups(self) -> dict[Any, Any]:
            assert (self.tensor_parallel_size, self.data_parallel_size) == (1, self.world_size)
            return {"new_mode": self.groups}

    DIST_GROUP_INITIALIZER.register_module(Mine)
    INITIALIZER_MAPPING["new_mode"] = "Mine"
    try:
        launch({"parallel": {"tensor": {"size": 1, "mode": "new_mode", "groups": groups}}})
        assert gpc.data_parallel_size == 3
        total = torch.tensor([dist.get_rank()])
        if gpc.is_initialized("new_mode"):
            dist.all_reduce(total, group=gpc.get_group("new_mode"))
        return gpc.get_ranks_in_group("new_mode") if "new_mode" in gpc_kinds() else [], int(total)
    finally:
        shutdown()
        del INITIALIZER_MAPPING["new_mode"]


def gpc_kinds() -> list[str]:
    try:
        gpc.get_ranks_in_group("new_mode")
    except ConfigError:
        return []
    return ["new_mode"]


def test_a_mode_of_ones_own_has_its_groups() -> None:
    assert run_on_ranks(own_mode, 3, [[0, 2]]) == [([0, 2], 2), ([], 1), ([0, 2], 2)]


def refused_groups() -> str:
    with pytest.raises(ConfigError) as refused:
        own_mode([[0, 1], [1, 2]])
    assert not gpc.is_launched
    return str(refused.value)


def test_groups_that_overlap_are_refused() -> None:
    assert all("each of the ranks 0 to 2" in said for said in run_on_ranks(refused_groups, 3))


def in_turn(path: str, executor: int) -> list[str]:
    here = DistCoordinator()
    assert (here.world_size, here.num_nodes, here.local_world_size, here.local_rank) == (2, 1, 2, here.rank)
    with priority_execution(executor), Path(path).open("a") as log:
        log.write(f"{here.rank}\n")
    here.block_all()
    return Path(path).read_text().split()


@pytest.mark.parametrize("executor", [0, 1])
def test_one_rank_goes_first(tmp_path: Path, executor: int) -> None:
    found = run_on_ranks(in_turn, 2, str(tmp_path / "log"), executor)
    assert found == [[str(executor), str(1 - executor)]] * 2


def failing_first() -> str:
    try:
        with priority_execution():
            assert dist.get_rank() == 0
            raise OSError("no network")
    except (OSError, StateError) as error:
        return str(error)


def test_the_others_hear_that_the_first_one_has_failed() -> None:
    first, second = run_on_ranks(failing_first, 2)
    assert first == "no network"
    assert second == "rank 0, which runs the block first, failed: OSError: no network"


def left_as_it_is(parallel: dict[str, Any]) -> tuple[int, list[int]]:
    launch({"parallel": parallel})  # the tests' own group is destroyed after this
    group, total = gpc.get_group(ParallelMode.TENSOR), torch.ones(1)
    dist.all_reduce(total, group=group)
    return int(total), list(tnn.Linear(4, 8).weight.shape)


def test_a_run_whose_group_is_gone_does_not_stay() -> None:
    for _ in range(2):
        found = run_on_ranks(left_as_it_is, 2, {"tensor": {"size": 2, "mode": "1d"}})
        assert found == [(2, [4, 4])] * 2
    run_on_ranks(shutdown, 2)


def with_a_name_of_its_own(place: int, world_size: int, port: int) -> None:
    assert (place, world_size) == (0, 1)
    assert port > 0


def test_a_spawned_function_names_its_rank_as_it_likes() -> None:
    spawn(with_a_name_of_its_own, 1)


def started(rank: int, world_size: int, port: int, directory: str, ports: list[int]) -> None:
    place, meets = {"RANK": rank, "WORLD_SIZE": world_size, "LOCAL_RANK": rank}, port
    ways = [
        ({}, lambda config: launch(config, rank, world_size, "localhost", meets, "nccl")),
        ({**place, "MASTER_ADDR": "localhost", "MASTER_PORT": ports[0]}, launch_from_torch),
        (
            {"SLURM_PROCID": rank, "SLURM_NPROCS": world_size},
            lambda config: launch_from_slurm(config, "localhost", ports[1]),
        ),
        (
            {"MPI_COMM_WORLD_RANK": rank, "OMPI_COMM_WORLD_SIZE": world_size},
            lambda config: launch_from_openmpi(config, "localhost", ports[2]),
        ),
    ]
    for environ, start in ways:
        os.environ.update({name: str(value) for name, value in environ.items()})
        start({"parallel": {"pipeline": 2}})
        assert gpc.get_ranks_in_group(ParallelMode.PIPELINE) == [0, 1]
        total = torch.ones(1)
        dist.all_reduce(total, group=gpc.get_group(ParallelMode.PIPELINE))
        with Path(directory, str(rank)).open("a") as said:
            said.write(str(int(total)))
        dist.barrier()
        shutdown()
        assert not dist.is_initialized()


def test_processes_meet_whichever_launcher_has_started_them(tmp_path: Path) -> None:
    spawn(started, 2, directory=str(tmp_path), ports=[free_port() for _ in range(3)])
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {"0": "2222", "1": "2222"}


@pytest.mark.parametrize("count", [0, True, "2"])
def test_spawn_needs_a_number_of_processes(count: Any) -> None:
    with pytest.raises(ConfigError, match="whole number"):
        spawn(started, count)
