"""Several ranks write one checkpoint, each its own files; any number of ranks can read it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from gemini.checkpoint import CheckpointReader, Rank, latest, new_checkpoint
from gemini.checkpoint.contents import optimizer_file, range_name, weights_file
from gemini.checkpoint.directory import complete_checkpoints, found_in, publish
from gemini.checkpoint.loading import _newest_of_all
from gemini.checkpoint.saving import CheckpointWriter
from gemini.checkpoint.tensor_file import TensorSpec
from gemini.errors import CheckpointError

SHAPES = {"a.weight": (7, 5), "b.weight": (3,), "c.weight": (2, 4)}
WEIGHTS = {
    name: torch.arange(15.0 * index, 15.0 * index + 60)[: torch.Size(shape).numel()].reshape(shape)
    for index, (name, shape) in enumerate(SHAPES.items())
}


def test_of_parts_whose_newest_saves_differ_the_newest_that_all_have_is_taken_and_said(
    caplog: pytest.LogCaptureFixture,
) -> None:
    two, one = ("dir/step-2", "save 2"), ("dir/step-1", "save 1")
    first = Rank(0, 1, lambda text: [text])
    assert _newest_of_all([[two, one], [two, one]], first) == Path("dir/step-2")
    assert caplog.messages == []
    assert _newest_of_all([[two, one], [one]], first) == Path("dir/step-1")
    (said,) = caplog.messages
    assert "part 0 dir/step-2, part 1 dir/step-1" in said
    assert said.endswith("loading the newest save that all parts have, dir/step-1")


class Exchange:
    """What ranks in threads of one process talk through."""

    def __init__(self, count: int) -> None:
        self._said = [""] * count
        self._barrier = threading.Barrier(count, timeout=20)

    def rank(self, index: int) -> Rank:
        def exchange(text: str) -> list[str]:
            self._said[index] = text
            self._barrier.wait()
            said = list(self._said)
            self._barrier.wait()
            return said

        return Rank(index, len(self._said), exchange)


def share(numel: int, rank: Rank) -> tuple[int, int]:
    """Return which elements of a flat parameter a rank has: all but the last have the same number."""
    each = -(-numel // rank.count)
    return min(numel, rank.index * each), min(numel, (rank.index + 1) * each)


def write_part(writer: CheckpointWriter) -> None:
    """Write what a rank has: its range of every moment, and every so manyth weight."""
    rank = writer.rank
    ranges = []
    for name, weight in WEIGHTS.items():
        start, stop = share(weight.numel(), rank)
        if start < stop:
            ranges += [(state, name, start, stop) for state in ("exp_avg", "exp_avg_sq")]
    file_name = optimizer_file(rank.index, rank.count, 0)
    specs = [
        TensorSpec(range_name(name, state, start, stop), torch.float32, (stop - start,))
        for state, name, start, stop in ranges
    ]
    file = writer.add_file(file_name, specs)
    for spec, (state, name, start, stop) in zip(specs, ranges, strict=True):
        values = moment(state, name)[start:stop]
        half = len(values) // 2
        file.write(spec.name, half, values[half:])  # in any order
        file.write(spec.name, 0, values[:half])
        writer.states.setdefault(state, {}).setdefault(name, []).append((start, stop, file_name, spec.name))
    for number, (name, weight) in enumerate(WEIGHTS.items()):
        if number % rank.count == rank.index:
            spec = TensorSpec(name, torch.float32, SHAPES[name])
            writer.add_weights(weights_file(number, len(WEIGHTS)), [spec], {}).write(name, 0, weight)
    writer.rng = {"rank": rank.index}


def moment(state: str, name: str) -> torch.Tensor:
    flat = WEIGHTS[name].flatten()
    return -flat if state == "exp_avg" else flat**2


def manifest() -> dict[str, Any]:
    parameters = {
        name: {"shape": list(shape), "stride": list(torch.empty(shape).stride())}
        for name, shape in SHAPES.items()
    }
    return {
        "step": 5,
        "parameters": parameters,
        "aliases": {},
        "buffers": {},
        "optimizer_steps": dict.fromkeys(parameters, 5),
        "group_members": [list(parameters)],
        "loss_scale": None,
        "scheduler": False,
        "objects": {},
        "extra": {},
    }


def save_together(
    directory: Path, count: int, write: Callable[[CheckpointWriter], None] = write_part
) -> list[BaseException | Path]:
    """Save from ``count`` threads; return what each of them got."""
    exchange = Exchange(count)
    results: list[BaseException | Path] = [Path()] * count

    def run(index: int) -> None:
        try:
            with new_checkpoint(directory, 5, rank=exchange.rank(index)) as writer:
                writer.manifest = manifest()
                write(writer)
            results[index] = writer.final
        except BaseException as error:
            results[index] = error

    threads = [threading.Thread(target=run, args=(index,)) for index in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


@pytest.mark.parametrize("readers", [1, 2, 5])
@pytest.mark.parametrize("writers", [1, 3, 8])
def test_any_number_of_ranks_reads_what_any_number_wrote(tmp_path: Path, writers: int, readers: int) -> None:
    final = tmp_path / "run" / "step-00000005"
    assert save_together(tmp_path / "run", writers) == [final] * writers
    with CheckpointReader(latest(tmp_path / "run")) as reader:
        reader.verify()
        assert reader.manifest["ranks"] == writers
        for name, weight in WEIGHTS.items():
            assert torch.equal(reader.weight(name), weight)
            for state in ("exp_avg", "exp_avg_sq"):
                assert torch.equal(reader.state(state, name).flatten(), moment(state, name))
                for index in range(readers):
                    start, stop = share(weight.numel(), Rank(index, readers))
                    got = torch.full((stop - start,), torch.nan)
                    for first, values in reader.state_pieces(state, name, start, stop):
                        got[first - start : first - start + len(values)] = values
                    assert torch.equal(got, moment(state, name)[start:stop])
        assert reader.rng(writers - 1, writers) == {"rank": writers - 1}
        assert reader.rng(0, writers + 1) == {"rank": 0}


@pytest.mark.parametrize("failing", [0, 1, 2])
def test_a_rank_that_fails_fails_all_and_leaves_nothing(tmp_path: Path, failing: int) -> None:
    save_together(tmp_path / "run", 3)

    def write(writer: CheckpointWriter) -> None:
        write_part(writer)
        if writer.rank.index == failing:
            raise OSError(28, "No space left on device")

    results = save_together(tmp_path / "run", 3, write)
    for index, result in enumerate(results):
        assert isinstance(result, OSError if index == failing else CheckpointError)
    assert f"rank {failing} of 3 failed" in str(results[failing - 1])
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["step-00000005"]


@pytest.mark.parametrize("which", ["missing", "twice"])
def test_ranges_that_are_not_the_whole_parameter_are_refused(tmp_path: Path, which: str) -> None:
    def write(writer: CheckpointWriter) -> None:
        write_part(writer)
        if writer.rank.index == 1:
            ranges = writer.states["exp_avg"]["a.weight"]
            (start, stop, *where) = ranges[0]
            ranges[:] = [] if which == "missing" else [(start - 1, stop, *where)]  # type: ignore[list-item]

    results = save_together(tmp_path / "run", 2, write)
    assert all(isinstance(result, CheckpointError) and "a.weight" in str(result) for result in results)
    assert complete_checkpoints(tmp_path / "run") == []


def test_a_saver_that_is_refused_keeps_no_other_rank_waiting(tmp_path: Path) -> None:
    with new_checkpoint(tmp_path / "run", 1) as other:
        results = save_together(tmp_path / "run", 3)
        other.manifest = {"parameters": {}, "buffers": {}, "optimizer_steps": {}}
    assert all(isinstance(result, CheckpointError) for result in results)
    assert "another save is running" in str(results[2])
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["step-00000001"]


def save_parts(
    root: Path, write: Callable[[CheckpointWriter], None] = write_part, keep: int = 1
) -> list[BaseException | Path]:
    """Save two parts of a model, each by a thread to a directory of its own."""
    exchange = Exchange(2)
    results: list[BaseException | Path] = [Path()] * 2

    def run(part: int) -> None:
        rank = Rank(parts=exchange.rank(part))
        try:
            with new_checkpoint(root / str(part), 5, rank=rank, keep=keep) as writer:
                writer.manifest = manifest()
                write(writer)
            results[part] = writer.final
        except BaseException as error:
            results[part] = error

    threads = [threading.Thread(target=run, args=(part,)) for part in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def held(root: Path, part: int) -> list[str]:
    return [found.save for found in found_in(root / str(part))]


@pytest.mark.parametrize("losing", [0, 1])
def test_what_all_parts_have_stays_until_all_have_a_newer_one(
    tmp_path: Path, losing: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def publish_or_fail(partial: Path) -> Path:
        if partial.parent.name == str(losing):
            raise OSError(28, "No space left on device")
        return publish(partial)

    def fail(writer: CheckpointWriter) -> None:
        raise OSError(5, "the disk is gone")

    save_parts(tmp_path)
    (first,) = held(tmp_path, 0)
    assert held(tmp_path, 1) == [first]
    with monkeypatch.context() as patched:
        patched.setattr("gemini.checkpoint.saving.publish", publish_or_fail)
        assert all(isinstance(result, Exception) for result in save_parts(tmp_path))
    assert [len(held(tmp_path, part)) for part in (losing, 1 - losing)] == [1, 2]
    assert all(isinstance(result, OSError) for result in save_parts(tmp_path, fail))
    assert first in held(tmp_path, 0)
    assert first in held(tmp_path, 1)
    assert save_parts(tmp_path)[0] in complete_checkpoints(tmp_path / "0")
    assert held(tmp_path, 0) == held(tmp_path, 1) != [first]


def test_no_part_has_its_name_before_all_are_complete(tmp_path: Path) -> None:
    def write(writer: CheckpointWriter) -> None:
        write_part(writer)
        if writer.rank.part:
            writer.weights.clear()  # found when it is sealed

    assert all(isinstance(result, CheckpointError) for result in save_parts(tmp_path, write))
    assert held(tmp_path, 0) == held(tmp_path, 1) == []
