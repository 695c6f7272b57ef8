"""The documents' names under gemini.compat: all are there or said to come, with the documents' defaults."""

from __future__ import annotations

import importlib
import re
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from packaging.version import Version
from torch import nn

import gemini
import gemini.compat as documents
from gemini import CheckpointError, ConfigError, IoError
from gemini.compat.adapters.chunk_adapters import ChunkManager, GeminiManager, init_chunk_manager
from gemini.compat.modules import MODULES, own_name, resolve, why_absent
from gemini.compat.names import COMING, NAMES, OWN
from gemini.parallel.colo import ColoParameter
from gemini.parallel.launch import GRADIENT_HANDLER, shutdown

ROOT = Path(__file__).resolve().parents[2]

# Every path that a program of the documents imports, or may.
DOCUMENTED = """
Booster initialize launch launch_from_torch launch_from_slurm launch_from_openmpi get_default_parser
__version__ amp.AMP_TYPE amp.convert_to_amp amp.apex_amp.convert_to_apex_amp booster.Booster
booster.plugin.GeminiPlugin booster.plugin.LowLevelZeroPlugin booster.plugin.TorchDDPPlugin
booster.plugin.TorchFSDPPlugin booster.mixed_precision.FP16TorchMixedPrecision
booster.mixed_precision.FP16ApexMixedPrecision booster.mixed_precision.FP16NaiveMixedPrecision
mixed_precision.FP16TorchMixedPrecision mixed_precision.FP16ApexMixedPrecision
mixed_precision.FP16NaiveMixedPrecision builder.build_pipeline_model
builder.build_pipeline_model_from_cfg builder.pipeline.partition_uniform cluster.DistCoordinator
cluster.dist_coordinator.priority_execution constants.INITIALIZER_MAPPING context.ParallelMode
context.parallel_mode.ParallelMode context.random.moe_set_seed
context.dist_group_initializer.ProcessGroupInitializer core.global_context engine.BaseGradientHandler
engine.gradient_handler.BaseGradientHandler engine.schedule.BaseSchedule engine.schedule.PipelineSchedule
engine.schedule.InterleavedPipelineSchedule gemini.ChunkManager gemini.GeminiManager
global_variables.moe_env logging.get_dist_logger logging.disable_existing_loggers nn.Linear nn.Linear2D
nn.Dropout nn.LayerNorm nn.CrossEntropyLoss nn.Lamb nn.layer.moe.Experts nn.layer.moe.MoeLayer
nn.layer.moe.Top2Router nn.layer.moe.NormalNoiseGenerator nn.moe.MoeLayer
nn.layer.wrapper.PipelineSharedModuleWrapper nn.lr_scheduler.LinearWarmupLR
nn.lr_scheduler.CosineAnnealingLR nn.lr_scheduler.CosineAnnealingWarmupLR nn.metric.Accuracy
nn.optimizer.CPUAdam nn.optimizer.HybridAdam nn.parallel.GeminiDDP
pipeline.pipelinable.PipelinableContext registry.LAYERS registry.MODELS registry.GRADIENT_HANDLER
registry.DIST_GROUP_INITIALIZER tensor.ProcessGroup tensor.ColoTensor tensor.ColoTensorSpec
tensor.ColoParameter tensor.ShardSpec tensor.ReplicaSpec tensor.ComputeSpec tensor.ComputePattern
testing.spawn trainer.Trainer trainer.hooks.BaseHook trainer.hooks.LossHook trainer.hooks.AccuracyHook
trainer.hooks.LogMetricByEpochHook trainer.hooks.LogMetricByStepHook trainer.hooks.ThroughputHook
trainer.hooks.LRSchedulerHook trainer.hooks.SaveCheckpointHook trainer.hooks.TensorboardHook
trainer.hooks.LogMemoryByEpochHook nn.optimizer.Lamb utils.MultiTimer utils.get_dataloader utils.is_using_pp
utils.get_current_device utils.print_rank_0 utils.save_checkpoint utils.load_checkpoint
utils.timer.MultiTimer utils.model.colo_init_context.ColoInitContext zero.ColoInitContext
zero.zero_model_wrapper zero.zero_optim_wrapper zero.low_level.LowLevelZeroOptimizer
gemini.chunk.init_chunk_manager zero.GeminiAdamOptimizer zero.ZeroDDP nn.moe.MoeLoss nn.moe.Top1Router
nn.moe.VanillaFFN nn.metric.MixupAccuracy auto_parallel.autoparallelize auto_parallel.ColoTracer
autoparallelize engine.gradient_handler.MoeGradientHandler
"""


@pytest.fixture(autouse=True)
def _quiet_and_alone() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        yield
    shutdown()


# -- the list --------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", sorted({*DOCUMENTED.split(), *NAMES, *COMING}))
def test_every_name_of_the_documents_is_there_or_said_to_come(path: str) -> None:
    module, _, name = f"gemini.compat.{path}".rpartition(".")
    found = importlib.import_module(module)
    reason = why_absent(path)
    if reason is None:
        assert getattr(found, name) is resolve(path)
        assert name in dir(found)
        return
    assert not hasattr(found, name)
    with pytest.raises(ImportError, match=re.escape(f"{path} is still to come: {reason}")):
        exec(f"from {module} import {name}")


def test_a_name_is_in_one_table() -> None:
    tables = [NAMES.keys(), COMING.keys()]
    assert sum(map(len, tables)) == len(set().union(*tables))
    assert set(OWN) <= set(NAMES.values())
    assert set(MODULES).isdisjoint({*NAMES, *COMING})


def test_the_tracer_alone_is_to_come() -> None:
    assert set(COMING) == {"auto_parallel.ColoTracer"}


def test_a_configuration_that_names_an_unknown_handler_says_which_there_are() -> None:
    with pytest.raises(ConfigError, match=r"no 'MoeGradient' \(it has .*DataParallelGradientHandler"):
        GRADIENT_HANDLER.get_module("MoeGradient")


def test_fp8_is_refused_by_name() -> None:
    for place in (documents.mixed_precision, documents.booster.mixed_precision):
        with pytest.raises(ConfigError, match=r"FP8MixedPrecision: fp8 is not supported: .*'bf16'"):
            place.FP8MixedPrecision()


@pytest.mark.parametrize("own", sorted({own_name(path) for path in NAMES}))
def test_our_own_names_are_ours(own: str) -> None:
    module, _, name = own.rpartition(".")
    assert hasattr(importlib.import_module(module), name)
    assert not own.startswith("gemini.compat")


def test_a_note_says_our_own_name_once() -> None:
    code = (
        "from gemini.compat.nn.parallel import GeminiDDP\nimport gemini.compat.nn.parallel as places\n"
        "places.GeminiDDP\nimport gemini.compat as documents\ndocuments.Booster\ndocuments.Booster"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    notes = [line for line in done.stderr.splitlines() if "DeprecationWarning" in line]
    assert [note.rpartition(" it is ")[2] for note in notes] == [
        "gemini.parallel.colo.GeminiDDP",
        "gemini.parallel.Booster",
    ]


@pytest.mark.parametrize(
    "statement", ["import gemini.compat.nothing", "from gemini.compat.zero import Nothing"]
)
def test_other_names_are_errors_as_of_any_module(statement: str) -> None:
    with pytest.raises(ImportError, match=r"[Nn]othing"):
        exec(statement)
    assert not hasattr(documents.zero, "Nothing")


@pytest.mark.parametrize(
    ("statement", "said"),
    [
        ("from gemini.compat.utils import save_chekpoint", r"did you mean utils\.save_checkpoint\?"),
        ("import gemini.compat.nn.lr_schedular", r"did you mean nn\.lr_scheduler\?"),
        ("from gemini.compat.kernel import anything", r"has no kernel; docs/compat\.md lists the names"),
    ],
)
def test_an_import_that_fails_says_what_may_be_meant(statement: str, said: str) -> None:
    with pytest.raises(ImportError, match=said):
        exec(statement)


def test_all_names_of_a_module_may_be_imported_at_once() -> None:
    found: dict[str, object] = {}
    exec("from gemini.compat.nn.lr_scheduler import *", found)
    names = {name for name in found if not name.startswith("__")}  # a warning leaves one as well
    assert names == {"CosineAnnealingLR", "CosineAnnealingWarmupLR", "LinearWarmupLR"}


def test_compat_is_thin() -> None:
    files = list((ROOT / "gemini" / "compat").rglob("*.py"))
    assert len(files) > 5
    assert sum(len(path.read_text().splitlines()) for path in files) <= 1500


def test_the_table_of_the_documentation_is_the_list() -> None:
    rows = dict(
        re.findall(r"^\| `([\w.]+)` \| (.*?) \|$", (ROOT / "docs/compat.md").read_text(), re.MULTILINE)
    )
    wanted = {path: f"`{own_name(path)}`" for path in NAMES}
    wanted |= {path: f"to come: {why}" for path, why in COMING.items()}
    assert rows == wanted


PROGRAM = """
import colossalai
import colossalai.nn as col_nn
from colossalai.core import global_context as gpc
from colossalai import Booster
from colossalai.booster.plugin import GeminiPlugin
def main():
    from colossalai.nn.optimizer import HybridAdam
    colossalai.launch_from_torch(config='config.py')
    model = col_nn.Linear(8, 4)
    optimizer = HybridAdam(model.parameters(), lr=1e-3)
    booster = Booster(plugin=GeminiPlugin(placement_policy='cuda', strict_ddp_mode=True, max_norm=1.0))
    model, optimizer, criterion, _, _ = booster.boost(model, optimizer, lambda out: out.mean())
    import torch
    booster.backward(criterion(model(torch.ones(gpc.config.BATCH_SIZE, 8))), optimizer)
    optimizer.step()
main()
"""


def test_a_program_runs_once_its_import_root_is_changed(tmp_path: Path) -> None:
    page = (ROOT / "docs/compat.md").read_text()
    (change,) = re.findall(r"^sed -i .*train\.py config\.py$", page, re.MULTILINE)
    (tmp_path / "train.py").write_text(PROGRAM)
    (tmp_path / "config.py").write_text("from colossalai.amp import AMP_TYPE\nBATCH_SIZE = 4\n")
    subprocess.run(["bash", "-c", change], cwd=tmp_path, check=True)
    done = subprocess.run(
        [sys.executable, "train.py"], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert done.stdout.startswith("searching chunk configuration")


# -- defaults --------------------------------------------------------------------------------------


def model_of(seed: int = 3) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 4))


def batches() -> list[torch.Tensor]:
    return list(torch.randn(3, 4, 8, generator=torch.Generator().manual_seed(1)))


def train(model: nn.Module, optimizer: Any) -> list[float]:
    losses = []
    for x in batches():
        optimizer.zero_grad()
        loss = model(x).float().square().mean()
        optimizer.backward(loss)
        optimizer.step()
        losses.append(loss.item())
    return losses


def ours(**options: Any) -> list[float]:
    with gemini.GeminiDDP(model_of(), **options) as model:
        return train(model, gemini.GeminiAdamOptimizer(model, lr=1e-2, initial_scale=2**5))


def test_a_managed_model_computes_in_fp16_and_says_its_chunks(capsys: pytest.CaptureFixture[str]) -> None:
    want, plain = ours(mixed_precision="fp16"), ours()
    assert want != plain
    with documents.nn.parallel.GeminiDDP(model_of(), "cpu", "cpu", search_range_mb=32) as model:
        got = train(model, documents.zero.GeminiAdamOptimizer(model, lr=1e-2, initial_scale=2**5))
    assert got == want
    first, second, third = capsys.readouterr().out.splitlines()
    assert re.fullmatch(r"searching chunk configuration is completed in [\d.]+ s\.", first)
    assert re.fullmatch(r"used number: [\d.]+ MB, wasted number: [\d.]+ MB", second)
    assert re.fullmatch(r"total wasted percentage is [\d.]+%", third)
    with documents.nn.parallel.GeminiDDP(model_of(), mixed_precision=None, verbose=False) as model:
        assert train(model, documents.zero.GeminiAdamOptimizer(model, lr=1e-2)) == plain
    assert capsys.readouterr().out == ""


def test_managers_made_by_hand_say_what_the_wrapper_does(capsys: pytest.CaptureFixture[str]) -> None:
    size = ChunkManager.search_chunk_size(model_of(), 64 * 1024**2, 32)
    chunks = ChunkManager(
        size,
        documents.tensor.ProcessGroup(),
        enable_distributed_storage=True,
        init_device=GeminiManager.get_default_device("cpu"),
    )
    with documents.zero.ZeroDDP(model_of(), GeminiManager("cpu", chunks)) as model:
        got = train(model, documents.zero.GeminiAdamOptimizer(model, lr=1e-2, initial_scale=2**5))
    assert got == ours(mixed_precision="fp16")
    assert capsys.readouterr().out.count("used number") == 2
    assert GeminiManager.get_default_device("cpu") == torch.device("cpu")
    with pytest.raises(ConfigError, match="chunks are always cut"):
        ChunkManager(size, enable_distributed_storage=False)


def test_the_chunk_size_of_a_manager_is_kept() -> None:
    def layers() -> nn.Module:
        return nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(8)))

    def num_chunks(numel: int) -> int:
        with documents.zero.ZeroDDP(layers(), GeminiManager("cuda", ChunkManager(numel))) as model:
            found: int = model.stats()["num_chunks"]
            return found

    assert num_chunks(4096) == 2 * num_chunks(8192) == 8 * num_chunks(8 * 4096)
    searched = init_chunk_manager(layers(), hidden_dim=64, search_range_mb=1, min_chunk_size_mb=0.01)
    assert searched.chunk_size >= 4096


def test_parameters_made_in_the_context_are_on_the_cpu_and_say_how_they_lie() -> None:
    context = documents.zero.ColoInitContext()
    for _ in range(2):
        with context, documents.utils.model.colo_init_context.ColoInitContext(device="cpu"), context:
            layer = nn.Linear(2, 2)
        assert isinstance(layer.weight, ColoParameter)
        assert (layer.weight.device.type, layer.weight.dtype) == ("cpu", torch.float32)
        assert not isinstance(nn.Linear(2, 2).weight, ColoParameter)


def by_stage(stage: int, **adam: Any) -> list[float]:
    documents.launch_from_torch({})
    with documents.zero.ColoInitContext(device="cpu"):
        model = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 4))
    optimizer = documents.nn.optimizer.HybridAdam(model.parameters(), **adam)
    config = {"strict_ddp_mode": True, "device": "cpu", "placement_policy": "cpu", "pin_memory": True}
    wrapped = documents.zero.zero_model_wrapper(model, stage, config if stage == 3 else None)
    return train(wrapped, documents.zero.zero_optim_wrapper(wrapped, optimizer, initial_scale=2**5))


def test_one_program_launched_twice_has_the_losses_of_states_on_disk(tmp_path: Path) -> None:
    plain = by_stage(3)
    assert by_stage(3, nvme_offload_fraction=1.0, nvme_offload_dir=str(tmp_path)) == plain
    assert by_stage(1) != plain  # the model's own precision


@pytest.mark.parametrize("name", ["GeminiPlugin", "LowLevelZeroPlugin"])
def test_plugins_compute_in_fp16_unless_told_otherwise(name: str) -> None:
    def run(package: Any, booster: dict[str, Any], **options: Any) -> list[float]:
        model = model_of()
        optimizer = gemini.HybridAdam(model.parameters(), lr=1e-2)
        plugin = getattr(package.booster.plugin, name)(initial_scale=2**5, **options)
        return train(*package.booster.Booster(plugin=plugin, **booster).boost(model, optimizer)[:2])

    half, brain = (
        run(gemini.parallel, {"mixed_precision": "fp16"}),
        run(gemini.parallel, {"mixed_precision": "bf16"}),
    )
    plain = run(gemini.parallel, {})
    assert len({tuple(half), tuple(brain), tuple(plain)}) == 3
    assert run(documents, {}) == half
    assert run(documents, {"mixed_precision": "fp16"}) == half
    assert run(documents, {"mixed_precision": "bf16"}) == brain
    assert run(documents, {}, precision="bf16") == brain
    assert run(documents, {}, precision="fp32") == plain
    with pytest.raises(ConfigError, match="precision is 'fp8'; it may be fp16, bf16, fp32"):
        getattr(documents.booster.plugin, name)(precision="fp8")


# -- mixed precision by type -----------------------------------------------------------------------


def test_types_of_mixed_precision_are_those_of_a_booster() -> None:
    convert, types = documents.amp.convert_to_amp, documents.amp.AMP_TYPE

    def run(mode: Any, config: dict[str, Any] | None = None) -> list[float]:
        model = model_of()
        return train(*convert(model, torch.optim.SGD(model.parameters(), lr=0.1), None, mode, config)[:2])

    model = model_of()
    booster = gemini.parallel.Booster("fp16", gemini.parallel.TorchDDPPlugin())
    want = train(*booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1))[:2])
    assert run(types.TORCH) == run(types.APEX) == run(types.APEX, {"opt_level": "O1"}) == want
    assert run(types.APEX, {"enabled": False}) == run(types.APEX, {"opt_level": "O0"}) != want
    assert run(types.TORCH, {"enabled": False}) != run(types.APEX, {"enabled": False})
    assert len(run(types.NAIVE, {"initial_scale": 2**5, "log_num_zeros_in_grad": False})) == 3
    model = model_of()
    half, _, criterion = convert(model, torch.optim.SGD(model.parameters()), len, types.NAIVE)
    assert criterion is len
    assert {param.dtype for param in half.parameters()} == {torch.float16}
    for mode, config, error in (
        (types.APEX, {"opt_level": "O2"}, ConfigError),
        (types.APEX, {"keep_batchnorm_fp32": True}, ConfigError),
        (types.TORCH, {"initial_scale": 2}, TypeError),
        ("torch", None, ConfigError),
    ):
        with pytest.raises(error):
            run(mode, config)


# -- checkpoints -----------------------------------------------------------------------------------


def test_what_one_way_to_train_saved_another_one_loads(tmp_path: Path) -> None:
    file = tmp_path / "ckpt" / "xxx.pt"
    with documents.nn.parallel.GeminiDDP(model_of()) as model:
        optimizer = documents.zero.GeminiAdamOptimizer(model, lr=1e-2, initial_scale=2**5)
        train(model, optimizer)
        documents.utils.save_checkpoint(file, 7, model)
        want = model.state_dict()
    plain = model_of(4)
    assert documents.utils.load_checkpoint(file, plain) == 7
    assert all(torch.equal(value, want[name]) for name, value in plain.state_dict().items())


def test_optimizer_and_scheduler_go_along(tmp_path: Path) -> None:
    def make() -> tuple[nn.Module, torch.optim.Optimizer, Any]:
        model = model_of()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        return model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 1)

    model, optimizer, scheduler = make()
    model(batches()[0]).sum().backward()
    optimizer.step()
    scheduler.step()
    documents.utils.save_checkpoint(tmp_path / "all.pt", 1, model, optimizer, scheduler)
    documents.utils.save_checkpoint(tmp_path / "model.pt", 1, model)
    other = make()
    with pytest.raises(CheckpointError, match="has no optimizer"):
        documents.utils.load_checkpoint(tmp_path / "model.pt", *other)
    assert documents.utils.load_checkpoint(tmp_path / "all.pt", *other) == 1
    assert other[2].get_last_lr() == scheduler.get_last_lr()
    moments = [state["momentum_buffer"] for state in other[1].state.values()]
    kept = [state["momentum_buffer"] for state in optimizer.state.values()]
    assert all(torch.equal(one, two) for one, two in zip(moments, kept, strict=True))


def test_files_that_are_none_are_named(tmp_path: Path) -> None:
    with pytest.raises(IoError, match=r"missing\.pt"):
        documents.utils.load_checkpoint(tmp_path / "missing.pt", model_of())
    (tmp_path / "other.pt").write_bytes(b"other")
    with pytest.raises(CheckpointError, match="was not written by save_checkpoint"):
        documents.utils.load_checkpoint(tmp_path / "other.pt", model_of())
    for content in (model_of().state_dict(), torch.ones(2)):
        torch.save(content, tmp_path / "state.pt")
        with pytest.raises(CheckpointError, match=r"model\.load_state_dict\(torch\.load\(file\)\)"):
            documents.utils.load_checkpoint(tmp_path / "state.pt", model_of())


def test_a_save_that_fails_leaves_the_earlier_file(tmp_path: Path) -> None:
    file, model = tmp_path / "xxx.pt", model_of()
    documents.utils.save_checkpoint(file, 1, model)
    model.register_buffer("odd", torch.zeros(1))
    model.odd.share_memory_()
    with pytest.raises(Exception, match="pickle"):
        documents.utils.save_checkpoint(file, lambda: 2, model)  # type: ignore[arg-type]
    assert documents.utils.load_checkpoint(file, model_of(5)) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["xxx.pt"]


def test_small_things() -> None:
    documents.launch(rank=0, world_size=1)
    assert not documents.utils.is_using_pp()
    assert documents.utils.get_current_device() == gemini.system.device.current_device()
    assert documents.core.global_context.get_global_rank() == 0
    assert documents.__version__ == gemini.__version__
    assert Version(documents.__version__) > Version("0.1.10")
