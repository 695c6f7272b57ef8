"""Keys and values that lie below DEVICE: answers, logits and weights are those without."""

from __future__ import annotations

import copy
import errno
import gc
import pickle
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_trained import llama

import gemini
from gemini.chunk.chunk import ChunkKind
from gemini.errors import ConfigError, IoError, OutOfBudgetError, StateError
from gemini.inference import Engine, Request
from gemini.inference.kv import TokenShape
from gemini.model.handle import handle_around

transformers = pytest.importorskip("transformers", reason="the extra 'hf' is not installed")
from gemini.inference.kv_cache import KVCache  # noqa: E402

LONG = {"max_position_embeddings": 512, "vocab_size": 300, "num_hidden_layers": 3, "eos_token_id": None}
REQUESTS = [
    Request(
        tuple((7 * i + j * j) % 290 + 2 for j in range(5 + 40 * i)),
        max_tokens=30 + 5 * i,
        temperature=0.9 * (i % 2),
        seed=i,
    )
    for i in range(4)
]
KV_BYTES = 512 * 2**10


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return llama(tmp_path_factory.mktemp("kv") / "model", dtype=torch.float32, **LONG)


@pytest.fixture(scope="module")
def windowed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("kv") / "windowed"
    torch.manual_seed(0)
    config = transformers.Gemma2Config(
        hidden_size=64,
        intermediate_size=96,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        sliding_window=20,
        initializer_range=0.2,
        pad_token_id=0,
        bos_token_id=None,
        **LONG,
    )
    transformers.Gemma2ForCausalLM(config).save_pretrained(directory)
    return directory


def answers(engine: Engine) -> list[tuple[int, ...]]:
    return [one.result(60).tokens for one in [engine.submit(request) for request in REQUESTS]]


@pytest.fixture(scope="module")
def resident_answers(saved: Path, windowed: Path) -> dict[Path, list[tuple[int, ...]]]:
    found = {}
    for directory in (saved, windowed):
        model = transformers.AutoModelForCausalLM.from_pretrained(directory)
        with Engine(model, kv_bytes=2**22, max_pass_tokens=50) as engine:
            found[directory] = answers(engine)
    return found


@pytest.mark.parametrize("kind", ["saved", "windowed"])
@pytest.mark.parametrize(
    ("device_bytes", "kv_device_bytes", "host_bytes"),
    [
        (256 * 2**10, 0, None),
        (320 * 2**10, 64 * 2**10, None),
        (256 * 2**10, 32 * 2**10, 2**20),
        (2**23, 2**10, None),
    ],
)
def test_answers_are_those_of_keys_and_values_in_memory(
    kind: str,
    device_bytes: int,
    kv_device_bytes: int,
    host_bytes: int | None,
    request: pytest.FixtureRequest,
    resident_answers: dict[Path, list[tuple[int, ...]]],
    tmp_path: Path,
) -> None:
    directory = request.getfixturevalue(kind)
    with Engine.from_pretrained(
        directory,
        device_bytes=device_bytes,
        kv_bytes=KV_BYTES,
        kv_device_bytes=kv_device_bytes,
        host_bytes=host_bytes,
        disk_dir=None if host_bytes else str(tmp_path),
        max_pass_tokens=50,
    ) as engine:
        handle = gemini.handle_of(engine.model)
        assert answers(engine) == resident_answers[directory]
        stats = engine.stats()
        blocks = [chunk for chunk in handle.manager.chunks.chunks if chunk.spec.kind is ChunkKind.KV]
        table = handle.manager.chunks.table
        handle.manager.chunks.drain()
        assert len(blocks) > 3
        assert not any(table.held_tiers(block.id) for block in blocks), "ended requests leave nothing"
    assert stats["runtime"]["device"]["peak_bytes"] <= device_bytes
    assert stats["kv"]["used_bytes"] == 0
    assert 0 < stats["kv"]["peak_bytes"] <= KV_BYTES
    if device_bytes < 2**20 and host_bytes is None:
        assert stats["runtime"]["disk_write"]["bytes"] > 0, "some had no room on DEVICE"


def test_what_a_window_has_passed_takes_no_memory(windowed: Path, tmp_path: Path) -> None:
    model = gemini.from_pretrained(
        windowed, "AutoModelForCausalLM", trains=False, device_bytes=2**20, disk_dir=str(tmp_path)
    )
    handle = gemini.handle_of(model)
    with KVCache(model, kv_bytes=2**18) as cache:
        model.generate(torch.arange(8)[None], cache=cache, max_new_tokens=150)
        held = [
            sum(map(bool, map(handle.manager.chunks.table.held_tiers, ids)))
            for ids in ([part.id for part in layer.array.chunks] for layer in cache.layers)
        ]
    handle.close()
    sliding, full = held[0], held[1]  # of 20 tokens, and of 157
    assert sliding <= 3
    assert full >= 9


@pytest.fixture(params=["manage", "GeminiDDP", "trains=False"])
def managed(request: pytest.FixtureRequest, saved: Path, tmp_path: Path) -> Iterator[Any]:
    options: dict[str, Any] = {"device_bytes": 300 * 2**10, "disk_dir": str(tmp_path)}
    if request.param == "trains=False":
        model = gemini.from_pretrained(saved, "AutoModelForCausalLM", trains=False, **options)
        handle = gemini.handle_of(model)
    else:
        model = transformers.AutoModelForCausalLM.from_pretrained(saved).requires_grad_(False)
        if request.param == "manage":
            handle = gemini.manage(model, **options)
        else:
            wrapped = gemini.GeminiDDP(model, **options)
            model, handle = wrapped.module, gemini.handle_of(wrapped)
    yield model.eval()
    handle.close()


def test_logits_have_the_bits_of_transformers_own_cache(managed: Any) -> None:
    ids = torch.arange(3 * 40).view(3, 40) % 290 + 2

    def generated(**options: Any) -> Any:
        return managed.generate(
            ids,
            attention_mask=torch.ones_like(ids).index_fill_(1, torch.tensor([0]), 0),
            max_new_tokens=20,
            do_sample=False,
            pad_token_id=0,
            output_logits=True,
            return_dict_in_generate=True,
            **options,
        )

    want = generated()
    handle = handle_around(managed)
    for kv_device_bytes in (0, "20KiB"):
        with KVCache(managed, kv_bytes="1MiB", kv_device_bytes=kv_device_bytes) as cache:
            got = generated(cache=cache)
            assert cache.get_seq_length() == 59
        assert torch.equal(got.sequences, want.sequences)
        assert all(map(torch.equal, got.logits, want.logits))
    assert handle.stats()["device"]["peak_bytes"] <= 300 * 2**10
    assert handle.manager.context.other_device_bytes == 0, "plans have all of DEVICE again"


def test_a_chat_goes_on_with_the_cache_that_it_has(managed: Any) -> None:
    own = transformers.DynamicCache(config=managed.config)
    ids, other = torch.arange(30)[None] + 5, torch.arange(30)[None] + 5
    with KVCache(managed, kv_bytes="1MiB") as cache, torch.no_grad():
        for turn in range(3):
            ids = managed.generate(ids, cache=own, max_new_tokens=8, do_sample=False)
            other = managed.generate(other, cache=cache, max_new_tokens=8, do_sample=False)
            assert torch.equal(ids, other)
            ids = torch.cat([ids, ids[:, turn : turn + 4]], dim=1)
            other = ids.clone()
        cache.crop(-3)
        own.crop(-3)
        passes = [managed(ids[:, -7:], cache=each).logits for each in (own, cache)]
    assert torch.equal(*passes)


def test_changes_of_the_batch_are_refused_by_name(managed: Any) -> None:
    ids = torch.arange(6)[None]
    with KVCache(managed, kv_bytes="1MiB") as cache:
        with pytest.raises(ConfigError, match="beams"):
            managed.generate(ids, cache=cache, num_beams=2, max_new_tokens=4)
        cache.reset()
        managed.generate(ids.expand(3, -1), cache=cache, max_new_tokens=4)
        with pytest.raises(ConfigError, match="another batch"), torch.no_grad():
            managed(ids, cache=cache)
        with pytest.raises(ConfigError, match="already has memory for keys and values"):
            KVCache(managed, kv_bytes="1MiB")
    cache.close()
    with pytest.raises(StateError, match="closed"):
        managed.generate(ids, cache=cache, max_new_tokens=4)


def test_a_cache_that_was_forgotten_stands_in_no_way(managed: Any) -> None:
    handle = handle_around(managed)
    ids = torch.arange(40)[None]
    for _ in range(3):
        cache = KVCache(managed, kv_bytes="256KiB", kv_device_bytes="32KiB")
        managed.generate(ids, cache=cache, max_new_tokens=4)
        del cache
    with KVCache(managed, kv_bytes="256KiB") as cache:
        managed.generate(ids, cache=cache, max_new_tokens=4)
    handle.manager.chunks.drain()
    assert handle.manager.context.other_device_bytes == 0
    blocks = [chunk for chunk in handle.manager.chunks.chunks if chunk.spec.kind is ChunkKind.KV]
    assert not any(handle.manager.chunks.table.held_tiers(block.id) for block in blocks)
    assert len(blocks) <= 3 * 64, "the arrays of the first were taken again"


def test_a_model_with_a_cache_goes_with_its_last_reference(saved: Path, tmp_path: Path) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(saved)
    handle = gemini.manage(model, device_bytes=300 * 2**10, disk_dir=str(tmp_path))
    with KVCache(model, kv_bytes="64KiB") as cache:
        model.generate(torch.arange(4)[None], cache=cache, max_new_tokens=2)
    manager = weakref.ref(handle.manager)
    handle.close()
    del model, handle, cache
    gc.collect()
    assert manager() is None


def test_a_text_longer_than_the_bytes_are_for_is_refused_with_both(managed: Any) -> None:
    with KVCache(managed, kv_bytes="64KiB") as cache, pytest.raises(OutOfBudgetError, match=r"64\.0 KiB"):
        managed.generate(torch.arange(120)[None], cache=cache, max_new_tokens=4)


def test_tiers_that_cannot_have_them_are_named(saved: Path) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(saved)
    with pytest.raises(ConfigError, match="is not managed"):
        Engine(model, kv_bytes=2**20, kv_device_bytes=2**10)
    with pytest.raises(ConfigError, match="raise host_bytes to that, or give disk_dir"):
        Engine.from_pretrained(saved, device_bytes=2**20, kv_bytes=2**20, kv_device_bytes=2**10)
    with pytest.raises(ConfigError, match="nothing is left for weights"):
        Engine.from_pretrained(saved, device_bytes=2**20, kv_bytes=2**22, kv_device_bytes=2**20)
    with pytest.raises(OutOfBudgetError, match="device_bytes"):
        Engine.from_pretrained(
            saved, device_bytes=2**18, kv_bytes=2**22, kv_device_bytes=250 * 2**10, host_bytes=2**22
        )


def test_one_layer_of_a_text_has_to_fit_on_device(saved: Path, tmp_path: Path) -> None:
    with Engine.from_pretrained(
        saved, device_bytes=160 * 2**10, kv_bytes=2**21, kv_device_bytes=0, disk_dir=str(tmp_path)
    ) as engine:
        assert len(engine.submit(Request((1, 2), max_tokens=3)).result(60).tokens) == 3
        with pytest.raises(OutOfBudgetError, match="in one layer, which attention needs on DEVICE at once"):
            engine.submit(Request((1,) * 500, max_tokens=12))


def test_a_failed_read_of_keys_fails_the_requests_of_its_pass_alone(
    saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Engine.from_pretrained(
        saved, device_bytes=256 * 2**10, kv_bytes=KV_BYTES, kv_device_bytes=0, disk_dir=str(tmp_path)
    ) as engine:
        want = engine.submit(REQUESTS[1]).result(60)
        room = engine._kv.room  # type: ignore[attr-defined]
        real, calls = room.fetch, []

        def failing(tensors: list[int]) -> None:
            calls.append(1)
            if len(calls) == 20:
                raise IoError(errno.EIO, "Input/output error", "keys")
            real(tensors)

        monkeypatch.setattr(room, "fetch", failing)
        with pytest.raises(IoError):
            engine.submit(REQUESTS[1]).result(60)
        assert engine.submit(REQUESTS[1]).result(60) == want
        assert engine.stats()["kv"]["used_bytes"] == 0


def test_memory_that_could_not_be_had_is_asked_for_again(
    saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Engine.from_pretrained(
        saved, device_bytes=256 * 2**10, kv_bytes=KV_BYTES, kv_device_bytes=0, disk_dir=str(tmp_path)
    ) as engine:
        room = engine._kv.room  # type: ignore[attr-defined]
        real, calls = room.array, []

        def failing(nbytes: int, chunk_bytes: int) -> Any:
            calls.append(1)
            if len(calls) == 2:
                raise IoError(errno.ENOSPC, "No space left on device", "keys")
            return real(nbytes, chunk_bytes)

        monkeypatch.setattr(room, "array", failing)
        with pytest.raises(IoError):
            engine.submit(REQUESTS[1]).result(60)
        assert len(engine.submit(REQUESTS[1]).result(60).tokens) == REQUESTS[1].max_tokens
        with pytest.raises(ConfigError, match="they have to be of one type"):
            TokenShape.of(torch.ones(1, 1, 1, 4).bfloat16(), torch.ones(1, 1, 1, 4))


def test_tensors_that_somebody_keeps_stay_as_they_are(managed: Any) -> None:
    handle = handle_around(managed)
    state = torch.randn(1, 2, 40, 16)
    cache = KVCache(managed, kv_bytes="256KiB")
    kept = cache.update(state, 2 * state, 0)
    cache.close()
    with KVCache(managed, kv_bytes="256KiB") as other:
        other.update(3 * state, 4 * state, 0)
        assert torch.equal(kept[0], state)
        assert torch.equal(kept[1], 2 * state)
    del kept
    with KVCache(managed, kv_bytes="256KiB"):
        pass
    handle.manager.chunks.drain()
    blocks = [chunk for chunk in handle.manager.chunks.chunks if chunk.spec.kind is ChunkKind.KV]
    assert not any(handle.manager.chunks.table.held_tiers(block.id) for block in blocks)


def test_caches_of_many_sizes_share_their_memory(managed: Any) -> None:
    handle = handle_around(managed)
    counts = []
    for kib in (512, 480, 300, 500, 411, 390):
        with KVCache(managed, kv_bytes=kib * 2**10) as cache:
            managed.generate(torch.arange(9)[None], cache=cache, max_new_tokens=2)
        counts.append(len(handle.manager.chunks.chunks))
    assert len(set(counts)) <= 2


def test_what_cannot_be_is_refused_by_name(managed: Any) -> None:
    for nbytes in (0, 1, None):
        with pytest.raises(ConfigError, match="kv_bytes is"):
            KVCache(managed, kv_bytes=nbytes)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="lower kv_device_bytes"):
        KVCache(managed, kv_bytes="1MiB", kv_device_bytes="300KiB")
    with KVCache(managed, kv_bytes="64KiB") as cache:
        for duplicate in (copy.deepcopy, pickle.dumps):
            with pytest.raises(ConfigError, match="make a new cache"):
                duplicate(cache)


def test_answers_between_steps_move_no_number_of_training(saved: Path, tmp_path: Path) -> None:
    plain = transformers.AutoModelForCausalLM.from_pretrained(saved)
    managed = copy.deepcopy(plain)
    handle = gemini.manage(managed, device_bytes=2**20, disk_dir=str(tmp_path))
    rules = [torch.optim.AdamW(model.parameters(), 1e-3) for model in (plain, managed)]
    ids = torch.arange(24).view(2, 12) + 3
    for step in range(4):
        for model, rule in zip((plain, managed), rules, strict=True):
            model(input_ids=ids, labels=ids).loss.backward()
            rule.step()
            rule.zero_grad()
        if step in (1, 2):
            texts = []
            with KVCache(managed, kv_bytes="1MiB") as cache:
                texts.append(managed.generate(ids, cache=cache, max_new_tokens=6, do_sample=False))
            texts.append(plain.generate(ids, max_new_tokens=6, do_sample=False))
            assert torch.equal(*texts)
    weights = handle.state_dict()
    assert all(torch.equal(weights[name], value) for name, value in plain.state_dict().items())
    with (
        KVCache(managed, kv_bytes="1MiB") as cache,
        pytest.raises(ConfigError, match="passes without gradients"),
    ):
        managed(input_ids=ids, cache=cache)
    handle.close()
