"""Answers over ranks of tensor parallelism: those of one process, and what follows when a rank fails."""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_trained import SIZES, byte_level, llama

pytest.importorskip("transformers", reason="the extra 'hf' is not installed")

sys.path.insert(0, str(Path(__file__).parents[1] / "parallel"))

from processes import close_workers, run_on_ranks
from serving_ranks import MAX_TOKENS, OPTIONS, PROMPTS, answers_around_a_failure, answers_of

SMALL = {**SIZES, "vocab_size": 128, "head_dim": 16, "eos_token_id": None, "bos_token_id": None}
SMALL["pad_token_id"] = 0
KINDS: dict[str, dict[str, Any]] = {
    "llama": SMALL,
    "opt": {**SMALL, "ffn_dim": 96, "word_embed_proj_dim": 64},
}
Answers = list[tuple[int, ...]]


@pytest.fixture(autouse=True, scope="module")
def _workers_end() -> Iterator[None]:
    yield
    close_workers()


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[str, Answers]]:
    """Directories of models whose likeliest tokens are far from the others, and their answers."""
    import transformers

    found = {}
    for kind, sizes in KINDS.items():
        torch.manual_seed(0)
        config = transformers.AutoConfig.for_model(kind, **sizes)
        model = transformers.AutoModelForCausalLM.from_config(config).eval()
        with torch.no_grad():
            for param in model.parameters():
                param.mul_(3 if param.dim() > 1 else 1)
        directory = str(tmp_path_factory.mktemp("ranks") / kind)
        model.save_pretrained(directory)
        found[kind] = directory, [_generated(model, prompt) for prompt in PROMPTS]
    return found


def _generated(model: Any, prompt: tuple[int, ...]) -> tuple[int, ...]:
    made = model.generate(torch.tensor([prompt]), max_new_tokens=MAX_TOKENS, do_sample=False, pad_token_id=0)
    return tuple(made[0, len(prompt) :].tolist())


@pytest.mark.dear("two ranks start and import transformers")
@pytest.mark.parametrize("kind", KINDS)
def test_answers_are_those_of_one_process(kind: str, made: dict[str, tuple[str, Answers]]) -> None:
    directory, want = made[kind]
    got, stats = run_on_ranks(answers_of, 2, directory, {**OPTIONS, "device_bytes": 2**20})[0]
    assert got == want
    layers, size, itemsize = SMALL["num_hidden_layers"], SMALL["head_dim"], 4
    heads = SMALL["num_key_value_heads"] if kind == "llama" else SMALL["num_attention_heads"]
    tokens = sum(sorted(len(prompt) + MAX_TOKENS for prompt in PROMPTS)[-3:])
    kv = stats["kv"]
    assert kv["used_bytes"] == 0
    assert kv["peak_bytes"] <= tokens * layers * 2 * (heads // 2) * size * itemsize, "of the rank's heads"


def test_each_rank_has_its_part_within_its_own_budgets(
    made: dict[str, tuple[str, Answers]], tmp_path: Path
) -> None:
    directory, want = made["llama"]
    budget = 2**16 + 2**15
    below = {"kv_device_bytes": 2**14, "disk_dir": str(tmp_path), "host_bytes": 0}
    got, stats = run_on_ranks(answers_of, 2, directory, {**OPTIONS, **below, "device_bytes": budget})[0]
    assert got == want
    assert stats["runtime"]["device"]["peak_bytes"] <= budget
    assert stats["runtime"]["disk_read"]["bytes"] > 0


@pytest.mark.parametrize("who", [0, 1])
def test_a_pass_that_fails_on_one_rank_ends_its_requests_alone(
    who: int, made: dict[str, tuple[str, Answers]]
) -> None:
    directory, want = made["llama"]
    (kind, why), after = run_on_ranks(answers_around_a_failure, 2, directory, who)[0]
    assert kind == ("IoError" if who == 0 else "GeminiError")
    assert "the disk is gone" in why
    assert who == 0 or "rank 1 of 2" in why
    assert after == want[0]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = llama(tmp_path_factory.mktemp("served") / "tiny", dtype=torch.float32)
    byte_level().save_pretrained(directory)
    return directory


@contextmanager
def serving(*options: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Run ``gemini serve`` over two ranks, and yield the process and where it answers, once it does."""
    pytest.importorskip("fastapi", reason="the extra 'serve' is not installed")
    pytest.importorskip("uvicorn", reason="the extra 'serve' is not installed")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    command = [sys.executable, "-m", "gemini", "serve", *options, "--port", address.rpartition(":")[2]]
    sizes = ["--device-bytes", "4MiB", "--kv-bytes", "1MiB"]
    process = subprocess.Popen([*command, *sizes], stderr=subprocess.PIPE, text=True, start_new_session=True)
    try:
        assert process.stderr is not None
        for line in process.stderr:
            if "answers at" in line:
                break
        yield process, address
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def asked(address: str, path: str, body: dict[str, Any]) -> http.client.HTTPResponse:
    connection = http.client.HTTPConnection(address, timeout=300)
    connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
    return connection.getresponse()


@pytest.mark.dear("three processes import transformers")
def test_the_documents_configuration_serves_over_ranks_until_a_signal(served: Path, tmp_path: Path) -> None:
    file = tmp_path / "opt_config.py"
    file.write_text(f"checkpoint = {str(served)!r}\ntp_init_size = 2\n")
    with serving("--config", str(file), "--drain", "300") as (process, address):
        answer = asked(address, "/generation", {"prompt": "The", "max_tokens": 3, "top_k": 1})
        assert json.loads(answer.read())["text"].startswith("The")
        stream = asked(
            address, "/v1/completions", {"prompt": "The", "max_tokens": 20, "temperature": 0, "stream": True}
        )
        stream.readline()
        process.send_signal(signal.SIGINT)
        assert stream.read().endswith(b"data: [DONE]\n\n")
        assert process.wait(120) == 0


@pytest.mark.dear("three processes import transformers")
def test_a_lost_rank_ends_requests_with_503_and_the_job_with_its_reason(served: Path) -> None:
    with serving(str(served), "--tp", "2") as (process, address):
        found: list[tuple[int, str]] = []

        def ask() -> None:
            answer = asked(address, "/v1/completions", {"prompt": "The", "max_tokens": 100, "temperature": 0})
            found.append((answer.status, answer.read().decode()))

        client = threading.Thread(target=ask)
        client.start()
        time.sleep(0.5)
        os.kill(follower_of(process.pid), signal.SIGKILL)
        client.join(120)
        (status, text), (_, said) = found[0], process.communicate(timeout=120)
    assert (status, process.returncode) == (503, 2)
    assert "a rank that has a part of the model is lost" in text
    assert said.count("gemini: error:") == 1
    assert "rank 1" in said
    assert "was ended by SIGKILL" in said


def follower_of(pid: int) -> int:
    """Return the process of rank 1 among the children of ``pid``."""
    for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
        if b"\0RANK=1\0" in Path(f"/proc/{child}/environ").read_bytes():
            return int(child)
    raise AssertionError("there is no rank 1")
