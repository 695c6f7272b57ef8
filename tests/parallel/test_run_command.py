"""``gemini run``: ranks on this machine and on others, and what ends all of them."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from hosts import WIRE, Host, two_hosts
from programs import run_python

import gemini
from gemini.cli.command_line import EXIT_ERROR
from gemini.cli.main import main
from gemini.errors import ConfigError, IoError
from gemini.parallel.launch import hosts as launch_hosts
from gemini.parallel.launch.hosts import (
    choose_hosts,
    first_to_listen,
    is_this_machine,
    parse_hosts,
    read_hostfile,
)
from gemini.parallel.launch.launching import free_port
from gemini.parallel.launch.torchrun import Node, Program

# -- which machines --------------------------------------------------------------------------------


def test_a_hostfile_has_a_host_per_line_and_each_counts_once(tmp_path: Path) -> None:
    file = tmp_path / "hosts"
    file.write_text("\ufeff# ours\nnode1\n\n  me@node2  # the fast one\nnode1\n10.0.0.3\nfe80::1\n")
    assert read_hostfile(file) == ["node1", "me@node2", "10.0.0.3", "fe80::1"]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("node1 slots=4\n", "line 1 of .* has 'node1 slots=4'"),
        ("node1\n-oProxyCommand=x\n", "line 2 of .* has '-oProxyCommand=x'"),
        ("-Fx@node1\n", "line 1 of .* has '-Fx@node1'"),
        ("node1\n-@node2\n", "line 2 of .* has '-@node2'"),
        ("node[1-4]\n", "has 'node\\[1-4\\]', which is not the name of a host"),
        ("node1,node2\n", "one name per line"),
        ("# nobody\n", "names no host"),
        ("me@a\nyou@a\n", "names a twice, as me@a and as you@a"),
    ],
)
def test_a_hostfile_that_says_something_else_is_refused(tmp_path: Path, text: str, said: str) -> None:
    file = tmp_path / "hosts"
    file.write_text(text)
    with pytest.raises(ConfigError, match=said):
        read_hostfile(file)


def test_a_hostfile_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(IoError, match=r"name another hostfile.*absent"):
        read_hostfile(tmp_path / "absent")


def test_hosts_are_included_and_excluded_in_their_order() -> None:
    known = parse_hosts("a, b,c,a", "--host")
    assert known == ["a", "b", "c"]
    assert choose_hosts(known, include=["c", "a"]) == ["a", "c"]
    assert choose_hosts(known, exclude=["a"]) == ["b", "c"]
    with pytest.raises(ConfigError, match="--exclude names d; the hosts are a, b, c"):
        choose_hosts(known, exclude=["d"])
    with pytest.raises(ConfigError, match="no host is left"):
        choose_hosts(known, include=["b"], exclude=["b"])
    with pytest.raises(ConfigError, match="--host has ''"):
        parse_hosts("a,,b", "--host")
    for names in ("u@a,v@a", "a,b,u@a"):
        with pytest.raises(ConfigError, match=r"--include names a twice, as .*; leave one out"):
            parse_hosts(names, "--include")


@pytest.mark.parametrize("address", ["-oProxyCommand=x", "-x", "", "a b", "me@a"])
def test_an_address_that_is_none_is_refused(address: str, capsys: pytest.CaptureFixture[str]) -> None:
    for options in (["--host", "a,b"], ["--nnodes", "2", "--node-rank", "1"]):
        assert main(["run", *options, f"--master-addr={address}", "train.py"]) == 2
        assert f"--master-addr {'is' if '@' in address else 'has'} {address!r}" in capsys.readouterr().err


def test_ranks_meet_at_the_machine_that_gets_the_first_of_them() -> None:
    known = ["me@a", "b", "c"]
    assert first_to_listen(known, None, known) == (known, "a")
    assert first_to_listen(known, "b", known) == (["b", "me@a", "c"], "b")
    assert first_to_listen(known, "10.0.0.1", known) == (known, "10.0.0.1")
    with pytest.raises(ConfigError, match="--master-addr is b, which is not among the hosts: me@a, c"):
        first_to_listen(["me@a", "c"], "b", known)
    for address in ("localhost", "127.0.1.1", "::1"):
        with pytest.raises(ConfigError, match="a different machine on each of them"):
            first_to_listen(known, address, known)
    assert first_to_listen(["localhost"], None, ["localhost"]) == (["localhost"], "localhost")


@pytest.mark.parametrize(("index", "count"), [(-1, 2), (2, 2), (3, 2)])
def test_a_machine_that_is_none_of_them_is_refused(index: int, count: int) -> None:
    assert Node(index=count - 1, count=count).index == 1
    with pytest.raises(ConfigError, match=f"--node-rank is {index} of {count} machines"):
        Node(index=index, count=count)


def test_this_machine_is_known_by_its_addresses() -> None:
    assert is_this_machine("localhost")
    assert is_this_machine("127.0.0.1")
    assert not is_this_machine("192.0.2.1")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["absent.py"], "there is no file 'absent.py' to run"),
        (["--nproc-per-node", "0", __file__], "--nproc-per-node is '0'"),
        (["--nproc-per-node", "gpu", __file__], "--nproc-per-node gpu"),
        (["--master-port", "70000", __file__], "ports are 1 to 65535"),
        (["--exclude", "a", __file__], "give the list by --hostfile or --host"),
        (["--host", "a,b", "--hostfile", "h", __file__], "give one of them"),
        (["--host", "a,b", "--node-rank", "1", __file__], "start the ranks of one machine"),
        (["--nnodes", "2", __file__], "need --master-addr"),
        (
            ["--nnodes", "2", "--node-rank", "2", "--master-addr", "a", __file__],
            "--node-rank is 2 of 2 machines",
        ),
        (["--host", "192.0.2.1", "--env", "A=b", __file__], "--env needs the name of a variable that is set"),
        (["--host", "192.0.2.1", "--env", "NO_SUCH_9", __file__], "export NO_SUCH_9"),
        (["--env", "A=b", __file__], "first export A=b, then give --env A"),
        (["--host", "localhost,192.0.2.1", __file__], "a different machine on each of them"),
        (["--host", "192.0.2.1", "--ssh", "no-such-ssh -v", __file__], "'no-such-ssh', the command to reach"),
        (
            ["--host", "192.0.2.1", "--ssh", "ssh -i 'a b", __file__],
            "which is not a command: No closing quotation",
        ),
    ],
)
def test_what_cannot_run_is_refused_in_a_line(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert main(["run", *arguments]) == EXIT_ERROR
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1


# -- on this machine -------------------------------------------------------------------------------

# It needs no torch, so that ranks start at once.
PROGRAM = """
import os, signal, sys, time
rank, what = int(os.environ["RANK"]), sys.argv[1]
def say(*words):  # at once, or lines of ranks run into each other
    os.write(1, (" ".join(map(str, words)) + "\\n").encode())
def stop(number, frame):
    say("rank", rank, "got", number)
    sys.exit(0)
if what == "stop":
    signal.signal(signal.SIGINT, stop)
places = [os.environ[name] for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")]
say("place", *places, sys.argv[2:])
if what == "fail":  # when all have said so
    open(os.path.join(sys.argv[3], str(rank)), "w").close()
    while len(os.listdir(sys.argv[3])) < int(os.environ["WORLD_SIZE"]):
        time.sleep(0.05)
    if rank == int(sys.argv[2]):
        sys.exit(7)
if what == "killed" and rank == 1:
    os.kill(os.getpid(), signal.SIGKILL)
if what != "end":
    time.sleep(100)
"""


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "gemini", "run", *arguments]


def environment() -> dict[str, str]:
    path = str(Path(gemini.__file__).parents[1])
    return {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}


@pytest.fixture
def program(tmp_path: Path) -> str:
    file = tmp_path / "program.py"
    file.write_text(PROGRAM)
    return str(file)


def run(arguments: Sequence[str], directory: Path) -> subprocess.CompletedProcess[str]:
    scratch = directory / "scratch"
    scratch.mkdir(exist_ok=True)
    environ = {**environment(), "TMPDIR": str(scratch)}
    done = run_python(command(*arguments)[1:], env=environ, cwd=directory, timeout=90)
    assert list(scratch.iterdir()) == [], "files were left"
    return done


def test_each_rank_has_its_place_and_the_arguments(program: str, tmp_path: Path) -> None:
    done = run(["--nproc_per_node", "2", program, "end", "--host", "a b", "$HOME"], tmp_path)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == [
        f"place {rank} 2 {rank} 2 ['--host', 'a b', '$HOME']" for rank in (0, 1)
    ]


@pytest.mark.parametrize(
    ("what", "code", "said"), [("fail", 7, "failed with exit code 7"), ("killed", 137, "SIGKILL")]
)
def test_a_rank_that_dies_ends_all_with_its_code(
    what: str, code: int, said: str, program: str, tmp_path: Path
) -> None:
    begin = time.monotonic()
    (tmp_path / "said").mkdir()
    done = run(["--nproc-per-node=2", program, what, "1", str(tmp_path / "said")], tmp_path)
    assert done.returncode == code
    assert "gemini: error: rank 1 (process " in done.stderr
    assert said in done.stderr.splitlines()[-1]
    assert time.monotonic() - begin < 60  # the start of it all included


def test_an_interrupt_is_passed_on_to_all_ranks(program: str) -> None:
    with subprocess.Popen(
        command("--nproc-per-node=2", program, "stop"), env=environment(), stdout=subprocess.PIPE, text=True
    ) as job:
        assert job.stdout is not None
        assert [job.stdout.readline()[:5] for _ in range(2)] == ["place", "place"]
        job.send_signal(signal.SIGINT)
        assert sorted(job.stdout.read().splitlines()) == ["rank 0 got 2", "rank 1 got 2"]
        assert job.wait(30) == 130


def test_a_taken_port_is_refused_and_one_that_is_not_named_is_found(program: str, tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        port = taken.getsockname()[1]
        done = run(["--master-port", str(port), program, "end"], tmp_path)
    assert done.returncode == EXIT_ERROR
    assert f"port {port} on" in done.stderr


STUBBORN = """
import os, pathlib, signal, sys, time
signal.signal(signal.SIGINT, signal.SIG_IGN)
signal.signal(signal.SIGTERM, signal.SIG_IGN)
pathlib.Path(sys.argv[1], os.environ["RANK"]).write_text(str(os.getpid()))
time.sleep(100)
"""


def lives(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_ranks_that_do_not_end_are_ended_by_force(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, pids = tmp_path / "stubborn.py", tmp_path / "pids"
    file.write_text(STUBBORN)
    pids.mkdir()
    monkeypatch.setattr(launch_hosts, "_GRACE_SECONDS", 1.0)

    def interrupt() -> None:
        while len(list(pids.iterdir())) < 2:
            time.sleep(0.1)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt, daemon=True).start()
    node = Node("2", address="127.0.0.1", port=free_port())
    ended = launch_hosts.run_on_hosts(
        launch_hosts.Hosts(("localhost",)), node, Program(str(file), (str(pids),))
    )
    assert ended.code == 130
    deadline = time.monotonic() + 10
    while any(lives(int(pid.read_text())) for pid in pids.iterdir()):
        assert time.monotonic() < deadline
        time.sleep(0.1)


# -- on others -------------------------------------------------------------------------------------

# What ssh does, but into a namespace: options and all, one command as a text for a shell.
SSH = """#!{python}
import os, sys
arguments = sys.argv[1:]
while arguments[0] == "-o":
    arguments = arguments[2:]
host, text = arguments
pids = {pids}
if host not in pids:
    print(f"Warning: a banner\\nssh: connect to host {{host}} port 22: No route to host", file=sys.stderr)
    sys.exit(255)
enter = ["nsenter", f"--target={{pids[host]}}", "--net", "--mount", "--pid", "--uts", "--ipc"]
os.execvpe("nsenter", [*enter, "sh", "-c", text], {{"PATH": os.environ["PATH"]}})
"""

QUOTED = "a 'b' $HOME"
OVER_HOSTS = """
import os, socket, sys
from datetime import timedelta
import torch, torch.distributed as dist
dist.init_process_group("gloo", timeout=timedelta(seconds=60))
total = torch.ones(1)
dist.all_reduce(total)
where = (socket.gethostname(), os.getcwd(), os.environ.get("MINE"))
words = ["sum", int(total), dist.get_rank(), *where, sys.argv[1:]]
os.write(1, (" ".join(map(str, words)) + "\\n").encode())
dist.destroy_process_group()  # one that lives longer than the interpreter may abort the process
"""


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[tuple[Host, Host]]:
    with two_hosts(tmp_path) as joined:
        yield joined


@pytest.fixture
def reach(hosts: tuple[Host, Host], tmp_path: Path) -> list[str]:
    """Options of a run over two hosts and a third that is not there."""
    ssh, names = tmp_path / "ssh stand-in", tmp_path / "hostfile"
    ssh.write_text(SSH.format(python=sys.executable, pids={host.address: host.pid for host in hosts}))
    ssh.chmod(0o755)
    names.write_text("".join(f"{host.address}\n" for host in hosts) + "10.77.7.3\n")
    return ["--nproc-per-node=2", f"--ssh='{ssh}' -o Port=22", f"--hostfile={names}", "--env=MINE"]


def over_environment() -> dict[str, str]:
    return {**environment(), "GLOO_SOCKET_IFNAME": WIRE, "MINE": "it's mine"}


def inside(hosts: tuple[Host, Host]) -> list[psutil.Process]:
    """Return what runs on the hosts besides what holds them."""
    holders = {pid for host in hosts for pid in (host.pid, psutil.Process(host.pid).ppid())}
    spaces = {Path(f"/proc/{host.pid}/ns/net").readlink() for host in hosts}
    found = []
    for process in psutil.process_iter():
        with suppress(OSError):
            if Path(f"/proc/{process.pid}/ns/net").readlink() in spaces:
                found.append(process)
    return [process for process in found if process.pid not in holders]


@pytest.mark.dear("four ranks on two hosts, started for this case")
def test_two_hosts_run_two_ranks_each(hosts: tuple[Host, Host], reach: list[str], tmp_path: Path) -> None:
    file = tmp_path / "over hosts.py"
    file.write_text(OVER_HOSTS)
    told = command("--exclude=10.77.7.3", *reach, str(file), "end", QUOTED)[1:]
    done = run_python(told, env=over_environment(), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    said = f"{tmp_path} it's mine {['end', QUOTED]}"
    assert sorted(done.stdout.splitlines()) == [
        f"sum 4 {rank} host{1 + rank // 2} {said}" for rank in range(4)
    ]
    assert inside(hosts) == []


@pytest.mark.dear("four ranks on two hosts, started for this case")
def test_a_rank_that_dies_ends_those_of_other_hosts(
    hosts: tuple[Host, Host], reach: list[str], program: str, tmp_path: Path
) -> None:
    (tmp_path / "said").mkdir()
    with subprocess.Popen(
        command("--include=10.77.7.1,10.77.7.2", *reach, program, "fail", "3", str(tmp_path / "said")),
        env=over_environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as job:
        assert job.stdout is not None
        assert [job.stdout.readline()[:5] for _ in range(4)] == ["place"] * 4
        begin = time.monotonic()
        _, errors = job.communicate(timeout=60)
    assert time.monotonic() - begin < 30
    assert job.returncode == 7, errors
    assert "rank 3 (process " in errors
    assert errors.splitlines()[-1] == "gemini: error: 10.77.7.2 failed with exit code 7"
    assert inside(hosts) == []


@pytest.mark.dear("four ranks on two hosts, started for this case")
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGKILL, -9)])
def test_an_end_of_the_command_ends_all_hosts(
    number: int, code: int, hosts: tuple[Host, Host], reach: list[str], program: str
) -> None:
    with subprocess.Popen(
        command("--exclude=10.77.7.3", *reach, program, "wait"),
        env=over_environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as job:
        assert job.stdout is not None
        assert [job.stdout.readline()[:5] for _ in range(4)] == ["place"] * 4
        job.send_signal(number)
        assert job.wait(30) == code
        assert psutil.wait_procs(inside(hosts), timeout=30)[1] == []


def test_hosts_that_cannot_be_reached_are_named_in_a_line(reach: list[str], program: str) -> None:
    done = run_python(command(*reach, program, "end")[1:], env=over_environment(), timeout=60)
    assert done.returncode == EXIT_ERROR
    assert done.stdout == ""
    assert done.stderr == (
        "gemini: error: 10.77.7.3 cannot be reached over ssh: ssh: connect to host 10.77.7.3 port 22: No "
        "route to host; nothing was started; leave hosts out with --exclude\n"
    )


@pytest.mark.parametrize("address", ["LOCALHOST", "localhost.", "127.1", "0.0.0.0", "::", "0:0:0:0:0:0:0:1"])
def test_machines_never_meet_where_each_finds_itself(address: str) -> None:
    with pytest.raises(ConfigError, match="a different machine on each of them"):
        first_to_listen(["a", "b"], address, ["a", "b"])
