"""The two distributions: what their wheels hold, and what one adds to the command of the other."""

from __future__ import annotations

import os
import re
import runpy
import sys
from pathlib import Path

import pytest
from setuptools.dist import Distribution

from gemini.cli import command_line
from gemini.cli.command_line import COMMANDS, EXIT_ERROR
from gemini.cli.main import main

ROOT = Path(__file__).resolve().parents[2]

HELLO = """
def add_parser(subparsers):
    parser = subparsers.add_parser("hello", help="greet whom it may concern")
    parser.add_argument("--code", type=int, default=0)
    parser.set_defaults(run=lambda options: options.code)
"""


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A distribution that adds ``hello``, a ``broken`` one, and a ``check`` of its own."""
    (tmp_path / "hello_command.py").write_text(HELLO)
    info = tmp_path / "greetings-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: greetings\nVersion: 1.0\n")
    commands = (
        "hello = hello_command:add_parser",
        "broken = no_such:add_parser",
        "check = no_such:add_parser",
    )
    (info / "entry_points.txt").write_text("\n".join(["[gemini.commands]", *commands]))
    monkeypatch.syspath_prepend(tmp_path)


def printed_help(capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit):
        main(["--help"])
    return capsys.readouterr().out


@pytest.mark.usefixtures("installed")
def test_an_installed_command_is_listed_and_runs(capsys: pytest.CaptureFixture[str]) -> None:
    assert "greet whom it may concern" in printed_help(capsys)
    assert main(["hello", "--code", "7"]) == 7


def test_help_has_one_line_per_command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    lines = printed_help(capsys).splitlines()
    listed = lines[lines.index("  COMMAND") + 1 : lines.index("start here:") - 1]
    assert [line.split()[0] for line in listed][: len(COMMANDS)] == list(COMMANDS)
    assert all(re.fullmatch(r"    [\w-]+ +\w.*", line) for line in listed)


@pytest.mark.usefixtures("installed")
def test_a_command_that_cannot_be_loaded_stops_no_other(capsys: pytest.CaptureFixture[str]) -> None:
    assert "broken" not in printed_help(capsys)
    assert main(["broken"]) == EXIT_ERROR
    (said,) = capsys.readouterr().err.splitlines()
    assert "gemini broken" in said
    assert "no_such" in said
    assert "install greetings anew" in said


@pytest.mark.usefixtures("installed")
def test_no_command_of_our_own_is_replaced() -> None:
    assert not command_line.added_commands("check", COMMANDS).keys() & COMMANDS.keys()


def test_benchmarks_that_are_not_installed_say_how_they_would_be(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command_line.metadata, "entry_points", lambda group: ())
    assert main(["bench", "adam", "--numel", "1M"]) == EXIT_ERROR
    (said,) = capsys.readouterr().err.splitlines()
    assert "gemini bench is not installed: pip install ./benchmarks" in said
    assert "measure on this machine, against" not in printed_help(capsys)


def test_benchmarks_run_where_they_only_lie_on_the_path(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command_line.metadata, "entry_points", lambda group: ())
    monkeypatch.setattr(sys, "argv", ["gemini_bench", "adam", "--help"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_module("gemini_bench", run_name="__main__")
    assert not ended.value.code
    assert "usage: gemini bench adam" in capsys.readouterr().out


def test_the_package_runs_as_the_command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["gemini", "--version"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_module("gemini", run_name="__main__")
    assert not ended.value.code
    assert capsys.readouterr().out.startswith("gemini ")


def test_the_distribution_names_its_authors_and_its_terms() -> None:
    text = (ROOT / "pyproject.toml").read_text()
    assert 'license = "Apache-2.0"' in text
    assert "authors = [" in text
    assert "Apache License" in (ROOT / "LICENSE").read_text()[:200]


def test_the_benchmarks_that_the_extra_brings_are_those_of_this_version() -> None:
    runtime, benchmarks = ((ROOT / part / "pyproject.toml").read_text() for part in (".", "benchmarks"))
    (version,) = re.findall(r'^version = "(.+)"$', runtime, re.MULTILINE)
    assert f'\nbench = ["gemini-runtime-bench=={version}"]\n' in runtime
    assert f'\nversion = "{version}"\n' in benchmarks
    assert f'\ndependencies = ["gemini-runtime=={version}"]\n' in benchmarks


def test_wheels_are_tried_for_what_is_promised_and_by_tests_that_exist() -> None:
    script = (ROOT / "scripts" / "wheels.sh").read_text()
    (versions,) = re.findall(r"VERSIONS=\((.+)\)", script)
    promised = re.findall(r"Python :: (3\.\d+)", (ROOT / "pyproject.toml").read_text())
    assert set(promised) <= set(versions.split())
    (laws,) = re.findall(r"LAWS=\(([^)]+)\)", script)
    assert len(laws.split()) > 10
    assert [name for name in laws.split() if not (ROOT / "tests" / name).is_file()] == []


def modules_of(folder: Path) -> list[str]:
    """Return the modules of the wheel that the setup.py, else the pyproject.toml, of a folder makes."""
    here = Path.cwd()
    os.chdir(folder)
    try:
        if Path("setup.py").exists():
            from distutils.core import run_setup  # setuptools'

            distribution = run_setup("setup.py", stop_after="init")
        else:
            distribution = Distribution({"script_name": "setup.py"})
            distribution.parse_config_files()
        build = distribution.get_command_obj("build_py")
        build.ensure_finalized()
        return [f"{package}.{module}" for package, module, _ in build.find_all_modules()]
    finally:
        os.chdir(here)


def test_each_wheel_holds_its_own_files_alone() -> None:
    runtime, benchmarks = modules_of(ROOT), modules_of(ROOT / "benchmarks")
    assert {"gemini.model.ddp", "gemini.parallel.zero.optimizer"} <= set(runtime)
    assert not [name for name in runtime if not name.startswith("gemini.") or "bench" in name]
    assert {"gemini_bench.worker", "gemini_bench.cli.bench"} <= set(benchmarks)
    assert not [name for name in benchmarks if not name.startswith("gemini_bench.")]
