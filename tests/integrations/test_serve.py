"""``gemini serve`` over real connections: OpenAI's client, the documents' endpoint, limits, the end."""

from __future__ import annotations

import http.client
import json
import logging
import random
import socket
import threading
import time
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from programs import run_python
from tiny_trained import TEXT, byte_level, llama

from gemini.errors import ConfigError
from gemini.inference import Engine, Request
from gemini.inference.text import TextStream
from gemini.jobs.serve.config import ServeConfig, read_config_file
from gemini.jobs.serve.query_cache import QueryCache

transformers = pytest.importorskip("transformers", reason="the extra 'hf' is not installed")
tokenizers = pytest.importorskip("tokenizers", reason="comes with transformers")
pytest.importorskip("fastapi", reason="the extra 'serve' is not installed")
pytest.importorskip("uvicorn", reason="the extra 'serve' is not installed")
openai = pytest.importorskip("openai", reason="the client is for tests alone")

PROMPT = "The capital"
TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = llama(
        tmp_path_factory.mktemp("served") / "tiny", dtype=torch.float32, max_position_embeddings=4096
    )
    tokenizer = byte_level()
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(directory)
    return directory


class Served:
    """A server on a thread of its own."""

    def __init__(self, config: ServeConfig) -> None:
        from gemini.jobs.serve.app import Server
        from gemini.jobs.serve.service import Service

        self.engine = Engine.from_pretrained(
            config.model,
            device_bytes=2**22,
            kv_bytes=2**21,
            max_batch=config.max_batch,
            queue_size=config.queue_size,
        )
        self.tokenizer = transformers.AutoTokenizer.from_pretrained(config.model)
        self.service = Service(self.engine, self.tokenizer, config)
        started, self.url = threading.Event(), ""

        def start(url: str) -> None:
            self.url = url
            started.set()

        self._server = Server(self.service, start)
        self._thread = threading.Thread(target=self._server.run)
        self._thread.start()
        assert started.wait(30)
        self.client = openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0)

    def close(self) -> None:
        self.client.close()
        self._server.should_exit = True
        self._thread.join(30)
        self.engine.close()

    def ask(
        self, path: str, body: Any = None, *, headers: dict[str, str] | None = None
    ) -> tuple[int, Any, Any]:
        """Return the status, the headers and the content of an answer."""
        connection = http.client.HTTPConnection(self.url.removeprefix("http://"), timeout=30)
        try:
            raw = body if isinstance(body, (bytes, type(None))) else json.dumps(body).encode()
            given = {"Content-Type": "application/json", **(headers or {})}
            connection.request("GET" if raw is None else "POST", path, raw, given)
            answer = connection.getresponse()
            content = answer.read().decode()
            is_json = "json" in answer.headers.get("Content-Type", "")
            return answer.status, answer.headers, json.loads(content) if is_json else content
        finally:
            connection.close()


@pytest.fixture(scope="module")
def served(model: Path) -> Iterator[Served]:
    found = Served(ServeConfig(model, port=0, max_batch=4, queue_size=8, max_tokens=2000, body_bytes=10_000))
    yield found
    found.close()


@pytest.fixture(scope="module")
def want(model: Path) -> str:
    plain = transformers.AutoModelForCausalLM.from_pretrained(model)
    tokenizer = transformers.AutoTokenizer.from_pretrained(model)
    ids = torch.tensor([tokenizer(PROMPT)["input_ids"]])
    made = plain.generate(ids, max_new_tokens=24, do_sample=False, pad_token_id=0)
    text: str = tokenizer.decode(made[0, ids.shape[1] :], skip_special_tokens=True)
    return text


def test_openai_s_client_gets_what_transformers_says(served: Served, want: str) -> None:
    done = served.client.completions.create(model="tiny", prompt=PROMPT, max_tokens=24, temperature=0)
    assert done.choices[0].text == want
    assert done.choices[0].finish_reason == "length"
    assert (done.usage.completion_tokens, done.usage.total_tokens) == (24, 24 + done.usage.prompt_tokens)
    tokens = served.tokenizer(PROMPT)["input_ids"]
    again = served.client.completions.create(model="tiny", prompt=tokens, max_tokens=24, temperature=0)
    assert again.choices[0].text == want
    assert [one.id for one in served.client.models.list()] == ["tiny"]


def test_a_stream_is_the_same_text_in_pieces(served: Served, want: str) -> None:
    parts = list(
        served.client.completions.create(
            model="tiny",
            prompt=PROMPT,
            max_tokens=24,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    *texts, usage = parts
    assert "".join(part.choices[0].text for part in texts) == want
    assert len(texts) > 5
    assert texts[-1].choices[0].finish_reason == "length"
    assert usage.usage.completion_tokens == 24


def test_a_conversation_is_asked_by_the_template(served: Served) -> None:
    messages: list[Any] = [{"role": "user", "content": "Why?"}]
    asked = f"{'user'}: Why?\nassistant:"
    text = served.client.completions.create(model="tiny", prompt=asked, max_tokens=9, temperature=0)
    chat = served.client.chat.completions.create(
        model="tiny", messages=messages, max_completion_tokens=9, temperature=0
    )
    assert chat.choices[0].message.content == text.choices[0].text
    parts = served.client.chat.completions.create(
        model="tiny", messages=messages, max_tokens=9, temperature=0, stream=True
    )
    assert "".join(part.choices[0].delta.content for part in parts) == text.choices[0].text


def test_a_stop_text_ends_an_answer_and_does_not_belong_to_it(served: Served, want: str) -> None:
    stop = want[6:9]
    done = served.client.completions.create(
        model="tiny", prompt=PROMPT, max_tokens=24, temperature=0, stop=[stop, "never"]
    )
    assert done.choices[0].text == want[: want.index(stop)]
    assert done.choices[0].finish_reason == "stop"


def test_draws_with_a_seed_are_repeatable(served: Served) -> None:
    def drawn(seed: int) -> str:
        done = served.client.completions.create(model="tiny", prompt=PROMPT, max_tokens=12, seed=seed)
        return str(done.choices[0].text)

    assert drawn(1) == drawn(1) != drawn(2)


def test_the_documents_endpoint_gives_the_prompt_and_what_follows(served: Served) -> None:
    body = {"prompt": PROMPT, "max_tokens": 5, "top_k": 1, "temperature": 0.7}
    status, _, content = served.ask("/generation", body)
    assert (status, list(content)) == (200, ["text"])
    assert content["text"].startswith(PROMPT)
    assert served.ask("/generation", {**body, "beams": 4})[0] == 400
    assert served.ask("/generation", {**body, "prompt": ""})[0] == 400


@pytest.mark.parametrize(
    ("body", "status", "said"),
    [
        ({"prompt": PROMPT, "best_of": 3}, 400, "'best_of' is not supported"),
        ({"prompt": PROMPT, "wild": True}, 400, "'wild' is not supported"),
        ({"prompt": PROMPT, "logprobs": 5}, 400, "'logprobs' is not supported"),
        ({"max_tokens": 4}, 400, "prompt: Field required"),
        ({"prompt": ["a", "b"]}, 400, "several texts"),
        ({"prompt": ""}, 400, "no tokens"),
        ({"prompt": []}, 400, "no tokens"),
        ({"prompt": [999]}, 400, "token 999 is not one of"),
        ({"prompt": PROMPT, "max_tokens": 3000}, 400, "at most 2000"),
        ({"prompt": PROMPT, "max_tokens": 0}, 400, "max_tokens is 0"),
        ({"prompt": PROMPT, "top_p": 0}, 400, "top_p is 0"),
        ({"prompt": PROMPT, "temperature": -1}, 400, "temperature is -1"),
        ({"prompt": PROMPT, "stop": ["a"] * 17}, 400, "stop has 17 strings"),
        ({"prompt": PROMPT, "stop": "a" * 4097}, 400, "4,097 characters"),
        ({"prompt": PROMPT, "model": "other"}, 404, "the model 'other' does not exist"),
        (b"{", 400, "JSON"),
        (b" " * 10_001, 413, "more than 9.8 KiB"),
    ],
)
def test_what_cannot_be_is_answered_with_one_sentence(
    served: Served, body: Any, status: int, said: str
) -> None:
    code, _, content = served.ask("/v1/completions", body)
    assert code == status
    assert said in content["error"]["message"]


def test_a_chat_of_no_tokens_is_refused(served: Served) -> None:
    said = [{"role": "user", "content": "Hi"}]
    for name in ("max_tokens", "max_completion_tokens"):
        code, _, content = served.ask("/v1/chat/completions", {"messages": said, name: 0})
        assert (code, "max_tokens is 0" in content["error"]["message"]) == (400, True)


def test_options_that_ask_for_nothing_are_taken(served: Served) -> None:
    neutral = {"n": 1, "presence_penalty": 0.0, "logit_bias": None, "user": "me", "echo": False}
    assert served.ask("/v1/completions", {"prompt": PROMPT, "max_tokens": 1, **neutral})[0] == 200


def test_a_body_without_a_length_has_an_end_as_well(served: Served) -> None:
    host, port = served.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=30) as connection:
        head = "POST /v1/completions HTTP/1.1\r\nHost: here\r\nTransfer-Encoding: chunked\r\n\r\n"
        connection.sendall(
            head.encode() + b"2000\r\n" + b" " * 0x2000 + b"\r\n2000\r\n" + b" " * 0x2000 + b"\r\n"
        )
        assert b"413" in connection.recv(4096)


def test_a_client_that_leaves_is_no_longer_computed_for(served: Served) -> None:
    body = json.dumps({"prompt": PROMPT, "max_tokens": 1900, "temperature": 0}).encode()
    for stream in (False, True):
        text = body if not stream else body[:-1] + b', "stream": true}'
        host, port = served.url.removeprefix("http://").split(":")
        before = served.engine.stats()["requests"].get("cancelled", 0)
        with socket.create_connection((host, int(port)), timeout=30) as connection:
            head = f"POST /v1/completions HTTP/1.1\r\nHost: here\r\nContent-Length: {len(text)}\r\n"
            connection.sendall(head.encode() + b"Content-Type: application/json\r\n\r\n" + text)
            wait_for(lambda: served.engine.stats()["running"] == 1)
        wait_for(lambda before=before: served.engine.stats()["requests"].get("cancelled", 0) == before + 1)
        assert served.engine.stats()["kv"]["used_bytes"] == 0


def test_a_full_queue_answers_429_at_once_and_others_are_answered(served: Served) -> None:
    codes: list[int] = []
    body = {"prompt": PROMPT, "max_tokens": 60, "temperature": 0}
    threads = [
        threading.Thread(target=lambda: codes.append(served.ask("/v1/completions", body)[0]))
        for _ in range(30)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert set(codes) == {200, 429}
    assert codes.count(200) >= 8
    assert served.ask("/health")[0] == 200


def test_metrics_count_what_was_answered(served: Served) -> None:
    status, _, text = served.ask("/metrics")
    assert status == 200
    numbers = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    stats = served.engine.stats()
    assert float(numbers["gemini_tokens_total"]) == stats["tokens"] > 0
    assert float(numbers["gemini_kv_budget_bytes"]) == 2**21
    assert float(numbers['gemini_requests_total{outcome="length"}']) == stats["requests"]["length"]


def test_health_says_when_the_engine_has_stopped(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    served = Served(ServeConfig(model, port=0))
    try:
        assert served.ask("/health")[0] == served.ask("/ready")[0] == 200
        monkeypatch.setattr(served.engine, "_begin", lambda: 1 / 0)
        status, _, content = served.ask("/v1/completions", {"prompt": PROMPT})
        assert status == 503
        assert "division by zero" in content["error"]["message"]
        assert served.ask("/health")[0] == 503
        assert served.ask("/v1/completions", {"prompt": PROMPT})[0] == 503
    finally:
        served.close()


def test_half_a_request_at_the_end_leaves_no_trace(model: Path, caplog: pytest.LogCaptureFixture) -> None:
    served = Served(ServeConfig(model, port=0, drain_s=1))
    host, port = served.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as half:
        half.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\n{")
        assert served.ask("/health")[0] == 200
        logger = logging.getLogger("uvicorn.error")
        logger.addHandler(caplog.handler)
        try:
            served.close()
        finally:
            logger.removeHandler(caplog.handler)
    assert any("timeout" in record.getMessage() for record in caplog.records)
    assert not [record for record in caplog.records if record.exc_info]


def test_kept_answers_are_given_again_for_the_same_options_alone(model: Path) -> None:
    served = Served(ServeConfig(model, port=0, cache_size=2, cache_list_size=2))
    try:
        body = {"prompt": PROMPT, "max_tokens": 12}
        drawn = [served.ask("/v1/completions", body)[2]["choices"][0]["text"] for _ in range(6)]
        assert len(set(drawn[:2])) == 2
        assert set(drawn[2:]) <= set(drawn[:2])
        others = [{**body, "temperature": 0.9}, {**body, "stop": "x"}, {**body, "max_tokens": 11}]
        hits = served.service.cache.hits
        for other in [*others, {**body, "seed": 1}]:
            served.ask("/v1/completions", other)
        assert served.service.cache.hits == hits == 4
    finally:
        served.close()


SIGNALLED = """
import http.client, json, os, signal, sys, threading, time
from gemini.cli.main import main

model, port = sys.argv[1:]

def ask():
    while True:
        try:
            connection = http.client.HTTPConnection("127.0.0.1", int(port), timeout=60)
            connection.connect()
            break
        except ConnectionRefusedError:
            time.sleep(0.05)
    body = json.dumps({"prompt": "The", "max_tokens": 60, "temperature": 0, "stream": True})
    connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
    answer = connection.getresponse()
    answer.readline()
    os.kill(os.getpid(), signal.SIGTERM)
    print(answer.read().decode()[-14:].strip())

client = threading.Thread(target=ask, daemon=True)
client.start()
code = main(["serve", model, "--port", port, "--device-bytes", "4MiB", "--drain", "300"])
client.join()
sys.exit(code)
"""


def test_a_signal_lets_answers_end(model: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    done = run_python(["-c", SIGNALLED, str(model), str(port)], imports=["transformers", "fastapi"])
    assert (done.stdout.strip(), done.returncode) == ("data: [DONE]", 0), done.stderr
    assert f"tiny answers at http://127.0.0.1:{port}" in done.stderr


def test_a_configuration_of_the_documents_is_read_and_not_executed(tmp_path: Path) -> None:
    file = tmp_path / "opt_config.py"
    trap = tmp_path / "trap"
    file.write_text(
        "from energonai.model import opt_125M\n"
        f"open({str(trap)!r}, 'w')\n"
        "model_class = opt_125M\ncheckpoint = './opt'\ntp_init_size = 2\n"
        "executor_max_batch_size = 16\ncache_size = 50\ncache_list_size = 2\nfixed_cache_keys = [('a', 3)]\n"
    )
    found = read_config_file(file)
    assert found.options == {
        "model": Path("opt"),
        "tp": 2,
        "max_batch": 16,
        "cache_size": 50,
        "cache_list_size": 2,
    }
    assert found.ignored == ("fixed_cache_keys",)
    assert not trap.exists()
    for text, why in (
        ("tp_init_size = 'all'", "a number"),
        ("cache_size = 'a'", "a number"),
        ("x = (", "line 1"),
    ):
        file.write_text(text)
        with pytest.raises(ConfigError, match=why):
            read_config_file(file)


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_kept_answers_are_those_of_an_ordered_dict(data: st.DataObject) -> None:
    size, list_size = data.draw(st.integers(0, 3)), data.draw(st.integers(1, 3))
    cache: QueryCache[int] = QueryCache(size, list_size, draw=random.Random(0))
    model: OrderedDict[str, list[int]] = OrderedDict()
    for number in range(data.draw(st.integers(0, 30))):
        key = data.draw(st.sampled_from("abcde"))
        answers = model.get(key, [])
        got = cache.get(key)
        assert (got is not None) == (len(answers) == list_size)
        assert got is None or got in answers
        if key in model:
            model.move_to_end(key)
        if got is None and size:
            cache.add(key, number)
            model[key] = [*answers, number]
            model.move_to_end(key)
            while len(model) > size:
                model.popitem(last=False)


@settings(max_examples=200, deadline=None)
@given(
    st.text(alphabet="abc \u00e9\u4e2d\U0001f600", max_size=12),
    st.lists(st.text("abc ", min_size=1), max_size=2),
)
def test_pieces_of_text_are_the_whole_up_to_the_first_stop(text: str, stops: list[str]) -> None:
    tokenizer = _tokenizer()
    tokens = tokenizer(text + TEXT[:9])["input_ids"]
    whole = tokenizer.decode(tokens)
    found = [(whole.index(stop) + len(stop), whole.index(stop)) for stop in stops if stop in whole]
    stream = TextStream(tokenizer, stops)
    pieces = [stream.push(token) for token in tokens] + [stream.end()]
    assert "".join(pieces) == whole[: min(found, default=(0, len(whole)))[1]]
    assert "\ufffd" not in "".join(pieces)
    assert stream.is_stopped == bool(found)


def test_the_space_before_an_answer_is_part_of_it() -> None:
    """Decoders of sentencepiece's kind drop the space that a text begins with, and join bytes."""
    pieces = ["<unk>", "\u2581The", "\u2581capital", "\u2581is", "\u2581P", "<0xC3>", "<0xA9>"]
    backend = tokenizers.Tokenizer(
        tokenizers.models.BPE({piece: i for i, piece in enumerate(pieces)}, [], byte_fallback=True)
    )
    backend.decoder = tokenizers.decoders.Sequence(
        [
            tokenizers.decoders.Replace("\u2581", " "),
            tokenizers.decoders.ByteFallback(),
            tokenizers.decoders.Fuse(),
            tokenizers.decoders.Strip(" ", 1, 0),
        ]
    )
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=backend)
    for prompt, answer, text in (
        ((1, 2), (3, 4, 5, 6), " is P\u00e9"),
        ((1, 4, 5), (6, 3), "\u00e9 is"),
        ((), (1, 2), "The capital"),
    ):
        stream = TextStream(tokenizer, (), prompt)
        assert "".join([*map(stream.push, answer), stream.end()]) == text


_TOKENIZERS: list[Any] = []


def _tokenizer() -> Any:
    if not _TOKENIZERS:
        _TOKENIZERS.append(byte_level())
    return _TOKENIZERS[0]


def wait_for(condition: Any) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_request_is_checked_where_it_is_made() -> None:
    for options, why in (
        ({"top_k": -1}, "top_k is -1"),
        ({"timeout_s": 0.0}, "timeout_s"),
        ({"seed": -1}, "seed"),
    ):
        with pytest.raises(ConfigError, match=why):
            Request((1,), **options)
