"""What a stage makes of what another stage has: it is sent, whatever its type, or it is refused by name."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from pipeline_harness import ADAM, CHUNKS
from pipeline_models import (
    REFUSED,
    SENT,
    WIDTH,
    Block,
    CheckpointedAcross,
    Model,
    Normed,
    Reentrant,
    batch_of,
    build,
    loss_of,
    whole,
)
from processes import run_on_ranks
from safetensors.torch import load_file
from torch import Tensor, nn
from torch import distributed as dist

from gemini import ConfigError, CPUAdam, StateError
from gemini.parallel import Booster, HybridParallelPlugin
from gemini.parallel.pipeline.batches import kind_of


def _train(kind: type[Model], style: str, device_bytes: str) -> list[float] | str:
    plugin = HybridParallelPlugin(
        pp_size=2, pp_style=style, num_microbatches=4, device_bytes=device_bytes, host_bytes="16MiB", **CHUNKS
    )
    booster, model, losses = Booster(plugin=plugin), build(kind), []
    model, optimizer, *_ = booster.boost(model, CPUAdam(model.parameters(), **ADAM))
    try:
        for step in range(3):
            out = booster.execute_pipeline(iter([batch_of(step)]), model, loss_of, optimizer)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(float(out["loss"]))
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return losses


@pytest.mark.parametrize("style", ["1f1b", "zbv"])
@pytest.mark.parametrize("kind", SENT)
def test_stages_are_sent_masks_and_indices_and_may_count_and_write(kind: type[Model], style: str) -> None:
    roomy, tight = (run_on_ranks(_train, 2, kind, style, budget) for budget in ("16MiB", "48KiB"))
    assert tight == roomy
    for losses in roomy:
        assert losses == pytest.approx(whole(kind), rel=1e-5)


@pytest.mark.parametrize("kind", REFUSED)
def test_a_loss_or_a_decision_of_what_another_stage_has_is_refused(kind: type[Model]) -> None:
    what = REFUSED[kind]
    first, last = run_on_ranks(_train, 2, kind, "1f1b", "16MiB")
    assert last.startswith(f"ConfigError: {what} that only another stage has")
    assert f"{what} that only another stage has" in first


@pytest.mark.parametrize(
    ("kind", "why"), [(Reentrant, "use_reentrant=False"), (CheckpointedAcross, "not around several")]
)
def test_checkpoints_that_stages_cannot_compute_again_are_refused(kind: type[Model], why: str) -> None:
    assert any(why in said for said in run_on_ranks(_train, 2, kind, "1f1b", "16MiB"))


class Remembering(nn.Module):
    """A block that hands the first one's output on in a list."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Block()

    def forward(self, x: Tensor, earlier: list[Tensor]) -> Tensor:
        x = self.inner(x)
        earlier.append(x)
        return x + earlier[0]


class ListGivenToBlocks(Model):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Remembering() for _ in range(4))

    def through(self, x: Tensor) -> Tensor:
        earlier: list[Tensor] = []
        for block in self.blocks:
            x = block(x, earlier)
        return x


class Leaving(Block):
    """A block that leaves a loss in a list of the model, and adds it up in a dict and in an object."""

    def __init__(self, found: list[Tensor], sums: dict[str, Any], beside: SimpleNamespace) -> None:
        super().__init__()
        self.found, self.sums, self.beside = found, sums, beside

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        x = super().forward(x, mask)
        loss = x.square().mean()
        self.found.append(loss)
        self.sums["squares"] = self.sums["squares"] + loss
        self.beside.largest = torch.maximum(self.beside.largest, x.abs().amax())
        return x


class LossesInContainers(Model):
    def __init__(self) -> None:
        super().__init__()
        found: list[Tensor] = []
        sums: dict[str, Any] = {}
        self.sums, self.beside = sums, SimpleNamespace()
        self.blocks = nn.ModuleList(Leaving(found, sums, self.beside) for _ in range(4))

    def forward(self, ids: Tensor) -> Tensor:
        self.blocks[0].found.clear()  # type: ignore[operator, union-attr]
        self.sums["squares"] = torch.zeros(())
        self.beside.largest = torch.zeros(())
        output = super().forward(ids)
        losses: Any = self.blocks[-1].found
        return output + (torch.stack(losses).prod() + self.sums["squares"] + self.beside.largest) * output


class LossesOfTheModel(Model):
    """Gathers losses in an attribute that each pass makes anew."""

    def forward(self, ids: Tensor) -> Tensor:
        self.losses: list[Tensor] = []
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
            self.losses.append(x.square().mean())
        return self.head(x) * (1 + sum(self.losses))


class WrittenOver(Model):
    """Writes what the front returns into zeros, and scales it by a mask that large values decide."""

    def forward(self, ids: Tensor) -> Tensor:
        x = torch.zeros(*ids.shape, WIDTH)
        x[:, 1:] = self.embed(ids)[:, :-1]
        mask = x.abs().amax(-1) > 1.5
        for block in self.blocks:
            x = block(x, mask)
        return self.head(x)


@pytest.mark.parametrize("style", ["1f1b", "zbv"])
@pytest.mark.parametrize("kind", [ListGivenToBlocks, LossesInContainers, LossesOfTheModel, WrittenOver])
def test_what_blocks_leave_in_lists_and_dicts_travels(kind: type[Model], style: str) -> None:
    for losses in run_on_ranks(_train, 2, kind, style, "16MiB"):
        assert losses == pytest.approx(whole(kind), rel=1e-5)


class MaskInEvaluation(Model):
    def forward(self, ids: Tensor, mask: bool = False) -> Tensor:
        x = self.embed(ids)
        y = self.through(x)
        return self.head(y if self.training and not mask else y * (x[..., :1] > 0))


def _train_and_go_on(otherwise: str) -> str:
    plugin = HybridParallelPlugin(pp_size=2, num_microbatches=4, **CHUNKS)
    booster, model = Booster(plugin=plugin), build(MaskInEvaluation)
    model, optimizer, *_ = booster.boost(model, CPUAdam(model.parameters(), **ADAM))
    criterion = lambda output, batch: loss_of(output, batch["ids"])  # noqa: E731
    booster.execute_pipeline(iter([{"ids": batch_of(0)}]), model, criterion, optimizer)
    if otherwise == "evaluated":
        model.eval()
    batch = {"ids": batch_of(1), **({"mask": True} if otherwise == "called" else {})}
    with pytest.raises((ConfigError, StateError)) as caught, torch.set_grad_enabled(otherwise == "called"):
        booster.execute_pipeline(iter([batch]), model, criterion)
    return str(caught.value)


@pytest.mark.parametrize("otherwise", ["evaluated", "called"])
def test_a_model_is_looked_at_anew_where_it_is_evaluated_or_called_otherwise(otherwise: str) -> None:
    for message in run_on_ranks(_train_and_go_on, 2, otherwise):
        assert "the loss depends on a value that only another stage has" in message


def test_batches_with_other_texts_or_numbers_are_of_one_kind() -> None:
    """Each new kind takes a dry run of its own."""
    first, second = ({"ids": batch_of(step), "texts": ["a"] * step, "index": step} for step in (1, 2))
    assert kind_of(first) == kind_of(second)
    assert kind_of({**first, "mask": True}) != kind_of({**first, "mask": False}) != kind_of(first)


# -- buffers ---------------------------------------------------------------------------------------------


class Seen(Normed):
    """Statistics within the blocks and behind them, and a count in front of them."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("rows", torch.zeros(()))
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, ids: Tensor) -> Tensor:
        self.rows += ids.numel()
        x = self.through(self.embed(ids))
        self.mean += x.detach().mean((0, 1))
        return self.head(x)


def _save_seen(path: str) -> None:
    plugin = HybridParallelPlugin(pp_size=2, num_microbatches=4, **CHUNKS)
    booster, model = Booster(plugin=plugin), build(Seen)
    model, optimizer, *_ = booster.boost(model, CPUAdam(model.parameters(), **ADAM))
    for step in range(2):
        booster.execute_pipeline(iter([batch_of(step)]), model, loss_of, optimizer)
    booster.save_model(model, path)


def test_statistics_are_those_of_one_process(tmp_path: Path) -> None:
    """Whoever has them; looking at a model leaves none."""
    path, model = str(tmp_path / "model.safetensors"), build(Seen)
    run_on_ranks(_save_seen, 2, path)
    for step in range(2):
        for part in batch_of(step).chunk(4):
            model(part)
    stored = load_file(path)
    for name, buffer in model.named_buffers():
        torch.testing.assert_close(stored[name], buffer, msg=lambda text, name=name: f"{name}: {text}")


class WritingALot(Model):
    """Writes to a buffer that is not copied for looks at a model."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("queue", torch.zeros(2**21 + 1))

    def forward(self, ids: Tensor) -> Tensor:
        self.queue += 1
        return self.head(self.through(self.embed(ids)))


def test_a_large_buffer_that_forward_writes_to_is_refused_by_name() -> None:
    for said in run_on_ranks(_train, 2, WritingALot, "1f1b", "16MiB"):
        assert "writes to the buffer 'queue' of WritingALot of 8 MiB" in said


# -- random numbers --------------------------------------------------------------------------------------


class Noisy(Model):
    """Noise that is added in front of the blocks and used behind them, and dropout there and within them."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(Block(), nn.Dropout(0.5)) for _ in range(5))
        self.drawn: list[Tensor] = []

    def forward(self, ids: Tensor) -> Tensor:
        x = nn.functional.dropout(self.embed(ids), 0.5)
        x = x + torch.bernoulli(x.detach().sigmoid())
        noise = torch.rand(*ids.shape, WIDTH)  # behind what a stage draws for what it has not
        self.drawn.append(noise)
        return self.head(self.through(x + noise) - noise)


def _draw(layout: dict[str, Any], seeds: list[int]) -> tuple[list[Tensor], list[Tensor]]:
    """Train two steps; return the noise of each forward pass, of each stage here, and masks of the blocks."""
    plugin = HybridParallelPlugin(num_microbatches=4, **layout, **CHUNKS)
    booster, model = Booster(plugin=plugin), build(Noisy)
    drawn, masks = model.drawn, []
    for block in model.blocks:
        block[1].register_forward_hook(lambda _block, _args, output: masks.append(output.detach() != 0))
    model, optimizer, *_ = booster.boost(model, CPUAdam(model.parameters(), **ADAM))
    torch.manual_seed(seeds[dist.get_rank()])
    booster.execute_pipeline(iter([batch_of(0)]), model, loss_of, optimizer)
    drawn.clear()  # the first pass is looked at
    masks.clear()
    for step in range(2):
        booster.execute_pipeline(iter([batch_of(step)]), model, loss_of, optimizer)
        optimizer.step()
    return drawn, masks


@pytest.mark.parametrize("seeds", [[7, 7], [7, 8]])
@pytest.mark.parametrize("style", ["1f1b", "zbv"])
def test_stages_draw_the_same_numbers_around_blocks_and_others_in_them(style: str, seeds: list[int]) -> None:
    (noise, masks), (other, other_masks) = run_on_ranks(_draw, 2, {"pp_size": 2, "pp_style": style}, seeds)
    chunks = 2 if style == "zbv" else 1
    assert len(noise) == len(other) == 2 * 4 * chunks
    distinct = {tuple(each.flatten().tolist()) for each in noise}
    assert len(distinct) == 2 * 4
    assert distinct == {tuple(each.flatten().tolist()) for each in other}
    drawn = [tuple(mask.flatten().tolist()) for mask in masks + other_masks]
    assert len(set(drawn)) == len(drawn) == 2 * 4 * 5


# -- 16 bits, and means over no tokens -------------------------------------------------------------------


def _llama(precision: str, zero_stage: int, pp_size: int) -> list[float]:
    import transformers

    torch.manual_seed(8)
    sizes: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    model: Any = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=64, **sizes, **heads))
    plugin = HybridParallelPlugin(
        pp_size=pp_size, zero_stage=zero_stage, num_microbatches=4, mixed_precision=precision
    )
    booster, losses = Booster(plugin=plugin), []
    model, optimizer, *_ = booster.boost(model, CPUAdam(model.parameters(), **ADAM))
    for step in range(3):
        batch = {"input_ids": batch_of(step), "labels": batch_of(step)}
        run = booster.execute_pipeline(iter([batch]), model, lambda out, _: out.loss, optimizer)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(run["loss"]))
    return losses


@pytest.mark.parametrize(("precision", "zero_stage"), [("bf16", 3), ("fp16", 3), ("bf16", 2)])
def test_positions_that_rotate_have_the_type_that_stages_compute_in(precision: str, zero_stage: int) -> None:
    pytest.importorskip("transformers", reason="models of transformers")
    (wanted,) = run_on_ranks(_llama, 1, precision, zero_stage, 1)
    for losses in run_on_ranks(_llama, 2, precision, zero_stage, 2):
        assert losses == wanted


def _mean_without_tokens() -> float:
    plugin = HybridParallelPlugin(pp_size=2, num_microbatches=2, **CHUNKS)
    booster, model = Booster(plugin=plugin), build(Model)
    model, optimizer, *_ = booster.boost(model, CPUAdam(model.parameters(), **ADAM))
    ids, labels = batch_of(0), batch_of(1)
    labels[4:] = -100

    def criterion(output: Tensor, batch: tuple[Tensor, Tensor]) -> Tensor:
        return nn.functional.cross_entropy(output.flatten(0, 1), batch[1].flatten())

    run = booster.execute_pipeline(
        iter([(ids, labels)]), model, criterion, optimizer, count=lambda batch: float((batch[1] >= 0).sum())
    )
    return float(run["loss"])


def _train_to_the_end() -> int:
    booster, model = Booster(plugin=HybridParallelPlugin(pp_size=2, **CHUNKS)), build(Model)
    model, optimizer, *_ = booster.boost(model, CPUAdam(model.parameters(), **ADAM))
    batches, steps = iter([batch_of(0), batch_of(1)]), 0
    with suppress(StopIteration):
        while True:
            booster.execute_pipeline(batches, model, loss_of, optimizer)
            steps += 1
    return steps


def test_iterators_that_end_on_all_ranks_end_there() -> None:
    assert run_on_ranks(_train_to_the_end, 2) == [2, 2]


def test_a_micro_batch_in_which_no_token_counts_leaves_the_loss_alone() -> None:
    model = build(Model)
    wanted = nn.functional.cross_entropy(model(batch_of(0)[:4]).flatten(0, 1), batch_of(1)[:4].flatten())
    assert run_on_ranks(_mean_without_tokens, 2) == pytest.approx([wanted.item()] * 2, rel=1e-5)
