"""Stages that a program has built itself train as those of the whole model, and are saved as it."""

from __future__ import annotations

import copy
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from processes import run_on_ranks
from torch import Tensor, nn

import gemini.compat as documents
from gemini import ConfigError, GeminiError, HybridAdam
from gemini.parallel import Booster, HybridParallelPlugin, Layout, Mesh
from gemini.parallel.engine import (
    InterleavedPipelineSchedule,
    PipelineSchedule,
    build_pipeline_model,
    build_pipeline_model_from_cfg,
    initialize,
)
from gemini.parallel.launch import LAYERS, MODELS, ParallelMode, global_context, launch_from_torch, shutdown
from gemini.parallel.pipeline import BuiltStages, PipelinableContext, SharedParameters
from gemini.parallel.tensor.nn import Linear

STEPS = 3


@LAYERS.register_module
class Embed(nn.Module):
    """The first layer: rows of its table."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(11, 8))

    def forward(self, tokens: Tensor) -> Tensor:
        return self.table[tokens].mean(1)


def layers() -> nn.Sequential:
    torch.manual_seed(5)
    return nn.Sequential(Embed(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))


def batches() -> list[tuple[Tensor, Tensor]]:
    tokens = torch.randint(11, (STEPS, 8, 4), generator=torch.Generator().manual_seed(1))
    return [(batch, batch[:, 0] % 8) for batch in tokens]


def plain() -> list[float]:
    model = layers()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    losses = []
    for tokens, label in batches():
        loss = nn.functional.cross_entropy(model(tokens), label)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        losses.append(loss.item())
    return losses


def train(stages: nn.Module, adam: type[torch.optim.Optimizer], *, compat: bool = False) -> list[float]:
    optimizer = adam(stages.parameters(), lr=1e-2)  # type: ignore[call-arg]
    if compat:  # where the model is this rank's stages as it is
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            engine, *_ = documents.initialize(stages, optimizer, nn.CrossEntropyLoss())
    else:
        engine, *_ = initialize(BuiltStages.of(stages), optimizer, nn.CrossEntropyLoss())
    assert type(engine.schedule) is (
        InterleavedPipelineSchedule if isinstance(stages, nn.ModuleList) else PipelineSchedule
    )
    data, losses = iter(batches()), []
    with pytest.raises(ConfigError, match=r"call engine\.execute_schedule"):
        engine.model(batches()[0][0])
    for _ in range(STEPS):
        engine.zero_grad()
        losses.append(float(engine.execute_schedule(data, return_output_label=False)[2]))
        engine.step()
    return losses


DESCRIBED = [
    {"type": "Embed"},
    {"type": "Linear", "in_features": 8, "out_features": 8},
    {"type": nn.Tanh},
    {"type": "Linear", "in_features": 8, "out_features": 8},
    {"type": "Tanh"},
    {"type": "Linear", "in_features": 8, "out_features": 8},
]


@MODELS.register_module
class Described:
    """A model that says its layers, as documents' models do."""

    def __new__(cls) -> Any:
        model = nn.Module()
        model.layers_cfg = DESCRIBED  # type: ignore[assignment]
        return model


def every_way(directory: str) -> dict[str, Any]:
    """Build stages in each of the documents' ways, on two ranks; return losses and numbers of layers."""
    found: dict[str, Any] = {}
    file = Path(directory, f"model{torch.distributed.get_rank()}.py")
    file.write_text("model = [dict(type='Embed'), *(dict(type='Identity') for _ in range(5))]")
    for chunks in (1, 2):
        config = {"parallel": {"pipeline": 2}, "NUM_MICRO_BATCHES": 4, "clip_grad_norm": 0.1}
        launch_from_torch(config)
        stages = build_pipeline_model(layers(), num_chunks=chunks, verbose=True)
        found[f"sequential {chunks}"] = train(stages, HybridAdam)
        found[f"torch's Adam {chunks}"] = train(build_pipeline_model(layers(), chunks), torch.optim.Adam)
        context = PipelinableContext("uniform")
        with context:
            layers()
        noted = context.partition(chunks, 2, global_context.get_local_rank(ParallelMode.PIPELINE))
        found[f"noted {chunks}"] = train(noted, torch.optim.Adam, compat=True)
        torch.manual_seed(5)
        for what in (DESCRIBED, {"type": "Described"}):
            torch.manual_seed(5)
            described = build_pipeline_model_from_cfg(what, chunks, "layer")
            found[f"described {chunks} {type(what).__name__}"] = train(described, HybridAdam)
        found[f"sizes {chunks}"] = (
            len(build_pipeline_model_from_cfg(str(file))),
            len(build_pipeline_model_from_cfg(file, partition_method="layer")),
        )
        shutdown()
    return found


def test_every_way_to_build_stages_has_the_losses_of_the_whole_model(tmp_path: Path) -> None:
    want = plain()
    first, last = run_on_ranks(every_way, 2, str(tmp_path))
    for name, losses in first.items():
        if not name.startswith("sizes"):
            assert losses == last[name] == pytest.approx(want, rel=1e-4), name
    assert first["sizes 1"] == (1, 3)
    assert last["sizes 1"] == (5, 3)


# -- shared weights, files, parts of layers ------------------------------------------------------------


class Tied(nn.Module):
    """A stage of a model whose head is its embedding."""

    def __init__(self, first: bool, last: bool, kind: type[nn.Module]) -> None:
        super().__init__()
        torch.manual_seed(5)
        table, blocks = nn.Embedding(12, 8), [kind(8, 16), kind(16, 8), kind(8, 16), kind(16, 8)]
        self.table = table if first or last else None
        self.blocks = nn.Sequential(*(blocks if first and last else blocks[:2] if first else blocks[2:]))
        self.first, self.last = first, last

    def forward(self, hidden: Tensor | None = None, tokens: Tensor | None = None, mask: Any = None) -> Tensor:
        assert mask is not None
        if self.first:
            assert self.table is not None
            hidden = self.table(tokens)
        hidden = self.blocks(hidden) * mask[..., None]
        return hidden @ self.table.weight.T if self.last else hidden  # type: ignore[union-attr]


def train_tied(directory: str, sizes: dict[str, Any], adam: str) -> Any:
    launch_from_torch({"parallel": sizes, "NUM_MICRO_BATCHES": 2, "clip_grad_norm": 0.05})
    rank = global_context.mesh.axis("pp").rank if sizes.get("pipeline") else 0
    alone = not sizes.get("pipeline")
    stage = Tied(alone or rank == 0, alone or rank == 1, Linear)
    if not alone:
        shared = SharedParameters(global_context.mesh.axis("pp"), [0, 1])
        with torch.no_grad():
            stage.table.weight.mul_(1.0 + rank)  # the first one's values are taken
        shared.register_module(stage.table)
    optimizer = (
        HybridAdam(stage.parameters(), lr=1e-2)
        if adam == "ours"
        else torch.optim.SGD(stage.parameters(), lr=2.0, momentum=0.9)  # which feels the norm
    )
    pp, tp = global_context.pipeline_parallel_size, global_context.tensor_parallel_size
    options = {"num_microbatches": 2, "zero_stage": 3 if adam == "ours" else 1}
    if adam != "ours":
        options["max_norm"] = 0.05
    plugin = HybridParallelPlugin(tp_size=tp, pp_size=pp, **options)
    booster = Booster(plugin=plugin)
    model, optim, *_ = booster.boost(BuiltStages(stage), optimizer)
    losses = []
    for tokens, label in batches():
        batch = ({"tokens": tokens, "mask": torch.ones(8, 4), "unused": tokens}, label)
        if alone:
            batch[0].pop("unused")
        done = booster.execute_pipeline(
            iter([batch]), model, lambda out, b: nn.functional.cross_entropy(out.mean(1), b[1]), optim
        )
        if adam == "ours":
            optim.clip_grad_by_norm(0.05)
        optim.step()
        optim.zero_grad()
        losses.append(float(done["loss"]))
    name = f"{adam}-{pp}-{tp}"
    booster.save_model(model, f"{directory}/{name}")
    booster.save_optimizer(optim, f"{directory}/{name}-optimizer")
    before = {key: value.detach().clone() for key, value in model.state_dict(keep_vars=True).items()}
    with torch.no_grad():
        for param in model.parameters():
            param.zero_()
    booster.load_model(model, f"{directory}/{name}")
    booster.load_optimizer(optim, f"{directory}/{name}-optimizer")
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict(keep_vars=True).items())
    shutdown()
    from safetensors import safe_open

    files = sorted(Path(directory, name).glob("*.safetensors")) or [Path(directory, name)]
    kept = {}
    for file in files:
        with safe_open(file, "pt") as opened:
            kept.update({key: opened.get_tensor(key) for key in opened.keys()})  # noqa: SIM118
    return losses, {key: tuple(value.shape) for key, value in kept.items()}, kept


@pytest.mark.parametrize("adam", ["ours", "SGD"])
def test_weights_that_stages_share_are_one_in_numbers_norms_and_files(tmp_path: Path, adam: str) -> None:
    ((want, _, whole),) = run_on_ranks(train_tied, 1, str(tmp_path), {}, adam)
    for losses, shapes, kept in run_on_ranks(train_tied, 2, str(tmp_path), {"pipeline": 2}, adam):
        assert losses == pytest.approx(want, rel=1e-4)
        assert set(shapes) == {"stage0.table.weight"} | {
            f"stage{stage}.blocks.{block}.{what}"
            for stage in (0, 1)
            for block in (0, 1)
            for what in ("weight", "bias")
        }
        torch.testing.assert_close(
            kept["stage0.table.weight"], whole["stage0.table.weight"], rtol=1e-3, atol=1e-5
        )


def test_stages_of_layers_over_ranks_are_saved_whole(tmp_path: Path) -> None:
    ((want, shapes, _),) = run_on_ranks(train_tied, 1, str(tmp_path), {}, "SGD")
    sizes = {"pipeline": 2, "tensor": {"size": 2, "mode": "1d"}}
    for losses, parts, _ in run_on_ranks(train_tied, 4, str(tmp_path), sizes, "SGD"):
        assert losses == pytest.approx(want, rel=1e-4)
        assert sorted(parts.values()) == sorted(shapes.values())


# -- what is refused ----------------------------------------------------------------------------------


class Pair(nn.Linear):
    def forward(self, x: Tensor) -> Any:
        return super().forward(x), x


def refuse(what: str) -> str:
    axis = Mesh(Layout(pp=2)).axis("pp")
    assert axis is not None
    plugin = HybridParallelPlugin(pp_size=2, zero_stage=0)
    chunks: list[nn.Module] = [Pair(2, 2) if what == "pair" else nn.Linear(2, 2)]
    if what == "chunks" and axis.rank:
        chunks.append(copy.deepcopy(chunks[0]))
    shared = SharedParameters(axis, [0, 1])
    shared.register_module(nn.Linear(2, 2) if what == "shared" and axis.rank else chunks[0])
    built = BuiltStages(*chunks)
    optimizer = torch.optim.SGD(built.parameters(), lr=0.1)
    booster = Booster(plugin=plugin)
    try:
        model, optim, *_ = booster.boost(built, optimizer)
        booster.execute_pipeline(iter([torch.ones(2, 2)]), model, lambda out, _: out.sum(), optim)
    except GeminiError as error:
        return str(error)
    return "nothing"


def test_what_is_no_pipeline_is_refused_on_all_ranks() -> None:
    for what, message in (
        ("chunks", r"built \[1, 2\] stages, but each needs 1"),
        ("shared", r"on ranks \[1\] no parameter of the stages is registered"),
        ("pair", "stage 0 returned a tuple, but a built stage passes exactly one tensor"),
    ):
        for text in run_on_ranks(refuse, 2, what):
            assert message.replace("\\", "") in text
    with pytest.raises(ConfigError, match=r"of this rank, BuiltStages\(stage\)"):
        BuiltStages()


def test_what_describes_no_row_of_layers_is_refused(tmp_path: Path) -> None:
    launch_from_torch({})
    (tmp_path / "none.py").write_text("layers = 3")
    for config, message in (
        (tmp_path / "none.py", "has no model"),
        ([{"type": "Nothing"}], "LAYERS has no 'Nothing'"),
        ([{"in_features": 3}], "does not describe a module"),
        ([{"type": "Parameter"}], "is no nn.Module"),
        ({"type": "Nothing"}, "MODELS has no 'Nothing'"),
        ({"type": "Module"}, "has no layers_cfg"),
        (DESCRIBED[:0], "0 layers"),
    ):
        with pytest.raises(ConfigError, match=message):
            build_pipeline_model_from_cfg(config)
    with pytest.raises(ConfigError, match="'parameter' or 'layer'"):
        build_pipeline_model_from_cfg(DESCRIBED, partition_method="random")
    with pytest.raises(ConfigError, match=r"the model is a Linear"):
        build_pipeline_model(nn.Linear(2, 2))  # type: ignore[arg-type]
    assert len(build_pipeline_model(layers())) == 6  # type: ignore[arg-type]
    shutdown()
