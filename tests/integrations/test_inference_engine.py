"""An engine answers as ``generate()`` does, whatever shares its passes, and keeps what it promises."""

from __future__ import annotations

import errno
import itertools
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_adapter_merge import adapt
from tiny_trained import SIZES, llama

from gemini.errors import ConfigError, GeminiError, IoError, OutOfBudgetError, StateError
from gemini.inference import Engine, Generation, QueueFullError, Request
from gemini.inference.batching import bucket
from gemini.inference.choice import Chooser
from gemini.inference.kv import KVMemory
from gemini.inference.packed_attention import Packed, attend, attending
from gemini.inference.passes import PackedModel

transformers = pytest.importorskip("transformers", reason="the extra 'hf' is not installed")

WINDOW = 5
SMALL = {**SIZES, "vocab_size": 128, "head_dim": 16, "eos_token_id": None, "bos_token_id": None}
SMALL["pad_token_id"] = 0
MIXTURE = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}
GPT2 = {
    "vocab_size": 128,
    "n_embd": 64,
    "n_layer": 2,
    "n_head": 4,
    "eos_token_id": None,
    "bos_token_id": None,
}
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "llama": SMALL,
    "gpt2": GPT2,
    "opt": {**SMALL, "ffn_dim": 96, "word_embed_proj_dim": 64},
    "gpt_neox": SMALL,
    "mistral": {**SMALL, "sliding_window": WINDOW},
    "gemma2": {**SMALL, "sliding_window": WINDOW, "query_pre_attn_scalar": 16},
    "qwen3_moe": {**SMALL, **MIXTURE, "num_experts": 4},
    "gpt_oss": {
        **SMALL,
        "num_experts_per_tok": 2,
        "num_local_experts": 4,
        "sliding_window": WINDOW,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    },
}
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "mamba": ({"vocab_size": 128, "hidden_size": 64, "num_hidden_layers": 2}, "a state outside attention"),
    "qwen2": (
        {**SMALL, "rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}},
        "encoded as dynamic, by the longest text;",
    ),
    "bloom": ({"vocab_size": 128, "hidden_size": 64, "n_layer": 2, "n_head": 4}, "no exchangeable attention"),
    "t5": ({"vocab_size": 128, "d_model": 64, "num_layers": 2}, "an encoder"),
}
PROMPTS = [tuple((5 * i + 3 * j) % 120 + 2 for j in range(length)) for i, length in enumerate((7, 1, 12, 3))]


def model_of(kind: str, sizes: dict[str, Any]) -> Any:
    """Return a model whose likeliest tokens are far from the others."""
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(kind, **sizes)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for param in model.parameters():
            if param.dim() > 1:
                param.mul_(3)
    return model


def generated(model: Any, prompt: tuple[int, ...], count: int) -> tuple[int, ...]:
    ids = torch.tensor([prompt])
    made = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, do_sample=False, pad_token_id=0
    )
    return tuple(made[0, len(prompt) :].tolist())


@pytest.fixture(scope="module")
def plain() -> Any:
    return model_of("llama", SMALL)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return llama(tmp_path_factory.mktemp("engine") / "model", vocab_size=300, dtype=torch.float32)


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with Engine(model_of("llama", SMALL), kv_bytes=2**18, max_batch=3, max_pass_tokens=8) as open_engine:
        yield open_engine


@pytest.mark.parametrize("kind", ARCHITECTURES)
def test_answers_are_those_of_generate(kind: str) -> None:
    model = model_of(kind, ARCHITECTURES[kind])
    want = [generated(model, prompt, 12) for prompt in PROMPTS]
    with Engine(model, kv_bytes=2**18, max_batch=3, max_pass_tokens=8) as engine:
        answers = [engine.submit(Request(prompt, max_tokens=12)) for prompt in PROMPTS]
        assert [answer.result(30).tokens for answer in answers] == want
    assert generated(model, PROMPTS[0], 12) == want[0], "the model is as before"


@pytest.mark.parametrize("kind", REFUSED)
def test_other_models_are_refused_by_name(kind: str) -> None:
    sizes, why = REFUSED[kind]
    config = transformers.AutoConfig.for_model(kind, **sizes)
    auto = transformers.AutoModelForSeq2SeqLM if kind == "t5" else transformers.AutoModelForCausalLM
    with pytest.raises(ConfigError, match=why):
        Engine(auto.from_config(config))


@pytest.mark.parametrize(
    ("kind", "sizes", "why"),
    [
        ("nemotron", SMALL, "0 of its 2 layers"),
        ("bert", SMALL, "attends to later tokens"),
        ("doge", SMALL, "its own mask"),
        ("diffllama", {**SMALL, "num_key_value_heads": 2}, "attends more than once"),
        ("phimoe", {**SMALL, "sliding_window": WINDOW, "num_local_experts": 2}, "a sliding window"),
    ],
)
def test_an_attention_of_its_own_is_found_in_the_first_pass(
    kind: str, sizes: dict[str, Any], why: str
) -> None:
    with Engine(model_of(kind, sizes), kv_bytes=2**16) as engine, pytest.raises(ConfigError, match=why):
        engine.submit(Request((1, 2))).result(30)


def test_what_an_attention_is_asked_for_is_never_left_out(plain: Any) -> None:
    query = torch.ones(1, 1, 1, 4)
    layer = plain.model.layers[0].self_attn
    with pytest.raises(ConfigError, match="attends with position_bias"):
        attend(layer, query, query, query, None, packed=Packed([]), position_bias=query)


def test_a_wrapper_is_refused_with_what_to_give_instead() -> None:
    with pytest.raises(ConfigError, match="no configuration"):
        Engine(torch.nn.Linear(1, 1))
    with pytest.raises(ConfigError, match=r"model\.module of GeminiDDP"):
        Engine(_Wrapper(model_of("llama", SMALL)))


class _Wrapper(torch.nn.Module):
    _supports_attention_backend = True

    def __init__(self, inner: Any) -> None:
        super().__init__()
        self.inner, self.config = inner, inner.config

    def forward(self, *arguments: Any, **options: Any) -> Any:
        return self.inner(*arguments, **options)


def test_a_model_serves_one_engine_and_comes_back_as_it_was() -> None:
    model = model_of("llama", SMALL).train()
    model.lm_head.eval()
    engine = Engine(model, kv_bytes=2**16)
    with pytest.raises(StateError, match="another engine serves"):
        Engine(model, kv_bytes=2**16)
    engine.submit(Request((1, 2), max_tokens=2)).result(30)
    closers = [threading.Thread(target=engine.close) for _ in range(4)]
    for closer in closers:
        closer.start()
    for closer in closers:
        closer.join(30)
    assert (model.training, model.model.training, model.lm_head.training) == (True, True, False)
    model(input_ids=torch.tensor([[1, 2]]), labels=torch.tensor([[1, 2]])).loss.backward()


def test_a_notify_that_raises_fails_its_own_answer_alone(engine: Engine) -> None:
    def at_once() -> None:
        raise KeyError("mine")

    def closes() -> None:
        engine.close()

    other = engine.submit(Request(PROMPTS[0], max_tokens=12))
    with pytest.raises(RuntimeError, match="KeyError"):
        engine.submit(Request(PROMPTS[1], max_tokens=4), at_once).result(30)
    with pytest.raises(StateError, match="would wait for itself"):
        engine.submit(Request(PROMPTS[1], max_tokens=4), closes).result(30)
    assert len(other.result(30).tokens) == 12
    assert engine.is_alive


def test_scores_that_are_no_numbers_are_no_answer() -> None:
    for temperature in (0.0, 1.0):
        chooser = Chooser(Request((1,), temperature=temperature, seed=0))
        with pytest.raises(GeminiError, match="not a number"):
            chooser.choose(torch.tensor([0.0, float("nan"), 1.0]))


@pytest.mark.parametrize("temperature", [5e-324, 1e-40, 1e-8])
def test_a_tiny_temperature_draws_the_likeliest_token(temperature: float) -> None:
    chooser = Chooser(Request((1,), temperature=temperature, top_k=2, top_p=0.9, seed=0))
    assert chooser.choose(torch.tensor([3.0, 700.0, -2.0])) == 1


def test_a_prompt_alone_has_the_bits_of_a_plain_pass(plain: Any) -> None:
    with torch.no_grad():
        want = plain(input_ids=torch.tensor([PROMPTS[2]]), logits_to_keep=1).logits[0, -1]
    memory = KVMemory(2**16)
    with attending(plain):
        sequence = memory.reserve(16)
        assert sequence is not None
        (got,) = PackedModel(plain).logits([(sequence, PROMPTS[2])], [True])
    assert torch.equal(got, want)


@pytest.mark.parametrize(
    ("device_bytes", "max_batch", "max_pass_tokens"),
    [(140 * 2**10, 1, 512), (140 * 2**10, 4, 5), (2**18, 2, 1), (2**22, 4, 512)],
)
def test_budgets_and_batches_change_no_answer(
    saved: Path, device_bytes: int, max_batch: int, max_pass_tokens: int
) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(saved)
    kv_bytes = 30 * 2**10
    with Engine.from_pretrained(
        saved,
        device_bytes=device_bytes,
        kv_bytes=kv_bytes,
        max_batch=max_batch,
        max_pass_tokens=max_pass_tokens,
    ) as engine:
        answers = [engine.submit(Request(prompt, max_tokens=8)) for prompt in PROMPTS]
        got = [answer.result(60).tokens for answer in answers]
        stats = engine.stats()
    assert got == [generated(model, prompt, 8)[: len(one)] for prompt, one in zip(PROMPTS, got, strict=True)]
    assert stats["kv"]["used_bytes"] == 0
    assert stats["kv"]["peak_bytes"] + stats["runtime"]["device"]["peak_bytes"] <= device_bytes


def test_draws_do_not_depend_on_neighbours(engine: Engine) -> None:
    request = Request(PROMPTS[0], max_tokens=10, temperature=0.9, top_k=50, top_p=0.95, seed=7)
    alone = engine.submit(request).result(30)
    others = [engine.submit(Request(prompt, max_tokens=9, temperature=1.5)) for prompt in PROMPTS[1:3]]
    assert engine.submit(request).result(30) == alone
    assert engine.submit(Request(PROMPTS[0], max_tokens=10, temperature=0.9, seed=8)).result(30) != alone
    for other in others:
        other.result(30)


def test_stop_tokens_end_an_answer_and_do_not_belong_to_it(engine: Engine) -> None:
    whole = engine.submit(Request(PROMPTS[0], max_tokens=12)).result(30)
    assert whole.finish_reason == "length"
    stop = whole.tokens[5]
    part = engine.submit(Request(PROMPTS[0], max_tokens=12, stop_tokens=frozenset({stop}))).result(30)
    assert (part.tokens, part.finish_reason) == (whole.tokens[: whole.tokens.index(stop)], "stop")


def test_tokens_come_one_by_one(engine: Engine) -> None:
    calls: list[int] = []
    answer = engine.submit(Request(PROMPTS[0], max_tokens=6), notify=lambda: calls.append(1))
    assert tuple(answer) == answer.result(30).tokens
    deadline = time.monotonic() + 10
    while len(calls) < 7 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert len(calls) == 7, "each token, and the end"


def test_a_request_that_takes_too_long_keeps_what_it_has(plain: Any) -> None:
    with Engine(plain, kv_bytes=2**18) as engine:
        slow = engine.submit(Request(PROMPTS[0], max_tokens=100, timeout_s=1e-6)).result(30)
    assert (slow.finish_reason, len(slow.tokens) < 100) == ("timeout", True)


def test_what_cannot_be_is_refused_before_it_waits(engine: Engine) -> None:
    engine.submit(Request((1,), max_tokens=1)).result(30)
    with pytest.raises(ConfigError, match="token 128 is not one of the model's 128"):
        engine.submit(Request((128,)))
    with pytest.raises(ConfigError, match="the model takes 128"):
        engine.submit(Request(PROMPTS[0], max_tokens=122))
    with pytest.raises(ConfigError, match="no tokens"):
        Request(())


def test_memory_that_one_sequence_never_fits_is_refused_with_its_number(plain: Any) -> None:
    with Engine(plain, kv_bytes=8 * 2**10) as engine:
        first = engine.submit(Request((1,) * 60, max_tokens=60))
        with pytest.raises(OutOfBudgetError, match=r"values of 120 tokens take over .*, and kv_bytes"):
            first.result(30)
        assert len(engine.submit(Request((1, 2), max_tokens=4)).result(30).tokens) == 4
        with pytest.raises(OutOfBudgetError, match=r"take 60\.0 KiB, and kv_bytes is 8\.0 KiB"):
            engine.submit(Request((1,) * 60, max_tokens=60))


def test_a_full_queue_refuses_and_a_closed_engine_too(plain: Any) -> None:
    engine = Engine(plain, kv_bytes=2**18, max_batch=1, queue_size=1)
    held, go = threading.Event(), threading.Event()

    def hold() -> None:
        held.set()
        go.wait(30)

    running = engine.submit(Request(PROMPTS[0], max_tokens=2), notify=hold)
    held.wait(30)
    waiting = engine.submit(Request(PROMPTS[1], max_tokens=2))
    with pytest.raises(QueueFullError, match="1 requests are waiting"):
        engine.submit(Request(PROMPTS[1]))
    with pytest.raises(StateError, match="submit requests to the engine"):
        plain(input_ids=torch.tensor([[1]]))
    go.set()
    engine.close()
    assert [len(one.result(0).tokens) for one in (running, waiting)] == [2, 2], "what was taken is answered"
    with pytest.raises(StateError, match="closed"):
        engine.submit(Request(PROMPTS[1]))


def test_a_failed_read_fails_the_requests_of_its_pass_alone(
    saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Engine.from_pretrained(saved, device_bytes=2**20, kv_bytes=2**16) as engine:
        want = engine.submit(Request(PROMPTS[0], max_tokens=6)).result(30)
        packed = engine._packed
        real = packed.model.forward
        broken = IoError(errno.EIO, "Input/output error", "weights")
        failures = iter([broken, IndexError("of a model's own code")])

        def failing(*arguments: Any, **options: Any) -> Any:
            for failure in failures:
                raise failure
            return real(*arguments, **options)

        monkeypatch.setattr(packed.model, "forward", failing)
        failed = engine.submit(Request(PROMPTS[1], max_tokens=6))
        with pytest.raises(IoError, match="weights"):
            failed.result(30)
        assert failed.finish_reason == "error"
        with pytest.raises(RuntimeError, match="IndexError"):
            engine.submit(Request(PROMPTS[1], max_tokens=6)).result(30)
        assert engine.submit(Request(PROMPTS[0], max_tokens=6)).result(30) == want
        assert engine.stats()["kv"]["used_bytes"] == 0


REQUESTS = st.builds(
    Request,
    tokens=st.sampled_from(PROMPTS),
    max_tokens=st.integers(1, 8),
    temperature=st.sampled_from([0.0, 1.0]),
    timeout_s=st.sampled_from([None, 1e-6, 60.0]),
)


@settings(max_examples=20, deadline=None)
@given(st.lists(st.tuples(REQUESTS, st.none() | st.integers(0, 5)), min_size=1, max_size=6))
def test_each_request_ends_once_and_leaves_nothing(
    engine: Engine, plan: list[tuple[Request, int | None]]
) -> None:
    ends: list[int] = []
    answers: list[Generation] = []
    before = engine.stats()["requests"]
    for request, cancelled in plan:
        answers.append(engine.submit(request))
        if cancelled is not None:
            answers[cancelled % len(answers)].cancel()
    for answer in answers:
        result = answer.result(60)
        ends.append(1)
        assert len(result.tokens) <= answer.request.max_tokens
        assert (len(result.tokens) == answer.request.max_tokens) == (result.finish_reason == "length")
    stats = engine.stats()
    ended = {name: count - before.get(name, 0) for name, count in stats["requests"].items()}
    assert ended.pop("submitted") == len(answers) == sum(ended.values()) == len(ends)
    assert (stats["waiting"], stats["running"], stats["kv"]["used_bytes"]) == (0, 0, 0)


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 4), st.sampled_from([0.5, 1.0]), st.sampled_from([0, 5])), max_size=8),
    st.integers(0, 2),
    st.integers(1, 4),
)
def test_buckets_are_those_of_the_documents(
    options: list[tuple[int, float, int]], running: int, max_batch: int
) -> None:
    waiting = [Request((1,), max_tokens=n, temperature=t, top_k=k) for n, t, k in options]
    batch: list[Request] = []
    if running == 0:
        for request in waiting:
            head = waiting[0]
            same = (request.top_k, request.top_p, request.temperature) == (
                head.top_k,
                head.top_p,
                head.temperature,
            )
            if len(batch) == max_batch or not same or request.max_tokens > head.max_tokens:
                break
            batch.append(request)
    assert bucket(waiting, running, max_batch) == len(batch)


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_pieces_of_memory_never_overlap(data: st.DataObject) -> None:
    memory = KVMemory(4096)
    ones = torch.ones(1, 1, 1, 4)
    first = memory.reserve(8)
    assert first is not None
    assert memory.reserve(1) is None, "what a token takes is not known"
    first.append(0, ones, ones)
    first.advance(1)
    held = [first]
    for _ in range(data.draw(st.integers(1, 20))):
        if held and data.draw(st.booleans()):
            held.pop(data.draw(st.integers(0, len(held) - 1))).close()
            continue
        sequence = memory.reserve(data.draw(st.integers(1, 40)))
        if sequence is not None:
            held.append(sequence)
        ends = sorted((one.first, one.end) for one in held)
        assert all(end <= first for (_, end), (first, _) in itertools.pairwise(ends))
        assert memory.used_bytes == sum(end - first for first, end in ends) <= 4096
    for sequence in held:
        sequence.close()
    assert memory.used_bytes == 0
    assert memory.reserve(128) is not None, "all of it is one piece again"


def test_adapters_answer_as_with_generate(saved: Path, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft", reason="the extra 'hf' is not installed")
    adapted = adapt(saved, tmp_path / "adapter", r=8, lora_alpha=64)
    plain = transformers.AutoModelForCausalLM.from_pretrained(saved)
    alone = generated(plain, PROMPTS[0], 8)
    model = peft.PeftModel.from_pretrained(plain, adapted).eval()
    want = generated(model, PROMPTS[0], 8)
    with Engine(model, kv_bytes=2**16) as engine:
        assert engine.submit(Request(PROMPTS[0], max_tokens=8)).result(30).tokens == want != alone
    with Engine.from_pretrained(saved, device_bytes=2**18, kv_bytes=2**16, adapter=adapted) as engine:
        assert engine.submit(Request(PROMPTS[0], max_tokens=8)).result(30).tokens == want
    learned = peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4)
    with pytest.raises(ConfigError, match="PEFT's learned prompts"):
        Engine(peft.get_peft_model(transformers.AutoModelForCausalLM.from_pretrained(saved), learned))
