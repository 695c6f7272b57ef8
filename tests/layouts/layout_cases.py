"""Cases of the campaign: a model, its batches, and the layouts that train it, all drawn from one seed."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, replace
from typing import Any

from layout_models import SUBJECTS, Subject

STEPS = 4
SAVED_AT = 2  # where a case goes on in another layout, it does so before this step
_FLAGS = (
    *("no_sync", "skewed", "ignores", "counted", "tied", "lora", "evaluates", "generates"),
    *("grouped", "scheduled"),
)
_FILES_OF_THEIR_OWN = ("wrapper", "trainer")
_PROGRAMS = ("hybrid", "gemini", "zero", "ddp", *_FILES_OF_THEIR_OWN)
_OF_ONE_SEQUENCE = ("causal", "masked", "own")  # which sequence parallelism cuts
_MANY_STAGES = ("interleaved", "zero_bubble", "zbv", "dualpipev")


@dataclass(frozen=True)
class Layout:
    """How some steps are trained. ``program``: ``"hybrid"`` (HybridParallelPlugin), ``"gemini"``
    (GeminiPlugin), ``"zero"`` (LowLevelZeroPlugin), ``"ddp"`` (TorchDDPPlugin), ``"fsdp"`` (TorchFSDPPlugin),
    ``"wrapper"`` (GeminiDDP without a booster) or ``"trainer"`` (GeminiTrainer). ``device``: what DEVICE gets
    of the data that this rank trains; 0: no limit. ``plan``: the file of what a ``"hybrid"`` runs."""

    program: str
    dp: int
    sizes: tuple[tuple[str, Any], ...] = ()
    options: tuple[tuple[str, Any], ...] = ()
    microbatches: int = 1
    device: float = 0.0
    host: str = ""  # a budget of HOST, with DISK behind it
    disk: bool = False
    recompute: str = ""  # "blocks", "group", or the "model" itself does
    plan: str = ""

    @property
    def size(self) -> dict[str, Any]:
        return dict(self.sizes)


@dataclass(frozen=True)
class Case:
    """What is trained for :data:`STEPS` steps: in one layout, or in two with a save between them."""

    seed: int
    subject: str
    world: int
    layouts: tuple[Layout, ...]
    rule: str
    max_norm: float
    accumulate: int
    no_sync: bool
    rows: int  # of a micro-batch
    skewed: bool  # ranks have other numbers of rows
    lengths: tuple[int, ...]
    padding: str
    ignores: bool
    counted: bool  # micro-batches count by their labels
    tied: bool
    lora: bool
    frozen: str
    precision: str
    evaluates: bool
    generates: bool
    shard: bool  # files of the save are a directory
    grouped: bool = False  # vectors have other settings than matrices
    scheduled: bool = False  # learning rates fall from step to step

    def __str__(self) -> str:
        """Return the case in a line."""
        how = " then ".join(_said(layout) for layout in self.layouts)
        flags = [name for name in _FLAGS if getattr(self, name)]
        more = [
            f"{name} {value}" for name in ("padding", "frozen", "precision") if (value := getattr(self, name))
        ]
        return (
            f"seed {self.seed}: {self.subject} on {self.world}, {how}; {self.rule}, "
            f"max_norm {self.max_norm}, accumulate {self.accumulate}, rows {self.rows}, "
            f"lengths {self.lengths} {' '.join(flags + more)}"
        )


def _said(layout: Layout) -> str:
    parts = [f"{name}={value}" for name, value in (*layout.sizes, *layout.options)]
    if layout.program == "hybrid":
        parts.append(f"M={layout.microbatches}")
    if layout.device:
        parts.append(f"device={layout.device:.2f} host={layout.host or 'free'} disk={layout.disk}")
    if layout.recompute:
        parts.append(f"recompute={layout.recompute}")
    return f"{layout.program} dp={layout.dp} {' '.join(parts)}"


def draw(seed: int) -> Case:
    """Return the case of a seed."""
    dice = random.Random(seed)
    name = dice.choice(list(SUBJECTS))
    subject = SUBJECTS[name]
    world = dice.choices((1, 2, 3, 4), (10, 50, 8, 32))[0]
    lora = bool(subject.adapted) and dice.random() < 0.3
    precision = "bf16" if dice.random() < 0.06 else ""
    program = dice.choices(_PROGRAMS, (58, 11, 10, 4, 11, 6))[0]
    if program == "trainer" and (subject.inputs != "causal" or precision):  # transformers scales other losses
        program = "hybrid"
    layouts = [_layout(dice, program, name, world, bool(precision))]
    if dice.random() < 0.25:
        again = (
            "wrapper" if program == "wrapper" else dice.choice(("hybrid", "hybrid", "gemini", "zero", "ddp"))
        )
        layouts.append(_layout(dice, again, name, world, bool(precision)))
    rules = ["HybridAdam", "CPUAdam"]  # of chunks over stages and parts
    if not any(dict(layout.options).get("zero_stage") == 3 for layout in layouts) or dice.random() < 0.03:
        rules += ["AdamW", "AdamW", "SGD", "Adagrad", "RMSprop"]
    loops = all(layout.program != "hybrid" for layout in layouts)
    case = Case(
        seed=seed,
        subject=name,
        world=world,
        layouts=tuple(layouts),
        rule=dice.choice(rules),
        max_norm=dice.choice((0.3, 0.3, math.inf)),
        accumulate=dice.choice((1, 1, 1, 2)),
        no_sync=dice.random() < 0.5,
        rows=dice.choice((1, 2)),
        skewed=loops and dice.random() < 0.3,
        lengths=tuple(dice.choice(_lengths(layouts)) for _ in range(STEPS)),
        padding=dice.choice(("", "", "right", "left")),
        ignores=dice.random() < 0.5,
        counted=dice.random() < 0.7,
        tied=subject.ties and dice.random() < 0.4,
        lora=lora,
        frozen="" if lora or dice.random() < 0.75 else frozen_part(dice, subject),
        precision=precision,
        evaluates=dice.random() < 0.4,
        generates=subject.inputs == "causal" and dice.random() < 0.25,
        shard=dice.random() < 0.5,
    )
    if any(layout.program == "trainer" for layout in layouts):
        return case
    layouts = [_varied(dice, layout, case.rule) for layout in layouts]
    return replace(case, layouts=tuple(layouts), grouped=dice.random() < 0.4, scheduled=dice.random() < 0.4)


def _varied(dice: random.Random, layout: Layout, rule: str) -> Layout:
    """Return a layout that sometimes shards by torch, or keeps two copies of chunks that are cut."""
    chance = dice.random()
    if layout.program == "ddp" and chance < 0.5 and rule not in ("HybridAdam", "CPUAdam"):
        return replace(layout, program="fsdp")
    is_plain = layout.program in ("wrapper", "gemini") and "ep_size" not in dict(layout.options)
    if is_plain and layout.dp == 4 and chance < 0.4:
        return replace(layout, options=(*layout.options, ("copies", 2)))
    return layout


def frozen_part(dice: random.Random, subject: Subject) -> str:
    frozen = dice.choice(("embedding", "blocks"))
    return "blocks" if subject.inputs == "images" else frozen


def _lengths(layouts: list[Layout]) -> tuple[int, ...]:
    """Norms on parts of the sequence need a length that the ranks divide."""
    cut = any(dict(layout.options).get("sequence_parallel_norms") for layout in layouts)
    return (8, 12, 16) if cut else (9, 12, 13, 16)


def _layout(dice: random.Random, program: str, name: str, world: int, in_16_bits: bool) -> Layout:
    if program == "hybrid":
        return _hybrid(dice, name, world)
    options: list[tuple[str, Any]] = []
    if program == "zero":
        options = [("stage", dice.choice((1, 2)))]
    if program in ("gemini", "zero") and SUBJECTS[name].experts and world in (2, 4) and dice.random() < 0.4:
        options.append(("ep_size", 2))
    recompute = "model" if dice.random() < 0.2 else ""
    if program in ("zero", "ddp"):
        return Layout(program, world, options=tuple(options), recompute=recompute)
    more, budgets = _of_chunks(dice, has_head=SUBJECTS[name].inputs in ("causal", "masked"))
    return Layout(program, world, options=(*options, *more), recompute=recompute, **budgets)


def _hybrid(dice: random.Random, name: str, world: int) -> Layout:
    fits = [each for each in _factors(world) if SUBJECTS[name].inputs in _OF_ONE_SEQUENCE or each[2] == 1]
    pp, tp, sp, dp = dice.choice(fits if dice.random() < 0.95 else _factors(world))
    options: list[tuple[str, Any]] = [("zero_stage", dice.choice((0, 1, 2, 3, 3)))]
    sizes = [(key, size) for key, size in (("tp_size", tp), ("pp_size", pp), ("sp_size", sp)) if size > 1]
    if SUBJECTS[name].experts and dp % 2 == 0 and dice.random() < 0.5:
        sizes.append(("ep_size", 2))
    if sp > 1:
        options.append(("sp_mode", dice.choice(("ulysses", "ring"))))
    if tp > 1 and name in ("llama", "qwen3", "gpt2") and dice.random() < 0.2:
        options.append(("sequence_parallel_norms", True))
    microbatches = dice.choice((1, 2, 2, 3))
    if pp > 1:
        style, chunks, microbatches = _schedule(dice, pp)
        options.append(("pp_style", style))
        if style in _MANY_STAGES[:2]:
            options.append(("num_model_chunks", chunks))
        if dice.random() < 0.3:
            options.append(("split", "layers"))
    has_head = tp == 1 and SUBJECTS[name].inputs in ("causal", "masked")
    more, budgets = _of_chunks(dice, has_head=has_head) if options[0][1] == 3 else ([], {})
    return Layout(
        "hybrid",
        dp,
        tuple(sizes),
        (*options, *more),
        microbatches,
        recompute=dice.choice(("", "", "", "blocks", "group" if pp == 1 else "blocks", "model")),
        **budgets,
    )


def _factors(world: int) -> list[tuple[int, int, int, int]]:
    """Return all (pp, tp, sp, dp) of a number of ranks."""
    sizes = [size for size in (1, 2, 3, 4) if world % size == 0]
    return [
        (pp, tp, sp, world // (pp * tp * sp))
        for pp in sizes
        for tp in sizes
        for sp in sizes
        if world % (pp * tp * sp) == 0 and tp != 3
    ]


def _schedule(dice: random.Random, pp: int) -> tuple[str, int, int]:
    """Return a schedule that the pipeline has blocks and micro-batches for."""
    styles = ["1f1b", "gpipe", "zero_bubble"] + (["interleaved", "zbv", "dualpipev"] if pp == 2 else [])
    style = dice.choice(styles)
    chunks = 2 if style == "interleaved" else dice.choice((1, 2)) if pp == 2 else 1
    if style in ("1f1b", "gpipe"):
        return style, chunks, dice.choice((1, 2, 3, 4))
    return style, chunks, pp * (2 if style == "dualpipev" else dice.choice((1, 2)))


def _of_chunks(dice: random.Random, *, has_head: bool) -> tuple[list[tuple[str, Any]], dict[str, Any]]:
    """Return what says how chunks are used: budgets, and options that need some or none. ``has_head``: the
    model has a head on this rank whose loss can be tiled."""
    found = _budgets(dice)
    chances = {
        "tiled_loss": (0.2 if has_head else 0.01, True),
        "activation_offload": (0.2 if found else 0.0, True),
    }
    chances["gather_bytes"] = (0.15, "1MiB")
    options = [(name, value) for name, (chance, value) in chances.items() if dice.random() < chance]
    return options, found


def _budgets(dice: random.Random) -> dict[str, Any]:
    if dice.random() < 0.35:
        return {}
    disk = dice.random() < 0.6
    host = dice.choice(("", "32KiB", "128KiB") if disk else ("16MiB",))
    return {"device": round(dice.uniform(0.3, 0.9), 2), "disk": disk, "host": host}
