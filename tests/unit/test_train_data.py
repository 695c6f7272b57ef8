"""The byte corpus: what it holds, and that a batch is a function of its number."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from gemini.errors import ConfigError, IoError
from gemini.jobs.gpt.data import ByteCorpus


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "b.txt").write_bytes(b"world" * 20)
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "one.txt").write_bytes(b"hello")
    (tmp_path / "empty.txt").write_bytes(b"")
    (tmp_path / ".hidden").write_bytes(b"secret")
    (tmp_path / "binary.bin").write_bytes(b"\x7fELF\0\0")
    return tmp_path


def test_directory_is_its_text_files_in_sorted_order(folder: Path) -> None:
    corpus = ByteCorpus(folder)
    assert corpus.num_files == 2
    assert corpus.read(0, corpus.nbytes) == b"world" * 20 + b"hello"


def test_any_range_across_files_reads_as_one_text(folder: Path) -> None:
    corpus = ByteCorpus(folder)
    whole = corpus.read(0, corpus.nbytes)
    for start in range(0, corpus.nbytes, 7):
        for nbytes in (0, 1, corpus.nbytes - start):
            assert corpus.read(start, nbytes) == whole[start : start + nbytes]
    with pytest.raises(ConfigError, match="outside the corpus of 105"):
        corpus.read(100, 6)


def test_targets_are_the_inputs_one_byte_later(folder: Path) -> None:
    corpus = ByteCorpus(folder)
    inputs, targets = corpus.batch(3, batch=4, seq=10, seed=1)
    assert inputs.shape == targets.shape == (4, 10)
    assert inputs.dtype == targets.dtype == torch.int64
    assert torch.equal(inputs[:, 1:], targets[:, :-1])
    start = corpus.positions(3, batch=4, seq=10, seed=1)[2]
    assert bytes(targets[2].tolist()) == corpus.read(start + 1, 10)


def test_batch_is_a_function_of_its_number_whatever_was_read_before(folder: Path) -> None:
    in_order = [ByteCorpus(folder).positions(i, batch=4, seq=10, seed=5) for i in range(20)]
    resumed = ByteCorpus(folder)
    assert [resumed.positions(i, batch=4, seq=10, seed=5) for i in range(10, 20)] == in_order[10:]
    assert in_order[0] != in_order[1]
    assert resumed.positions(0, batch=4, seq=10, seed=6) != in_order[0]


def test_batches_stay_the_same_in_every_release(folder: Path) -> None:
    assert ByteCorpus(folder).positions(0, batch=4, seq=10, seed=0) == [44, 53, 69, 61]


def test_every_start_is_possible_and_none_is_outside(tmp_path: Path) -> None:
    (tmp_path / "text").write_bytes(bytes(range(1, 13)))
    corpus = ByteCorpus(tmp_path / "text")
    seen = {start for i in range(100) for start in corpus.positions(i, batch=4, seq=8, seed=0)}
    assert seen == {0, 1, 2, 3}


def test_standard_library_is_real_text_and_bounded() -> None:
    corpus = ByteCorpus(None)
    assert 2**20 < corpus.nbytes <= 32 * 2**20
    assert b"def " in corpus.read(0, 2**16)


def test_fingerprint_is_that_of_the_files_not_of_the_place(
    folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    copy = tmp_path_factory.mktemp("copy")
    (copy / "a").mkdir()
    (copy / "a" / "one.txt").write_bytes(b"hello")
    (copy / "b.txt").write_bytes(b"world" * 20)
    assert ByteCorpus(copy).fingerprint() == ByteCorpus(folder).fingerprint()
    (copy / "b.txt").write_bytes(b"world" * 21)
    assert ByteCorpus(copy).fingerprint() != ByteCorpus(folder).fingerprint()


def test_bad_data_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "empty.txt").write_bytes(b"")
    with pytest.raises(ConfigError, match=r"no text in .*empty\.txt"):
        ByteCorpus(tmp_path / "empty.txt")
    with pytest.raises(ConfigError, match="no text in"):
        ByteCorpus(tmp_path)
    with pytest.raises(ConfigError, match=r"missing\.txt does not exist"):
        ByteCorpus(tmp_path / "missing.txt")
    (tmp_path / "short.txt").write_bytes(b"abc")
    with pytest.raises(ConfigError, match="has 3 bytes; sequences of 3 need at least 4"):
        ByteCorpus(tmp_path / "short.txt").positions(0, batch=1, seq=3, seed=0)


def test_file_that_shrinks_while_training_is_a_typed_error(tmp_path: Path) -> None:
    path = tmp_path / "text"
    path.write_bytes(b"x" * 100)
    corpus = ByteCorpus(path)
    path.write_bytes(b"x" * 50)
    with pytest.raises(IoError, match=r"read 10 of 20 bytes"):
        corpus.read(40, 20)
