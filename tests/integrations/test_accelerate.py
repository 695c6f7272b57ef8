"""A script with Accelerate trains a managed model with the numbers of an unmanaged one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

accelerate = pytest.importorskip("accelerate", reason="the extra 'hf' is not installed")

from accelerate_runs import TIGHT, assert_equal, net, run  # noqa: E402

import gemini  # noqa: E402
from gemini.checkpoint.saving import CheckpointFiles  # noqa: E402
from gemini.errors import ConfigError  # noqa: E402
from gemini.integrations.accelerate import GeminiAccelerator, unwrap_optimizer  # noqa: E402

KINDS = [accelerate.Accelerator, GeminiAccelerator]


@pytest.fixture(autouse=True)
def _forgotten() -> Iterator[None]:
    """Accelerate keeps its state for the process."""
    yield
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    accelerate.state.GradientState._reset_state()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_figures_and_weights_are_those_of_an_unmanaged_model(kind: type, precision: str) -> None:
    want = run(accelerate.Accelerator, managed=False, mixed_precision=precision)
    got = run(kind, managed=True, mixed_precision=precision)
    assert got[0] == want[0]
    assert_equal(got[1], want[1])
    assert got[2] == "Sequential"


@pytest.mark.parametrize("kind", KINDS)
def test_what_was_saved_goes_on_as_if_nothing_was(kind: type, tmp_path: Path) -> None:
    want = run(kind, managed=True, save=str(tmp_path / "state"))
    got = run(kind, managed=True, load=str(tmp_path / "state"))
    assert got[0] == want[0][-len(got[0]) :]
    assert_equal(got[1], want[1])


def test_a_save_that_fails_in_a_directory_leaves_the_state_that_was_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    accelerator = GeminiAccelerator(cpu=True, gemini=TIGHT)
    model, optimizer = accelerator.prepare(model_ := net(), torch.optim.AdamW(model_.parameters()))

    def step() -> dict[str, torch.Tensor]:
        accelerator.backward(model(torch.ones(4, 32)).square().mean())
        optimizer.step()
        optimizer.zero_grad()
        return {name: value.clone() for name, value in model.state_dict().items()}

    saved = step()
    accelerator.save_state(str(tmp_path / "run"))
    wanted = step()
    whole = CheckpointFiles.blocks
    with monkeypatch.context() as patch:
        patch.setattr(CheckpointFiles, "blocks", lambda files: [*whole(files)[:1], None])
        with pytest.raises(AttributeError):
            accelerator.save_state(str(tmp_path / "run"))
    accelerator.load_state(str(tmp_path / "run"))
    assert_equal(model.state_dict(), saved)
    assert_equal(step(), wanted)  # the moments are those of then, too
    accelerator.save_state(str(tmp_path / "run"))
    step()
    accelerator.load_state(str(tmp_path / "run"))
    assert_equal(model.state_dict(), wanted)


@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_prepare_manages_what_it_is_given_where_the_accelerator_says_so(
    precision: str, tmp_path: Path
) -> None:
    want = run(accelerate.Accelerator, managed=False, mixed_precision=precision)
    options = {"mixed_precision": precision, "gemini": TIGHT, "gemini_optimizer": {"overlap": False}}
    got = run(GeminiAccelerator, managed=True, save=str(tmp_path / "state"), **options)
    assert got[0] == want[0]
    assert_equal(got[1], want[1])
    again = run(GeminiAccelerator, managed=True, load=str(tmp_path / "state"), **options)
    assert_equal(again[1], want[1])


def test_prepare_takes_models_and_optimizers_in_any_order_and_leaves_others_alone() -> None:
    first, second, other = net(), net(), torch.nn.Parameter(torch.ones(3))
    optimizers = [torch.optim.AdamW(each.parameters()) for each in (first, second)]
    accelerator = GeminiAccelerator(cpu=True, gemini=TIGHT)
    prepared = accelerator.prepare(optimizers[1], torch.optim.SGD([other], lr=1.0), second, first)
    late = accelerator.prepare(optimizers[0])
    assert unwrap_optimizer(prepared[0]).model is gemini.handle_of(second)
    assert unwrap_optimizer(late).model is gemini.handle_of(first)
    assert type(prepared[1].optimizer) is torch.optim.SGD
    assert prepared[2:] == (second, first)
    assert accelerator.prepare(prepared[0]) is prepared[0]


def test_options_for_optimizers_alone_are_refused() -> None:
    with pytest.raises(ConfigError, match="give gemini="):
        GeminiAccelerator(cpu=True, gemini_optimizer={"overlap": False})


def test_states_are_streamed(tmp_path: Path) -> None:
    run(GeminiAccelerator, managed=True, save=str(tmp_path))
    names = {path.name for path in tmp_path.iterdir()}
    assert "gemini" in names
    assert not names & {"model.safetensors", "optimizer.bin"}


def test_a_state_of_accelerates_own_is_refused_with_the_way_out(tmp_path: Path) -> None:
    run(accelerate.Accelerator, managed=False, save=str(tmp_path))
    with pytest.raises(ConfigError, match=r"Accelerate's own Accelerator.*gemini\.from_pretrained"):
        run(GeminiAccelerator, managed=True, load=str(tmp_path))


def test_clipping_without_the_optimizer_is_refused() -> None:
    accelerator = GeminiAccelerator(cpu=True)
    model = net()
    gemini.manage(model, **TIGHT)
    gemini.GeminiAdamOptimizer(model, lr=1e-2)
    accelerator.prepare(model)
    with pytest.raises(ConfigError, match="prepare"):
        accelerator.clip_grad_norm_(model.parameters(), 1.0)


def test_other_models_are_as_with_accelerate_itself(tmp_path: Path) -> None:
    want = run(accelerate.Accelerator, managed=False)
    got = run(GeminiAccelerator, managed=False, save=str(tmp_path))
    assert got[0] == want[0]
    assert (tmp_path / "model.safetensors").exists()


def test_hooks_of_saving_see_all_models_with_their_weights(tmp_path: Path) -> None:
    """They may take one out and save it themselves, and then load it themselves."""
    found = []
    for kind in (accelerate.Accelerator, GeminiAccelerator):
        reset_state()
        options = {} if kind is accelerate.Accelerator else {"gemini": TIGHT}
        accelerator = kind(cpu=True, **options)
        model = net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model, optimizer = accelerator.prepare(model, optimizer)
        seen: list[Any] = []

        def save(models: Any, weights: list[Any], directory: str, seen: list[Any] = seen) -> None:
            seen.append([type(each).__name__ for each in models if isinstance(each, torch.nn.Sequential)])
            state = weights.pop()
            seen.append({name: value.clone() for name, value in state.items()})
            torch.save({"4.bias": state["4.bias"] + 1}, Path(directory, "own.pt"))

        def load(models: list[Any], directory: str) -> None:
            models.pop().load_state_dict(torch.load(Path(directory, "own.pt")), strict=False)

        accelerator.register_save_state_pre_hook(save)
        accelerator.register_load_state_pre_hook(load)
        accelerator.save_state(str(tmp_path / kind.__name__))
        before = model[0].weight.detach().clone()
        optimizer.zero_grad()
        accelerator.backward(model(torch.ones(2, 32)).sum())
        optimizer.step()
        trained = model[0].weight.detach().clone()
        accelerator.load_state(str(tmp_path / kind.__name__))
        assert not torch.equal(before, trained)
        assert torch.equal(model[0].weight.detach().clone(), trained)  # nobody loads it
        found.append((len(seen), seen[1], model[4].bias.detach().clone()))
    assert found[0][0] == found[1][0]
    assert found[0][1].keys() == found[1][1].keys()
    assert all(torch.equal(value, found[1][1][name]) for name, value in found[0][1].items())
    assert torch.equal(found[0][2], found[1][2])


def test_the_last_of_the_states_that_accelerate_names_is_loaded(tmp_path: Path) -> None:
    """Hooks are called in the order in which they were registered, with the directory."""
    found = []
    for kind in (accelerate.Accelerator, GeminiAccelerator):
        reset_state()
        directory = tmp_path / kind.__name__
        project = accelerate.utils.ProjectConfiguration(
            project_dir=str(directory), automatic_checkpoint_naming=True
        )
        options: dict[str, Any] = {} if kind is accelerate.Accelerator else {"gemini": TIGHT}
        accelerator = kind(cpu=True, project_config=project, **options)
        model = net()
        model, optimizer = accelerator.prepare(model, gemini.CPUAdam(model.parameters(), lr=1e-2))
        calls: list[Any] = []
        for name in ("one", "two"):

            def save(models: Any, weights: Any, path: str, name: str = name, calls: Any = calls) -> None:
                calls.append((name, len(models), [sorted(state) for state in weights], Path(path).name))

            def load(models: Any, path: str, name: str = name, calls: Any = calls) -> None:
                calls.append((name, len(models), Path(path).name))

            accelerator.register_save_state_pre_hook(save)
            accelerator.register_load_state_pre_hook(load)
        for step in range(4):
            accelerator.backward(model(torch.ones(2, 32)).square().sum())
            optimizer.step()
            optimizer.zero_grad()
            if step < 3:
                accelerator.save_state()
        accelerator.load_state()
        found.append((calls, {name: value.clone() for name, value in model.state_dict().items()}))
    assert found[0][0] == found[1][0]
    assert [call[0] for call in found[0][0]] == ["one", "two"] * 4
    assert found[0][0][-1] == ("two", 1, "checkpoint_2")
    assert all(torch.equal(value, found[1][1][name]) for name, value in found[0][1].items())


def test_weights_that_a_hook_changes_in_the_dict_are_refused(tmp_path: Path) -> None:
    reset_state()
    accelerator = GeminiAccelerator(cpu=True, gemini=TIGHT)
    model = net()
    accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    hook = accelerator.register_save_state_pre_hook(
        lambda models, weights, directory: weights[0].pop("0.bias")
    )
    with pytest.raises(ConfigError, match=r"weights\.pop"):
        accelerator.save_state(str(tmp_path / "run"))
    hook.remove()
    accelerator.save_state(str(tmp_path / "run"))
    accelerator.load_state(str(tmp_path / "run"))


def reset_state() -> None:
    """Let the next accelerator be another one."""
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    accelerate.state.GradientState._reset_state()
