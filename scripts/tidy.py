"""Run clang-tidy over the units of a build that have changed since it found nothing in them.

    tidy.py BUILD [JOBS]

BUILD is a folder with a ``compile_commands.json``. A unit without findings leaves a record: its flags, the
version and the settings of clang-tidy, and the hash of every file that the unit includes. The environment
variable TIDY_CACHE names the folder of the records, by default ``~/.cache/gemini-tidy``; all clones use it.
With an empty name clang-tidy looks at all units. Units with OpenMP are left out: clang lacks that header.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import re
import shlex
import subprocess
import sys
import time
import zlib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
CLANG_TIDY = Path(sys.executable).with_name("clang-tidy")
KEPT_DAYS = 30
SHOWN_BY_NUMBER = re.compile(r"^\d+ warnings? .*generated\.$")


@dataclass(frozen=True)
class Unit:
    """A source file and how it is compiled."""

    file: Path
    folder: Path
    command: str


@functools.cache
def digest_of(name: str) -> str:
    """Return the hash of a file, named absolutely or from the checkout on; '' if there is none."""
    try:
        return hashlib.sha256((ROOT / name).read_bytes()).hexdigest()
    except OSError:
        return ""


def units_of(build: Path) -> list[Unit]:
    entries = json.loads((build / "compile_commands.json").read_text())
    units = {
        entry["file"]: Unit(Path(entry["file"]), Path(entry["directory"]), entry["command"])
        for entry in entries
        if entry["file"].endswith(".cpp") and "-fopenmp" not in entry["command"]
    }
    return [units[name] for name in sorted(units)]


@functools.cache
def tool() -> str:
    """Return the inputs of clang-tidy besides the sources: its version and settings."""
    version = subprocess.run([CLANG_TIDY, "--version"], check=True, capture_output=True, text=True).stdout
    return version + (ROOT / ".clang-tidy").read_text()


def key_of(unit: Unit) -> str:
    """Return the name under which a unit's records are kept, the same in every clone."""
    text = "\0".join((tool(), unit.command.replace(str(ROOT), "."), digest_of(str(unit.file))))
    return hashlib.sha256(text.encode()).hexdigest()


def files_read(unit: Unit) -> list[str]:
    """Return all files that a unit includes, those of the checkout relative to it; gcc tells."""
    command = shlex.split(unit.command)
    without = {command.index("-o"), command.index("-o") + 1, command.index("-c")}
    listing = [word for position, word in enumerate(command) if position not in without]
    made = subprocess.run([*listing, "-M"], cwd=unit.folder, check=True, capture_output=True, text=True)
    paths = shlex.split(made.stdout.partition(":")[2].replace("\\\n", " "))
    absolute = {os.path.normpath(unit.folder / path) for path in paths}
    return sorted(
        os.path.relpath(path, ROOT) if Path(path).is_relative_to(ROOT) else path for path in absolute
    )


def is_known(records: Path, key: str) -> bool:
    """Return whether a record of the unit matches its files as they are now."""
    for record in records.glob(f"{key}-*"):
        files = json.loads(zlib.decompress(record.read_bytes()))
        if all(digest_of(name) == digest for name, digest in files.items()):
            record.touch()
            return True
    return False


def record_of(unit: Unit) -> bytes:
    """Return the content of a unit's record: the hashes of its files as they are now."""
    return json.dumps({name: digest_of(name) for name in files_read(unit)}).encode()


def keep(records: Path, key: str, content: bytes) -> None:
    """Write a record atomically."""
    record = records / f"{key}-{hashlib.sha256(content).hexdigest()[:16]}"
    unfinished = record.with_name(f".{record.name}.{os.getpid()}")
    unfinished.write_bytes(zlib.compress(content))
    unfinished.replace(record)


def forget_old(records: Path) -> None:
    for record in records.iterdir():
        if record.stat().st_mtime < time.time() - KEPT_DAYS * 24 * 3600:
            record.unlink(missing_ok=True)


def findings(build: Path, unit: Unit) -> str | None:
    """Return the output of clang-tidy for a unit with findings, None for one without."""
    command = [CLANG_TIDY, "-p", build, "--quiet", unit.file]
    ended = subprocess.run(command, check=False, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if ended.returncode == 0:
        return None
    lines = (line for line in ended.stdout.splitlines() if not SHOWN_BY_NUMBER.match(line))
    return "\n".join((*lines, f"clang-tidy: {unit.file}: status {ended.returncode}"))


def main() -> int:
    build = Path(sys.argv[1]).resolve()
    jobs = int(sys.argv[2]) if len(sys.argv) > 2 else os.cpu_count()
    name = os.environ.get("TIDY_CACHE", str(Path.home() / ".cache" / "gemini-tidy"))
    records = Path(name) if name else None
    if records:
        records.mkdir(parents=True, exist_ok=True)
        forget_old(records)

    def look_at(unit: Unit) -> str | None:
        key = key_of(unit)
        if records and is_known(records, key):
            return None
        looked_at.append(unit)
        content = record_of(unit)  # before clang-tidy reads them: what is edited meanwhile is looked at again
        found = findings(build, unit)
        if records and not found:
            keep(records, key, content)
        return found

    units, looked_at = units_of(build), list[Unit]()
    if not units:
        sys.exit(f"{build} has no units")
    with ThreadPoolExecutor(jobs) as threads:
        found = [text for text in threads.map(look_at, units) if text]
    print(
        *found, f"clang-tidy: {len(looked_at)} of {len(units)} units had changed", sep="\n", file=sys.stderr
    )
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
