"""The documents' programs run, and what they say they show is so: examples/documents, all of it."""

from __future__ import annotations

import os
import re
import runpy
import subprocess
import sys
import warnings
from pathlib import Path
from types import ModuleType

import pytest
from processes import run_on_ranks

import gemini
from gemini.parallel.launch import shutdown

ROOT = Path(__file__).resolve().parents[2]


def _table_module() -> ModuleType:
    sys.path.insert(0, str(ROOT / "scripts"))
    import examples_table

    return examples_table


TABLE = _table_module()
EXAMPLES = TABLE.examples()


def run_program(path: str, arguments: list[str], directory: str) -> None:
    """Run a program as its interpreter would, in a process that has joined the others already."""
    before, argv = Path.cwd(), sys.argv
    sys.path.insert(0, str(Path(path).parent))
    sys.argv = [path, *arguments]
    os.chdir(directory)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            runpy.run_path(path, run_name="__main__")
    finally:
        shutdown()
        os.chdir(before)
        sys.argv = argv


@pytest.mark.dear("programs of the documents, up to eight processes each")
@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: example.path.stem)
def test_the_documents_program_shows_what_it_says(example: TABLE.Example, tmp_path: Path) -> None:
    if example.run.startswith("python"):  # it starts processes itself, which a worker of the tests may not
        path = str(Path(gemini.__file__).parents[1])
        environment = {
            **os.environ,
            "PYTHONPATH": f"{path}:{example.path.parent}",
            "GLOO_SOCKET_IFNAME": "lo",
        }
        command = [sys.executable, "-W", "ignore", str(example.path), *example.arguments]
        done = subprocess.run(
            command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=170
        )
        assert done.returncode == 0, done.stdout + done.stderr
    else:
        arguments = (str(example.path), example.arguments, str(tmp_path))
        run_on_ranks(run_program, example.processes, *arguments, timeout=170.0)
    assert list(tmp_path.iterdir()) == []


def test_the_table_of_the_documentation_is_of_these_files() -> None:
    page = TABLE.PAGE.read_text()
    assert page == TABLE.with_table(page), "run python scripts/examples_table.py"


def test_every_example_of_the_documents_is_here_or_said_to_come() -> None:
    names = " ".join([example.name for example in EXAMPLES])
    here = {int(number) for number in re.findall(r"EX(\d+)", names)}
    rest = TABLE.PAGE.read_text().partition(TABLE.END)[2]
    coming = {int(number) for number in re.findall(r"EX(\d+)", rest)}
    assert here.isdisjoint(coming)
    assert here | coming == set(range(1, 36))


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: example.path.stem)
def test_an_example_asserts_what_it_shows(example: TABLE.Example) -> None:
    text = example.path.read_text()
    assert re.search(r"^ *(assert |torch.testing.assert_close)", text, re.MULTILINE)
    assert f"examples/documents/{example.path.name}" in example.run
