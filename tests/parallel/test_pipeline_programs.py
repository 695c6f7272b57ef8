"""What programs do beside training in stages: tasks by name, counts, freezing, penalties, empty batches."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from pipeline_harness import ADAM, CHUNKS
from pipeline_models import VOCAB, WIDTH, Block, Model, batch_of, build, loss_of
from processes import run_on_ranks
from torch import Tensor, nn

from gemini import ConfigError, CPUAdam, StateError
from gemini.parallel import Booster, HybridParallelPlugin
from gemini.parallel.pipeline.batches import cut_batch

Batch = Any
MICRO = 4


def _one_process(
    kind: type[Model],
    batches: Callable[[int], Batch],
    criterion: Callable[[Any, Any], Tensor],
    before: Callable[[nn.Module, int], None],
    weight: Callable[[Any], float] | None,
) -> list[float]:
    """The losses of three steps, micro-batch by micro-batch."""
    model, losses = build(kind), []
    optimizer = CPUAdam(model.parameters(), **ADAM)
    for step in range(3):
        before(model, step)
        parts = cut_batch(batches(step), MICRO)
        weights = [1.0 if weight is None else weight(part) for part in parts]
        total = 0.0
        for part, by in zip(parts, weights, strict=True):
            out = model(**part) if isinstance(part, dict) else model(part)
            if by:
                loss = criterion(out, part) * by / sum(weights)
                loss.backward()
                total += loss.item()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    return losses


def _in_stages(
    layout: Mapping[str, Any],
    kind: type[Model],
    batches: Callable[[int], Batch],
    criterion: Callable[[Any, Any], Tensor],
    before: Callable[[nn.Module, int], None],
    weight: Callable[[Any], float] | None,
) -> list[float] | str:
    options = {} if layout.get("zero_stage", 3) < 3 else CHUNKS
    plugin = HybridParallelPlugin(num_microbatches=MICRO, **layout, **options)
    booster, model = Booster(plugin=plugin), build(kind)
    model, optimizer, *_ = booster.boost(model, CPUAdam(model.parameters(), **ADAM))
    losses = []
    try:
        for step in range(3):
            before(model.module, step)
            batch = batches(step)
            out = booster.execute_pipeline(iter([batch]), model, criterion, optimizer, count=weight)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(float(out["loss"]))
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return losses


def nothing(_model: nn.Module, _step: int) -> None:
    pass


class ByTask(Model):
    """A batch names a task, by which blocks get the choice of a router in front."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Scaled() for _ in range(4))
        self.router = nn.Linear(WIDTH, 3)

    def forward(self, ids: Tensor, task: str = "a") -> Tensor:
        x = self.embed(ids)
        choice = self.router(x).argmax(-1) if task == "b" else torch.zeros_like(ids)
        for block in self.blocks:
            x = block(x, choice)
        return self.head(x)


class Scaled(Block):
    def forward(self, x: Tensor, choice: Tensor) -> Tensor:
        return super().forward(x) * (1 + 0.2 * choice.unsqueeze(-1))


def of_tasks(step: int) -> dict[str, Any]:
    return {"ids": batch_of(step), "task": "ab"[step % 2]}


def of_ids(output: Tensor, batch: dict[str, Any]) -> Tensor:
    return loss_of(output, batch["ids"])


class CountingBlock(Block):
    """A block that counts its calls, in a number, a tensor and a buffer that it replaces."""

    def __init__(self) -> None:
        super().__init__()
        self.calls, self.seen = 0, torch.zeros(1)
        self.register_buffer("mean", torch.zeros(1))

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        self.calls += 1
        self.seen += 1
        self.mean = self.mean + x.detach().mean()
        y: Tensor = super().forward(x) / (1 + 0.1 * self.calls) + 0.01 * self.seen + self.mean
        return y


class Counted(Model):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(CountingBlock() for _ in range(4))


class CountedAround(Model):
    """Counts its passes, and the program sets the count anew."""

    def forward(self, ids: Tensor) -> Tensor:
        self.calls += 1
        return self.head(self.through(self.embed(ids))) / self.calls


def begin_again(model: nn.Module, _step: int) -> None:
    model.calls = 0  # type: ignore[assignment]


class CountedInBuffer(Model):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("passes", torch.zeros(()))

    def forward(self, ids: Tensor) -> Tensor:
        self.passes.add_(1)
        return self.head(self.through(self.embed(ids)) + 0.1 * self.passes)


class Tied(Model):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)
        self.head.weight = self.embed.weight


class TurnedBlock(Block):
    """Gets tensors in a tuple, by its keyword, and returns a tuple."""

    def forward(self, x: Tensor, *, turn: Any) -> Any:  # type: ignore[override]
        cos, sin = turn
        y: Tensor = super().forward(x) * cos + x.flip(-1) * sin
        return y, None


class Turned(Model):
    """More blocks than its tensors have dimensions: what is taken for a tuple loses one at each."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(TurnedBlock() for _ in range(10))

    def through(self, x: Tensor) -> Tensor:
        angles = 0.1 * torch.arange(x.size(1)).unsqueeze(-1)
        for block in self.blocks:
            x = block(x, turn=(angles.cos(), angles.sin()))[0]
        return x


def freeze_embedding(model: nn.Module, step: int) -> None:
    if step == 1:
        model.embed.weight.requires_grad_(False)  # type: ignore[union-attr]


def unfreeze_embedding(model: nn.Module, step: int) -> None:
    freeze_embedding(model, step)
    if step == 2:
        model.embed.weight.requires_grad_(True)  # type: ignore[union-attr]


def freeze_the_rear(model: nn.Module, step: int) -> None:
    """All that the second of two stages has; gradients go through it."""
    if step == 1:
        for module in (*model.blocks[2:], model.head):  # type: ignore[index]
            for param in module.parameters():  # type: ignore[union-attr]
                param.requires_grad_(False)


class Criterion(nn.Module):
    """Counts how often it was called, and says so in the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, output: Tensor, ids: Tensor) -> Tensor:
        self.calls += 1
        return loss_of(output, ids) * (1 + 0.1 * self.calls)


CASES: dict[str, tuple[Any, ...]] = {
    "tasks": (ByTask, of_tasks, of_ids, nothing, None),
    "tuples": (Turned, batch_of, loss_of, nothing, None),
    "blocks that count": (Counted, batch_of, loss_of, nothing, None),
    "counts that are set": (CountedAround, batch_of, loss_of, begin_again, None),
    "a tied weight frozen": (Tied, batch_of, loss_of, freeze_embedding, None),
    "and trained again": (Tied, batch_of, loss_of, unfreeze_embedding, None),
    "stages frozen": (Model, batch_of, loss_of, freeze_the_rear, None),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(
    "layout",
    [{"pp_size": 2}, {"pp_size": 2, "zero_stage": 1}, {"pp_size": 2, "pp_style": "zbv"}],
    ids=["chunks", "zero 1", "zbv"],
)
def test_programs_train_as_one_process(layout: dict[str, Any], case: str) -> None:
    expected = _one_process(*CASES[case])
    for losses in run_on_ranks(_in_stages, 2, layout, *CASES[case]):
        assert losses == pytest.approx(expected, rel=1e-5)


def test_a_criterion_that_counts_is_not_counted_while_a_model_is_looked_at() -> None:
    expected = _one_process(Model, batch_of, Criterion(), nothing, None)
    for losses in run_on_ranks(_in_stages, 2, {"pp_size": 2}, Model, batch_of, Criterion(), nothing, None):
        assert losses == pytest.approx(expected, rel=1e-5)


def _with_empty_parts(step: int) -> Tensor:
    ids = batch_of(step)
    ids[2:4] = 0  # the second micro-batch
    return ids


def _counted(ids: Tensor) -> float:
    return float((ids != 0).sum())


def _mean_of_counted(output: Tensor, ids: Tensor) -> Tensor:
    each = nn.functional.cross_entropy(output.flatten(0, 1), ids.flatten(), reduction="none")
    counts = (ids != 0).flatten()
    return (each * counts).sum() / counts.sum()


@pytest.mark.parametrize("pp_size", [1, 2])
def test_a_micro_batch_that_counts_nothing_leaves_gradients_alone(pp_size: int) -> None:
    case = (Model, _with_empty_parts, _mean_of_counted, nothing, _counted)
    for losses in run_on_ranks(_in_stages, pp_size, {"pp_size": pp_size}, *case):
        assert losses == pytest.approx(_one_process(*case), rel=1e-5)


def test_a_rank_on_which_nothing_trains_updates_with_the_others() -> None:
    """Two copies of two stages in chunks; the second stages are frozen."""
    case = (Model, batch_of, loss_of, freeze_the_rear, None)
    for losses in run_on_ranks(_in_stages, 4, {"pp_size": 2}, *case):
        assert losses == pytest.approx(_one_process(*case), rel=1e-5)


def test_a_buffer_that_two_stages_of_a_rank_would_write_to_is_refused() -> None:
    case = (CountedInBuffer, batch_of, loss_of, nothing, None)
    for losses in run_on_ranks(_in_stages, 2, {"pp_size": 2}, *case):
        assert losses == pytest.approx(_one_process(*case), rel=1e-5)
    said = run_on_ranks(_in_stages, 2, {"pp_size": 2, "pp_style": "zbv"}, *case)
    assert all("writes to the buffer 'passes'" in each for each in said)


def _detached(output: Tensor, ids: Tensor) -> Tensor:
    return loss_of(output, ids).detach()


def test_a_loss_without_a_gradient_is_refused() -> None:
    case = (Model, batch_of, _detached, nothing, None)
    assert any(
        "detached the loss from autograd" in each
        for each in run_on_ranks(_in_stages, 2, {"pp_size": 2}, *case)
    )


def _read_within() -> str:
    plugin = HybridParallelPlugin(pp_size=2, num_microbatches=MICRO, **CHUNKS)
    booster, model = Booster(plugin=plugin), build(Tied)
    model, optimizer, *_ = booster.boost(model, CPUAdam(model.parameters(), **ADAM))
    booster.execute_pipeline(iter([batch_of(0)]), model, loss_of, optimizer)
    for param in model.parameters():
        optimizer.get_param_grad(param)
    booster.execute_pipeline(iter([batch_of(1)]), model, loss_of, optimizer)
    try:
        optimizer.step()
    except StateError as error:
        return str(error)
    return ""


def test_sums_over_stages_are_not_added_to() -> None:
    assert all("in the middle of an accumulation" in said for said in run_on_ranks(_read_within, 2))


class _Encoding(Mapping):  # type: ignore[type-arg]
    """What is a mapping and no dict, as a tokenizer returns it."""

    def __init__(self, **values: Tensor) -> None:
        self.values_by_name = values

    def __getitem__(self, name: str) -> Tensor:
        return self.values_by_name[name]

    def __iter__(self) -> Any:
        return iter(self.values_by_name)

    def __len__(self) -> int:
        return len(self.values_by_name)


def test_other_mappings_are_cut_as_dicts() -> None:
    ids = batch_of(0)
    first, second = cut_batch(_Encoding(ids=ids), 2)
    assert torch.equal(torch.cat([first["ids"], second["ids"]]), ids)
    inputs, targets = cut_batch((_Encoding(ids=ids), ids), 2)[1]
    assert torch.equal(inputs["ids"], targets)
    with pytest.raises(ConfigError, match="first dimension"):
        cut_batch(_Encoding(ids=ids, more=ids[1:]), 2)
