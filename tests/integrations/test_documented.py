"""The programs of pages about trainers and libraries run as printed."""

from __future__ import annotations

import json
import os
import re
import shlex
from pathlib import Path

import pytest
from programs import run_python

import gemini

transformers = pytest.importorskip("transformers", reason="the extra 'hf' is not installed")

LIBRARIES = ["transformers", "peft", "torchao", "trl", "lightning"]  # which take long to import
DOCS = Path(__file__).resolve().parents[2] / "docs"


@pytest.mark.dear("the programs of the pages run in processes of their own")
def test_programs_with_hugging_face_run_as_printed(tmp_path: Path) -> None:
    pytest.importorskip("trl", reason="only the extra 'test' brings it")
    programs = programs_of("huggingface.md")
    assert len(programs) == 7
    run("\n".join([*programs_of("finetune.md"), *programs]), tmp_path)
    assert (tmp_path / "run" / "checkpoint-4" / "gemini").is_dir()
    assert (tmp_path / "state" / "gemini").is_dir()
    transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "averaged")


def test_the_mixture_of_the_page_answers_and_trains_within_its_budget(tmp_path: Path) -> None:
    lines = run("\n".join(programs_of("experts.md")), tmp_path).splitlines()
    tokens, read_bytes = lines[-6:-4]
    assert len(json.loads(tokens)) == 24
    assert int(read_bytes) > 0
    waiting = [int(line.split()[1]) for line in lines[-4:]]
    assert waiting[0] == 0  # the step that is recorded
    assert waiting[-1] > 4 * 32  # in four layers, two arrays of 32 experts


@pytest.mark.dear("the program of the page runs in a process of its own, and reads weights in each pass")
def test_a_pass_of_the_page_reads_what_memory_lacks(tmp_path: Path) -> None:
    read, begins = run("\n".join(programs_of("inference.md")), tmp_path).splitlines()[-2:]
    assert 0.99 < float(read.split()[0]) < 1.5
    assert begins == "begins as the short text: True"


def test_the_engine_of_the_page_shares_passes_within_its_budget(tmp_path: Path) -> None:
    page = (DOCS / "serve.md").read_text()
    lines = run("\n".join(programs_of("serve.md")), tmp_path).splitlines()
    assert lines[-4:-2] == ["[16, 16, 16, 16]", "True"]
    passes, tokens = map(int, re.findall(r"\d+", lines[-2]))
    assert tokens == 96
    assert f"take {passes} passes instead of {tokens}" in page


@pytest.mark.dear("the program of the page runs in a process of its own")
def test_the_adapters_of_the_page_learn_beside_a_quantized_base(tmp_path: Path) -> None:
    pytest.importorskip("torchao", reason="the extra 'quantized' is not installed")
    *losses, read_bytes = run("\n".join(programs_of("quantized.md")), tmp_path).splitlines()[-5:]
    assert float(losses[3]) < float(losses[0])
    assert int(read_bytes) > 0


def test_the_tiled_loss_of_the_page_falls(tmp_path: Path) -> None:
    lines = run("\n".join(programs_of("tiled-loss.md")), tmp_path).splitlines()
    losses = [float(line.removeprefix("loss ")) for line in lines if line.startswith("loss ")]
    assert len(losses) == 3
    assert losses[2] < losses[0]


@pytest.mark.dear("the commands of the page run in processes of their own")
def test_the_toy_of_finetune_is_made_tuned_and_loaded_as_printed(tmp_path: Path) -> None:
    (program,) = programs_of("finetune.md")
    run(program, tmp_path)
    pytest.importorskip("tensorboard", reason="the extra 'tensorboard' is not installed")
    pytest.importorskip("bitsandbytes", reason="the extra 'quantized' is not installed")
    lines = re.findall(
        r"^    gemini (finetune --model toy .*)$", (DOCS / "finetune.md").read_text(), flags=re.M
    )
    assert len(lines) == 3
    (tmp_path / "README.md").write_text("all work and no play " * 400)
    commands = "\n".join(f"assert main({[*line.split(), '--quiet']}) == 0" for line in lines)
    run(f"from gemini.cli.main import main\n{commands}", tmp_path)
    steps = (tmp_path / "out" / "dpo" / "metrics.jsonl").read_text().splitlines()
    assert json.loads(steps[-1])["rewards/margins"] > 0
    assert list((tmp_path / "out" / "dpo" / "tensorboard").iterdir())
    tuned = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out" / "toy" / "model")
    assert tuned.num_parameters() == 8_525_056


@pytest.mark.dear("the commands of the page run in processes of their own")
def test_what_comes_after_training_runs_as_printed(tmp_path: Path) -> None:
    pytest.importorskip("gguf", reason="the extra 'gguf' is not installed")
    (program,) = programs_of("after-training.md")
    page = (DOCS / "after-training.md").read_text()
    lines = [
        line.split() for line in re.findall(r"^    (gemini (?:finetune|merge|sample|export) .*)$", page, re.M)
    ]
    assert [words[1] for words in lines] == ["finetune", "merge", "sample", "export"]
    commands = [shlex.split(" ".join(words))[1:] for words in lines]
    run_all = "\n".join(f"assert main({words}) == 0" for words in commands)
    output = run(f"{program}\nfrom gemini.cli.main import main\n{run_all}", tmp_path)
    assert "> What is 30 plus 1?\n" in output
    assert "out/small.gguf: gguf, 21 tensors, 427.5 KiB" in output
    card = (tmp_path / "out" / "merged" / "README.md").read_text()
    assert "| data | chats.jsonl |" in card
    assert "| steps | 20 |" in card
    assert str(tmp_path) not in card


def test_the_program_with_lightning_runs_as_printed(tmp_path: Path) -> None:
    pytest.importorskip("lightning", reason="only the extra 'test' brings it")
    (program,) = programs_of("lightning.md")
    run(program, tmp_path)
    assert (tmp_path / "run.ckpt" / "gemini").is_dir()


@pytest.mark.dear("the scripts of the pages run in processes of their own")
def test_scripts_print_the_same_before_and_after_the_lines_that_change(tmp_path: Path) -> None:
    for name in ("trl", "lightning"):
        pytest.importorskip(name, reason="only the extra 'test' brings it")
    from hf_models import SIZES, saved
    from test_trl import tokenizer

    text = (DOCS / "changed-lines.md").read_text()
    scripts = re.findall(r"^```diff\n(.*?)^```", text, flags=re.M | re.S)
    said = re.findall(r"^\| \[.*\) \| (\d) \| (\d) \|$", text, flags=re.M)
    assert [changes(script) for script in scripts] == [(int(lines), int(imports)) for lines, imports in said]
    assert len(said) == 6
    saved(transformers.LlamaConfig(**SIZES), transformers.LlamaForCausalLM, tmp_path / "model")
    tokenizer().save_pretrained(tmp_path / "model")
    before, after = ("\n".join(one_side(script, sign) for script in scripts) for sign in "-+")
    output = run(f"{before}\nprint('-- changed')\n{after}", tmp_path)  # importing takes most of the time
    sides = output.split("-- changed\n")
    losses = [[line for line in side.splitlines() if line.startswith("loss ")] for side in sides]
    assert losses[0] == losses[1]
    assert len(losses[0]) == 3 + 3 * 3


def changes(script: str) -> tuple[int, int]:
    """Return how many lines are new or become another, imports aside, and how many imports are new."""
    added = re.findall(r"^\+(.*)$", script, flags=re.M)
    removed = re.findall(r"^-(.*)$", script, flags=re.M)
    imports = [line for line in added if line.startswith(("import ", "from "))]
    return max(len(added) - len(imports), len(removed)), len(imports)


def one_side(script: str, sign: str) -> str:
    """Return what a script is before (``-``) or after (``+``) the change."""
    return "\n".join(line[1:] for line in script.splitlines() if line[:1] in ("", " ", sign))


def programs_of(page: str) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", (DOCS / page).read_text(), flags=re.M | re.S)


def run(program: str, directory: Path) -> str:
    """Run ``program`` in ``directory``, with this gemini; return its output."""
    environment = {
        **os.environ,
        "PYTHONPATH": str(Path(gemini.__file__).parents[1]),
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "CUDA_VISIBLE_DEVICES": "",
    }
    done = run_python(["-c", program], cwd=directory, env=environment, imports=LIBRARIES)
    assert done.returncode == 0, done.stderr
    return done.stdout
