"""Prove that an unpacked sdist would give the module that was compiled here: same commands over same files.

    same_build.py BUILT CONFIGURED

BUILT is the folder in which CMake built ``gemini._C`` of this checkout. CONFIGURED is one that CMake only
configured, from the sdist. Both lie where setup.py puts them: ``build/cmake-<interpreter>`` of the source.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

TARGET = "_C"
READ_WITHOUT_NINJA = ("CMakeLists.txt", "setup.py", "pyproject.toml")
SURELY_READ = {Path("csrc/bindings/module.cpp"), Path("csrc/bindings/bind.h"), Path("csrc/adam/element.inc")}


def ninja(build: Path, *arguments: str) -> list[str]:
    """Return the lines that one of ninja's tools prints."""
    command = [str(Path(sys.executable).with_name("ninja")), "-C", str(build), "-t", *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()


def source_of(build: Path) -> Path:
    return build.parents[1]


def commands(build: Path) -> list[str]:
    """Return the commands that build the module, with placeholders for the folders of the source and the
    environment.
    """
    names = {sys.prefix: "<environment>", str(source_of(build)): "<source>"}
    lines = []
    for line in ninja(build, "commands", TARGET):
        for path, name in names.items():
            line = line.replace(path, name)
        lines.append(line)
    return sorted(lines)


def included(build: Path, objects: set[str]) -> Iterator[Path]:
    """Yield the files that the compiler read for some objects; raise if ninja has no record of one."""
    recorded = set()
    name = ""
    for line in ninja(build, "deps"):
        if line.startswith("    "):
            if name in objects:
                yield build / line.strip()
        elif line:
            name, _, state = line.partition(": ")
            if state.endswith("(VALID)"):
                recorded.add(name)
    if missing := sorted(objects - recorded):
        raise SystemExit(f"ninja does not know what {', '.join(missing)} were compiled from")


def read_files(build: Path) -> set[Path]:
    """Return the files of the source that the build reads, relative to it."""
    source = source_of(build)
    inputs = ninja(build, "inputs", TARGET)
    objects = {name for name in inputs if name.endswith((".o", ".gch"))}
    files = {Path(name) for name in READ_WITHOUT_NINJA}
    for path in (*(build / name for name in inputs), *included(build, objects)):
        path = Path(path.resolve())
        if path.is_relative_to(source) and not path.is_relative_to(build) and sys.prefix not in str(path):
            files.add(path.relative_to(source))
    return files


def differences(built: Path, configured: Path) -> Iterator[str]:
    """Yield a sentence for each file that the sdist lacks or changes, and for each command that differs."""
    files = read_files(built)
    if missing := SURELY_READ - files:
        yield f"the {len(files)} files that ninja says the build reads lack {', '.join(map(str, missing))}"
    for file in sorted(files):
        copy = source_of(configured) / file
        if not copy.exists():
            yield f"the sdist lacks {file}, which the build reads"
        elif copy.read_bytes() != (source_of(built) / file).read_bytes():
            yield f"{file} of the sdist differs from the one that was compiled"
    here, there = commands(built), commands(configured)
    for line in sorted(set(here) ^ set(there)):
        yield f"only {'this build' if line in here else 'a build of the sdist'} would run: {line}"


def main() -> int:
    built, configured = (Path(argument).resolve() for argument in sys.argv[1:])
    found = list(differences(built, configured))
    for line in found[:20]:
        print(line, file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
