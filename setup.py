"""Builds ``gemini._C`` with CMake and maps the folder ``parallel/`` to ``gemini.parallel``.

Everything else about the distribution is in pyproject.toml. Build options are environment variables
with the names of the CMake options: GEMINI_CUDA, GEMINI_URING, GEMINI_SANITIZE, GEMINI_WERROR, and
CMAKE_BUILD_TYPE, CMAKE_BUILD_PARALLEL_LEVEL. GEMINI_COMPILED is a folder where another build of these
very sources left the module: it is taken from there, and nothing is compiled.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pybind11
from setuptools import Extension, find_packages, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent
OPTIONS = (
    "GEMINI_CUDA",
    "GEMINI_URING",
    "GEMINI_SANITIZE",
    "GEMINI_WERROR",
    "CMAKE_BUILD_TYPE",
)


def find_tool(name: str) -> str:
    """Return the path of a build tool; the interpreter's own folder first, for venvs not on PATH."""
    path = os.pathsep.join([sysconfig.get_path("scripts"), os.environ.get("PATH", os.defpath)])
    tool = shutil.which(name, path=path)
    if tool is None:
        raise SystemExit(f"building gemini needs {name}, which is not on PATH: pip install {name}")
    return tool


def is_stale(cache: Path, wanted: list[str]) -> bool:
    """Tell whether a CMake cache is from another checkout or names the temporary tools of an earlier pip."""
    return cache.exists() and not set(wanted) <= {
        line.partition("=")[2] for line in cache.read_text().splitlines()
    }


class CMakeBuild(build_ext):
    """Configure and build the extension in ``build/cmake-<interpreter>``, then copy it in place.

    The folder is kept between builds, so that a second build compiles only what changed.
    """

    def build_extension(self, ext: Extension) -> None:
        """Build one extension; a failing tool ends the build with its own message."""
        cmake, ninja = find_tool("cmake"), find_tool("ninja")
        pybind11_dir = pybind11.get_cmake_dir()
        build_dir = ROOT / "build" / f"cmake-{sysconfig.get_config_var('SOABI')}"
        configure = [cmake, "-S", str(ROOT), "-B", str(build_dir), "-G", "Ninja"]
        configure += [f"-DCMAKE_MAKE_PROGRAM={ninja}", f"-Dpybind11_DIR={pybind11_dir}"]
        configure += [f"-DPython_EXECUTABLE={sys.executable}"]
        # An option that is not set goes back to its default; it does not stay what an earlier build was told.
        configure += [
            f"-D{name}={os.environ[name]}" if os.environ.get(name) else f"-U{name}" for name in OPTIONS
        ]
        if is_stale(build_dir / "CMakeCache.txt", [str(ROOT), ninja, pybind11_dir, sys.executable]):
            configure.append("--fresh")
        commands = [configure]
        compiled = os.environ.get("GEMINI_COMPILED")
        if not compiled:
            commands.append([cmake, "--build", str(build_dir), "--target", "_C"])
        for command in commands:
            if subprocess.run(command, check=False).returncode != 0:
                raise SystemExit(f"building gemini._C failed at: {' '.join(command)}")
        target = Path(self.get_ext_fullpath(ext.name)).resolve()
        target.parent.mkdir(parents=True, exist_ok=True)
        # Replace, never overwrite: a running process may have the old file mapped.
        target.unlink(missing_ok=True)
        shutil.copy2(Path(compiled or build_dir) / target.name, target)


setup(
    packages=[
        *find_packages(str(ROOT), include=["gemini", "gemini.*"]),
        "gemini.parallel",
        *(f"gemini.parallel.{name}" for name in find_packages(str(ROOT / "parallel"))),
    ],
    package_dir={"gemini.parallel": "parallel"},
    ext_modules=[Extension("gemini._C", sources=[])],
    cmdclass={"build_ext": CMakeBuild},
)
