"""After a load or an update that failed half-way nothing is taken for whole until weights and states are."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_models import KIB, Run, assert_equal, start

from gemini import IoError, StateError
from gemini.parallel import Booster, GeminiPlugin

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    """A run after two steps."""
    begun = start(device_bytes=128 * KIB, disk_dir=str(tmp_path)).train(2)
    with begun.model:
        yield begun


@contextmanager
def a_chunk_that_cannot_be_had(run: Run, fails_at: int = 2) -> Iterator[None]:
    """Let the n-th access to chunks fail during the block, and expect it."""
    chunks, left = run.model.manager.chunks, fails_at
    really = chunks.acquire

    def acquire(tensors: Any, **where: bool) -> None:
        nonlocal left
        left -= 1
        if left == 0:
            raise IoError(28, "injected")
        really(tensors, **where)

    chunks.acquire = acquire  # type: ignore[method-assign]
    try:
        with pytest.raises(IoError, match="injected"):
            yield
    finally:
        chunks.acquire = really  # type: ignore[method-assign]


class Kept:
    """Everything that a run was, as state dicts."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self.weights = {key: value.clone() for key, value in run.model.state_dict().items()}
        self.states, self.settings = run.optimizer.state_dict(), run.scheduler.state_dict()
        self._generator = torch.get_rng_state()

    def load_weights(self) -> None:
        self._run.model.load_state_dict(self.weights)

    def load_states(self) -> None:
        self._run.optimizer.load_state_dict(self.states)

    def go_on(self, steps: int = 2) -> list[float]:
        """Train from here; return the losses."""
        self._run.optimizer.zero_grad()
        self._run.scheduler.load_state_dict(self.settings)
        torch.set_rng_state(self._generator)
        self._run.losses.clear()
        return list(self._run.train(steps).losses)


def half_load(run: Run, directory: Path) -> None:
    """Load a checkpoint as far as its moments."""
    run.save(directory)
    with a_chunk_that_cannot_be_had(run, 14):
        run.load(directory)


def half_step(run: Run, directory: Path) -> None:
    """Update some parameters."""
    run.optimizer.overlap = False
    loss = run.model(torch.arange(10).view(2, 5)).square().mean()
    run.optimizer.backward(loss)
    with a_chunk_that_cannot_be_had(run):
        run.optimizer.step()


def assert_refused(*calls: Callable[[], object], match: str) -> None:
    for call in calls:
        with pytest.raises(StateError, match=rf"failed half-way.*{match}"):
            call()


@pytest.mark.parametrize("fail", [half_load, half_step])
@pytest.mark.parametrize("weights_first", [True, False])
def test_half_of_what_is_a_mixture_does_not_make_it_whole(
    run: Run, tmp_path: Path, fail: Callable[[Run, Path], None], weights_first: bool
) -> None:
    kept = Kept(run)
    want = kept.go_on()
    kept.load_weights()
    kept.load_states()
    fail(run, tmp_path / "run")
    uses = (run.optimizer.step, run.optimizer.state_dict, lambda: run.save(tmp_path / "other"))
    assert_refused(*uses, match=r"load_state_dict of both")
    assert_refused(run.model.state_dict, match=r"model\.load_state_dict.*model\.module\.state_dict")
    if weights_first:
        kept.load_weights()
        assert_equal(dict(run.model.state_dict()), kept.weights)
        assert_refused(*uses, match=r"load_state_dict of both")
        kept.load_states()
    else:
        kept.load_states()
        assert_refused(*uses, run.model.state_dict, match=r"model\.load_state_dict")
        kept.load_weights()
    assert kept.go_on() == want
    assert not (tmp_path / "other").exists()


def test_weights_that_are_loaded_in_parts_are_whole_after_the_last(run: Run, tmp_path: Path) -> None:
    kept = Kept(run)
    half_load(run, tmp_path / "run")
    names = list(kept.weights)
    for part in (names[::2], names[::2], names[1:2]):
        run.model.load_state_dict({name: kept.weights[name] for name in part}, strict=False)
        assert_refused(run.model.state_dict, match="all weights")
    run.model.load_state_dict({name: kept.weights[name] for name in names[1::2]}, strict=False)
    assert_equal(dict(run.model.state_dict()), kept.weights)


def test_weights_whose_load_failed_are_refused_until_those_are_loaded(run: Run) -> None:
    kept = Kept(run)
    want = kept.go_on()
    kept.load_states()
    some = {name: kept.weights[name] for name in ("up.weight", "down.weight", "norm.running_mean")}
    kept.load_weights()
    with a_chunk_that_cannot_be_had(run):
        run.model.load_state_dict(some, strict=False)
    assert_refused(run.model.state_dict, run.optimizer.step, match=r"model\.load_state_dict")
    run.model.load_state_dict(some, strict=False)
    assert_equal(dict(run.model.state_dict()), kept.weights)
    assert kept.go_on() == want


def test_states_whose_load_failed_are_refused_until_they_are_loaded(run: Run) -> None:
    kept = Kept(run)
    want = kept.go_on()
    kept.load_weights()
    with a_chunk_that_cannot_be_had(run):
        kept.load_states()
    assert_refused(run.optimizer.state_dict, run.optimizer.step, match="load a checkpoint")
    assert_equal(dict(run.model.state_dict()), kept.weights)
    kept.load_states()
    assert kept.go_on() == want


def test_what_is_not_loaded_because_it_does_not_fit_changes_nothing(run: Run) -> None:
    kept = Kept(run)
    want = kept.go_on()
    kept.load_weights()
    kept.load_states()
    with pytest.raises(RuntimeError, match="missing keys"):
        run.model.load_state_dict({})
    with pytest.raises(ValueError, match="parameter groups"):
        run.optimizer.load_state_dict({"state": {}, "param_groups": []})
    assert_equal(dict(run.model.state_dict()), kept.weights)
    assert kept.go_on() == want


def test_a_mixture_is_not_saved_as_a_model(run: Run, tmp_path: Path) -> None:
    half_load(run, tmp_path / "run")
    booster = Booster(plugin=GeminiPlugin())
    assert_refused(lambda: booster.save_model(run.model, tmp_path / "model"), match="all weights")
    assert not (tmp_path / "model").exists()
    assert all(value.isfinite().all() for value in run.model.module.state_dict().values())
