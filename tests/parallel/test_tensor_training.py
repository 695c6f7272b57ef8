"""Cut models under GeminiDDP: training is that of one process, whatever the budgets."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from processes import run_on_ranks
from tensor_harness import LANGUAGE_PLAN, Language, gathered, make_mesh
from torch import Tensor, nn
from torch import distributed as dist

from gemini import (
    CheckpointError,
    ConfigError,
    CPUAdam,
    GeminiDDP,
    GeminiOptimizer,
    StateError,
    checkpoint,
    init_on,
)
from gemini.parallel import parallelize
from gemini.parallel.mesh import Mesh

STEPS = 5
ADAM = {"lr": 1e-2, "eps": 1e-6, "weight_decay": 0.01}
CHUNKS = {"min_chunk_size_mb": 0.004, "search_range_mb": 0.004}
CLIP = 0.05  # of the first step's gradients most is cut off


def batch(step: int) -> Tensor:
    return torch.randint(Language.VOCABULARY, (4, 7), generator=torch.Generator().manual_seed(step))


def loss_of(model: nn.Module, ids: Tensor) -> Tensor:
    logits = model(ids[:, :-1])
    return nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())


def build(seed: int = 21) -> Language:
    torch.manual_seed(seed)
    return Language()


def train_whole() -> tuple[list[float], list[float], dict[str, Tensor]]:
    """Train in one process without a runtime; return losses, norms and weights."""
    model = build()
    optimizer = CPUAdam(model.parameters(), **ADAM)
    losses, norms = [], []
    for step in range(STEPS):
        loss = loss_of(model, batch(step))
        loss.backward()
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), CLIP)))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, norms, {key: value.clone() for key, value in model.state_dict().items()}


def wrap(mesh: Mesh, **options: Any) -> tuple[GeminiDDP, GeminiOptimizer, Any]:
    model = build(21 + dist.get_rank())  # the first rank's values are taken
    partition = parallelize(model, mesh, LANGUAGE_PLAN)
    managed = GeminiDDP(
        model, process_group=mesh["dp"], model_ranks=partition.model_ranks, **{**CHUNKS, **options}
    )
    adam = CPUAdam(managed.parameters(), **ADAM)
    return managed, GeminiOptimizer(adam, managed, initial_scale=16), partition


def train_managed(
    tp: int, options: dict[str, Any]
) -> tuple[list[float], list[float], dict[str, Tensor], int]:
    """Train on the ranks; return losses, norms, weights and the bytes that have left DEVICE."""
    mesh = make_mesh(tp=tp, dp=dist.get_world_size() // tp)
    model, optimizer, partition = wrap(mesh, **options)
    losses, norms = [], []
    with model:
        for step in range(STEPS):
            own = batch(step).chunk(mesh.layout.dp)[mesh["dp"].get_local_rank()]
            loss = loss_of(model, own)
            optimizer.backward(loss)
            norms.append(float(optimizer.clip_grad_by_norm(CLIP)))
            optimizer.step()
            mean = loss.detach().clone()
            dist.all_reduce(mean, group=mesh["dp"].get_group())
            losses.append(mean.item() / mesh.layout.dp)
        moved = sum(model.stats()[link]["bytes"] for link in ("d2h", "disk_write"))
        model.manager.chunks.table.check_invariants()
        return losses, norms, gathered(model, partition), moved


ROOMY = {"device_bytes": "64MiB"}
TIGHT = {"host_bytes": "4MiB", "non_model_bytes": 0}


@pytest.mark.parametrize(("ranks", "device_bytes"), [(2, "100KiB"), (4, "112KiB")])
def test_training_is_that_of_one_process_and_budgets_change_no_bit(ranks: int, device_bytes: str) -> None:
    wanted_losses, wanted_norms, wanted = train_whole()
    roomy = run_on_ranks(train_managed, ranks, 2, ROOMY)
    tight = run_on_ranks(train_managed, ranks, 2, TIGHT | {"device_bytes": device_bytes})
    for (losses, norms, weights, moved), (same_losses, same_norms, same, moved_tight) in zip(
        roomy, tight, strict=True
    ):
        assert losses == pytest.approx(wanted_losses, rel=1e-5)
        assert norms == pytest.approx(wanted_norms, rel=1e-6)
        assert (same_losses, same_norms) == (losses, norms)
        assert moved == 0 < moved_tight
        for key, value in wanted.items():
            assert float((weights[key] - value).abs().max()) <= 2e-5, key
            assert torch.equal(same[key], weights[key]), key


def train_unmanaged() -> bool:
    mesh = make_mesh(tp=2)
    managed, optimizer, partition = wrap(mesh, **TIGHT, device_bytes="100KiB")
    model = build()
    plain = parallelize(model, mesh, LANGUAGE_PLAN)
    adam = CPUAdam(model.parameters(), **ADAM)
    equal = []
    with managed:
        for step in range(STEPS):
            loss, other = loss_of(managed, batch(step)), loss_of(model, batch(step))
            optimizer.backward(loss)
            other.backward()
            optimizer.step()
            adam.step()
            adam.zero_grad()
            equal.append(loss.item() == other.item())
        got, wanted = gathered(managed, partition), gathered(model, plain)
    return all(equal) and all(torch.equal(got[key], value) for key, value in wanted.items())


def test_managed_parts_train_with_the_bits_of_unmanaged_ones() -> None:
    assert all(run_on_ranks(train_unmanaged, 2))


def overflow_on_one_rank() -> list[bool]:
    mesh = make_mesh(tp=2)
    model, optimizer, partition = wrap(mesh, mixed_precision="fp16", device_bytes="64MiB")
    weight = model.module.blocks[0].up.weight
    changed = []
    with model:
        for factor in (float("inf"), 1.0):
            before = gathered(model, partition)
            rank = mesh["tp"].get_local_rank()
            hook = weight.register_hook(lambda grad, times=factor if rank == 1 else 1.0: grad * times)
            optimizer.backward(loss_of(model, batch(0)))
            optimizer.step()
            optimizer.zero_grad()
            hook.remove()
            after = gathered(model, partition)
            changed.append(any(not torch.equal(after[key], value) for key, value in before.items()))
    return changed


def test_overflow_on_one_rank_skips_the_step_on_all() -> None:
    assert run_on_ranks(overflow_on_one_rank, 2) == [[False, True]] * 2


def weights_from_meta(tp: int) -> dict[str, Tensor]:
    mesh = make_mesh(tp=tp, dp=dist.get_world_size() // tp)
    torch.manual_seed(5)
    with init_on("meta"):
        model = Language(tied=False)
    partition = parallelize(model, mesh, LANGUAGE_PLAN)
    assert all(
        p.numel() <= 40 * 32 // tp or p.dim() == 1 or "blocks" in n for n, p in model.named_parameters()
    )
    return gathered(model, partition)


def test_model_built_on_meta_begins_with_the_same_bits_at_any_layout() -> None:
    torch.manual_seed(5)
    wanted = Language(tied=False).state_dict()
    for ranks, tp in ((2, 2), (4, 4), (4, 2)):
        for got in run_on_ranks(weights_from_meta, ranks, tp):
            for key, value in wanted.items():
                assert torch.equal(got[key], value), (key, tp)


def load_at(tp: int, state: dict[str, Tensor]) -> tuple[dict[str, Tensor], float]:
    mesh = make_mesh(tp=tp, dp=dist.get_world_size() // tp)
    model, _, partition = wrap(mesh, device_bytes="64MiB")
    with model:
        model.load_state_dict(partition.cut_state(state))
        loss = loss_of(model, batch(0)).item()
        whole = {key: value.clone() for key, value in partition.gather_state(model.state_dict()).items()}
    return whole, loss


def test_whole_state_dict_loads_at_any_layout_and_comes_back_with_its_bits() -> None:
    model = build(77)
    wanted = {key: value.clone() for key, value in model.state_dict().items()}
    loss = loss_of(model, batch(0)).item()
    for ranks, tp in ((2, 2), (4, 4)):
        for got, found in run_on_ranks(load_at, ranks, tp, wanted):
            assert found == pytest.approx(loss, rel=1e-6)
            assert got.keys() == wanted.keys()
            assert all(torch.equal(got[key], value) for key, value in wanted.items())


def save_and_load(directory: str) -> tuple[str, bool]:
    mesh = make_mesh(tp=2)
    model, optimizer, partition = wrap(mesh, device_bytes="64MiB")
    with model:
        for save_or_load in (checkpoint.save, checkpoint.load):
            with pytest.raises(CheckpointError) as caught:
                save_or_load(directory, model, optimizer)
        own = f"{directory}/{mesh['tp'].get_local_rank()}"
        wanted = gathered(model, partition)
        checkpoint.save(own, model, optimizer)
        optimizer.backward(loss_of(model, batch(0)))
        optimizer.step()
        checkpoint.load(own, model, optimizer)
        got = gathered(model, partition)
    return str(caught.value), all(torch.equal(got[key], value) for key, value in wanted.items())


def test_parts_are_not_saved_over_each_other(tmp_path: Path) -> None:
    for said, equal in run_on_ranks(save_and_load, 2, str(tmp_path)):
        assert said.startswith(f"2 ranks hold different parts of the model, and several name {tmp_path}")
        assert equal
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0", "1"]


class Dropping(nn.Module):
    """Dropout between a column and a row layer, and behind them."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 64), nn.Linear(64, 8)
        self.kept: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        inside = nn.functional.dropout(torch.ones_like(self.up(x)), 0.5)
        self.kept.append(inside.detach() != 0)
        outside = nn.functional.dropout(torch.ones_like(self.down(inside * self.up(x))), 0.5)
        self.kept.append(outside != 0)
        return self.down(inside * self.up(x)) * outside


def draw_masks(recompute: bool) -> tuple[Tensor, Tensor, bool, Tensor]:
    torch.manual_seed(1)
    model = Dropping()
    parallelize(model, make_mesh(tp=2), {"up": "colwise", "down": "rowwise"}, check=False)
    x = torch.ones(16, 8)
    if recompute:
        out = torch.utils.checkpoint.checkpoint(model, x.requires_grad_(), use_reentrant=False)
        out.sum().backward()
        again = torch.equal(model.kept[0], model.kept[2]) and torch.equal(model.kept[1], model.kept[3])
    else:
        model.eval()
        state = torch.get_rng_state()
        model(x)
        again = len(model.kept) == 2 and not torch.equal(state, torch.get_rng_state())
    return model.kept[0], model.kept[1], again, torch.get_rng_state()


@pytest.mark.parametrize("recompute", [False, True])
def test_masks_differ_between_ranks_where_they_are_of_parts_alone(recompute: bool) -> None:
    (inside, outside, again, state), (other, same, other_again, other_state) = run_on_ranks(
        draw_masks, 2, recompute
    )
    assert torch.equal(outside, same)
    assert torch.equal(state, other_state)
    assert again
    assert other_again
    if recompute:  # in training
        assert not torch.equal(inside, other)
        assert 0.4 < inside.float().mean() < 0.6


def draw_masks_from_seeds_of_their_own(later: bool) -> tuple[Tensor, list[str]]:
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("gemini").addHandler(handler)
    torch.manual_seed(dist.get_rank())
    model = Dropping()
    parallelize(model, make_mesh(tp=2), {"up": "colwise", "down": "rowwise"}, check=False)
    if later:
        torch.manual_seed(dist.get_rank())
    for _ in range(2):
        model(torch.ones(16, 8))
    logging.getLogger("gemini").removeHandler(handler)
    return torch.stack(model.kept[1::2]), said


@pytest.mark.parametrize("later", [False, True])
def test_ranks_with_seeds_of_their_own_draw_the_same_masks_outside(later: bool) -> None:
    (outside, said), (same, other_said) = run_on_ranks(draw_masks_from_seeds_of_their_own, 2, later)
    assert torch.equal(outside, same)
    assert not said
    assert [line.partition(",")[0] for line in other_said] == later * [
        "torch's generators were in different states than on the first rank of 'tp'"
    ]


def interrupt(*_: object) -> None:
    raise KeyboardInterrupt


def draw_masks_after_ctrl_c() -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(1)
    model = Dropping()
    parallelize(model, make_mesh(tp=2), {"up": "colwise", "down": "rowwise"}, check=False)
    hook = model.down.register_forward_pre_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        model(torch.ones(16, 8))
    hook.remove()
    model(torch.ones(16, 8))
    _interrupted, inside, outside = model.kept
    return inside, outside, torch.get_rng_state()


def test_ctrl_c_between_the_layers_leaves_masks_as_they_have_to_be() -> None:
    (inside, outside, state), (other, same, other_state) = run_on_ranks(draw_masks_after_ctrl_c, 2)
    assert torch.equal(outside, same)
    assert torch.equal(state, other_state)
    assert not torch.equal(inside, other)


def fail(*_: object) -> None:
    raise ValueError("a batch is missing")


def fail_on_one_rank(where: str) -> str:
    try:
        with make_mesh(tp=2) as mesh:
            model, optimizer, _ = wrap(mesh, device_bytes="64MiB")
            if dist.get_rank() == 1 and where == "backward":
                model.module.blocks[1].up.weight.register_hook(fail)
            if dist.get_rank() == 1 and where == "forward":
                model.module.blocks[1].norm.register_forward_hook(fail)
            optimizer.backward(loss_of(model, batch(0)))
            if dist.get_rank() == 1 and where == "step":
                raise ValueError("a batch is missing")
            optimizer.clip_grad_by_norm(1.0)
    except (ValueError, StateError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


@pytest.mark.parametrize("where", ["forward", "backward", "step"])
def test_rank_that_fails_tells_those_that_compute_with_it_why(where: str) -> None:
    waiting, failed = run_on_ranks(fail_on_one_rank, 2, where)
    assert failed == "ValueError: a batch is missing"
    assert waiting.startswith(
        "StateError: rank 1 will not come: it ended with ValueError: a batch is missing"
    )


def refuse_dtensors() -> tuple[str, bool]:
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    parallelize_module(model, make_mesh(tp=2)["tp"], {"1": ColwiseParallel()})
    with pytest.raises(ConfigError) as caught:
        GeminiDDP(model, process_group=make_mesh(dp=2)["dp"])
    return str(caught.value), type(model[0].weight) is nn.Parameter


def test_dtensors_are_refused_before_anything_is_touched() -> None:
    for said, untouched in run_on_ranks(refuse_dtensors, 2):
        assert said.startswith("parameter '1.weight' is a torch.distributed.tensor.DTensor")
        assert "gemini.parallel" in said
        assert untouched
