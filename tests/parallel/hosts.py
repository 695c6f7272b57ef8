"""Two "machines" on this one: namespaces of their own for network, processes and mounts, joined by one wire.

They share neither loopback nor abstract sockets, only files. Each is held by a process that reads a pipe from
this one: when this process ends, however it ends, so do the holders, with them everything that runs in the
namespaces, and with that the namespaces and the wire. Nothing of them has a name outside.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

WIRE = "wire"  # the one network interface of a host besides its loopback
BOOT_ID = "/proc/sys/kernel/random/boot_id"
_NAMESPACES = ("--net", "--mount", "--pid", "--uts", "--ipc")
_START_SECONDS = 20.0
# The kernel has one boot_id for all namespaces; each machine has another.
_SET_UP = f"""
mount --bind "$1" {BOOT_ID}
mount --bind "$3" /etc/hosts
mount -t sysfs sysfs /sys
hostname "$2"
ip link set lo up
echo ready
exec cat
"""


@dataclass(frozen=True)
class Host:
    """One of the machines. ``pid`` is its first process, as it is known outside."""

    name: str
    address: str
    boot_id: str
    pid: int

    def command(self, *arguments: str) -> list[str]:
        """Return the command that runs another one there."""
        return ["nsenter", f"--target={self.pid}", *_NAMESPACES, *arguments]

    def run(self, *arguments: str) -> str:
        """Run a command there and return what it prints."""
        done = subprocess.run(
            self.command(*arguments), capture_output=True, text=True, check=False, timeout=_START_SECONDS
        )
        assert done.returncode == 0, f"{arguments} on {self.name}: {done.stderr}"
        return done.stdout

    def set_link(self, state: str) -> None:
        """Set this end of the wire ``up`` or ``down``."""
        self.run("ip", "link", "set", WIRE, state)


@contextmanager
def two_hosts(directory: Path) -> Iterator[tuple[Host, Host]]:
    """Provide two joined hosts, or skip where they are not allowed; ``directory`` gets a few small files."""
    if os.geteuid() != 0:
        pytest.skip("network namespaces need root (CAP_SYS_ADMIN and CAP_NET_ADMIN)")
    missing = [name for name in ("ip", "unshare", "nsenter") if shutil.which(name) is None]
    if missing:
        pytest.skip(f"network namespaces need {', '.join(missing)} (packages iproute2, util-linux)")
    with ExitStack() as stack:
        first, second = (stack.enter_context(_host(number, directory)) for number in (1, 2))
        pair = ["type", "veth", "peer", "name", WIRE, "netns", str(second.pid)]
        _try(["ip", "link", "add", "name", WIRE, "netns", str(first.pid), *pair])
        for host in (first, second):
            host.run("ip", "address", "add", f"{host.address}/24", "dev", WIRE)
            host.set_link("up")
        yield first, second


@contextmanager
def _host(number: int, directory: Path) -> Iterator[Host]:
    """Provide one host, not joined to anything."""
    name = f"host{number}"
    machine = directory / f"{name}-boot-id"
    boot_id = f"00000000-0000-4000-8000-{number:012d}\n"
    machine.write_text(boot_id)
    names = directory / "hosts"
    names.write_text("127.0.0.1 localhost\n10.77.7.1 host1\n10.77.7.2 host2\n")
    holder = subprocess.Popen(
        [
            *("unshare", *_NAMESPACES, "--fork", "--kill-child", "--mount-proc"),
            *("sh", "-euc", _SET_UP, "sh", str(machine), name, str(names)),
        ],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert holder.stdin is not None
    assert holder.stdout is not None
    assert holder.stderr is not None
    try:
        if holder.stdout.readline() != "ready\n":
            _refuse(["unshare", *_NAMESPACES], holder.stderr.read())
        (inside,) = psutil.Process(holder.pid).children()
        yield Host(name, f"10.77.7.{number}", boot_id, inside.pid)
    finally:
        # It returns when all that ran there is gone; what its own end does not end, nothing does.
        holder.stdin.close()
        try:
            holder.wait(_START_SECONDS)
        finally:
            holder.kill()
            holder.wait()
            holder.stdout.close()
            holder.stderr.close()


def _try(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=_START_SECONDS)
    if done.returncode != 0:
        _refuse(command, done.stderr)


def _refuse(command: list[str], said: str) -> None:
    """Skip where the kernel, or the container that this runs in, does not have it; else fail."""
    text = f"{' '.join(command)}: {said.strip()}"
    refusals = ("not permitted", "ermission denied", "not supported", "Unknown device type")
    if any(word in said for word in refusals):
        pytest.skip(f"no network namespaces here: {text}")
    raise AssertionError(text)
