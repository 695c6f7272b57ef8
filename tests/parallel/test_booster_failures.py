"""What a booster saves is complete or not there, whatever happens meanwhile."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from booster_models import TINY, assert_same, every_layout, mlp

from gemini import IoError
from gemini.checkpoint.sealed_file import SealedFile
from gemini.parallel import Booster
from gemini.system import durable


def fail_write_after(num_bytes: int) -> Callable[[SealedFile, Any, int], None]:
    """Return a ``SealedFile.write`` for a disk with ``num_bytes`` left."""
    left = [num_bytes]
    write = SealedFile.write

    def limited(file: SealedFile, data: Any, offset: int) -> None:
        left[0] -= memoryview(data).nbytes
        if left[0] < 0:
            raise IoError(28, "no space left", str(file.path))
        write(file, data, offset)

    return limited


@every_layout
@pytest.mark.parametrize("room", [0, 300, 1500, 2300])
def test_full_disk_leaves_the_earlier_checkpoint(
    shard: bool, room: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    booster = Booster()
    arguments: dict[str, Any] = {"shard": shard, "size_per_shard": TINY}
    booster.save_model(mlp(1), tmp_path / "model", **arguments)
    before = sorted(path.name for path in tmp_path.rglob("*"))
    with monkeypatch.context() as patch:
        patch.setattr(SealedFile, "write", fail_write_after(room))
        with pytest.raises(IoError, match="no space left"):
            booster.save_model(mlp(2), tmp_path / "model", **arguments)
    assert sorted(path.name for path in tmp_path.rglob("*")) == before
    booster.load_model(model := mlp(0), tmp_path / "model")
    assert_same(model.state_dict(), mlp(1).state_dict())
    booster.save_model(mlp(2), tmp_path / "model", **arguments)
    booster.load_model(model, tmp_path / "model")
    assert_same(model.state_dict(), mlp(2).state_dict())


@every_layout
@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_what_is_raised_in_a_save_leaves_the_earlier_checkpoint_alone(
    shard: bool, error: type[BaseException], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    booster = Booster()
    arguments: dict[str, Any] = {"shard": shard, "size_per_shard": TINY}
    booster.save_model(mlp(1), tmp_path / "model", **arguments)
    before = sorted(path.name for path in tmp_path.rglob("*"))

    def write(*_: Any) -> None:
        raise error("a bad sample")

    monkeypatch.setattr(SealedFile, "write", write)
    with pytest.raises(error):
        booster.save_model(mlp(2), tmp_path / "model", **arguments)
    assert sorted(path.name for path in tmp_path.rglob("*")) == before


@every_layout
def test_a_path_that_cannot_be_is_refused_as_a_full_disk_is(shard: bool, tmp_path: Path) -> None:
    for path in (tmp_path / ("x" * 300), tmp_path / ("x" * 300) / "model"):
        with pytest.raises(IoError, match="cannot save the checkpoint: File name too long"):
            Booster().save_model(mlp(1), path, shard=shard, size_per_shard=TINY)
    assert list(tmp_path.iterdir()) == []


class Killed(BaseException):
    """What a kill -9 is here: nothing that would clean up may run."""


@every_layout
def test_kill_at_any_change_of_the_directory_leaves_one_whole_checkpoint(
    shard: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    booster = Booster()
    arguments: dict[str, Any] = {"shard": shard, "size_per_shard": TINY}
    booster.save_model(mlp(1), tmp_path / "model", **arguments)
    monkeypatch.setattr(Path, "unlink", dying(Path.unlink, when_dead=lambda *_, **__: None))
    for deaths in range(1, 40):
        dying.left = deaths
        with monkeypatch.context() as patch:
            for owner, name in ((Path, "replace"), (durable, "sync"), (SealedFile, "write")):
                patch.setattr(owner, name, dying(getattr(owner, name)))
            try:
                booster.save_model(mlp(deaths), tmp_path / "model", **arguments)
                finished = True
            except Killed:
                finished = False
        dying.left = -1
        booster.load_model(model := mlp(0), tmp_path / "model")
        weight = model[0].weight
        assert any(torch.equal(weight, mlp(seed)[0].weight) for seed in (1, *range(1, deaths + 1)))
        assert_same(model.state_dict(), mlp(seed_of(weight, deaths)).state_dict())
        if finished:
            break
    assert finished
    assert deaths > 3
    leftovers = [path.name for path in tmp_path.rglob("*.tmp")]
    assert leftovers == []
    assert len(list((tmp_path / "model").iterdir()) if shard else [0]) == (5 if shard else 1)


def seed_of(weight: torch.Tensor, last: int) -> int:
    return next(seed for seed in range(1, last + 1) if torch.equal(weight, mlp(seed)[0].weight))


def dying(function: Callable[..., Any], when_dead: Callable[..., Any] | None = None) -> Callable[..., Any]:
    """Return ``function`` of a process that dies at its so many-th call, and does nothing once it is dead."""

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        if when_dead is None:
            dying.left -= 1  # type: ignore[attr-defined]
        if dying.left == 0:  # type: ignore[attr-defined]
            if when_dead is not None:
                return when_dead(*args, **kwargs)
            raise Killed
        return function(*args, **kwargs)

    return wrapped


dying.left = -1  # type: ignore[attr-defined]
