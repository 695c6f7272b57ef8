"""``gemini run``: runs a program on the ranks of one machine or several, with torchrun and ssh."""

from __future__ import annotations

import argparse
import os
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gemini.cli.console import say_error
from gemini.errors import ConfigError

if TYPE_CHECKING:
    from gemini.parallel.launch.hosts import Hosts
    from gemini.parallel.launch.torchrun import Ended, Node, Program

EPILOG = """\
examples:
  gemini run --nproc-per-node 4 train.py --lr 3e-4
      four ranks on this machine; options after the program are passed to it
  gemini run --nproc-per-node 4 --host node1,node2 train.py
      eight ranks on two machines, reached over ssh; ranks meet at node1
  gemini run --nproc-per-node 4 --hostfile hosts.txt --exclude node3 --master-addr 10.0.0.1 train.py
      all machines of a file (one name per line) except node3; ranks meet at that address of the first machine
  gemini run --nproc-per-node 4 --nnodes 2 --node-rank 1 --master-addr node1 train.py
      only this machine's ranks, if srun or a container starts the command on each machine

in the program:
  from gemini.parallel import launch         then launch.launch_from_torch() joins the ranks (docs/compat.md),
  from gemini.parallel import join_ranks     or join_ranks(), or torch.distributed.init_process_group()

over ssh:
  Each machine needs the same Python at the same path, and this directory. ssh cannot ask for passwords: use
  keys. Variables of Python's paths and threads, NCCL_*, GLOO_*, TP_*, UCX_*, TORCH_*, GEMINI_* are passed
  on; add others with --env. With several network interfaces set GLOO_SOCKET_IFNAME or NCCL_SOCKET_IFNAME.

exit codes:
  the exit code of the first rank that failed, after all other ranks were ended; 128 + N if signal N
  ended that rank
  130, 143, 129 Ctrl-C, SIGTERM or SIGHUP: all ranks get the signal and have up to 30 s to end
  2 an error before the start, such as an unreachable machine
"""


def add_parser(subparsers: Any) -> None:
    """Add the ``run`` command to ``subparsers``."""
    parser = subparsers.add_parser(
        "run",
        help="run a program on several ranks, here or over ssh",
        description="Start a program on every rank with torchrun, on one or several machines, and end all "
        "ranks when one fails.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        usage="gemini run [options] PROGRAM [arguments]",
    )
    parser.add_argument("program", metavar="PROGRAM", help="a Python file, or a module with -m")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="arguments of the program")
    parser.add_argument("-m", "--module", action="store_true", help="PROGRAM is a module, as in python -m")
    parser.add_argument(
        "--nproc-per-node",
        "--nproc_per_node",
        metavar="N",
        default="1",
        help="ranks on each machine: a number, gpu, cpu, or auto (GPUs if there are any, else CPUs) "
        "(default: 1)",
    )
    parser.add_argument(
        "--master-port",
        "--master_port",
        type=int,
        metavar="PORT",
        help="port where ranks meet (default: 29500; on one machine another free port if that is taken)",
    )
    _add_machines(parser.add_argument_group("machines"))
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Run the program and return the exit code."""
    from gemini.parallel.launch.torchrun import Program

    program = Program(options.program, tuple(options.arguments), options.module)
    if options.told_by_stdin:
        from gemini.parallel.launch.hosts import obey_stdin

        obey_stdin()
    ended = _run(options, program)
    if ended.reason:
        say_error(ended.reason)
    # ssh itself exits with 255 if the connection failed, so the program must not.
    return 1 if options.told_by_stdin and ended.code == 255 else ended.code


def _run(options: argparse.Namespace, program: Program) -> Ended:
    from gemini.parallel.launch.hosts import run_on_hosts
    from gemini.parallel.launch.torchrun import DEFAULT_PORT, Node, run_ranks

    hosts = _hosts_from(options)
    if hosts is not None:
        found, address = hosts
        port = DEFAULT_PORT if options.master_port is None else options.master_port
        return run_on_hosts(found, Node(options.nproc_per_node, 0, len(found.names), address, port), program)
    node = _node_from(options)
    program.require()
    return run_ranks(node, program)


def _hosts_from(options: argparse.Namespace) -> tuple[Hosts, str] | None:
    """Return the machines to start from here, and the address where they meet; None: only this machine.

    Raises:
        ConfigError: options contradict each other, or have invalid values.
    """
    from gemini.parallel.launch.hosts import (
        Hosts,
        choose_hosts,
        first_to_listen,
        parse_hosts,
        read_hostfile,
    )

    environ = tuple(_known_variable(name) for name in options.env)
    if options.host and options.hostfile:
        raise ConfigError("--host and --hostfile both name the machines; give one of them")
    if not options.host and not options.hostfile:
        for name in ("include", "exclude"):
            if getattr(options, name):
                raise ConfigError(
                    f"--{name} selects machines of a list; give the list by --hostfile or --host"
                )
        return None
    if options.nnodes > 1 or options.node_rank:
        raise ConfigError(
            "--nnodes and --node-rank start the ranks of one machine; leave them out with --host or "
            "--hostfile"
        )
    known = parse_hosts(options.host, "--host") if options.host else read_hostfile(options.hostfile)
    chosen = [
        parse_hosts(text, f"--{name}") if (text := getattr(options, name)) else []
        for name in ("include", "exclude")
    ]
    names, address = first_to_listen(choose_hosts(known, *chosen), options.master_addr, known)
    try:
        ssh = tuple(shlex.split(options.ssh)) or ("ssh",)
    except ValueError as error:
        raise ConfigError(f"--ssh is {options.ssh!r}, which is not a command: {error}; correct it") from None
    return Hosts(tuple(names), ssh, environ), address


def _known_variable(name: str) -> str:
    """Return the name of an environment variable. Raise ConfigError if it is not set."""
    if name not in os.environ:
        wanted = name if "=" in name else f"{name}=..."
        raise ConfigError(
            f"--env needs the name of a variable that is set here, and {name!r} is not; first export "
            f"{wanted}, then give --env {name.partition('=')[0]}"
        )
    return name


def _node_from(options: argparse.Namespace) -> Node:
    """Return this machine's part of the run. Raises ConfigError if the options are invalid."""
    from gemini.parallel.launch.hosts import checked_address
    from gemini.parallel.launch.torchrun import DEFAULT_PORT, Node, chosen_port

    address = checked_address(options.master_addr) if options.master_addr is not None else "127.0.0.1"
    if options.nnodes == 1:
        port = chosen_port(options.master_port)
    elif options.master_addr is None:
        raise ConfigError(
            f"{options.nnodes} machines need --master-addr: give the address of the machine with "
            "--node-rank 0"
        )
    else:
        port = DEFAULT_PORT if options.master_port is None else options.master_port
    return Node(options.nproc_per_node, options.node_rank, options.nnodes, address, port)


def _add_machines(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--host", "--hosts", metavar="NAMES", help="names or addresses, separated by commas")
    group.add_argument(
        "--hostfile", type=Path, metavar="FILE", help="a file with one name or address per line"
    )
    group.add_argument("--include", metavar="NAMES", help="use only these machines of the list")
    group.add_argument("--exclude", metavar="NAMES", help="use all machines of the list except these")
    group.add_argument(
        "--master-addr",
        "--master_addr",
        metavar="ADDRESS",
        help="name or address of the machine where ranks meet; it gets the first ranks (default: the "
        "first machine)",
    )
    group.add_argument(
        "--ssh",
        metavar="COMMAND",
        default="ssh",
        help="the ssh command, such as 'ssh -p 2222 -i key' (default: ssh); no shell expands it",
    )
    group.add_argument(
        "--env",
        metavar="NAME",
        action="append",
        default=[],
        help="an environment variable to pass to the other machines; repeatable",
    )
    group.add_argument(
        "--nnodes",
        type=int,
        metavar="N",
        default=1,
        help="number of machines, if the command is started on each",
    )
    group.add_argument(
        "--node-rank",
        "--node_rank",
        type=int,
        metavar="I",
        default=0,
        help="index of this machine, from 0",
    )
    group.add_argument("--told-by-stdin", action="store_true", help=argparse.SUPPRESS)
