"""``gemini.manage``: the module itself trains, as an unmanaged one does, and becomes ordinary again."""

from __future__ import annotations

import copy
import io
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gemini
from gemini import CPUAdam, GeminiAdamOptimizer, GeminiOptimizer, checkpoint
from gemini.errors import ConfigError, OutOfBudgetError, StateError

pytestmark = pytest.mark.usefixtures("one_thread")


class Net(nn.Module):
    """A model that calls itself, as ``generate`` does, and has a buffer and a tied weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(32, 48)
        self.body = nn.Sequential(nn.Linear(48, 96), nn.GELU(), nn.Dropout(0.1), nn.Linear(96, 48))
        self.head = nn.Linear(48, 32, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def forward(self, tokens: Tensor) -> Tensor:
        """Return a score per token and class."""
        self.seen += tokens.numel()
        return self.head(self.body(self.embed(tokens)))

    def greedy(self, tokens: Tensor) -> Tensor:
        """Call the model as its users do."""
        return self(tokens).argmax(-1)


def build() -> Net:
    torch.manual_seed(3)
    return Net()


def tokens(seed: int) -> Tensor:
    return torch.randint(0, 32, (4, 6), generator=torch.Generator().manual_seed(seed))


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> list[float]:
    """Train as a script does that knows of no manager."""
    losses = []
    for step in steps:
        torch.manual_seed(step)
        loss = nn.functional.cross_entropy(model(tokens(step)).flatten(0, 1), tokens(step + 1).flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def small(tmp_path: Path, **options: Any) -> dict[str, Any]:
    return {"device_bytes": "132KiB", "disk_dir": str(tmp_path), "non_model_bytes": 0, **options}


def assert_same_weights(got: nn.Module, want: nn.Module) -> None:
    state = want.state_dict()
    assert got.state_dict().keys() == state.keys()
    for name, value in got.state_dict().items():
        assert torch.equal(value, state[name]), name


def trained_plain(steps: range) -> tuple[Net, list[float], torch.optim.Optimizer]:
    plain = build()
    optimizer = CPUAdam(plain.parameters(), lr=1e-2)
    return plain, train(plain, optimizer, steps), optimizer


def test_the_module_itself_trains_bit_for_bit_and_its_steps_are_planned(tmp_path: Path) -> None:
    plain, losses, _ = trained_plain(range(6))
    model = build()
    handle = gemini.manage(model, **small(tmp_path))
    optimizer = GeminiOptimizer(CPUAdam(model.parameters(), lr=1e-2), model)
    assert train(model, optimizer, range(6)) == losses
    stats = handle.stats()
    assert stats["step"] == 6
    assert not stats["warmup"]
    assert stats["disk_read"]["bytes"] > 0
    for tier in ("device", "host", "disk"):
        assert stats[tier]["peak_bytes"] <= stats[tier]["budget_bytes"]
    assert torch.equal(model.eval().greedy(tokens(9)), plain.eval().greedy(tokens(9)))
    assert_same_weights(model, plain)
    handle.close()


@pytest.mark.parametrize("precision", [None, "bf16"])
def test_release_gives_an_ordinary_module_back(tmp_path: Path, precision: str | None) -> None:
    model, untouched = build(), build()
    cls = type(model)
    handle = gemini.manage(model, **small(tmp_path), mixed_precision=precision)
    model(tokens(0))
    handle.release()
    assert type(model) is cls
    assert "_gemini" not in vars(model)
    assert not model._forward_pre_hooks
    assert all(type(param) is nn.Parameter and param.dtype is torch.float32 for param in model.parameters())
    assert model.head.weight is model.embed.weight
    untouched.seen.copy_(model.seen)
    assert_same_weights(model, untouched)
    again = torch.optim.SGD(model.parameters(), lr=0.1)
    assert len(train(model, again, range(2))) == 2
    handle.release()  # has nothing left to do


def test_a_released_module_is_managed_anew_and_goes_on(tmp_path: Path) -> None:
    plain, losses, plain_optimizer = trained_plain(range(3))
    model = build()
    handle = gemini.manage(model, **small(tmp_path))
    optimizer = GeminiAdamOptimizer(model, lr=1e-2)
    assert train(model, optimizer, range(3)) == losses
    states = optimizer.state_dict()
    handle.release()
    with pytest.raises(StateError, match="released"):
        optimizer.step()
    gemini.manage(model, **small(tmp_path))
    optimizer = GeminiAdamOptimizer(model, lr=1e-2)
    optimizer.load_state_dict(states)
    assert train(model, optimizer, range(3, 6)) == train(plain, plain_optimizer, range(3, 6))


def test_what_was_unfrozen_is_an_ordinary_parameter_after_release(tmp_path: Path) -> None:
    plain, model = build(), build()
    for module in (plain, model):
        module.body.requires_grad_(False)
    handle = gemini.manage(model, **small(tmp_path))
    optimizer, plain_optimizer = GeminiAdamOptimizer(model, lr=1e-2), CPUAdam(plain.parameters(), lr=1e-2)
    assert train(model, optimizer, range(2)) == train(plain, plain_optimizer, range(2))
    for module in (plain, model):
        module.body.requires_grad_(True)
    optimizer.add_param_group({"params": list(model.body.parameters())})
    assert train(model, optimizer, range(2, 4)) == train(plain, plain_optimizer, range(2, 4))
    handle.release()
    assert_same_weights(model, plain)
    fresh = [CPUAdam(module.parameters(), lr=1e-2) for module in (model, plain)]
    assert train(model, fresh[0], range(4, 6)) == train(plain, fresh[1], range(4, 6))


def test_release_finishes_a_save_that_is_under_way(tmp_path: Path) -> None:
    plain, losses, plain_optimizer = trained_plain(range(2))
    model = build()
    handle = gemini.manage(model, **small(tmp_path))
    optimizer = GeminiAdamOptimizer(model, lr=1e-2)
    assert train(model, optimizer, range(2)) == losses
    saving = checkpoint.save_async(tmp_path / "run", model, optimizer)
    handle.release()
    saving.wait()
    assert checkpoint.is_complete(tmp_path / "run")
    again = build()
    gemini.manage(again, **small(tmp_path))
    optimizer = GeminiAdamOptimizer(again, lr=1e-2)
    checkpoint.load(tmp_path / "run", again, optimizer)
    assert train(again, optimizer, range(2, 4)) == train(plain, plain_optimizer, range(2, 4))


def test_the_handle_has_what_a_wrapper_has(tmp_path: Path) -> None:
    model = build()
    want = {name: value.clone() for name, value in model.state_dict().items()}
    handle = gemini.manage(model, **small(tmp_path), mixed_precision="bf16")
    assert model.state_dict()["embed.weight"].dtype is torch.bfloat16
    whole, shards = handle.state_dict(), list(handle.state_dict_shard("8KiB"))
    assert len(shards) > 1
    sharded = {name: value for shard, _ in shards for name, value in shard.items()}
    for name, value in want.items():
        assert torch.equal(whole[name], value)
        assert torch.equal(sharded[name], value)
    optimizer = GeminiAdamOptimizer(model, lr=1e-2)
    assert len(handle.retry_step(lambda: train(model, optimizer, range(1)))) == 1
    handle.load_state_dict(want)
    with handle.no_sync(), handle.join(enable=False):
        assert model(tokens(0)).isfinite().all()


@pytest.mark.parametrize("kind", [gemini.Lion, torch.optim.SGD])
def test_other_rules_update_it(tmp_path: Path, kind: Any) -> None:
    options = {"lr": 1e-2, "weight_decay": 0.1, **({"momentum": 0.9} if kind is torch.optim.SGD else {})}
    plain, model = build(), build()
    handle = gemini.manage(model, **small(tmp_path))
    optimizer = GeminiOptimizer(kind(model.parameters(), **options), model)
    assert train(model, optimizer, range(5)) == train(plain, kind(plain.parameters(), **options), range(5))
    assert handle.stats()["device"]["peak_bytes"] <= handle.stats()["device"]["budget_bytes"]


def test_ctrl_c_within_a_forward_pass_leaves_the_model_usable(tmp_path: Path) -> None:
    plain, model = build(), build()
    gemini.manage(model, **small(tmp_path))
    optimizer = GeminiAdamOptimizer(model, lr=1e-2)

    def interrupt(*_arguments: Any) -> None:
        raise KeyboardInterrupt

    for part in (model.body[1], model.head):
        hook = part.register_forward_pre_hook(interrupt)
        with pytest.raises(KeyboardInterrupt):
            model(tokens(0))
        hook.remove()
    model.seen.zero_()
    assert train(model, optimizer, range(3)) == train(plain, CPUAdam(plain.parameters(), lr=1e-2), range(3))


def test_one_fp16_loss_goes_through_two_managed_modules(tmp_path: Path) -> None:
    whole, halves = build(), build()
    gemini.manage(whole, **small(tmp_path), mixed_precision="fp16")
    for half in (halves.embed, halves.body):
        gemini.manage(half, **small(tmp_path), mixed_precision="fp16")

    def loss_of(net: Net) -> Tensor:
        return net.body(net.embed(tokens(0))).float().square().mean()

    optimizers = [GeminiAdamOptimizer(half, lr=1e-2) for half in (halves.embed, halves.body)]
    optimizers[0].backward(loss_of(halves.eval()))
    for optimizer in optimizers:
        optimizer.step()
    one = GeminiAdamOptimizer(whole, lr=1e-2)
    one.backward(loss_of(whole.eval()))
    one.step()
    handle = gemini.handle_of(whole)
    want = handle.state_dict()
    for name in ("embed", "body"):
        for key, value in gemini.handle_of(getattr(halves, name)).state_dict().items():
            assert torch.equal(value, want[f"{name}.{key}"]), (name, key)


def test_copies_and_pickles_are_ordinary(tmp_path: Path) -> None:
    model = build()
    handle = gemini.manage(model, **small(tmp_path))
    twin = copy.deepcopy(model)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    for other in (twin, loaded):
        assert type(other) is Net
        assert "_gemini" not in vars(other)
        assert_same_weights(other, model)
        other(tokens(0))
    assert handle.stats()["step"] == 0
    assert gemini.handle_of(model) is handle
    with pytest.raises(ConfigError, match="cannot be copied"):
        copy.copy(handle)


def test_an_ensemble_of_managed_modules_is_stacked(tmp_path: Path) -> None:
    plain, managed = (
        [nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 8)) for _ in range(3)] for _ in range(2)
    )
    for one, other in zip(plain, managed, strict=True):
        other.load_state_dict(one.state_dict())
        gemini.manage(other, **small(tmp_path))
    want, got = (torch.func.stack_module_state(models)[0] for models in (plain, managed))
    base, x = copy.deepcopy(managed[0]).to("meta"), torch.ones(2, 64)

    def outputs(params: dict[str, Tensor]) -> Tensor:
        return torch.vmap(lambda each: torch.func.functional_call(base, each, (x,)))(params)

    assert torch.equal(outputs(got), outputs(want))


def test_slices_of_a_managed_sequential_are_ordinary_and_share_its_weights(tmp_path: Path) -> None:
    def layers() -> nn.Sequential:
        torch.manual_seed(2)
        return nn.Sequential(*(nn.Linear(64, 64) for _ in range(6)))

    results = []
    for options in (None, small(tmp_path, device_bytes="64KiB", min_chunk_size_mb=1 / 64)):
        net = layers()
        handle = gemini.manage(net, **options) if options else None
        optimizer: Any = CPUAdam(net.parameters(), lr=1e-2)
        if handle:
            optimizer = GeminiOptimizer(optimizer, handle)
        for step in range(3):
            net[:4](net[4:](torch.full((2, 64), step + 1.0))).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        assert type(net[1:3]) is nn.Sequential
        assert net[1:3][0] is net[1]
        assert len(net[:2] + net[2:]) == 6
        results.append({name: value.clone() for name, value in net.state_dict().items()})
    assert all(torch.equal(value, results[1][name]) for name, value in results[0].items())


def test_weights_are_loaded_into_masters(tmp_path: Path) -> None:
    want, model = build(), build()
    with torch.no_grad():
        for param in want.parameters():
            param.add_(1e-5)  # less than bf16 tells apart
    handle = gemini.manage(model, **small(tmp_path), mixed_precision="bf16")
    model.load_state_dict(want.state_dict())
    with pytest.raises(RuntimeError, match="missing keys"):
        model.load_state_dict({})
    handle.release()
    assert_same_weights(model, want)


def test_checkpoints_take_the_module_or_its_handle(tmp_path: Path) -> None:
    model = build()
    handle = gemini.manage(model, **small(tmp_path))
    optimizer = GeminiAdamOptimizer(handle, lr=1e-2)
    train(model, optimizer, range(2))
    checkpoint.save(tmp_path / "run", model, optimizer)
    losses = train(model, optimizer, range(2, 4))
    checkpoint.load(tmp_path / "run", handle, optimizer)
    assert train(model, optimizer, range(2, 4)) == losses


@pytest.mark.parametrize("recompute", [False, True])
def test_activations_are_offloaded_and_their_hooks_end_with_release(tmp_path: Path, recompute: bool) -> None:
    _, losses, _ = trained_plain(range(5))
    model = build()
    options = {"activation_offload": "auto", "activation_recompute": recompute}
    handle = gemini.manage(model, device_bytes="400KiB", disk_dir=str(tmp_path), **options)
    assert train(model, GeminiAdamOptimizer(model, lr=1e-2), range(5)) == losses
    handle.release()
    assert not any("forward" in vars(part) for part in model.modules())


def test_zero_grad_gives_gradients_up_and_to_is_refused(tmp_path: Path) -> None:
    model = build()
    gemini.manage(model, **small(tmp_path))
    model(tokens(0)).sum().backward()
    assert model.embed.weight.grad is not None
    model.zero_grad()
    assert model.embed.weight.grad is None
    assert model.to("cpu") is model
    with pytest.raises(ConfigError, match=r"stays torch\.float32"):
        model.double()


def test_a_forward_pass_that_raises_leaves_the_model_usable(tmp_path: Path) -> None:
    plain, model = build(), build()
    gemini.manage(model, **small(tmp_path))
    optimizer = GeminiAdamOptimizer(model, lr=1e-2)
    with pytest.raises(IndexError):
        model(torch.full((1, 1), 99))
    model.seen.zero_()
    assert train(model, optimizer, range(3)) == train(plain, CPUAdam(plain.parameters(), lr=1e-2), range(3))


def test_what_is_where_is_shown(tmp_path: Path) -> None:
    model = build()
    handle = gemini.manage(model, **small(tmp_path))
    assert "managed: DEVICE" in repr(model)
    assert "132.0 KiB" in repr(handle)
    assert model._repr_html_() == handle._repr_html_()
    assert "<caption>Net, managed" in handle._repr_html_()
    handle.release()
    assert "managed" not in repr(model)


def test_what_cannot_be_managed_is_refused_and_left_as_it_was(tmp_path: Path) -> None:
    model = build()
    with pytest.raises(OutOfBudgetError):
        gemini.manage(model, device_bytes="8KiB")
    assert type(model) is Net
    assert type(model.embed.weight) is nn.Parameter
    with pytest.raises(TypeError, match=r"no argument 'device_byte' \(did you mean device_bytes\?\)"):
        gemini.manage(model, device_byte="8KiB")
    with pytest.raises(ConfigError, match=r"takes an nn\.Module"):
        gemini.manage([model])  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="not a GeminiDDP, nor managed"):
        gemini.handle_of(model)
    gemini.manage(model, **small(tmp_path))
    with pytest.raises(ConfigError, match="already managed"):
        gemini.manage(model)
