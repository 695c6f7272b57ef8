"""Lightning checkpoints: hooks see weights and change what is saved and loaded; paths keep what they name."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("lightning", reason="only the extra 'test' brings it")

import torch
from hf_models import assert_same
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.plugins import AsyncCheckpointIO
from lightning.pytorch.strategies import Strategy
from lightning.pytorch.tuner import Tuner
from lightning_runs import TIGHT, Classifier, loader, run, trainer

from gemini.errors import CheckpointError, ConfigError
from gemini.integrations.lightning import GeminiStrategy

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")

EDITS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "nothing": lambda weights: len(weights),
    "take out": lambda weights: weights.pop("first.bias"),
    "delete": lambda weights: weights.__delitem__("last.2.weight"),
    "put in": lambda weights: weights.update({"first.bias": torch.full((64,), 0.5)}),
    "in place": lambda weights: weights["first.bias"].fill_(0.25),
    "half": lambda weights: [weights.__setitem__(name, value.half()) for name, value in weights.items()],
}


class Silent(Classifier):
    """Draws no random numbers: those of an unmanaged run are not in its checkpoints."""

    def __init__(self) -> None:
        super().__init__()
        self.last[1].p = 0.0


class Editing(Silent):
    """Edits the weights of checkpoints, when they are saved or loaded."""

    def __init__(self, saving: str = "nothing", loading: str = "nothing") -> None:
        super().__init__()
        self.strict_loading = False
        self.saving, self.loading = saving, loading
        self.seen: list[list[str]] = []

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.seen.append(list(checkpoint["state_dict"]))
        EDITS[self.saving](checkpoint["state_dict"])

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.seen.append(list(checkpoint["state_dict"]))
        EDITS[self.loading](checkpoint["state_dict"])


@pytest.mark.parametrize(
    ("saving", "loading"),
    [(edit, "nothing") for edit in EDITS] + [("nothing", edit) for edit in EDITS if edit != "nothing"],
)
def test_hooks_see_weights_and_their_edits_are_saved_and_loaded(
    saving: str, loading: str, tmp_path: Path
) -> None:
    found = []
    for managed in (False, True):
        path = tmp_path / f"{managed}.ckpt"
        made, module, _ = run(tmp_path, managed=managed, max_epochs=1, module=Editing(saving, loading))
        made.save_checkpoint(path)
        torch.manual_seed(7)
        other = Editing(saving, loading)
        _, resumed, figures = run(tmp_path, managed=managed, resume=path, module=other)
        found.append((module.seen + resumed.seen, figures, resumed))
    assert found[0][:2] == found[1][:2]
    assert_same(found[1][2], found[0][2])


class Replacing(Callback):
    """Saves other weights in the place of those of the module, which it keeps beside, as averaging does."""

    def on_save_checkpoint(self, trainer: Any, module: Any, checkpoint: dict[str, Any]) -> None:
        checkpoint["current"] = checkpoint["state_dict"]
        checkpoint["state_dict"] = {name: value + 1 for name, value in checkpoint["state_dict"].items()}

    def on_load_checkpoint(self, trainer: Any, module: Any, checkpoint: dict[str, Any]) -> None:
        module.load_state_dict(checkpoint["current"])


def test_a_callback_may_save_other_weights_and_those_of_the_module_beside(tmp_path: Path) -> None:
    found = []
    for managed in (False, True):
        path = tmp_path / f"{managed}.ckpt"
        options = {"managed": managed, "callbacks": [Replacing()]}
        made, _, _ = run(tmp_path, max_epochs=1, module=Silent(), **options)
        made.save_checkpoint(path)
        _, resumed, figures = run(tmp_path, resume=path, module=Silent(), **options)
        found.append((figures, resumed))
    assert found[0][0] == found[1][0]
    assert_same(found[1][1], found[0][1])


def test_a_hook_that_asks_for_states_of_the_optimizer_is_told_where_they_are(tmp_path: Path) -> None:
    class Asking(Classifier):
        def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            checkpoint["optimizer_states"][0]["state"]

    made, _, _ = run(tmp_path, managed=True, max_epochs=1, module=Asking())
    with pytest.raises(ConfigError, match="streamed to files"):
        made.save_checkpoint(tmp_path / "run.ckpt")


@pytest.mark.parametrize("weights_only", [False, True])
def test_a_save_that_fails_leaves_what_the_path_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, weights_only: bool
) -> None:
    def full(*_args: Any, **_options: Any) -> None:
        raise OSError(28, "No space left on device")

    made, want, _ = run(tmp_path, managed=True, max_epochs=1)
    made.save_checkpoint(tmp_path / "last.ckpt")
    for _ in range(2):
        (tmp_path / ".first.ckpt.partial" / "first.ckpt").mkdir(parents=True)  # as a killed save leaves it
        made, _, _ = run(tmp_path, managed=True, resume=tmp_path / "last.ckpt")
        with monkeypatch.context() as patched:
            patched.setattr(Strategy, "save_checkpoint", full)
            with pytest.raises(OSError, match="No space"):
                made.save_checkpoint(tmp_path / "last.ckpt", weights_only=weights_only)
    _, got, _ = run(tmp_path, managed=True, max_epochs=1, resume=tmp_path / "last.ckpt")
    assert_same(got, want)
    assert [path.name for path in tmp_path.glob("*last*")] + [*map(str, tmp_path.glob(".*"))] == ["last.ckpt"]


def test_files_of_other_saves_are_refused(tmp_path: Path) -> None:
    made, _, _ = run(tmp_path, managed=True, max_epochs=1)
    for name in ("one.ckpt", "other.ckpt"):
        made.save_checkpoint(tmp_path / name)
    shutil.rmtree(tmp_path / "one.ckpt" / "gemini")
    with pytest.raises(CheckpointError, match=r"one\.ckpt/gemini/step-00000006, which is not there"):
        run(tmp_path, managed=True, resume=tmp_path / "one.ckpt")
    shutil.copytree(tmp_path / "other.ckpt" / "gemini", tmp_path / "one.ckpt" / "gemini")
    with pytest.raises(CheckpointError, match="belongs to another save"):
        run(tmp_path, managed=True, resume=tmp_path / "one.ckpt")


def test_the_tuner_and_a_plugin_that_writes_in_a_thread_work(tmp_path: Path) -> None:
    """The tuner saves, trains and loads."""
    found = []
    for strategy in ("auto", GeminiStrategy(**TIGHT)):
        torch.manual_seed(1)
        made, _ = trainer(tmp_path, strategy, plugins=[AsyncCheckpointIO()], limit_val_batches=0)
        module = Tuned()
        tuner = Tuner(made)
        rate = tuner.lr_find(module, loader(), num_training=6, update_attr=False).results
        made.fit(module)
        made.save_checkpoint(tmp_path / "run.ckpt")
        made.strategy.teardown()
        found.append((rate, module))
    assert found[0][0] == found[1][0]
    assert_same(found[1][1], found[0][1])
    assert sorted(path.name for path in (tmp_path / "run.ckpt").iterdir()) == ["gemini", "lightning.ckpt"]


class Tuned(Silent):
    """Has a rate that a tuner looks for."""

    def __init__(self) -> None:
        super().__init__()
        self.lr = 1e-2

    def train_dataloader(self) -> Any:
        return torch.utils.data.DataLoader(loader().dataset, batch_size=4)

    def val_dataloader(self) -> Any:
        return loader(8)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=self.lr)
