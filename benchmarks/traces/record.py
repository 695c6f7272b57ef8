"""Record the traces of this directory: ``python benchmarks/traces/record.py [NAME ...]``.

Real steps of the runtime on the CPU with a DISK tier and less DEVICE than model data: a warmup, and a step in
which its order is timed. The traces say in which order the program uses which chunks, so the batch is small.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from models import Decoder, EncoderDecoder, Mixer, Shape, VisionTransformer, wide_resnet50
from torch import Tensor, nn

import gemini
from gemini.jobs.gpt.model import GPT, GPTConfig
from gemini.memstats import Trace

HERE = Path(__file__).parent
_STEPS = 2  # the warmup, and the one in which its order is timed
_DEVICE_SHARE = 0.4
_BATCH, _SEQ, _PIXELS = 2, 64, 128
_CLASSES = 1000

GPT2 = GPTConfig(vocab=50257, layers=12, hidden=768, heads=12, seq=1024)
GPT2_CHECKPOINTED = GPTConfig(**{**vars(GPT2), "checkpoint_activations": True})
DEEP_GPT = GPTConfig(vocab=16384, layers=36, hidden=512, heads=8, seq=512)
LLAMA = Shape(vocab=32000, hidden=1024, heads=16, inner=2816, layers=22)
T5 = Shape(vocab=32128, hidden=768, heads=12, inner=3072, layers=10)
MOE = Shape(vocab=16384, hidden=512, heads=8, inner=1536, layers=8, experts=8)
VIT = Shape(vocab=_CLASSES, hidden=768, heads=12, inner=3072, layers=12)
MIXER = Shape(vocab=_CLASSES, hidden=1024, heads=0, inner=4096, layers=20)


@dataclass(frozen=True)
class Recording:
    """What is recorded; ``vocab`` is 0 for images."""

    build: Callable[[], nn.Module]
    vocab: int
    accumulate: int = 1
    precision: str | None = None


RECORDINGS = {
    "gpt2": Recording(lambda: GPT(GPT2), GPT2.vocab),
    "gpt2-checkpointed": Recording(lambda: GPT(GPT2_CHECKPOINTED), GPT2.vocab),
    "gpt2-accumulated": Recording(lambda: GPT(GPT2), GPT2.vocab, accumulate=2),
    "gpt-deep": Recording(lambda: GPT(DEEP_GPT), DEEP_GPT.vocab),
    "llama-bf16": Recording(lambda: Decoder(LLAMA), LLAMA.vocab, precision="bf16"),
    "t5": Recording(lambda: EncoderDecoder(T5), T5.vocab),
    "moe": Recording(lambda: Decoder(MOE, tied=True), MOE.vocab),
    "vit": Recording(lambda: VisionTransformer(VIT, patches=(_PIXELS // 16) ** 2), 0),
    "mixer": Recording(lambda: Mixer(MIXER, patches=(_PIXELS // 16) ** 2), 0),
    "resnet": Recording(wide_resnet50, 0),
}


def record(recording: Recording) -> Trace:
    """Train a few steps and return the trace. The batch is the same in every step, so that the router of a
    mixture of experts has every chance to repeat its choices."""
    torch.manual_seed(0)
    module = recording.build()
    model_data = 16 * sum(parameter.numel() for parameter in module.parameters())
    inputs, targets = _batch(recording.vocab)
    with tempfile.TemporaryDirectory(prefix="gemini-trace-") as directory:
        model = gemini.GeminiDDP(
            module,
            device_bytes=int(_DEVICE_SHARE * model_data),
            host_bytes=0,
            disk_dir=directory,
            mixed_precision=recording.precision,
            search_range_mb=8,
            min_chunk_size_mb=8,
        )
        optimizer = gemini.GeminiOptimizer(gemini.CPUAdam(model.parameters(), lr=1e-6), model, overlap=False)
        for _ in range(_STEPS):
            for _ in range(recording.accumulate):
                logits = model(inputs).float()
                optimizer.backward(F.cross_entropy(logits.flatten(0, -2), targets.flatten()))
            optimizer.step()
        trace = model.memstats()
        model.close()
    assert trace is not None
    return trace


def _batch(vocab: int) -> tuple[Tensor, Tensor]:
    if vocab:
        tokens = torch.randint(vocab, (_BATCH, _SEQ + 1))
        return tokens[:, :-1], tokens[:, 1:]
    return torch.randn(_BATCH, 3, _PIXELS, _PIXELS), torch.randint(_CLASSES, (_BATCH,))


def main(names: list[str]) -> None:
    """Record the named traces, all of them if none is named."""
    for name in names or RECORDINGS:
        path = HERE / f"{name}.json"
        trace = record(RECORDINGS[name])
        trace.save(path)
        print(
            f"{name}: {trace.num_moments} moments, {len(trace.chunk_bytes)} chunks, "
            f"{sum(trace.chunk_bytes) / 1e9:.2f} GB, {sum(trace.seconds):.2f} s, {path.stat().st_size} bytes",
            flush=True,
        )


if __name__ == "__main__":
    main(sys.argv[1:])
