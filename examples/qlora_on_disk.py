"""Train LoRA adapters on a 4-bit base that is larger than the memory you give it.

    python examples/qlora_on_disk.py --layers 32            # the shape of Llama 7B, weights are random
    python examples/qlora_on_disk.py --layers 2 --width 64  # a small one

No moment has more than one layer in 16 bits: each is built, quantized by bitsandbytes, given adapters by
PEFT, and adopted into chunks before the next one is built.
"""

from __future__ import annotations

import argparse
import copy
import resource
import tempfile
import time

import bitsandbytes
import torch
import transformers
from peft import LoraConfig, inject_adapter_in_model
from torch import nn

import gemini

ADAPTERS = LoraConfig(r=8, target_modules=["q_proj", "v_proj"])


def main() -> None:
    options = parse()
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory(dir=options.disk_dir, prefix="qlora-") as directory:
        model = build(options, directory)
        optimizer = gemini.GeminiAdamOptimizer(model, lr=1e-4)
        handle = gemini.handle_of(model)
        for step in range(options.steps):
            begun = time.perf_counter()
            ids = torch.randint(model.config.vocab_size, (1, options.seq))
            loss = model(input_ids=ids, labels=ids).loss
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            seconds = time.perf_counter() - begun
            print(f"step {step}: loss {loss.item():.4f}, {options.seq / seconds:.2f} tokens/s", flush=True)
        planned = handle.plan().step
        if planned is not None and planned.promise is not None:
            seconds = planned.promise.simulation.step_seconds
            print(f"planned: {options.seq / seconds:.2f} tokens/s")
        print(f"trained: {sum(p.numel() for p in model.parameters() if p.requires_grad):,} parameters")
        tiers = {tier: handle.stats()[tier]["bytes"] / 2**30 for tier in ("device", "disk")}
        print("; ".join(f"{tier}: {held:.2f} GiB" for tier, held in tiers.items()))
    print(f"peak resident memory: {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20:.2f} GiB")


def build(options: argparse.Namespace, directory: str) -> nn.Module:
    """Return a managed model with quantized layers, built layer by layer."""
    config = transformers.LlamaConfig(
        hidden_size=options.width,
        intermediate_size=options.width * 43 // 16,
        num_hidden_layers=options.layers,
        num_attention_heads=max(1, options.width // 128),
        vocab_size=options.vocab,
        use_cache=False,
    )
    with gemini.init_on("meta", torch.bfloat16):
        model = transformers.LlamaForCausalLM(config)
    model.requires_grad_(False)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    layers, model.model.layers = list(model.model.layers), nn.ModuleList()
    gemini.manage(model, device_bytes=options.device_bytes, host_bytes=0, disk_dir=directory)
    model.model.enable_input_require_grads()
    first = None
    for layer in layers:
        if first is None or not options.repeat:
            layer.to_empty(device="cpu")
            for part in layer.modules():
                model._init_weights(part)
            quantize(layer, getattr(torch, options.compute))
            first = copy.deepcopy(layer) if options.repeat else None
        else:
            layer = copy.deepcopy(first)
        inject_adapter_in_model(ADAPTERS, layer)
        model.model.layers.append(layer)
        gemini.handle_of(model).adopt()
    return model.train()


def quantize(layer: nn.Module, compute: torch.dtype) -> None:
    """Replace the linear layers in ``layer`` by 4-bit ones with the same values."""
    for part in list(layer.modules()):
        for name, linear in list(part.named_children()):
            if isinstance(linear, nn.Linear):
                made = bitsandbytes.nn.Linear4bit(
                    linear.in_features, linear.out_features, bias=False, compute_dtype=compute,
                    quant_type="nf4", device="meta",
                )  # fmt: skip
                made.weight = bitsandbytes.nn.Params4bit(linear.weight.data, quant_type="nf4", module=made)
                setattr(part, name, made.to("cpu"))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--width", type=int, default=4096)
    parser.add_argument("--vocab", type=int, default=32000)
    parser.add_argument("--seq", type=int, default=128, help="tokens of a step")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--compute", default="bfloat16", help="what layers compute in: bfloat16, float32")
    parser.add_argument("--repeat", action="store_true", help="quantize one layer, and use copies of it")
    parser.add_argument("--device-bytes", default="2GiB", help="memory for model data and activations")
    parser.add_argument("--disk-dir", help="where the rest lies; default: the directory of temporary files")
    return parser.parse_args()


if __name__ == "__main__":
    main()
