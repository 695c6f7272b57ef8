"""Damage to any file of a checkpoint is seen before its values are used, and every byte is read once."""

from __future__ import annotations

import itertools
import os
import weakref
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_models import KIB, Run, assert_equal, assert_same, start
from torch import nn

import gemini
from gemini import checkpoint
from gemini.checkpoint import loading
from gemini.checkpoint.inspect import describe, verdict
from gemini.checkpoint.sealed_file import BLOCK_BYTES, DamagedError, Seal, crc32c
from gemini.checkpoint.tensor_file import BlockFile, ReadAhead
from gemini.errors import CheckpointError, StateError

pytestmark = pytest.mark.usefixtures("one_thread")

HOW = ["missing", "truncated", "one bit"]
DAMAGED = [
    "model-00002-of",
    "model.safetensors.index",
    "model-buffers",
    "optimizer-rank-00000-of-00001-00002",
    "optimizer.index",
    "rank-00000",
    "manifest",
]
# What only reading it all finds: by then the weights are loaded.
MIDWAY = ("optimizer-rank-00000-of-00001-00002", "one bit")


@pytest.fixture
def saved(tmp_path: Path) -> tuple[Run, Path]:
    """A run after two steps in several chunks, and its checkpoint."""
    run = start(device_bytes=128 * KIB, disk_dir=str(tmp_path)).train(2)
    return run, run.save(tmp_path / "run", shard_bytes="32KiB")


def _replace(file: Path, how: str) -> None:
    file.unlink()
    if how == "fifo":
        os.mkfifo(file)
    elif how == "directory":
        file.mkdir()
    elif how == "nested":
        file.write_text(100_000 * "[")
    else:
        file.touch()
        os.truncate(file, 2**40)  # sparse


def damage(file: Path, how: str) -> None:
    if how == "missing":
        file.unlink()
        return
    content = bytearray(file.read_bytes())
    if how == "truncated":
        del content[-1:]
    elif how == "one bit":
        content[len(content) // 2] ^= 1
    file.write_bytes(content)


@pytest.mark.parametrize(
    ("name", "how"), [pair for pair in itertools.product(DAMAGED, HOW) if pair != MIDWAY]
)
def test_damage_found_first_is_named_and_changes_nothing(
    saved: tuple[Run, Path], name: str, how: str
) -> None:
    run, path = saved
    run.train(1)
    before = {key: value.clone() for key, value in run.model.state_dict().items()}, run.optimizer.state_dict()
    (file,) = path.glob(f"{name}*")
    damage(file, how)
    with pytest.raises(CheckpointError, match=file.name):
        run.load(path.parent)
    assert_equal((run.model.state_dict(), run.optimizer.state_dict()), before)
    run.train(1)


@pytest.mark.parametrize("how", ["fifo", "directory", "nested", "1 TiB"])
@pytest.mark.parametrize("name", ["seal.json", "manifest.json", "model-00001-of", "rank-00000"])
def test_what_is_no_file_of_ours_is_neither_waited_for_nor_read(
    saved: tuple[Run, Path], name: str, how: str
) -> None:
    run, path = saved
    newest = run.train(1).save(path.parent, shard_bytes="32KiB")
    (file,) = newest.glob(f"{name}*")
    _replace(file, how)
    for look in (describe, verdict):
        assert file.name in look(newest)["damage"]
    with pytest.raises(DamagedError, match=file.name):
        run.load(newest)
    run.load(path.parent)
    assert run.model.manager.step == 2


def test_after_damage_found_midway_only_a_load_lets_training_go_on(saved: tuple[Run, Path]) -> None:
    run, path = saved
    run.train(2)
    (file,) = path.glob(f"{MIDWAY[0]}*")
    whole = file.read_bytes()
    damage(file, MIDWAY[1])
    for _ in range(2):
        with pytest.raises(DamagedError, match=rf"{file.name}.*a load failed half-way.*load_state_dict"):
            run.load(path.parent)
    for refused in (lambda: run.train(1), run.optimizer.state_dict, lambda: run.save(path.parent)):
        with pytest.raises(StateError, match="a load failed half-way"):
            refused()
    file.write_bytes(whole)
    run.load(path.parent)
    losses = run.losses[2:4]
    run.losses.clear()
    assert run.train(2).losses == losses


def test_after_damage_found_midway_loading_states_lets_training_go_on(saved: tuple[Run, Path]) -> None:
    run, path = saved
    weights = {key: value.clone() for key, value in run.model.state_dict().items()}
    states, settings = run.optimizer.state_dict(), run.scheduler.state_dict()
    generator = torch.get_rng_state()
    run.train(2)
    damage(next(path.glob(f"{MIDWAY[0]}*")), MIDWAY[1])
    with pytest.raises(DamagedError):
        run.load(path.parent)
    run.model.load_state_dict(weights)
    run.optimizer.load_state_dict(states)
    run.scheduler.load_state_dict(settings)
    torch.set_rng_state(generator)
    losses = run.losses[2:]
    run.losses.clear()
    assert run.train(2).losses == losses


def test_where_the_one_before_does_not_fit_the_error_says_what_was_left(saved: tuple[Run, Path]) -> None:
    run, path = saved
    checkpoint.save(path.parent, run.model, run.optimizer)  # without the scheduler
    newest = run.train(1).save(path.parent, shard_bytes="32KiB")
    damage(next(newest.glob(f"{MIDWAY[0]}*")), MIDWAY[1])
    with pytest.raises(CheckpointError, match=r"without a scheduler.*a load failed half-way"):
        run.load(path.parent)
    with pytest.raises(StateError, match="a load failed half-way"):
        run.train(1)


def test_a_load_that_fails_in_its_settings_failed_half_way(
    saved: tuple[Run, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    run, path = saved
    with monkeypatch.context() as patch:
        patch.setattr(run.scheduler, "load_state_dict", lambda state: state["absent"])
        with pytest.raises(KeyError):
            run.load(path.parent)
    with pytest.raises(StateError, match="a load failed half-way"):
        run.train(1)
    run.load(path.parent)
    run.train(1)


def test_going_on_to_older_checkpoints_takes_no_more_memory(
    saved: tuple[Run, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    run, path = saved
    for _ in range(2):
        newest = run.train(1).save(path.parent, shard_bytes="32KiB", keep=3)
        damage(next(newest.glob(f"{MIDWAY[0]}*")), MIDWAY[1])
    alive: weakref.WeakSet[ReadAhead] = weakref.WeakSet()
    most: list[int] = []
    really = ReadAhead.__init__

    def counted(self: ReadAhead) -> None:
        really(self)
        alive.add(self)
        most.append(len(alive))

    monkeypatch.setattr(ReadAhead, "__init__", counted)
    run.load(path.parent)
    assert run.model.stats()["step"] == 2
    assert most == [1, 1, 1]


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("name", [*DAMAGED, "seal"])
def test_where_the_newest_is_damaged_the_one_before_loads(
    saved: tuple[Run, Path], caplog: pytest.LogCaptureFixture, name: str, how: str
) -> None:
    run, path = saved
    newest = run.train(2).save(path.parent, shard_bytes="32KiB")
    (file,) = newest.glob(f"{name}*")
    damage(file, how)
    other = start(seed=7)
    other.load(path.parent)
    assert other.model.stats()["step"] == 2
    assert other.train(2).losses == run.losses[2:]
    assert_same(other, run)
    assert (newest.name in caplog.text) == (
        (name, how) != ("seal", "missing")
    )  # without its seal it is no checkpoint


@pytest.mark.parametrize("text", ["", "{", "[]", '{"format": "other"}', '{"format": "gemini-checkpoint-3"}'])
def test_a_damaged_seal_is_named_and_removes_nothing(saved: tuple[Run, Path], text: str) -> None:
    run, path = saved
    (path / "seal.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"seal\.json"):
        run.load(path.parent)
    assert not checkpoint.is_complete(path.parent)
    assert path.is_dir()


@pytest.mark.parametrize("before", ["check_headers", "_load_moments"])
def test_a_reader_overtaken_by_a_save_reads_the_newer_one(
    saved: tuple[Run, Path], monkeypatch: pytest.MonkeyPatch, before: str
) -> None:
    run, path = saved
    reader = start(seed=7)
    owner: Any = loading if before == "_load_moments" else checkpoint.CheckpointReader
    really = getattr(owner, before)
    rounds: list[int] = []

    def overtaken(*args: Any, **kwargs: Any) -> None:
        if not rounds:
            rounds.append(1)
            run.train(1).save(path.parent, keep=1)  # removes the checkpoint being read
        really(*args, **kwargs)

    monkeypatch.setattr(owner, before, overtaken)
    reader.load(path.parent)
    assert reader.model.stats()["step"] == 3
    assert_same(reader, run)


Wide = tuple[gemini.GeminiDDP, gemini.GeminiOptimizer]


@pytest.fixture
def wide() -> Iterator[Wide]:
    """A model of 8 MiB; its moments are files of several blocks."""
    torch.manual_seed(3)
    layers = [nn.Linear(1024, 1024, bias=False) for _ in range(2)]
    with gemini.GeminiDDP(nn.Sequential(*layers)) as model:
        yield model, gemini.GeminiAdamOptimizer(model)


def step(wide: Wide) -> None:
    model, optimizer = wide
    optimizer.backward(model(torch.ones(1, 1024)).square().sum())
    optimizer.step()


def contents(wide: Wide) -> Any:
    model, optimizer = wide
    return {key: value.clone() for key, value in model.state_dict().items()}, optimizer.state_dict()


@pytest.mark.parametrize("kind", ["model", "optimizer"])
@pytest.mark.parametrize("block", [1, -1])
def test_one_bit_in_any_block_is_found(tmp_path: Path, wide: Wide, kind: str, block: int) -> None:
    """Also in a block that is read after others of the file were used: the one before comes back whole."""
    step(wide)
    checkpoint.save(tmp_path, *wide)
    before = contents(wide)
    step(wide)
    newest = checkpoint.save(tmp_path, *wide)
    file = max(newest.glob(f"{kind}-*.safetensors"))
    content = bytearray(file.read_bytes())
    assert len(content) > 2 * BLOCK_BYTES
    content[-1 if block < 0 else block * BLOCK_BYTES] ^= 128
    file.write_bytes(content)
    checkpoint.load(tmp_path, *wide)
    assert_equal(contents(wide), before)
    step(wide)
    begin = range(0, len(content), BLOCK_BYTES)[block]
    end = min(begin + BLOCK_BYTES, len(content))
    with pytest.raises(DamagedError, match=f"{file.name} is damaged: bytes {begin} to {end} are not those"):
        checkpoint.load(newest, *wide)


def test_a_load_reads_every_byte_once(tmp_path: Path, wide: Wide, monkeypatch: pytest.MonkeyPatch) -> None:
    step(wide)
    path = checkpoint.save(tmp_path, *wide)
    read: list[tuple[int, int]] = []  # offset, bytes
    really = os.preadv

    def counted(descriptor: int, buffers: Any, offset: int) -> int:
        count = really(descriptor, buffers, offset)
        read.append((offset, count))
        return count

    monkeypatch.setattr(os, "preadv", counted)
    checkpoint.load(tmp_path, *wide)
    sizes = [file.stat().st_size for file in path.glob("*.safetensors")]
    assert len(sizes) == 2
    # The first block of the weights twice: before anything changes, and for its values.
    again = BLOCK_BYTES + 4096 * len(sizes)  # asking whether the file system has O_DIRECT
    assert sum(sizes) < sum(count for _, count in read) <= sum(sizes) + again
    late = [offset for offset, count in read if offset and count]
    assert len(late) == sum(-(-size // BLOCK_BYTES) - 1 for size in sizes)


def test_a_part_of_a_tensor_is_read_and_nothing_behind_it(
    tmp_path: Path, wide: Wide, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As ranks read moments that fewer ranks have saved."""
    step(wide)
    path = checkpoint.save(tmp_path, *wide)
    blocks: list[int] = []
    really = os.preadv
    with checkpoint.CheckpointReader(path) as reader:
        name = "0.weight"
        list(reader.state_pieces("exp_avg", name, 0, 1))  # opens the file

        def counted(descriptor: int, buffers: Any, offset: int) -> int:
            blocks.append(offset // BLOCK_BYTES)
            return really(descriptor, buffers, offset)

        monkeypatch.setattr(os, "preadv", counted)
        half = BLOCK_BYTES // 8  # elements
        got = [values.clone() for _, values in reader.state_pieces("exp_avg", name, half, 2 * half - 4096)]
        assert set(blocks) <= {0}
        assert torch.equal(torch.cat(got), reader.state("exp_avg", name).view(-1)[half : 2 * half - 4096])
        assert max(blocks) > 0


@pytest.mark.parametrize("size", [1, 4095, 4096, BLOCK_BYTES, BLOCK_BYTES + 1, 3 * BLOCK_BYTES - 7])
@pytest.mark.parametrize("direct", [True, False])
def test_blocks_are_what_is_in_the_file_or_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int, direct: bool
) -> None:
    if not direct:
        monkeypatch.setattr(os, "O_DIRECT", 0)
    data = bytearray(torch.arange(-(-size // 8)).numpy().tobytes()[:size])
    path, count = tmp_path / "file", -(-size // BLOCK_BYTES)
    seal = Seal.of(data)
    assert seal.blocks == [crc32c(data[at : at + BLOCK_BYTES]) for at in range(0, size, BLOCK_BYTES)]
    data[-1] ^= 1
    path.write_bytes(data)
    with closing(ReadAhead()) as ahead, closing(BlockFile(path, seal, ahead)) as file:
        for index in [*range(count), 0, *reversed(range(count))]:
            if index == count - 1:
                with pytest.raises(DamagedError, match=f"bytes {index * BLOCK_BYTES} to {size}"):
                    file.block(index)
            else:
                want = data[index * BLOCK_BYTES : (index + 1) * BLOCK_BYTES]
                assert bytes(file.block(index)) == want
                assert file.head(len(want) * (index + 1)) == data[: len(want) * (index + 1)]
    data[-1] ^= 1
    path.write_bytes(data)
    with closing(ReadAhead()) as ahead, closing(BlockFile(path, seal, ahead)) as file:
        assert b"".join(bytes(file.block(index)) for index in range(count)) == data
