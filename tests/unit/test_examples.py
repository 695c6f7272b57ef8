"""The programs a new user copies first run as they stand: examples/ with tiny sizes, and those of pages."""

from __future__ import annotations

import functools
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from programs import run_python

import gemini

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = {
    "wrap_a_model.py": [
        "--hidden",
        "64",
        "--layers",
        "4",
        "--steps",
        "3",
        "--policy",
        "const",
        "--device-bytes",
        "128KiB",
    ],
    "booster_gemini.py": ["--hidden", "32"],
    "save_and_resume.py": ["--hidden", "32", "--steps", "4", "--precision", "bf16"],
    "adam_on_disk.py": ["--hidden", "64", "--steps", "3"],
    "compact_states.py": ["--hidden", "64", "--steps", "4"],
    "gpt2_on_disk.py": ["--hidden", "48", "--layers", "2", "--vocab", "500", "--seq", "16", "--steps", "3"],
}


def run(arguments: list[str], directory: Path) -> str:
    """Run Python with ``arguments`` in ``directory``, with this gemini; return its output."""
    done = run_python(arguments, cwd=directory, env=environment())
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def run_alone(arguments: list[str], directory: Path) -> str:
    """Do the same in a process of its own."""
    done = subprocess.run(
        [sys.executable, *arguments], cwd=directory, env=environment(), capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(Path(gemini.__file__).parents[1]), "OMP_NUM_THREADS": "1"}


Runs = Callable[[str], tuple[str, Path]]


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """Return a function that runs an example, once for all tests; it returns the output and the directory."""

    @functools.cache
    def run_once(name: str) -> tuple[str, Path]:
        directory = tmp_path_factory.mktemp("example")
        starts = run_alone if name == "gpt2_on_disk.py" else run  # it starts a process, which imports it
        return starts([str(ROOT / "examples" / name), *EXAMPLES[name]], directory), directory

    return run_once


PROGRAM = """
import atexit, os, sys
atexit.register(print, "at the end")
print(__name__, sys.argv, os.getcwd(), os.environ["MINE"], flush=True)
sys.stderr.write("an error")
{end}
"""


@pytest.mark.parametrize("end", ["", "sys.exit(3)", "sys.exit('no')", "os.kill(os.getpid(), 9)"])
@pytest.mark.parametrize("as_file", [False, True])
def test_a_forked_program_does_what_it_does_in_a_process_of_its_own(
    end: str, as_file: bool, tmp_path: Path
) -> None:
    text, file = PROGRAM.format(end=end), tmp_path / "program.py"
    file.write_text(text)
    arguments = [str(file), "a b"] if as_file else ["-c", text, "a b"]
    mine = {**os.environ, "MINE": "x"}
    forked = run_python(arguments, cwd=tmp_path, env=mine)
    started = subprocess.run(
        [sys.executable, *arguments], cwd=tmp_path, env=mine, capture_output=True, text=True
    )
    assert (forked.returncode, forked.stdout, forked.stderr) == (
        started.returncode,
        started.stdout,
        started.stderr,
    )


def programs_of(page: str) -> list[str]:
    """Return the Python blocks of a page."""
    return re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)


def losses_of(output: str) -> list[float]:
    """Return the second word of every line."""
    return [float(line.split()[1]) for line in output.splitlines()]


def test_every_example_is_run_here() -> None:
    # tests/parallel/test_elastic.py: it leaves its checkpoints; tests/integrations/test_quantized_bases.py
    elsewhere = ["ranks_that_restart.py", "qlora_on_disk.py"]
    assert sorted(path.name for path in (ROOT / "examples").glob("*.py")) == sorted([*EXAMPLES, *elsewhere])


@pytest.mark.dear("a notebook from start to end, in steps that read and write")
def test_the_notebook_runs_from_its_first_cell_to_its_last(tmp_path: Path) -> None:
    notebook = json.loads((ROOT / "examples" / "first_steps.ipynb").read_text())
    cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert [cell for cell in cells if cell["outputs"] or cell["execution_count"]] == []  # none are stored
    output = run(["-c", "\n".join("".join(cell["source"]) for cell in cells)], tmp_path)
    (peak,) = re.findall(r"device +peak +([\d,]+)", output)
    assert int(peak.replace(",", "")) <= 3 * 2**20
    losses = [float(loss) for loss in re.findall(r"loss ([\d.]+)", output)]
    assert losses[-1] < losses[0] / 10
    assert "the same loss, bit for bit: True" in output
    assert output.splitlines()[-1].startswith("Parameters, gradients and optimizer states")


def test_links_of_the_notebook_lead_somewhere() -> None:
    page = ROOT / "examples" / "first_steps.ipynb"
    targets = re.findall(r"\]\((\.\./[^)#]+)", page.read_text())
    assert len(targets) > 4
    assert [target for target in targets if not (page.parent / target).exists()] == []


@pytest.mark.dear("an example from start to end, in a process of its own")
@pytest.mark.parametrize("name", EXAMPLES)
def test_example_runs_and_leaves_nothing_behind(name: str, ran: Runs) -> None:
    output, directory = ran(name)
    assert output
    assert list(directory.iterdir()) == []


def test_wrapped_model_is_larger_than_its_memory(ran: Runs) -> None:
    output, _ = ran("wrap_a_model.py")
    numbers = {
        match[1]: int(match[2].replace(",", ""))
        for match in re.finditer(r"(model data|device  peak)\s+([\d,]+)", output)
    }
    assert numbers["device  peak"] <= 128 * 1024 < numbers["model data"]


@pytest.mark.parametrize(
    "name", ["booster_gemini.py", "save_and_resume.py", "adam_on_disk.py", "gpt2_on_disk.py"]
)
def test_example_proves_what_it_says(name: str, ran: Runs) -> None:
    assert "identical" in ran(name)[0]


def test_compact_states_hold_as_few_bytes_as_promised(ran: Runs) -> None:
    output, _ = ran("compact_states.py")
    held = [float(number) for number in re.findall(r"states: +([\d.]+) bytes", output)]
    assert held == [14.0, 8.03]


def test_readme_program_runs_as_it_stands_with_falling_loss(tmp_path: Path) -> None:
    (program,) = programs_of("README.md")
    assert len(program.strip().splitlines()) <= 16
    losses = losses_of(run_alone(["-c", program], tmp_path))
    assert len(losses) == 5
    assert losses[-1] < losses[0]
    assert list(tmp_path.iterdir()) == []


def test_first_program_in_chinese_is_that_of_the_readme() -> None:
    assert programs_of("docs/zh/first-training.md") == programs_of("README.md")


def test_readme_can_be_read_in_some_minutes() -> None:
    assert len((ROOT / "README.md").read_text().split()) <= 700


def test_start_wraps_a_model(tmp_path: Path) -> None:
    program, _in_place = programs_of("docs/start.md")
    # Smaller, so that it takes a moment; everything else as printed.
    tiny = (
        program.replace("1024", "64")
        .replace("96MiB", "192KiB")
        .replace("min_chunk_size_mb=4", "min_chunk_size_mb=0.02")
    )
    assert tiny != program
    losses = losses_of(run(["-c", tiny], tmp_path))
    assert len(losses) == 5
    assert losses[-1] < losses[0]


def test_start_manages_a_module_in_place_as_it_stands(tmp_path: Path) -> None:
    _wrapped, program = programs_of("docs/start.md")
    output = run(["-c", program], tmp_path)
    assert "ManagedModel(Sequential: DEVICE" in output
    assert list(tmp_path.iterdir()) == []


def test_optimizer_alone_runs_as_it_stands_with_falling_loss(tmp_path: Path) -> None:
    (program,) = programs_of("docs/optimizers.md")
    losses = losses_of(run(["-c", program], tmp_path))
    assert len(losses) == 5
    assert losses[-1] < losses[0]


def test_torchs_checkpoint_of_a_managed_model_is_loaded_by_plain_torch_as_printed(tmp_path: Path) -> None:
    output = run(["-c", "\n".join(programs_of("docs/torch-checkpoint.md"))], tmp_path)
    assert output.splitlines()[-1] == "the same weights: True, the same moments: True"


PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_of_pages_lead_somewhere(page: Path) -> None:
    targets = re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", page.read_text())
    local = [target for target in targets if "://" not in target]
    assert [target for target in local if not (page.parent / target).exists()] == []
