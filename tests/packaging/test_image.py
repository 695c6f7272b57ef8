"""What Dockerfile copies is enough for its `pip install`: the wheel made of it has all of gemini.

CI has no Docker daemon, so this runs the copies and the install without the base image, the dependencies and
the compiler. `make image` builds the image where there is a daemon.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import gemini

ROOT = Path(__file__).resolve().parents[2]
STEPS = re.findall(r"^([A-Z]+) (.+)$", (ROOT / "Dockerfile").read_text(), re.MULTILINE)


def copied() -> dict[str, str]:
    """Return which files and folders of the checkout the image gets, with their places."""
    words = [rest.split() for step, rest in STEPS if step == "COPY" and not rest.startswith("--from")]
    return {source: target for *sources, target in words for source in sources}


def test_the_image_gets_what_dockerignore_lets_through_and_nothing_else() -> None:
    lines = (ROOT / ".dockerignore").read_text().splitlines()
    assert "*" in lines
    assert {line[1:] for line in lines if line.startswith("!")} == set(copied())
    assert [name for name in copied() if not (ROOT / name).exists()] == []


def test_the_image_runs_as_a_user_and_begins_with_the_command() -> None:
    steps = dict(STEPS)  # the last of each kind
    assert steps["USER"] not in {"root", "0"}
    assert json.loads(steps["ENTRYPOINT"]) == ["gemini"]


def test_what_is_copied_installs_all_of_gemini(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    ignored = shutil.ignore_patterns("__pycache__", "*.so")
    for name, place in copied().items():
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, source / place, ignore=ignored, symlinks=True)
        else:
            shutil.copy(ROOT / name, source / place)
    (source / "gemini" / "parallel").unlink(missing_ok=True)  # a link that a checkout may have
    (install,) = [rest for step, rest in STEPS if step == "RUN" and "pip install" in rest]
    (what,) = re.findall(r'"\.\[(\w+)\]"$', install)
    assert f"\n{what} = " in (ROOT / "pyproject.toml").read_text()
    pip = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "-q",
        "--no-build-isolation",
        "--no-deps",
        "-w",
        str(tmp_path),
    ]
    built = Path(gemini.__file__).parent  # where the module is that setup.sh compiled
    environment = {**os.environ, "GEMINI_COMPILED": str(built), "GEMINI_CUDA": "OFF"}
    subprocess.run([*pip, "."], cwd=source, env=environment, check=True)
    (wheel,) = tmp_path.glob("*.whl")
    inside = set(zipfile.ZipFile(wheel).namelist())
    folders = {"gemini": "gemini", "parallel": "gemini/parallel"}
    wanted = {
        f"{place}/{path.relative_to(ROOT / folder).as_posix()}"
        for folder, place in folders.items()
        for path in (ROOT / folder).rglob("*.py")
        if not (folder == "gemini" and path.is_relative_to(ROOT / "gemini" / "parallel"))
    }
    assert len(wanted) > 300
    assert wanted - inside == set()
    assert {name for name in inside if re.fullmatch(r"gemini/_C\..*\.so", name)}
