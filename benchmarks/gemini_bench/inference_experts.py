"""Case ``experts`` of ``gemini bench inference``: a mixture whose experts take three times what DEVICE holds.

The model has random weights and uses the experts of the shipped routings, whatever its routers say: hooks
replace their choice. Bytes are those of the whole model; what dense weights take is on DEVICE as well.
"""

from __future__ import annotations

import dataclasses
import importlib
import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

import gemini
from gemini.errors import StateError
from gemini_bench import routing
from gemini_bench.record import Row
from gemini_bench.session import TIMING_SAMPLE_SECONDS, CaseResult, Session

READ = {1: 0.5, 8: 0.7}  # bytes of a pass, of those of the experts that it uses, by batch
PREFILL = 1.0  # times that each expert of a long prompt is read


@dataclass(frozen=True)
class Settings:
    """A Qwen3-MoE of ``width`` with the layers and experts of each routing; ``share``: of its weights on
    DEVICE; ``passes`` that count, after ``left_out``; ``prompt``: tokens of the long one."""

    width: int = 128
    expert_width: int = 64
    share: float = 1 / 3
    left_out: int = 160
    passes: int = 96
    prompt: int = 256
    batches: tuple[int, ...] = (1, 8)


QUICK = Settings(width=64, expert_width=32, left_out=12, passes=4, prompt=16, batches=(1,))


def experts(session: Session) -> CaseResult:
    """Generate with the experts of shipped routings, a third of the weights on DEVICE."""
    settings = QUICK if session.quick else Settings()
    names = list(routing.shipped())[: 1 if session.quick else None]
    found: dict[str, dict[str, Any]] = {}
    for name in names:
        for batch in settings.batches:
            session.progress(f"experts: {name}, batch {batch}")
            options = {**dataclasses.asdict(settings), "disk_dir": str(session.disk_dir)}
            options |= {"routing": name, "batch": batch}
            run = session.run("inference.experts", options, sample_seconds=TIMING_SAMPLE_SECONDS)
            found[f"{name} {batch}"] = run.data()
    return CaseResult(rows_of(found, settings.batches), dataclasses.asdict(settings), found)


def rows_of(found: Mapping[str, Mapping[str, Any]], batches: tuple[int, ...]) -> list[Row]:
    """Return what each run read, of the bytes of the experts that it used, and its processor time."""
    rows: list[Row] = []
    for key, run in found.items():
        batch = int(key.rpartition(" ")[2])
        what = f"{key}: bytes read / bytes of the experts used"
        rows.append(Row(what, run["read_bytes"] / run["used_bytes"], "x", READ.get(batch)))
        rows.append(Row(f"{key}: the same, of a long prompt", run["prompt_reads"], "x", PREFILL))
        rows.append(Row(f"{key}: most on DEVICE / budget", run["peak_bytes"] / run["device_bytes"], "x", 1.0))
        beyond = run["cpu_seconds"] / run["resident_cpu_seconds"]
        rows.append(Row(f"{key}: processor time of a pass / resident", beyond, "x"))
    return rows


# -- in the worker -------------------------------------------------------------------------------


class _Routed:
    """Has each pass use the experts of a routing, and counts those that it uses."""

    def __init__(self, model: Any, recorded: routing.Routing, batch: int) -> None:
        self.used = 0
        self._recorded, self._batch, self._pass = torch.from_numpy(recorded.experts).long(), batch, 0
        for number, layer in enumerate(model.model.layers):
            layer.mlp.experts.register_forward_pre_hook(partial(self._replace, number))

    def restart(self) -> None:
        """Begin with the first pass of the routing."""
        self._pass = 0

    def _replace(self, layer: int, _module: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
        states, chosen, weights = args
        if len(states) == self._batch:  # else a prompt: as its routers say
            chosen = self._recorded[: self._batch, self._pass, layer]
            self._pass += layer == self._recorded.shape[2] - 1
        self.used += len(chosen.unique())
        return states, chosen, weights


def _model(options: Mapping[str, Any], recorded: routing.Routing) -> Any:
    transformers = importlib.import_module("transformers")
    torch.manual_seed(0)
    config = transformers.Qwen3MoeConfig(
        vocab_size=1024,
        hidden_size=options["width"],
        intermediate_size=options["width"],
        moe_intermediate_size=options["expert_width"],
        num_hidden_layers=recorded.experts.shape[2],
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=options["width"] // 4,
        num_experts=recorded.num_experts,
        num_experts_per_tok=recorded.experts.shape[3],
        max_position_embeddings=1024,
    )
    return transformers.Qwen3MoeForCausalLM(config).eval().requires_grad_(False)


def _generate(model: Any, options: Mapping[str, Any], passes: int, *listeners: Any) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    prompt = torch.randint(2, 1024, (options["batch"], 8), generator=generator)
    processors = importlib.import_module("transformers").LogitsProcessorList(listeners)
    count = {"max_new_tokens": passes, "min_new_tokens": passes, "do_sample": False, "pad_token_id": 0}
    out: Tensor = model.generate(prompt, logits_processor=processors, **count)
    return out


def measure(options: dict[str, Any]) -> dict[str, Any]:
    """Return what passes read and used.

    Raises:
        StateError: the tokens are not those of the resident model.
    """
    from gemini_bench.inference import Passes, read_bytes  # it has this case

    torch.set_num_threads(1)
    recorded = routing.shipped()[options["routing"]]
    model = _model(options, recorded)
    routed = _Routed(model, recorded, options["batch"])
    weights = sum(param.nbytes for param in model.parameters())
    array = model.model.layers[0].mlp.experts
    expert_bytes = array.gate_up_proj[0].nbytes + array.down_proj[0].nbytes
    passes = options["left_out"] + options["passes"]
    resident = Passes(lambda: 0)
    want = _generate(model, options, passes, resident)
    budget = int(options["share"] * weights)
    handle = gemini.manage(
        model, device_bytes=budget, disk_dir=options["disk_dir"], optimizer_rule="none", non_model_bytes=0
    )
    routed.restart()
    took = Passes(partial(read_bytes, handle), lambda: routed.used)
    if not torch.equal(_generate(model, options, passes, took), want):
        raise StateError("the tokens are not those of the resident model")
    counted = slice(options["left_out"], None)
    long = torch.randint(2, 1024, (1, options["prompt"]), generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        model(long)
        before = read_bytes(handle), routed.used
        model(long)
    peak = handle.stats()["device"]["peak_bytes"]
    found = {
        "weight_bytes": weights,
        "device_bytes": budget,
        "read_bytes": sum(took.read_bytes[counted]),
        "used_bytes": sum(took.others[counted]) * expert_bytes,
        "prompt_reads": (read_bytes(handle) - before[0]) / ((routed.used - before[1]) * expert_bytes),
        "peak_bytes": peak,
        "cpu_seconds": statistics.median(took.cpu_seconds[counted]),
        "resident_cpu_seconds": statistics.median(resident.cpu_seconds[counted]),
    }
    handle.close()
    return found
