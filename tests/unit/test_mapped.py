"""Exported tensors live in a file that nobody else can open and that leaves nothing behind."""

from __future__ import annotations

import errno
import gc
import os
from pathlib import Path

import pytest
import torch

from gemini import HybridAdam
from gemini.errors import IoError, StateError
from gemini.offload.mapped_tensors import MappedTensors
from gemini.system.threads import usable_processors


def open_files(directory: Path) -> list[os.stat_result]:
    """Return the status of every file below ``directory`` that this process has mapped."""
    mapped = {
        line.split()[0] for line in Path("/proc/self/maps").read_text().splitlines() if str(directory) in line
    }
    try:
        return [Path("/proc/self/map_files", name).stat() for name in mapped]
    except PermissionError:
        pytest.skip("this kernel shows mapped files to root only")


@pytest.mark.parametrize("code", [errno.ENOSYS, errno.EOPNOTSUPP, errno.EPERM])
def test_space_is_reserved_where_a_sandbox_knows_no_call_for_it(
    code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_args: object) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    tensor = torch.randn(2_000_000)
    assert torch.equal(MappedTensors(str(tmp_path), tensor.nbytes, 1).copy(tensor), tensor)


def test_processors_are_counted_where_a_sandbox_does_not_tell(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_process: int) -> None:
        raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))

    layer = torch.nn.Linear(64, 64)
    optimizer = HybridAdam(layer.parameters(), nvme_offload_fraction=1.0)  # or torch, which asks, too
    assert usable_processors() == os.sched_getaffinity(0)
    monkeypatch.setattr(os, "sched_getaffinity", refuse)
    assert usable_processors() == set(range(os.cpu_count() or 1))
    layer(torch.ones(1, 64)).sum().backward()
    optimizer.step()
    optimizer.close()


def test_copies_equal_what_was_copied_and_do_not_touch_each_other(tmp_path: Path) -> None:
    dtypes = [torch.float32, torch.bfloat16, torch.float64, torch.int8, torch.bool]
    tensors = [torch.randn(shape).to(dtype) for dtype in dtypes for shape in [(3, 5), (4100,), (), (0, 2)]]
    export = MappedTensors(str(tmp_path), sum(t.nbytes for t in tensors), len(tensors))
    copies = [export.copy(tensor) for tensor in tensors]
    for copy, tensor in zip(copies, tensors, strict=True):
        assert copy.dtype == tensor.dtype
        assert torch.equal(copy, tensor)
    copies[0].fill_(7)  # an ordinary tensor: its own, writable
    assert all(torch.equal(copy, tensor) for copy, tensor in zip(copies[1:], tensors[1:], strict=True))


def test_a_transposed_tensor_is_copied_by_value(tmp_path: Path) -> None:
    tensor = torch.randn(7, 3).t()
    copy = MappedTensors(str(tmp_path), tensor.nbytes, 1).copy(tensor)
    assert torch.equal(copy, tensor)
    assert copy.is_contiguous()


def test_copies_are_aligned(tmp_path: Path) -> None:
    export = MappedTensors(str(tmp_path), 300, 3)
    assert [export.copy(torch.zeros(n, dtype=torch.int8)).data_ptr() % 64 for n in (1, 99, 200)] == [0, 0, 0]


def test_the_file_is_private_nameless_and_gone_with_the_last_copy(tmp_path: Path) -> None:
    copy = MappedTensors(str(tmp_path), 8192, 1).copy(torch.ones(2048))
    gc.collect()
    assert list(tmp_path.iterdir()) == []
    assert [(status.st_mode & 0o777, status.st_nlink) for status in open_files(tmp_path)] == [(0o600, 0)]
    assert copy.sum() == 2048
    del copy
    gc.collect()
    assert open_files(tmp_path) == []


def test_a_missing_or_full_directory_is_an_error_with_its_name(tmp_path: Path) -> None:
    import resource

    with pytest.raises(IoError) as caught:
        MappedTensors(str(tmp_path / "missing"), 100, 1)
    assert caught.value.filename == str(tmp_path / "missing")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
    try:
        with pytest.raises(IoError) as caught:
            MappedTensors(str(tmp_path), 2**20, 1)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert caught.value.errno
    assert list(tmp_path.iterdir()) == []
    assert open_files(tmp_path) == []


def test_more_than_the_disk_has_is_not_even_tried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """To reserve it would take what other processes need."""
    monkeypatch.setattr(os, "posix_fallocate", lambda *_: pytest.fail("it was tried"))
    with pytest.raises(IoError, match="No space left"):
        MappedTensors(str(tmp_path), 2**60, 1)


def test_more_than_was_reserved_is_refused(tmp_path: Path) -> None:
    export = MappedTensors(str(tmp_path), 400, 1)
    with pytest.raises(StateError, match="464 bytes left"):
        export.copy(torch.zeros(1000))
    assert torch.equal(export.copy(torch.ones(100)), torch.ones(100))


def test_a_forked_child_sees_the_copies(tmp_path: Path) -> None:
    copy = MappedTensors(str(tmp_path), 400, 1).copy(torch.ones(100))
    child = os.fork()
    if child == 0:
        os._exit(0 if copy.sum().item() == 100 else 1)
    assert os.waitpid(child, 0)[1] == 0
