"""Pages of tasks: their commands run, with a small model, and the bytes of their tables add up."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from test_documented import DOCS, programs_of, run

pytest.importorskip("transformers", reason="the extra 'hf' is not installed")

PAGES = ("laptop.md", "card-24gb.md", "large-weights.md")
# What makes a command of a page small: options with another value.
SMALL = {
    "--steps": "2",
    "--seq": "32",
    "--lora": "2",
    "--batch": "1",
    "--device": "cpu",
    "--device-bytes": "24MiB",
    "--host-bytes": "8MiB",
}
SAMPLED = {"--device-bytes": "1MiB"}  # less than the weights that answer
PLANNED = {"gpt3-6.7b": "gpt:layers=2,hidden=64,heads=2"}


def commands_of(page: str) -> list[list[str]]:
    """Return the words of each command of a page, without ``gemini``."""
    text = re.sub(r"\\\n +", "", (DOCS / page).read_text())
    return [shlex.split(line) for line in re.findall(r"^    gemini (.*)$", text, re.M)]


def smaller(words: list[str]) -> list[str]:
    """Return a command of a page with the sizes of the small model."""
    small = {**SMALL, **(SAMPLED if words[0] == "sample" else {})}
    options = zip(["", *words], words, strict=False)
    words = [small.get(option, PLANNED.get(word, word)) for option, word in options]
    return [*words, "--quiet"] if words[0] == "finetune" and "--show" not in words else words


@pytest.mark.dear("the commands of three pages run in a process of their own")
def test_commands_of_the_pages_run_on_a_small_model(tmp_path: Path) -> None:
    (toy,) = programs_of("after-training.md")
    (tmp_path / "card.json").write_text(
        re.findall(r"```json\n(.*?)```", (DOCS / PAGES[1]).read_text(), re.S)[0]
    )
    commands = {page: [smaller(words) for words in commands_of(page)] for page in PAGES}
    assert {page: [words[0] for words in of_page] for page, of_page in commands.items()} == {
        "laptop.md": ["finetune", "finetune", "merge", "sample", "finetune"],
        "card-24gb.md": ["plan", "finetune", "finetune"],
        "large-weights.md": ["sample", "serve", "finetune", "sample"],
    }
    lines = [toy.replace('"small"', '"model"').replace("chats.jsonl", "notes.jsonl")]
    lines += [
        "import shutil",
        "from gemini.cli.command_line import build_parser",
        "from gemini.cli.main import main",
    ]
    for page, of_page in commands.items():
        lines += [f"print({page!r}, flush=True)", "shutil.rmtree('out', ignore_errors=True)"]
        for words in of_page:
            started = (
                f"build_parser().parse_args({words})" if words[0] == "serve" else f"assert main({words}) == 0"
            )
            lines.append(started)
    output = run("\n".join(lines), tmp_path)
    of_page = dict(
        zip(PAGES, re.split(r"^(?:laptop|card-24gb|large-weights)\.md$", output, flags=re.M)[1:], strict=True)
    )
    assert "> What did I write about budgets?\n" in of_page["laptop.md"]
    assert "It fits." in of_page["card-24gb.md"]
    assert of_page["large-weights.md"].count("\nHello") == 2


@pytest.mark.parametrize("page", PAGES[:2])
def test_what_lies_on_each_tier_adds_up(page: str) -> None:
    rows = re.findall(r"^\| .*?\| ([\d.]+) GB \| (.*GB) \|$", (DOCS / page).read_text(), re.M)
    assert len(rows) > 2
    for total, parts in rows:
        places = [float(part) for part in re.findall(r"([\d.]+) GB", parts)]
        on_drive = max(0.0, float(total) - 6.0) if len(places) == 1 else float(total) - sum(places[:-1])
        assert places[-1] == pytest.approx(on_drive, abs=0.051)


def test_more_memory_waits_for_fewer_bytes_with_the_same_loss(tmp_path: Path) -> None:
    (program,) = programs_of("budgets.md")
    found = [
        (int(read.replace(",", "")), loss)
        for read, loss in re.findall(r"read ([\d,]+) bytes, loss (\S+)", run(program, tmp_path))
    ]
    (least, loss), (middle, second), (most, third) = found
    assert least > middle > most == 0
    assert loss == second == third
