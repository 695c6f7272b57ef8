"""Stages of a model, run one after another, give the bits of the whole one, and hold their own part alone."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from pipeline_harness import language
from tensor_harness import WIDTH, Language
from torch import Tensor, nn

from gemini.errors import ConfigError
from gemini.parallel.pipeline.split import StagedModel, choose_ranges, split
from gemini.parallel.pipeline.stage_pass import StageInputs
from gemini.parallel.pipeline.units import find_units

IDS = torch.arange(12).view(2, 6)


def convolutional() -> nn.Module:
    """A plain row of layers whose tensors change their shape."""
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(8, 16, 3),
        nn.Flatten(),
        nn.Linear(64, 5),
    )


class Around(nn.Module):
    """Weights of its own around blocks that return more than a tensor, and take more than one."""

    def __init__(self, *, late_norm: bool = False) -> None:
        super().__init__()
        self.start = nn.Parameter(torch.ones(WIDTH))
        self.embed = nn.Embedding(37, WIDTH)
        if late_norm:
            self.norm = nn.LayerNorm(WIDTH)
        self.blocks = nn.ModuleList(Pair() for _ in range(4))
        if not late_norm:
            self.norm = nn.LayerNorm(WIDTH)
        self.register_buffer("scale", torch.tensor(0.5))

    def forward(self, ids: Tensor) -> dict[str, Tensor]:
        x = self.embed(ids) + self.start
        for block in self.blocks:
            x, _ = block(hidden=x, scale=self.scale)
        return {"out": self.norm(x)}


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden: Tensor, scale: Tensor) -> tuple[Tensor, None]:
        return torch.tanh(self.inner(hidden)) * scale, None


class Biased(nn.Module):
    """Blocks that take, beside their input, what the front has computed; ``outside``: and it is changed, or
    added, between two blocks."""

    def __init__(self, *, frozen: bool = False, outside: str = "") -> None:
        super().__init__()
        self.outside = outside
        self.embed = nn.Embedding(37, WIDTH).requires_grad_(not frozen)
        self.blocks = nn.ModuleList(Adding() for _ in range(4))

    def forward(self, ids: Tensor) -> Tensor:
        first = x = self.embed(ids)
        for block in self.blocks:
            given = block(x, first * 2 if self.outside == "changed" else first)
            x = x + given if self.outside == "added" else given
        return x


class Adding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, first: Tensor) -> Tensor:
        out: Tensor = self.inner(x) + first
        return out


def staged(
    build: Callable[[], nn.Module], own: tuple[int, ...], num_stages: int = 4, **how: Any
) -> StagedModel:
    """The model with some of its stages."""
    torch.manual_seed(4)
    model = build()
    units = find_units(model, **how)
    return split(model, units, choose_ranges(model, units, num_stages, "layers"), own)


def run_all(parts: list[StagedModel], *args: Tensor) -> Any:
    """Run the stages of all parts in order."""
    stages = sorted((stage for part in parts for stage in part.stages), key=lambda stage: stage.index)
    takes = [stage.takes(args, {}) if stage.index else StageInputs() for stage in stages]
    out: Any = ()
    for stage, own, following in zip(stages, takes, [*takes[1:], StageInputs()], strict=True):
        out = stage.run(out, own, following, args, {})
    return out


class Halves(nn.Module):
    """An encoder and a decoder of torch's own layers, with weights between them."""

    def __init__(self) -> None:
        super().__init__()
        sizes = {"d_model": WIDTH, "nhead": 4, "dim_feedforward": 16, "dropout": 0.0, "batch_first": True}
        self.embed = nn.Embedding(37, WIDTH)
        layer, norm = nn.TransformerEncoderLayer(**sizes), nn.LayerNorm(WIDTH)
        self.encoder = nn.TransformerEncoder(layer, 2, norm, enable_nested_tensor=False)
        self.start = nn.Embedding(37, WIDTH)
        self.decoder = nn.TransformerDecoder(nn.TransformerDecoderLayer(**sizes), 2, nn.LayerNorm(WIDTH))
        self.head = nn.Linear(WIDTH, 37)

    def forward(self, ids: Tensor) -> Tensor:
        memory = self.encoder(self.embed(ids))
        out: Tensor = self.head(self.decoder(self.start(ids.flip(1)), memory))
        return out


class Early(Halves):
    """Has the decoder's input made in front of the encoder, past which nothing carries it."""

    def forward(self, ids: Tensor) -> Tensor:
        start = self.embed(ids.flip(1))
        out: Tensor = self.head(self.decoder(start, self.encoder(self.embed(ids))))
        return out


ROWS = [f"{half}.layers.{index}" for half in ("encoder", "decoder") for index in range(2)]


CASES: dict[str, tuple[Callable[[], nn.Module], Tensor]] = {
    "tied": (lambda: Language(), IDS),
    "untied": (lambda: Language(tied=False), IDS),
    "convolutional": (convolutional, torch.ones(2, 3, 8, 8)),
    "weights around": (Around, IDS),
    "blocks that share a tensor": (Biased, IDS),
    "blocks that share a frozen one": (lambda: Biased(frozen=True), IDS),
    "halves": (Halves, IDS),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("owned", [[(0,), (1,), (2,), (3,)], [(0, 3), (1, 2)], [(0, 2), (1, 3)]])
def test_stages_give_the_bits_of_the_whole(name: str, owned: list[tuple[int, ...]]) -> None:
    build, inputs = CASES[name]
    torch.manual_seed(4)
    whole = build()
    how = {"blocks": ROWS} if name == "halves" else {}
    parts = [staged(build, own, **how) for own in owned]
    wanted, got = whole(inputs), run_all(parts, inputs)
    for a, b in (
        zip(got.values(), wanted.values(), strict=True) if isinstance(wanted, dict) else [(got, wanted)]
    ):
        assert torch.equal(a, b)
    states = [part.module.state_dict() for part in parts]
    assert set().union(*states) == set(whole.state_dict())
    for state in states:
        assert all(torch.equal(value, whole.state_dict()[key]) for key, value in state.items())


def test_a_stage_holds_its_own_part_alone() -> None:
    counts = [
        sum(p.numel() for p in staged(lambda: Language(tied=False), (i,)).module.parameters())
        for i in range(4)
    ]
    assert sum(counts) == sum(p.numel() for p in Language(tied=False).parameters())


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("owned", [[(0,), (1,), (2,), (3,)], [(0, 3), (1, 2)]])
def test_what_begins_on_meta_has_the_values_of_one_process(owned: list[tuple[int, ...]], tied: bool) -> None:
    def on_meta() -> nn.Module:
        with torch.device("meta"):
            return Language(tied=tied)

    drawn = staged(on_meta, (0, 1, 2, 3)).module.state_dict()
    torch.manual_seed(4)
    built = Language(tied=tied).state_dict()
    if not tied:  # a tied head draws, too, before it is tied
        assert all(torch.equal(value, built[key]) for key, value in drawn.items())
    for own in owned:
        state = staged(on_meta, own).module.state_dict()
        assert state
        assert all(torch.equal(value, drawn[key]) for key, value in state.items())


def test_train_and_eval_reach_every_stage_of_a_rank() -> None:
    part = staged(Around, (0, 3))
    part.module.eval()
    part.stages[0].run((), StageInputs(), StageInputs((0,), 2), (IDS,), {})
    assert not part.stages[0].tree.training


def test_a_model_in_stages_refuses_to_be_called() -> None:
    for own in ((0,), (3,), (0, 3)):
        with pytest.raises(ConfigError, match="execute_pipeline"):
            staged(Language, own).module(IDS)


def test_what_runs_behind_and_is_registered_before_is_found_or_named(monkeypatch: pytest.MonkeyPatch) -> None:
    build = lambda: Around(late_norm=True)  # noqa: E731
    torch.manual_seed(4)
    wanted = build()(IDS)["out"]
    assert torch.equal(run_all([staged(build, (i,)) for i in range(4)], IDS)["out"], wanted)
    monkeypatch.setattr("gemini.parallel.pipeline.units._order_of_calls", lambda *_: {})
    with pytest.raises(ConfigError, match=r"behind=\['norm'\]"):
        run_all([staged(build, (0,)), staged(build, (1, 2, 3))], IDS)
    parts = [staged(build, (i,), behind=["norm"]) for i in range(4)]
    assert torch.equal(run_all(parts, IDS)["out"], wanted)


@pytest.mark.parametrize("outside", ["changed", "added"])
def test_what_is_made_between_blocks_of_another_stage_is_refused(outside: str) -> None:
    build = lambda: Biased(outside=outside)  # noqa: E731
    with pytest.raises(ConfigError, match=r"blocks\.[12]' is called with 'argument \d', which"):
        run_all([staged(build, own) for own in ((0,), (1,))], IDS)


class Skipping(nn.Module):
    """Blocks, and behind them something of the front; ``what``: its output, its weight, or NaN of its own."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.what = what
        self.start = nn.Parameter(torch.ones(WIDTH))
        self.embed = nn.Embedding(37, WIDTH)
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, ids: Tensor) -> Tensor:
        first = x = self.embed(ids) + self.start
        for block in self.blocks:
            x = block(x)
        if self.what == "output":
            return x + first
        return x + self.start if self.what == "weight" else (x - x) / (x - x)


@pytest.mark.parametrize(("what", "refused"), [("output", True), ("weight", True), ("NaN", False)])
def test_what_another_stage_has_is_told_from_nan_of_the_models_own(what: str, refused: bool) -> None:
    *before, last = (staged(lambda: Skipping(what), (i,)).stages[0] for i in range(4))
    takes = [StageInputs(), *(stage.takes((IDS,), {}) for stage in [*before[1:], last])]
    received: tuple[Tensor, ...] = ()
    for stage, own, following in zip(before, takes, takes[1:], strict=False):
        received = stage.run(received, own, following, (IDS,), {})
    output = last.run(received, takes[-1], StageInputs(), (IDS,), {})
    with pytest.raises(ConfigError, match="the loss depends on") if refused else nullcontext():
        assert bool(last.judge(output.sum).isnan())


def test_what_no_block_is_called_with_on_the_way_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"decoder\.layers\.0' is called with 'argument 0'"):
        run_all([staged(Early, (i,), blocks=ROWS) for i in range(4)], IDS)


def test_a_dry_run_draws_no_random_numbers() -> None:
    stage = staged(Around, (1,)).stages[0]
    stage.tree.register_forward_pre_hook(lambda _module, args: (args[0] + torch.rand(6).long(),))
    before = torch.get_rng_state()
    assert stage.takes((IDS,), {}) == StageInputs((0,), 2)
    assert torch.equal(torch.get_rng_state(), before)


def test_a_block_that_runs_twice_is_refused_by_its_names() -> None:
    block = nn.Linear(3, 3)
    for row in ([block, nn.Linear(3, 3), block], [block] * 3):
        with pytest.raises(ConfigError, match=r"the block '0' is also '[12]'"):
            find_units(nn.Sequential(*row))


@dataclass
class Hidden:
    x: Tensor


class InDataclasses(nn.Module):
    """Blocks that hand dataclasses on."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Opening() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        hidden = Hidden(x)
        for block in self.blocks:
            hidden = block(hidden)
        return hidden.x


class Opening(nn.Linear):
    def __init__(self) -> None:
        super().__init__(3, 3)

    def forward(self, hidden: Hidden) -> Hidden:  # type: ignore[override]
        return Hidden(super().forward(hidden.x))


def test_dataclasses_between_blocks_are_refused_by_name() -> None:
    stage = staged(InDataclasses, (2,)).stages[0]
    with pytest.raises(ConfigError, match=r"'blocks\.0' is called with a Hidden.*register_dataclass"):
        stage.takes((torch.ones(2, 3),), {})


class Reading(nn.Module):
    """Looks at what the front returns, in each of some ways, or writes it into what is there."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.embed = nn.Embedding(37, WIDTH)
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.register_buffer("mean", torch.zeros(()))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        if self.how == "numpy":
            x = x * float(x.detach().numpy().max())
        elif self.how == "list":
            x = x * max(x.detach().amax((1, 2)).tolist())
        elif self.how == "count":
            x = x * len((x > 0).nonzero())
        elif self.how == "buffer":
            self.mean.mul_(0.9).add_(x.detach().mean())
        elif self.how == "chosen":
            y = torch.zeros(*ids.shape, WIDTH)
            y[ids > 3] = x[ids > 3]
            x = y + x.masked_select((ids > 5).unsqueeze(-1)).view(-1, WIDTH).mean(0)
        elif self.how == "ones":
            x = x * 2 if bool(torch.ones_like(x).all()) else x
        for block in self.blocks:
            x = block(x)
        return x


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("numpy", "reads the memory of a value that only another stage has"),
        (
            "list",
            r"a decision from a value that only another stage has .*test_pipeline_split\.py: x = x \* max",
        ),
        ("count", "makes a decision from a value that only another stage has .*nonzero"),
        ("buffer", "another stage's values into the buffer 'mean'"),
        ("chosen", ""),
        ("ones", ""),
    ],
)
def test_looks_at_what_another_stage_has_are_refused_and_masks_of_the_batch_are_known(
    how: str, said: str
) -> None:
    build = lambda: Reading(how)  # noqa: E731
    torch.manual_seed(4)
    wanted = build()(IDS)
    with pytest.raises(ConfigError, match=said) if said else nullcontext():
        assert torch.equal(run_all([staged(build, (i,)) for i in range(4)], IDS), wanted)


def test_every_weight_beside_blocks_has_its_stage() -> None:
    model = Halves()
    units = find_units(model, blocks=ROWS)
    assert units.front == ("embed",)
    assert units.between == (("start", 2), ("encoder.norm", 2))
    assert units.behind == ("head", "decoder.norm")
    for name in ("start", "encoder.norm"):
        assert [name in units.of_stage(*each) for each in ((0, 1), (1, 2), (2, 4))] == [False, True, False]


def test_models_that_cannot_be_cut_are_refused_with_a_way_out() -> None:
    with pytest.raises(ConfigError, match="blocks="):
        find_units(nn.Linear(3, 3))
    two = nn.ModuleDict({k: nn.ModuleList(nn.Linear(3, 3) for _ in range(2)) for k in "ab"})
    with pytest.raises(ConfigError, match="'a' and 'b'"):
        find_units(two)
    model = language()
    units = find_units(model)
    with pytest.raises(ConfigError, match="4 stages or fewer"):
        choose_ranges(model, units, 5)
    with pytest.raises(ConfigError, match="1 in ascending order"):
        choose_ranges(model, units, 2, ["blocks.2", "blocks.1"])
    with pytest.raises(ConfigError, match="no 'nothing'"):
        find_units(model, behind=["nothing"])


def test_boundaries_bytes_and_costs() -> None:
    model = language(tied=False)
    units = find_units(model)
    assert choose_ranges(model, units, 2, ["blocks.3"]) == ((0, 3), (3, 4))
    assert choose_ranges(model, units, 2, costs=[9, 1, 1, 1]) == ((0, 1), (1, 4))
    assert choose_ranges(model, units, 2) == ((0, 2), (2, 4))
    two = nn.ModuleDict({k: nn.ModuleList(nn.Linear(3, 3) for _ in range(2)) for k in "ab"})
    assert find_units(two, blocks=["a.0", "a.1", "b.0", "b.1"]).blocks == ("a.0", "a.1", "b.0", "b.1")
