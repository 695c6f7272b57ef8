"""On which machines a run goes: names given by hand or in a file, some of them chosen or left out."""

from __future__ import annotations

import ipaddress
import re
import socket
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path

import psutil

from gemini.errors import ConfigError, IoError

# A host as ssh takes it; neither it nor its user begins with what would be an option there.
_HOST = re.compile(r"(?:[\w.+][\w.+-]*@)?[A-Za-z0-9_:][\w.:%-]*", re.ASCII)
_NEXT_LINE = "give one name per line"


def read_hostfile(path: Path) -> list[str]:
    """Return the hosts of a file: one per line, each once, as lists of schedulers repeat them; empty lines
    and what follows ``#`` do not count.

    Raises:
        IoError: it cannot be read. ConfigError: a line is not a host, or there is none.
    """
    try:
        lines = path.read_text("utf-8-sig").splitlines()
    except OSError as error:
        raise IoError(error.errno or 0, f"{error.strerror}; name another hostfile", str(path)) from None
    except UnicodeDecodeError:
        raise ConfigError(f"{path} is not text; {_NEXT_LINE}") from None
    found: dict[str, None] = {}
    for number, line in enumerate(lines, start=1):
        name = line.partition("#")[0].strip()
        if name:
            found[_checked(name, f"line {number} of {path}", _NEXT_LINE)] = None
    if not found:
        raise ConfigError(f"{path} names no host; {_NEXT_LINE}")
    return _each_once(found, str(path))


def parse_hosts(text: str, option: str) -> list[str]:
    """Return the hosts of a list with commas, each once. Raises ConfigError where one is none."""
    names = [name.strip() for name in text.split(",")]
    found = dict.fromkeys(_checked(name, option, "give names with commas between them") for name in names)
    return _each_once(found, option)


def checked_address(address: str) -> str:
    """Return the ``--master-addr`` that was given. Raises ConfigError where it is no name or address."""
    if "@" in address:
        raise ConfigError(f"--master-addr is {address!r}; give the host without the user")
    return _checked(address, "--master-addr", "give the name or address of a machine")


def choose_hosts(known: Sequence[str], include: Sequence[str] = (), exclude: Sequence[str] = ()) -> list[str]:
    """Return the ``known`` hosts that are included (all, if none is) and not excluded, in their order.

    Raises:
        ConfigError: one that is included or excluded is not known, or none is left.
    """
    for option, names in (("--include", include), ("--exclude", exclude)):
        unknown = [name for name in names if name not in known]
        if unknown:
            raise ConfigError(f"{option} names {', '.join(unknown)}; the hosts are {', '.join(known)}")
    left = [name for name in known if (not include or name in include) and name not in exclude]
    if not left:
        raise ConfigError(f"no host is left: {', '.join(known)} without {', '.join(exclude)}")
    return left


def first_to_listen(
    hosts: Sequence[str], master_addr: str | None, known: Sequence[str]
) -> tuple[list[str], str]:
    """Return the hosts with the one first at which ranks meet, and its address: ``master_addr``, or the name
    of the first one. ``known`` are those that were chosen from.

    Raises:
        ConfigError: other machines would not find it there.
    """
    ordered = list(hosts)
    address = address_of(ordered[0]) if master_addr is None else checked_address(master_addr)
    named = [host for host in known if address_of(host) == address]
    if named and named[0] not in hosts:
        raise ConfigError(f"--master-addr is {address}, which is not among the hosts: {', '.join(hosts)}")
    if named:
        ordered.remove(named[0])
        ordered.insert(0, named[0])
    if len(ordered) > 1 and is_loopback(address):
        raise ConfigError(
            f"{len(ordered)} machines meet at {address}, which each of them takes for itself; give "
            "--master-addr the name or address of the first one as the others see it"
        )
    return ordered, address


def address_of(host: str) -> str:
    """Return a host without the user."""
    return host.rpartition("@")[2]


def is_loopback(address: str) -> bool:
    """Say whether every machine takes this address for itself."""
    try:
        number = ipaddress.ip_address(address)
    except ValueError:
        return address.lower().rstrip(".") == "localhost" or address.startswith("127.")
    return number.is_loopback or number.is_unspecified


def is_this_machine(host: str) -> bool:
    """Say whether a host, given without a user, is the machine that this process runs on."""
    if host in {"localhost", socket.gethostname()}:
        return True
    links = psutil.net_if_addrs().values()
    own = {address.address.partition("%")[0] for addresses in links for address in addresses}
    with suppress(OSError, UnicodeError):
        return any(str(found[4][0]) in own for found in socket.getaddrinfo(host, None))
    return False


def _checked(name: str, where: str, way_out: str) -> str:
    if not _HOST.fullmatch(name):
        raise ConfigError(f"{where} has {name!r}, which is not the name of a host; {way_out}")
    return name


def _each_once(names: Iterable[str], where: str) -> list[str]:
    """Return ``names``. Raises ConfigError where two of them are one host, with other users."""
    first: dict[str, str] = {}
    for name in names:
        other = first.setdefault(address_of(name), name)
        if other != name:
            raise ConfigError(
                f"{where} names {address_of(name)} twice, as {other} and as {name}; leave one of them out"
            )
    return list(names)
