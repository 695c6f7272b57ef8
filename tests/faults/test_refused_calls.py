"""What the system refuses: requests of io_uring, threads, descriptors, large files, names that are text."""

from __future__ import annotations

import errno
import os
import resource
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from fault_training import adam, assert_sound, file_size_limit, managed, train_step, undisturbed
from programs import run_python
from refused_calls import NEW_THREAD

from gemini import _C, checkpoint
from gemini.errors import IoError, StateError, ThreadError
from gemini.offload import AsyncFile
from gemini.system.threads import Workers

MIB = 2**20
HERE = Path(__file__).parent
needs_seccomp = pytest.mark.skipif(
    sys.platform != "linux" or not NEW_THREAD, reason="knows the system calls of Linux on x86-64 and arm64"
)


def run(script: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    """Run Python code with the tests' helpers in a process of its own."""
    path = os.pathsep.join([str(HERE), str(HERE.parent), *sys.path])
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    environment.pop("GEMINI_IO_BACKEND", None)
    return run_python(["-c", script, *map(str, arguments)], env=environment)


TRAIN_WITHOUT_URING = """
import sys
from refused_calls import IO_URING_ENTER, refuse
refuse(IO_URING_ENTER, int(sys.argv[2]))
from fault_training import adam, managed, train_step
from gemini import _C
from gemini.errors import ConfigError
from gemini.offload import AsyncFile
model = managed(sys.argv[1])
optimizer = adam(model)
print([train_step(model, optimizer, step) for step in range(3)])
try:
    AsyncFile(sys.argv[1], 4096, backend="uring")
except ConfigError as error:
    print(error)
"""


@needs_seccomp
@pytest.mark.parametrize("code", [errno.EPERM, errno.ENOSYS])
def test_threads_serve_the_disk_where_a_ring_can_be_set_up_and_not_used(tmp_path: Path, code: int) -> None:
    done = run(TRAIN_WITHOUT_URING, tmp_path, code)
    assert done.returncode == 0, done.stderr
    losses, refusal = done.stdout.splitlines()
    assert losses == str(undisturbed(3)[0])
    assert "cannot be used here (" in refusal
    if not _C.uring_refusal():
        assert f"io_uring_enter: {os.strerror(code)}" in refusal


RESERVE_WITHOUT_FALLOCATE = """
import sys
from refused_calls import FALLOCATE, refuse
refuse(FALLOCATE, int(sys.argv[2]))
from fault_training import adam, managed, train_step
model = managed(sys.argv[1])
optimizer = adam(model)
print([train_step(model, optimizer, step) for step in range(3)])
"""


@needs_seccomp
@pytest.mark.parametrize("code", [errno.ENOSYS, errno.EOPNOTSUPP, errno.EPERM])
def test_space_is_reserved_where_a_sandbox_refuses_the_call_for_it(tmp_path: Path, code: int) -> None:
    done = run(RESERVE_WITHOUT_FALLOCATE, tmp_path, code)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == str(undisturbed(3)[0])


WITHOUT_THREADS = """
import sys
from refused_calls import NEW_THREAD, refuse
from gemini.cli.main import main
from gemini.errors import ThreadError
from gemini.offload import AsyncFile
import gemini.checkpoint.inspect
refuse(NEW_THREAD, int(sys.argv[2]))
for backend in ("threads", None):
    try:
        AsyncFile(sys.argv[1], 4096, backend=backend)
    except ThreadError as error:
        print(error)
print(main(["ckpt", "verify", sys.argv[1]]))
"""


@needs_seccomp
def test_a_thread_that_is_refused_says_what_it_is_for_and_the_way_out(tmp_path: Path) -> None:
    model = managed(tmp_path)
    optimizer = adam(model)
    train_step(model, optimizer, 0)
    checkpoint.save(tmp_path / "saved", model, optimizer)
    done = run(WITHOUT_THREADS, tmp_path / "saved", errno.EAGAIN)
    assert done.returncode == 0, done.stderr
    *said, code = done.stdout.splitlines()
    assert len(said) == 2
    assert code == "2"
    last = done.stderr.splitlines()[-1]
    assert last.startswith("gemini: error: ")
    for message in [*said, last]:
        assert "cannot start a thread for " in message
        assert "ulimit -u" in message
        assert "pids limit" in message
    assert "Traceback" not in done.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["saved"]


def test_threads_of_which_one_is_refused_end(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[threading.Thread] = []
    start = threading.Thread.start

    def refuse_third(thread: threading.Thread) -> None:
        if len(started) == 2:
            raise RuntimeError("can't start new thread")
        started.append(thread)
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refuse_third)
    with pytest.raises(ThreadError, match="checkpoints"):
        Workers(4)
    assert not any(thread.is_alive() for thread in started)


def test_a_directory_whose_name_is_no_text_serves_as_any_other(tmp_path: Path) -> None:
    place = os.fsdecode(os.fsencode(tmp_path) + b"/\xff\xfe")
    Path(place).mkdir()
    model = managed(Path(place))
    optimizer = adam(model)
    assert [train_step(model, optimizer, step) for step in range(3)] == undisturbed(3)[0]
    assert model.stats()["disk_read"]["bytes"] > 0
    assert_sound(model)


def test_errors_about_a_name_that_is_no_text_can_be_printed(tmp_path: Path) -> None:
    place = os.fsdecode(os.fsencode(tmp_path) + b"/\xff")
    with pytest.raises(IoError) as missing:
        _C.AsyncFile([place], MIB)
    assert missing.value.filename == place
    Path(place).mkdir()
    with AsyncFile(place, MIB) as file:
        assert file.path == f"{place}/<unlinked>"
        with pytest.raises(StateError) as outside:
            file.read(0, 4096, 2 * MIB)
    for error in (missing.value, outside.value):
        assert str(error).encode().decode() == str(error)  # no surrogates
        assert "xff" in str(error) or "udcff" in str(error)


def test_a_file_beyond_the_limit_names_the_limit_and_the_path_once(tmp_path: Path) -> None:
    with file_size_limit(MIB), pytest.raises(IoError, match="ulimit -f") as caught:
        AsyncFile(tmp_path, 4 * MIB)
    assert caught.value.errno == errno.EFBIG
    assert str(caught.value).count(str(tmp_path)) == 1
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("spare", range(3))
def test_a_file_beyond_the_descriptors_names_their_limit(tmp_path: Path, spare: int) -> None:
    if spare and _C.uring_refusal():
        pytest.skip("threads need no descriptors")
    _C.uring_refusal()  # asks once, and needs a descriptor
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    used = [os.dup(0) for _ in range(8)]  # whatever holes there are below
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (used[-1] + 1 + spare, hard))
        with pytest.raises(IoError, match="ulimit -n") as caught:
            AsyncFile(tmp_path, MIB, backend=None if spare else "threads")
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for descriptor in used:
            os.close(descriptor)
    assert caught.value.errno == errno.EMFILE
    data = torch.zeros(MIB + 4096, dtype=torch.uint8)
    address = data.data_ptr() + -data.data_ptr() % 4096
    with AsyncFile(tmp_path, MIB) as file:  # nothing was kept
        file.wait(file.write(address, MIB, 0))
