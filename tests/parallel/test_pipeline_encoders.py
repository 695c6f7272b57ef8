"""Models of an encoder and a decoder in stages: they train as in one process, wherever they are cut."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from itertools import combinations, pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from pipeline_harness import ADAM, CHUNKS, MAX_NORM, Trained, train_alone
from processes import run_on_ranks
from torch import Tensor, nn

from gemini import ConfigError, CPUAdam
from gemini.parallel import Booster, HybridParallelPlugin
from gemini.parallel.pipeline.batches import cut_batch
from gemini.parallel.pipeline.engine import Engine
from gemini.parallel.pipeline.orders import Action, Kind, Order, make_order
from gemini.parallel.pipeline.split import split
from gemini.parallel.pipeline.units import find_units

pytest.importorskip("transformers", reason="models of transformers")

STEPS = 4
VOCABULARY = 64
TIGHT = {"device_bytes": "600KiB", "host_bytes": "16MiB"}
CUT_ENCODER, CUT_DECODER = ["encoder.block.1"], ["decoder.block.1"]


def build(name: str) -> nn.Module:
    """A small model, in fp32, without dropout, most with more layers in one half than in the other."""
    import transformers as t

    t.logging.set_verbosity_error()
    torch.manual_seed(8)
    if name.startswith("t5"):
        config = t.T5Config(
            vocab_size=VOCABULARY,
            d_model=32,
            d_kv=8,
            d_ff=64,
            num_layers=3,
            num_decoder_layers=2,
            num_heads=4,
            relative_attention_num_buckets=8,
            dropout_rate=0.0,
            tie_word_embeddings="untied" not in name,
            feed_forward_proj="gated-gelu" if "untied" in name else "relu",
            decoder_start_token_id=0,
        )
        return t.T5ForConditionalGeneration(config)
    sizes = {
        "vocab_size": VOCABULARY,
        "d_model": 32,
        "encoder_layers": 2,
        "decoder_layers": 3,
        "encoder_attention_heads": 4,
        "decoder_attention_heads": 4,
        "encoder_ffn_dim": 64,
        "decoder_ffn_dim": 64,
        "dropout": 0.0,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "decoder_start_token_id": 1,
    }
    if name == "bart":
        sizes["decoder_layers"] = 2
        return t.BartForConditionalGeneration(t.BartConfig(**sizes, max_position_embeddings=16))
    if name == "marian":
        return t.MarianMTModel(t.MarianConfig(**sizes, max_position_embeddings=16))
    config = t.WhisperConfig(**sizes, num_mel_bins=8, max_source_positions=6, max_target_positions=16)
    return t.WhisperForConditionalGeneration(config)


def batch_of(name: str, step: int) -> dict[str, Tensor]:
    """Tokens (sounds) and what they are to become; the last of them are padding in some sequences."""
    draw = torch.Generator().manual_seed(step)
    if name == "whisper":
        sounds = torch.randn(8, 8, 12, generator=draw)
        return {"input_features": sounds, "labels": torch.randint(3, VOCABULARY, (8, 5), generator=draw)}
    ids = torch.randint(1, VOCABULARY, (8, 6), generator=draw)
    labels = torch.randint(1, VOCABULARY, (8, 5), generator=draw)
    mask = torch.ones_like(ids)
    mask[::2, 4:] = 0
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def loss_of(output: Any, _batch: dict[str, Tensor]) -> Tensor:
    loss: Tensor = output.loss
    return loss


@cache
def whole(name: str) -> Trained:
    model = build(name)
    return train_alone(model, lambda step: model(**batch_of(name, step)).loss, STEPS)


def _train(name: str, style: str, options: dict[str, Any], path: str) -> tuple[list[float], list[float], int]:
    plugin = HybridParallelPlugin(
        pp_size=2, pp_style=style, num_microbatches=4, max_norm=MAX_NORM, **options, **CHUNKS, **TIGHT
    )
    booster, model = Booster(plugin=plugin), build(name)
    model, optimizer, *_ = booster.boost(model, CPUAdam(model.parameters(), **ADAM))
    losses, norms = [], []
    for step in range(STEPS):
        out = booster.execute_pipeline(iter([batch_of(name, step)]), model, loss_of, optimizer)
        optimizer.step()
        losses.append(float(out["loss"]))
        norms.append(optimizer.get_grad_norm())
    booster.save_model(model, path, shard=True)
    return losses, norms, model.stats()["device"]["peak_bytes"]


class Alone:
    """A model that one process trains, as an engine calls it."""

    def forward(self, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return call(*args, **kwargs)

    def run_backward(self, call: Callable[[float | None], Any]) -> Any:
        return call(None)

    def no_sync(self) -> AbstractContextManager[None]:
        return nullcontext()

    def passes_in_a_row(self) -> AbstractContextManager[None]:
        return nullcontext()

    def leave(self, why: str) -> None:
        raise AssertionError(why)


def on_one_rank(order: Order) -> Order:
    """The same order, with the actions of all ranks on one, which takes turns."""
    waiting, done = [list(actions) for actions in order.by_rank], []
    while any(waiting):
        for actions in waiting:
            while actions and is_ready(actions[0], done, order.num_stages):
                done.append(actions.pop(0))
    return Order(order.schedule, order.num_micro_batches, (0,) * order.num_stages, (tuple(done),))


def is_ready(action: Action, done: list[Action], num_stages: int) -> bool:
    forward = action.kind is Kind.FORWARD
    if action.kind is Kind.WEIGHT or action.stage == (0 if forward else num_stages - 1):
        return True
    source = action.stage + (-1 if forward else 1)
    kinds = [Kind.FORWARD] if forward else [Kind.BACKWARD, Kind.INPUT]
    return any(Action(kind, source, action.micro_batch) in done for kind in kinds)


@cache
def gradients(name: str) -> tuple[float, dict[str, Tensor | None]]:
    """The loss and the gradients of the model, whole, for two micro-batches."""
    model, loss = build(name), torch.zeros(())
    for part in cut_batch(batch_of(name, 0), 2):
        loss = loss + model(**part).loss / 2
    loss.backward()
    return loss.item(), {key: param.grad for key, param in model.named_parameters()}


@pytest.mark.parametrize("name", ["t5", "t5 untied", "bart", "marian", "whisper"])
@pytest.mark.parametrize(
    ("style", "chunks"), [("1f1b", 1), ("gpipe", 1), ("interleaved", 2), ("zero_bubble", 2), ("zbv", 2)]
)
def test_gradients_are_those_of_the_whole(name: str, style: str, chunks: int) -> None:
    wanted_loss, wanted = gradients(name)
    order = on_one_rank(make_order(style, 2, 2, chunks))
    num_blocks = len(find_units(build(name)).blocks)
    for ranges in cuts(num_blocks, order.num_stages):
        model = build(name)
        staged = split(model, find_units(model), ranges, range(order.num_stages))
        engine, batches = Engine(staged, Alone(), None, 0), cut_batch(batch_of(name, 0), 2)
        engine.learn(batches, lambda text: [text])
        done = engine.run(order, batches, loss_of, [0.5, 0.5])
        assert float(sum(done.losses)) / 2 == pytest.approx(wanted_loss, rel=1e-6)
        for key, param in model.named_parameters():
            assert (param.grad is None) == (wanted[key] is None), (ranges, key)
            if param.grad is not None:
                assert torch.allclose(param.grad, wanted[key], rtol=1e-4, atol=1e-7), (ranges, key)


def test_what_runs_before_blocks_follows_from_the_source_or_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    known = find_units(build("bart"))
    monkeypatch.setattr("gemini.parallel.pipeline.units._order_of_calls", lambda *_: {})
    norms = [f"model.{half}.layernorm_embedding" for half in ("encoder", "decoder")]
    assert find_units(build("bart")) != known == find_units(build("bart"), before=norms)
    with pytest.raises(ConfigError, match="before names 'model"):
        find_units(build("bart"), before=["model.encoder.layers.0"])


def test_an_encoder_alone_has_the_layers_that_it_has() -> None:
    import transformers as t

    sizes = {"d_model": 16, "encoder_layers": 2, "decoder_layers": 3, "num_mel_bins": 8, "vocab_size": 64}
    heads = {"encoder_attention_heads": 2, "decoder_attention_heads": 2, "pad_token_id": 0}
    config = t.WhisperConfig(**sizes, **heads, encoder_ffn_dim=32, decoder_ffn_dim=32)
    blocks = find_units(t.WhisperForAudioClassification(config)).blocks
    assert blocks == ("encoder.layers.0", "encoder.layers.1")
    t5 = t.T5Config(
        vocab_size=64, d_model=16, d_kv=8, d_ff=16, num_layers=2, num_decoder_layers=3, num_heads=2
    )
    assert find_units(t.T5EncoderModel(t5)).blocks == ("encoder.block.0", "encoder.block.1")


def test_layers_that_are_left_out_at_random_are_refused() -> None:
    model = build("marian")
    model.get_decoder().layerdrop = 0.05  # type: ignore[operator, union-attr]
    with pytest.raises(ConfigError, match=r"'model\.decoder' skips layers at random .*layerdrop"):
        split(model, find_units(model), [(0, 3), (3, 5)], range(2))


@pytest.mark.parametrize("ranges", [[(0, 1), (1, 4)], [(0, 2), (2, 4)], [(0, 3), (3, 4)]])
def test_what_runs_elsewhere_than_it_is_registered_is_refused(
    ranges: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gemini.parallel.pipeline.units._order_of_calls", lambda *_: {})
    model = build("bart")
    staged = split(model, find_units(model), ranges, range(2))
    engine, batches = Engine(staged, Alone(), None, 0), cut_batch(batch_of("bart", 0), 2)
    order = on_one_rank(make_order("1f1b", 2, 2, 1))

    def train() -> None:
        engine.learn(batches, lambda text: [text])
        engine.run(order, batches, loss_of, [0.5, 0.5])

    with pytest.raises(ConfigError, match=r"model\.(encoder|decoder)\.layer"):
        train()


def cuts(num_blocks: int, num_stages: int) -> list[tuple[tuple[int, int], ...]]:
    """Every way to cut the blocks into stages."""
    inner = combinations(range(1, num_blocks), num_stages - 1)
    return [tuple(pairwise([0, *each, num_blocks])) for each in inner]


@pytest.mark.parametrize(
    ("name", "style", "options"),
    [
        ("t5", "1f1b", {"split": CUT_DECODER}),
        ("t5", "zbv", {"split": "layers"}),
        ("marian", "dualpipev", {}),
        ("bart", "interleaved", {"num_model_chunks": 2}),
        ("t5 untied", "1f1b", {"tp_size": 2}),
        ("whisper", "1f1b", {"tp_size": 2}),
    ],
)
def test_encoders_and_decoders_train_in_stages(
    tmp_path: Path, name: str, style: str, options: dict[str, Any]
) -> None:
    path = str(tmp_path / "saved")
    wanted = whole(name)
    for got, got_norms, peak in run_on_ranks(
        _train, 2 * options.get("tp_size", 1), name, style, options, path
    ):
        assert got == pytest.approx(wanted.losses, rel=1e-5)
        assert got_norms == pytest.approx(wanted.norms, rel=1e-6)
        assert peak <= 600 * 1024
    read = type(build(name)).from_pretrained(path)
    for key, value in read.state_dict().items():
        assert torch.allclose(value, wanted.weights[key], atol=2e-5), key
