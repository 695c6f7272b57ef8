"""``gemini check``: shows the features of this machine and this build, and how to add missing ones."""

from __future__ import annotations

import argparse
import platform
import resource
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil
from rich.table import Table
from rich.text import Text

from gemini import _C
from gemini.cli.console import Console, print_json
from gemini.system.config import format_bytes
from gemini.system.device import free_memory_bytes
from gemini.system.threads import usable_processors

PACKAGES = ("torch", "numpy", "scipy", "safetensors", "psutil", "rich", "matplotlib")
LIBRARIES = ("transformers", "accelerate", "peft", "trl", "lightning")  # sources of models and trainers
PROBE_BYTES = 1 << 20
HUGE_PAGES_FILE = Path("/sys/kernel/mm/transparent_hugepage/enabled")
DISTRIBUTION = "gemini-runtime"
REBUILD = "pip install --force-reinstall --no-deps .   (in the checkout)"

Facts = dict[str, Any]


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Register the subcommand."""
    parser = subparsers.add_parser(
        "check",
        help="show what is installed and what is missing",
        description=(
            "Show versions, compiled parts, CPU, memory, I/O and GPU, and the commands that install "
            "missing parts."
        ),
    )
    parser.add_argument(
        "-i",
        "--installation",
        action="store_true",
        help="show only the installation: versions, compiled parts, and whether their CUDA versions agree",
    )
    shape = parser.add_mutually_exclusive_group()
    shape.add_argument("--json", action="store_true", help="print one JSON object instead of tables")
    shape.add_argument(
        "--markdown",
        action="store_true",
        help="print it for an issue report: without paths and host names",
    )
    parser.add_argument(
        "--dir",
        type=Path,
        default=Path(),
        metavar="DIR",
        help="the directory for a DISK tier; a small test file is written to it (default: .)",
    )
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Print the report. Return 0, also if optional parts are missing."""
    facts = installation() if options.installation else collect(options.dir)
    if options.json:
        print_json(facts)
    elif options.markdown:
        print(markdown(facts), end="")
    else:
        render(facts, Console())
    return 0


def installation() -> Facts:
    """Return the facts about the installation, in the sections of :func:`collect`. No directory is
    accessed."""
    facts: Facts = {"versions": versions(), "compiled": _C.build_info(), "gpu": gpu()}
    del facts["compiled"]["version"]
    facts["compatibility"] = compatibility(facts)
    facts["missing"] = _entries(missing_from_build(facts))
    return facts


def compatibility(facts: Facts) -> Facts:
    """Return whether the versions of each pair of parts agree: ``yes``, the reason if not, or that one is
    absent."""
    built, torch_cuda, gpu = facts["compiled"]["cuda"], facts["gpu"]["torch_cuda"], facts["gpu"]
    if built is None or torch_cuda is None:
        absent = "the CUDA part" if built is None else "torch's CUDA"
        cuda = f"not needed without {absent}"
    elif built.split(".")[0] == torch_cuda.split(".")[0]:
        cuda = "yes"
    else:
        cuda = f"no: CUDA part {built}, torch's CUDA {torch_cuda}; build with nvcc of the same major version"
    if not gpu["driver"]:
        driver = "no NVIDIA driver on this machine"
    elif built is None:
        driver = "not needed without the CUDA part"
    else:
        driver = f"no: {gpu['problem']}" if gpu["problem"] else "yes"
    return {"torch": _torch_fits(facts["versions"]["torch"]), "CUDA part and torch": cuda, "driver": driver}


def _torch_fits(version: str | None) -> str:
    """Return whether torch is new enough for this build, as text."""
    from torch.torch_version import TorchVersion

    said = next((line for line in metadata.requires(DISTRIBUTION) or () if line.startswith("torch>=")), None)
    least = said.removeprefix("torch>=") if said else ""
    if version is None or not least:
        return "unknown: its metadata is not installed"
    return (
        "yes"
        if TorchVersion(version) >= least
        else f"no: torch is {version}; the first version that does is {least}"
    )


def collect(directory: Path) -> Facts:
    """Return every fact as plain data, one dict per section, and the list ``missing``.

    Raises:
        ConfigError, IoError: ``directory`` cannot hold a file.
    """
    facts: Facts = {
        "versions": versions(),
        "compiled": _C.build_info(),
        "cpu": cpu(),
        "memory": memory(),
        "io": io(directory),
        "gpu": gpu(),
    }
    del facts["compiled"]["version"]
    facts["missing"] = _entries(missing(facts))
    return facts


def _entries(found: Iterator[tuple[str, str, str]]) -> list[Facts]:
    return [{"what": what, "why": why, "command": command} for what, why, command in found]


def versions() -> Facts:
    """Return the versions of gemini, Python and the packages; None for a package that is not installed."""
    found: Facts = {"gemini": _C.build_info()["version"], "python": platform.python_version()}
    for name in (*PACKAGES, *LIBRARIES):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = None
    found["system"] = f"{platform.system()} {platform.release()} {platform.machine()}"
    return found


def cpu() -> Facts:
    """Return the CPU's model, the cores that this process may use, and the Adam kernels that it can run."""
    return {
        "model": _cpu_model(),
        "cores": len(usable_processors()),
        "adam_isa": _C.adam_isa(),
        "adam_isas": list(_C.adam_isas()),
    }


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    for line in lines:
        key, _, value = line.partition(":")
        if key.strip() == "model name":
            return value.strip()
    return platform.processor() or platform.machine()


def memory() -> Facts:
    """Return RAM, huge pages and the limit of locked memory; None means no limit."""
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return {
        "total_bytes": psutil.virtual_memory().total,
        "free_bytes": free_memory_bytes(),
        "huge_pages": _huge_pages(),
        "memlock_bytes": None if soft == resource.RLIM_INFINITY else soft,
    }


def _huge_pages() -> str:
    """Return the kernel's setting: ``always``, ``madvise``, ``never``, or ``unknown``."""
    try:
        text = HUGE_PAGES_FILE.read_text()
    except OSError:
        return "unknown"
    return text.partition("[")[2].partition("]")[0] or "unknown"


def io(directory: Path) -> Facts:
    """Return the I/O that a DISK tier in ``directory`` would use. Leaves nothing behind."""
    from gemini.offload.async_file import checked_directory

    checked_directory(directory)
    file = _C.AsyncFile([str(directory)], PROBE_BYTES)
    try:
        backend, direct = file.backend, file.direct
    finally:
        file.close()
    return {
        "backend": backend,
        "directory": str(directory.resolve()),
        "file_system": _file_system(directory),
        "direct": direct,
        "free_bytes": psutil.disk_usage(str(directory)).free,
        "uring_refusal": _C.uring_refusal() or None,
    }


def _file_system(directory: Path) -> str:
    """Return the type of a directory's file system; ``unknown`` if it cannot be determined."""
    where = directory.resolve()
    found = [part for part in psutil.disk_partitions(all=True) if where.is_relative_to(part.mountpoint)]
    # If several file systems are mounted at one place, the last one is visible.
    nearest = max(found, key=lambda part: (len(part.mountpoint), found.index(part)), default=None)
    return nearest.fstype if nearest is not None else "unknown"


def gpu() -> Facts:
    """Return the GPUs that the CUDA part sees, and torch's CUDA version."""
    import torch

    return {
        "driver": Path("/proc/driver/nvidia/version").exists(),
        "devices": _C.cuda_devices(),
        "problem": _C.cuda_problem() or None,
        "torch_cuda": torch.version.cuda,
    }


def missing(facts: Facts) -> Iterator[tuple[str, str, str]]:
    """Yield (missing part, its benefit, the command that adds it)."""
    yield from missing_from_build(facts)
    if facts["memory"]["huge_pages"] == "never":
        command = f"echo madvise | sudo tee {HUGE_PAGES_FILE}"
        yield "huge pages", "the first access to a window is several times faster", command
    if not facts["io"]["direct"]:
        why = f"no O_DIRECT in {facts['io']['directory']}: reads and writes go through the page cache"
        yield "direct I/O", why, "choose a disk directory on ext4 or xfs:  gemini check --dir DIR"


def missing_from_build(facts: Facts) -> Iterator[tuple[str, str, str]]:
    """Yield the parts that are missing from the installation, as :func:`missing`."""
    if facts["versions"]["matplotlib"] is None:
        yield "matplotlib", "plots of the memory per tier", "pip install 'gemini-runtime[plot]'"
    compiled, has_gpu = facts["compiled"], facts["gpu"]["driver"]
    if not compiled["uring"]:
        yield "liburing", "io_uring part of the build", f"apt-get install liburing-dev && {REBUILD}"
    if has_gpu and compiled["cuda"] is None:
        yield (
            "CUDA part",
            "there is a GPU, but nvcc was missing at build time",
            f"install CUDA's nvcc && {REBUILD}",
        )
    if has_gpu and facts["gpu"]["torch_cuda"] is None:
        yield "torch with CUDA", "this torch is built for the CPU only", "pip install --force-reinstall torch"


def render(facts: Facts, console: Console) -> None:
    """Print the facts as one table, followed by the missing parts."""
    table = Table(title="gemini check", title_justify="left", show_header=False, box=None)
    table.add_column(style="bold")
    table.add_column(style="cyan", no_wrap=True)
    table.add_column(overflow="fold")
    for section, rows in _sections(facts):
        for index, (label, value) in enumerate(rows):
            shown = Text("not installed" if value is None else str(value))  # a path may have brackets
            table.add_row("" if index else section, label, shown)
        table.add_section()
    console.print(table)
    if not facts["missing"]:
        console.print("\nNothing is missing.")
    for entry in facts["missing"]:
        console.print(f"\n[yellow]missing[/]  {entry['what']}: {entry['why']}", highlight=False)
        console.print(f"         {entry['command']}", markup=False, highlight=False, soft_wrap=True)


def markdown(facts: Facts) -> str:
    """Return the facts as a table for an issue report. Packages that are not installed are left out, and
    everything that identifies the machine: the directory, and commands that name it."""
    lines = ["| | | |", "|---|---|---|"]
    for section, rows in _sections(facts):
        shown = [(label, value) for label, value in rows if value is not None]
        if section == "I/O":
            io = facts["io"]
            at = f"{io['file_system']}, free {format_bytes(io['free_bytes'])}"
            shown = [
                ("file system", at) if label == "directory" else (label, value) for label, value in shown
            ]
        for index, (label, value) in enumerate(shown):
            text = " ".join(str(value).split()).replace("|", "\\|")
            lines.append(f"| {'' if index else section} | {label} | {text} |")
    absent = ", ".join(entry["what"] for entry in facts["missing"]) or "nothing"
    return "\n".join([*lines, f"| missing | | {absent} |"]) + "\n"


def _sections(facts: Facts) -> list[tuple[str, list[tuple[str, Any]]]]:
    """Return the rows of each collected section."""
    rows: dict[str, tuple[str, Callable[[], list[tuple[str, Any]]]]] = {
        "versions": ("versions", lambda: list(facts["versions"].items())),
        "compiled": ("compiled", lambda: _compiled_rows(facts["compiled"])),
        "compatibility": ("compatible", lambda: list(facts["compatibility"].items())),
        "cpu": ("CPU", lambda: _cpu_rows(facts["cpu"])),
        "memory": ("memory", lambda: _memory_rows(facts["memory"])),
        "io": ("I/O", lambda: _io_rows(facts["io"])),
        "gpu": ("GPU", lambda: _gpu_rows(facts["gpu"], facts["compiled"])),
    }
    return [(title, make()) for key, (title, make) in rows.items() if key in facts]


def _compiled_rows(compiled: Facts) -> list[tuple[str, Any]]:
    rows = [
        ("compiler", compiled["compiler"]),
        ("CUDA part", compiled["cuda"] or "no"),
        ("io_uring part", "yes" if compiled["uring"] else "no"),
    ]
    return [*rows, ("sanitizers", compiled["sanitize"])] if compiled["sanitize"] else rows


def _cpu_rows(cpu: Facts) -> list[tuple[str, Any]]:
    others = ", ".join(isa for isa in cpu["adam_isas"] if isa != cpu["adam_isa"])
    return [
        ("model", cpu["model"]),
        ("cores", str(cpu["cores"])),
        ("Adam kernel", f"{cpu['adam_isa']} (also here: {others})" if others else cpu["adam_isa"]),
    ]


def _memory_rows(memory: Facts) -> list[tuple[str, Any]]:
    locked = memory["memlock_bytes"]
    return [
        ("RAM", f"{format_bytes(memory['total_bytes'])}, free {format_bytes(memory['free_bytes'])}"),
        ("huge pages", memory["huge_pages"]),
        ("may be locked", "no limit" if locked is None else format_bytes(locked)),
    ]


def _io_rows(io: Facts) -> list[tuple[str, Any]]:
    return [
        ("backend", io["backend"]),
        ("directory", f"{io['directory']}, free {format_bytes(io['free_bytes'])}"),
        ("direct I/O", "yes" if io["direct"] else "no, through the page cache"),
        ("io_uring", "usable" if io["uring_refusal"] is None else f"not usable: {io['uring_refusal']}"),
    ]


def _gpu_rows(gpu: Facts, compiled: Facts) -> list[tuple[str, Any]]:
    rows = [("torch's CUDA", gpu["torch_cuda"] or "none")]
    for device in gpu["devices"]:
        capability = ".".join(str(number) for number in device["capability"])
        text = f"{device['name']}, {format_bytes(device['total_bytes'])}, capability {capability}"
        rows.append((f"device {device['index']}", text))
    if not gpu["devices"]:
        reason = gpu["problem"] if gpu["driver"] else "no NVIDIA driver on this machine"
        rows.append(("devices", "none" if compiled["cuda"] is None and gpu["driver"] else f"none ({reason})"))
    return rows
