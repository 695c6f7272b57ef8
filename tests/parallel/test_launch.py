"""One process launched in every way: places, configurations, loggers, and nothing that stays."""

from __future__ import annotations

import copy
import logging
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed as dist

from gemini import ConfigError, StateError
from gemini.parallel import Layout
from gemini.parallel.launch import (
    INITIALIZER_MAPPING,
    DistCoordinator,
    ParallelMode,
    ProcessGroupInitializer,
    disable_existing_loggers,
    get_default_parser,
    get_dist_logger,
    launch,
    launch_from_openmpi,
    launch_from_slurm,
    launch_from_torch,
    priority_execution,
    shutdown,
)
from gemini.parallel.launch import global_context as gpc
from gemini.parallel.launch.config import read_config
from gemini.parallel.launch.launching import OPENMPI, SLURM, TORCHRUN, Place
from gemini.parallel.launch.registry import Registry

LAUNCHES = [launch, launch_from_torch, launch_from_slurm, launch_from_openmpi]


@pytest.fixture(autouse=True)
def _nothing_stays(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in os.environ:
        if name in ("RANK", "WORLD_SIZE", "LOCAL_RANK") or name.startswith(("SLURM_", "OMPI_", "MPI_")):
            monkeypatch.delenv(name)
    yield
    shutdown()
    assert not dist.is_initialized()
    assert not gpc.is_launched


@pytest.mark.parametrize("start", LAUNCHES)
def test_one_process_needs_no_launcher(start: Any) -> None:
    start()
    start({"BATCH_SIZE": 3})
    assert (dist.get_rank(), dist.get_world_size()) == (0, 1)
    assert gpc.config.BATCH_SIZE == 3
    assert gpc.layout == Layout()
    assert [gpc.get_world_size(mode) for mode in ParallelMode] == [1] * len(ParallelMode)
    assert [gpc.get_local_rank(mode) for mode in ParallelMode] == [0] * len(ParallelMode)
    assert gpc.is_initialized(ParallelMode.GLOBAL)
    assert gpc.is_initialized(ParallelMode.DATA)
    assert not gpc.is_initialized(ParallelMode.PIPELINE)
    assert dist.get_world_size(gpc.get_group(ParallelMode.TENSOR)) == 1


def test_a_shutdown_leaves_nothing_and_another_launch_may_follow() -> None:
    for batch in (1, 2):
        launch({"BATCH_SIZE": batch})
        assert gpc.config == {"BATCH_SIZE": batch}
        shutdown()
        shutdown()
        assert gpc.config == {}
        assert not gpc.is_initialized(ParallelMode.DATA)
        with pytest.raises(StateError, match="no run has been launched"):
            _ = gpc.mesh


def test_a_group_that_a_program_has_made_is_kept() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    launch()
    shutdown()
    assert dist.is_initialized()
    dist.destroy_process_group()


def test_a_group_that_a_program_has_destroyed_is_made_again() -> None:
    launch({"X": 1})
    dist.destroy_process_group()
    launch({"X": 1})
    assert dist.get_world_size(gpc.get_group(ParallelMode.DATA)) == 1
    dist.destroy_process_group()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    launch({"X": 1})
    assert dist.get_world_size(gpc.get_group(ParallelMode.DATA)) == 1
    shutdown()
    assert dist.is_initialized()  # that one is the program's own
    dist.destroy_process_group()


def test_one_seed_makes_runs_in_one_process_alike() -> None:
    launch(seed=5)
    first = torch.rand(3)
    launch(seed=5)
    assert torch.equal(torch.rand(3), first)
    state = torch.get_rng_state()
    launch()
    assert torch.equal(torch.get_rng_state(), state)


def test_nccl_without_a_gpu_for_each_process_becomes_gloo(caplog: pytest.LogCaptureFixture) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU for the process")
    launch(backend="nccl")
    assert dist.get_backend() == "gloo"
    assert "needs a GPU for each process" in caplog.text


# -- places ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("launcher", "environ", "wanted"),
    [
        (SLURM, {"SLURM_PROCID": "3", "SLURM_NPROCS": "4", "SLURM_LOCALID": "1"}, (3, 4, 1)),
        (SLURM, {"SLURM_PROCID": "0", "SLURM_NTASKS": "2"}, (0, 2, 0)),
        (OPENMPI, {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2"}, (1, 2, 0)),
        (OPENMPI, {"MPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2"}, (1, 2, 0)),
        (TORCHRUN, {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1"}, (5, 8, 1)),
    ],
)
def test_launchers_say_the_place(launcher: Any, environ: dict[str, str], wanted: tuple[int, ...]) -> None:
    place = launcher.place("10.0.0.1", "29500", environ)
    assert (place.rank, place.world_size, place.local_rank) == wanted
    assert place.address == "tcp://10.0.0.1:29500"
    assert launcher.place("10.0.0.1", 29500, {}) == Place()


def test_an_address_of_ipv6_is_written_as_torch_reads_it() -> None:
    assert Place(0, 2, 0, "fe80::1", 29500).address == "tcp://[fe80::1]:29500"


@pytest.mark.parametrize(
    ("environ", "said"),
    [
        ({"SLURM_PROCID": "3"}, r"srun started this process, but SLURM_NPROCS or SLURM_NTASKS is not set"),
        ({"SLURM_NPROCS": "3"}, r"SLURM_PROCID is not set"),
        ({"SLURM_PROCID": "x", "SLURM_NPROCS": "3"}, r"SLURM_PROCID is 'x'"),
        ({"SLURM_PROCID": "3", "SLURM_NPROCS": "3"}, r"rank 3 .* of world_size 3"),
    ],
)
def test_half_a_place_is_refused(environ: dict[str, str], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        SLURM.place("host", 29500, environ)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"rank": 0}, "pass both or neither"),
        ({"rank": 0, "world_size": 2}, "pass both: launch"),
        ({"rank": 0, "world_size": 2, "host": "localhost"}, "None; pass both"),
        ({"rank": 2, "world_size": 2, "host": "localhost", "port": 29500}, "ranks are 0 to"),
        ({"rank": 0, "world_size": 2, "host": "localhost", "port": "x"}, "port is 'x'"),
        ({"rank": 0, "world_size": 2, "host": "localhost", "port": 70000}, "ports are 1 to 65535"),
        ({"config": 3}, "config is a int"),
        ({"config": {"parallel": {"pipeline": 2}}}, "do not divide 1 processes"),
        ({"config": {"parallel": {"tensor": 4}}}, "has no mode"),
        ({"config": {"parallel": {"moe": {"size": 2}}}}, "among 2 of 1 processes .*; choose 1$"),
    ],
)
def test_what_cannot_be_is_refused(arguments: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        launch(**arguments)
    assert not gpc.is_launched


def test_a_refused_configuration_leaves_the_run_as_it_is() -> None:
    launch({"X": 1})
    with pytest.raises(ConfigError, match="do not divide"):
        launch({"parallel": {"pipeline": 2}})
    assert gpc.config == {"X": 1}
    with pytest.raises(ConfigError, match="already rank 0 of 1"):
        launch(rank=1, world_size=2, host="localhost", port=29500)


def test_the_parser_takes_what_launch_does_and_more() -> None:
    parser = get_default_parser()
    parser.add_argument("--mine", type=int)
    nothing = parser.parse_args([])
    assert vars(nothing) == {
        **dict.fromkeys(("config", "host", "port", "world_size", "rank", "local_rank", "mine")),
        "backend": "nccl",
    }
    said = parser.parse_args(
        ["--local-rank", "1", "--world_size", "2", "--rank", "1", "--port", "7", "--host", "h", "--mine", "4"]
    )
    assert (said.local_rank, said.world_size, said.rank, said.port, said.host, said.mine) == (
        1,
        2,
        1,
        7,
        "h",
        4,
    )


# -- configurations --------------------------------------------------------------------------------


def test_a_configuration_is_a_python_file(tmp_path: Path) -> None:
    path = tmp_path / "config.py"
    path.write_text(
        "import math\n_own = 2\nSIZE = 4 * _own\nparallel = dict(tensor=dict(size=1, mode='1d'))\n"
    )
    launch(str(path))
    assert set(gpc.config) == {"SIZE", "parallel"}
    assert gpc.config.SIZE == 8
    assert gpc.config.parallel.tensor.mode == "1d"
    assert getattr(gpc.config, "gradient_accumulation", 1) == 1
    assert not hasattr(gpc.config, "LOG_PATH")
    with pytest.raises(AttributeError, match="has no 'BATCH'; it has SIZE, parallel"):
        _ = gpc.config.BATCH


def test_a_configuration_imports_what_is_beside_it(tmp_path: Path) -> None:
    (tmp_path / "sizes_beside_config.py").write_text("BASE = 4\n")
    path = tmp_path / "config.py"
    path.write_text("from sizes_beside_config import BASE\nSIZE = 2 * BASE\n")
    before = list(sys.path)
    assert read_config(path) == {"BASE": 4, "SIZE": 8}
    assert sys.path == before


def test_an_attribute_that_is_set_is_an_entry() -> None:
    launch({"SIZE": 4})
    gpc.config.SIZE = 8
    gpc.config.fp16 = {"mode": "torch"}
    assert gpc.config == {"SIZE": 8, "fp16": {"mode": "torch"}}
    assert gpc.config.fp16.mode == "torch"
    assert copy.deepcopy(gpc.config) == gpc.config


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("c.py", None, "does not exist"),
        ("c.json", "{}", "no Python file"),
        ("c.py", "x = 1 / 0", "ZeroDivisionError"),
        ("c.py", "x = (", "SyntaxError"),
        ("c.py", "from colossalai.amp import AMP_TYPE", "import root to gemini.compat"),
        ("c.py", "clip_grad_norm = -1", "clip_grad_norm is -1"),
    ],
)
def test_files_that_are_none_are_named(tmp_path: Path, name: str, text: str | None, said: str) -> None:
    path = tmp_path / name
    if text is not None:
        path.write_text(text)
    with pytest.raises(ConfigError, match=said):
        read_config(path)


@pytest.mark.parametrize(
    "config",
    [
        {"gradient_accumulation": 0},
        {"gradient_accumulation": True},
        {"gradient_accumulation": int},
        {"clip_grad_norm": "1"},
        {"clip_grad_norm": float("nan")},
        {"fp16": True},
        {"fp16": {}, "zero": {}},
        {"gradient_handler": [{"kind": "x"}]},
        {"gradient_handlers": "DataParallelGradientHandler"},
        {"NUM_MICRO_BATCHES": 0},
        {"NUM_CHUNKS": 1.0},
        {"TENSOR_SHAPE": ()},
        {"TENSOR_SHAPE": (2, 0)},
        {"tensor_shape": "8"},
        {"dali": 1},
        {"parallel": 4},
    ],
)
def test_reserved_keywords_are_checked(config: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=rf"config: ({'|'.join(config)})"):
        read_config(config)


def test_reserved_keywords_of_the_right_form_are_kept() -> None:
    config = {
        "fp16": {"mode": "torch"},
        "gradient_accumulation": 4,
        "clip_grad_norm": 1.0,
        "gradient_handler": [{"type": "Mine"}],
        "NUM_MICRO_BATCHES": 4,
        "NUM_CHUNKS": 1,
        "TENSOR_SHAPE": torch.Size([8, 16]),
        "tensor_shape": None,
        "zero": None,
    }
    assert read_config(config) == config
    assert read_config(None) == {}


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("gradient_accumalation", "gradient_accumulation"),
        ("CLIP_GRAD_NORM", "clip_grad_norm"),
        ("NUM_MICROBATCHES", "NUM_MICRO_BATCHES"),
    ],
)
def test_a_name_that_is_nearly_reserved_is_warned_of(
    name: str, meant: str, caplog: pytest.LogCaptureFixture
) -> None:
    assert read_config({name: 4, "NUM_CLASSES": 10, "BATCH_SIZE": 8, "NUM_EPOCHS": 2}) is not None
    assert caplog.messages == [
        f"config: {name!r} is not a reserved name and is left to the program; if you meant {meant}, "
        "write that"
    ]
    caplog.clear()
    assert read_config({name: 4, meant: 4})[name] == 4
    assert not caplog.messages


# -- what goes with it -----------------------------------------------------------------------------


def test_unknown_kinds_of_groups_are_refused() -> None:
    launch()
    with pytest.raises(ConfigError, match="no groups 'new_mode'; there are global"):
        gpc.get_world_size("new_mode")
    with pytest.raises(ConfigError, match="call is_initialized"):
        gpc.get_group(ParallelMode.PARALLEL_2D_COL)


def test_a_registry_keeps_classes_by_name() -> None:
    models = Registry("MODELS")

    @models.register_module
    class Mlp: ...

    assert models.get_module("Mlp") is Mlp
    assert models.has("Mlp")
    with pytest.raises(ConfigError, match=r"no 'Mpl' \(it has Mlp\)"):
        models.get_module("Mpl")
    with pytest.raises(ConfigError, match="choose another name"):
        models.register_module(type("Mlp", (), {"__module__": "elsewhere"}))
    assert models.get_module("Mlp") is Mlp


def test_a_mode_of_ones_own_needs_its_class(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(INITIALIZER_MAPPING, "new_mode", "Missing")
    with pytest.raises(ConfigError, match="DIST_GROUP_INITIALIZER has no 'Missing'"):
        launch({"parallel": {"tensor": {"size": 1, "mode": "new_mode"}}})
    with pytest.raises(NotImplementedError, match="override init_parallel_groups"):
        ProcessGroupInitializer(0, 1, {}).init_parallel_groups()


@pytest.mark.parametrize("launched", [False, True])
def test_one_process_is_every_master(launched: bool, capsys: pytest.CaptureFixture[str]) -> None:
    if launched:
        launch()
    here = DistCoordinator()
    assert (here.rank, here.world_size, here.num_nodes, here.local_rank, here.local_world_size) == (
        0,
        1,
        1,
        0,
        1,
    )
    assert here.is_master()
    assert here.is_node_master()
    assert here.is_last_process()
    assert here.on_master_only()(lambda: 3)() == 3
    here.block_all()
    with here.priority_execution():
        here.print_on_master("one")
        here.print_on_node_master("two")
    with pytest.raises(ConfigError, match="executor_rank is 1"), priority_execution(1):
        pass
    assert capsys.readouterr().out == "one\ntwo\n"


def test_loggers_write_on_the_ranks_that_are_asked(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    logger = get_dist_logger("launch_test")
    handler = logger.log_to_file(tmp_path / "logs", suffix="_a")
    try:
        logger.info("here %d", 1, ranks=[0])
        logger.info("not here", ranks=[1])
        logger.error("everywhere")
    finally:
        logger.logger.removeHandler(handler)
        handler.close()
    written = (tmp_path / "logs" / "rank_0_a.log").read_text()
    assert "INFO launch_test: here 1" in written
    assert "not here" not in written
    assert "everywhere" in written
    assert [record.filename for record in caplog.records] == [Path(__file__).name] * 2


def test_existing_loggers_are_quieted_but_for_those_kept() -> None:
    loud, kept = logging.getLogger("launch_loud"), logging.getLogger("launch_kept.part")
    disable_existing_loggers(["launch_loud", "launch_kept.part"], exclude=["launch_kept"])
    assert (loud.level, kept.level) == (logging.WARNING, logging.NOTSET)


def test_a_program_without_a_launch_has_no_groups() -> None:
    assert gpc.get_global_rank() == 0
    assert gpc.get_world_size(ParallelMode.DATA) == 1
    assert gpc.tensor_parallel_size == 1
