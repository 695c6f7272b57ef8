"""FineTuneConfig: all options of one run of ``gemini finetune``, frozen."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, ClassVar

from gemini.errors import ConfigError
from gemini.jobs.finetune.encoding import ANSWERS, LOSS_ON
from gemini.jobs.finetune.preferences import DPO, OBJECTIVES, SFT
from gemini.jobs.finetune.record_kinds import AUTO, DATA_FORMATS, PREFERENCE, parse_keys
from gemini.jobs.finetune.samples import DOCUMENTS
from gemini.jobs.run.managed import POLICIES, PRECISIONS, MemoryOptions
from gemini.jobs.run.run_directory import RESUME
from gemini.jobs.run.trackers import parse_trackers
from gemini.optim.kernels import STATE_DTYPES
from gemini.runtime.activation.block_groups import Names, names_in, text_of_names

SCHEDULES = ("cosine", "linear", "constant")
TILED_LOSS: dict[str, bool | str] = {"no": False, "auto": "auto", "yes": True}  # as gemini.manage() has it
PARTS = ("tp", "pp", "sp")  # kinds of parallelism that cut a copy of the model
ALL_LINEAR, NO_TARGETS = "all-linear", "none"  # special values of --lora-targets
NO, NF4, INT8 = "no", "nf4", "int8"
QUANTIZE = (NO, NF4, INT8)
# Default learning rates.
_FULL_LR, _LORA_LR, _DORA_LR = 1e-5, 2e-4, 1e-4
_DPO_FULL_LR, _DPO_LORA_LR = 1e-6, 5e-6
_OF_ADAPTERS = ("lora_alpha", "lora_dropout", "lora_targets", "lora_target_parameters")
_RSLORA_ALPHA = 8  # gives a scale of 2 at rank 16, which is LoRA's default scale
_PATHS = ("model", "data", "eval_data", "tokenizer", "disk_dir")
# Settings that the numbers of a run depend on, besides model and tokens. The number of steps may change.
_IDENTITY = (
    *("seq", "packing", "batch", "accumulate", "lr", "schedule", "warmup", "weight_decay", "clip"),
    *(
        "documents",
        "loss_on",
        "precision",
        "state_dtype",
        "lora",
        "lora_alpha",
        "lora_dropout",
        "lora_targets",
        "eval_share",
        "seed",
        "tiled_loss",
    ),
)


@dataclass(frozen=True)
class FineTuneConfig(MemoryOptions):
    """Options of ``gemini finetune`` and keys of its recipes. Sizes are in bytes; None lets the runtime
    choose a budget. Raise ConfigError for a combination that cannot work.

    Attributes:
        steps: None: the steps of ``epochs``.
        seq: None: 1024, or the number of the model's positions if it is smaller.
        lora: rank of the adapters; 0 trains all weights.
        lr, lora_alpha: None: the default for the weights that train.
        show: number of documents to show instead of training.
    """

    NOT_KEPT: ClassVar = (
        "output",
        "resume",
        "overwrite",
        "plan",
        "forecast",
        "show",
        "nproc",
        *PARTS,
    )  # not stored for a resume

    model: str = ""
    data: str = ""
    output: str = ""
    data_format: str = AUTO
    data_keys: str = ""
    objective: str = SFT
    dpo_beta: float = 0.1
    loss_on: str = ANSWERS
    tokenizer: str | None = None
    seq: int | None = None
    packing: bool = True
    documents: str = AUTO
    batch: int = 1
    accumulate: int = 1
    epochs: float = 1.0
    steps: int | None = None
    lr: float | None = None
    schedule: str = "cosine"
    warmup: float = 0.03
    weight_decay: float = 0.0
    clip: float = 1.0
    precision: str = "bf16"
    state_dtype: str = "fp32"
    lora: int = 0
    lora_alpha: int | None = None
    dora: bool = False
    rslora: bool = False
    lora_dropout: float = 0.0
    lora_targets: str = ALL_LINEAR
    lora_target_parameters: str = ""
    quantize: str = NO
    merge: bool = False
    eval_data: str | None = None
    eval_share: float = 0.0
    eval_every: int = 0
    keep_best: bool = False
    seed: int = 0
    activation_checkpointing: bool = False
    recompute: str = ""
    tiled_loss: str = "no"
    checkpoint_every: int = 0
    resume: str = "no"
    overwrite: bool = False
    report_to: str = ""
    plan: str | None = None
    nproc: int = 1
    tp: int = 1
    pp: int = 1
    sp: int = 1
    forecast: bool = True
    show: int = 0

    def __post_init__(self) -> None:
        for name, what in (
            ("model", "a directory in the format of save_pretrained()"),
            ("data", "a .jsonl, .json, .csv, .parquet or text file, or a directory of them"),
            ("output", "a directory for the checkpoint and the trained model"),
        ):
            if not getattr(self, name) and not (name == "output" and self.show):
                raise ConfigError(f"--{name} is missing: name {what}, here or in the recipe")
        self._check_numbers()
        self._check_choices()
        if self.merge and not self.lora:
            raise ConfigError("--merge needs adapters to merge; give --lora RANK, or leave it out")
        for name in ("dora", "rslora"):
            if getattr(self, name) and not self.lora:
                raise ConfigError(f"{option(name)} is a variant of LoRA; give --lora RANK, or leave it out")
        self.refuse_unread(each.name for each in fields(self) if getattr(self, each.name) != each.default)
        self._check_targets()
        self._check_quantize()
        self._check_parts()
        if self.resume != "no" and self.overwrite:
            raise ConfigError("--resume continues a run and --overwrite starts it over; give one of them")
        if self.recompute and self.activation_checkpointing:
            raise ConfigError(
                "--activation-checkpointing recomputes all blocks, and --recompute only those that "
                "it names; give one of them"
            )
        self.check_activations()
        if self.activations == "plan" and self.num_ranks > 1:
            raise ConfigError(
                f"--activations plan chooses for one process, but this run has {self.num_ranks}; use "
                "--activations offload, or --activation-checkpointing"
            )

    def refuse_unread(self, given: Iterable[str]) -> None:
        """Raise ConfigError if one of the fields in ``given`` has no effect on this run."""
        for name in given:
            if name in _OF_ADAPTERS and not self.lora:
                raise ConfigError(
                    f"{option(name)} is an option of adapters, but without --lora all weights train; "
                    "give --lora RANK, or leave it out"
                )
            if name == "dpo_beta" and self.objective != DPO:
                raise ConfigError("--dpo-beta is an option of DPO; give --objective dpo, or leave it out")

    @property
    def recomputed_blocks(self) -> tuple[Names, ...]:
        """The names in ``recompute``; groups are nested tuples."""
        return names_in(self.recompute)

    @property
    def learning_rate(self) -> float:
        """The highest learning rate: ``lr``, or the default for the weights that train."""
        if self.lr is not None:
            return self.lr
        if self.objective == DPO:
            return _DPO_LORA_LR if self.lora else _DPO_FULL_LR
        if not self.lora:
            return _FULL_LR
        return _DORA_LR if self.dora else _LORA_LR

    @property
    def keeps_reference(self) -> bool:
        """Whether DPO's reference is computed before the first step. Without adapters, the initial weights
        are gone later."""
        return self.objective == DPO and not self.lora

    @property
    def alpha(self) -> int:
        """The numerator of the adapters' scale. rsLoRA divides it by the square root of the rank, so its
        default does not grow with the rank."""
        if self.lora_alpha is not None:
            return self.lora_alpha
        return _RSLORA_ALPHA if self.rslora else 2 * self.lora

    def managed_options(self) -> dict[str, Any]:
        """Return the equivalent keywords of :func:`gemini.manage`."""
        return {**super().managed_options(), "tiled_loss": TILED_LOSS[self.tiled_loss]}

    def identity(self) -> dict[str, Any]:
        """Return the settings that the numbers of a run depend on. Budgets, tiers, policy and device are not
        among them."""
        own = {name: getattr(self, name) for name in _IDENTITY}
        # Newer settings are None by default, so that runs of older versions, which lack them, compare equal.
        kinds = {name: getattr(self, name) or None for name in ("dora", "rslora")}
        kinds["lora_target_parameters"] = self.lora_target_parameters or None
        kinds["quantize"] = None if self.quantize == NO else self.quantize
        beta = self.dpo_beta if self.objective == DPO else None
        return {**own, **self._resolved(), **kinds, "dpo_beta": beta}

    def options(self) -> dict[str, Any]:
        """Return the options that are stored for a resume. Paths are absolute."""
        given = {**asdict(self), **self._resolved()}
        for name in self.NOT_KEPT:
            del given[name]
        for name in _PATHS:
            if given[name] is not None:
                given[name] = str(Path(given[name]).absolute())
        return given

    def _resolved(self) -> dict[str, Any]:
        """Return the values of defaults (None) that a stored run must keep."""
        return {"lr": self.learning_rate, "lora_alpha": self.alpha if self.lora else self.lora_alpha}

    def _check_numbers(self) -> None:
        for name, least in (
            ("seq", 2),
            ("batch", 1),
            ("accumulate", 1),
            ("steps", 1),
            ("lora", 0),
            ("eval_every", 0),
            ("checkpoint_every", 0),
            ("show", 0),
            *((name, 1) for name in ("nproc", *PARTS)),
        ):
            value = getattr(self, name)
            if value is not None and value < least:
                raise ConfigError(f"{option(name)} is {value}; it must be at least {least}")
        for name, low, high in (
            ("epochs", 0.0, math.inf),
            ("lr", 0.0, math.inf),
            ("lora_alpha", 0.0, math.inf),
            ("dpo_beta", 0.0, math.inf),
        ):
            value = getattr(self, name)
            if value is not None and not low < value < high:
                raise ConfigError(f"{option(name)} is {value}; it must be a number above {low:g}")
        for name, high in (
            ("warmup", 1.0),
            ("lora_dropout", 1.0),
            ("eval_share", 1.0),
            ("weight_decay", math.inf),
            ("clip", math.inf),
        ):
            if not 0 <= getattr(self, name) < high:
                below = "" if high == math.inf else f" and below {high:g}"
                raise ConfigError(f"{option(name)} is {getattr(self, name)}; it must be at least 0{below}")
        if not 0 <= self.seed < 2**63:
            raise ConfigError(f"--seed is {self.seed}; it must be from 0 to 2**63 - 1")
        self.rows_of_rank(self.data_ranks(self.num_ranks))
        self._check_held_out()

    @property
    def part_sizes(self) -> dict[str, int]:
        """The number of parts of a copy of the model, by ``tp``, ``pp`` and ``sp``."""
        return {name: getattr(self, name) for name in PARTS}

    @property
    def num_parts(self) -> int:
        """Number of ranks that share a copy of the model. Each has a part of it, and they train on the same
        rows."""
        return self.tp * self.pp * self.sp

    @property
    def num_ranks(self) -> int:
        """Number of processes: ``nproc``, or the number that one copy of the model needs."""
        return max(self.nproc, self.num_parts)

    def data_ranks(self, ranks: int) -> int:
        """Return how many groups among ``ranks`` ranks divide the rows of a step.

        Raises:
            ConfigError: the ranks do not form whole copies of the model.
        """
        if ranks % self.num_parts:
            sizes = " x ".join(f"--{name} {getattr(self, name)}" for name in PARTS if getattr(self, name) > 1)
            raise ConfigError(
                f"{sizes} need {self.num_parts} ranks for one copy of the model, but there are "
                f"{ranks}: give --nproc {self.num_parts}, or a multiple of it"
            )
        return ranks // self.num_parts

    def rows_of_rank(self, ranks: int) -> tuple[int, int]:
        """Return (rows per pass, passes per step) of each of ``ranks`` data ranks. Together they process the
        rows that one process would.

        Raises:
            ConfigError: the rows of a step do not divide evenly.
        """
        if self.accumulate % ranks == 0:
            return self.batch, self.accumulate // ranks
        if self.batch % ranks == 0:
            return self.batch // ranks, self.accumulate
        raise ConfigError(
            f"{ranks} ranks divide the rows of a step, but neither --batch {self.batch} nor "
            f"--accumulate {self.accumulate} is a multiple of {ranks}; make one of them a multiple"
        )

    def _check_held_out(self) -> None:
        """Raise ConfigError if two options set the held-out data, or if it is needed and missing."""
        if self.eval_data is not None and self.eval_share:
            raise ConfigError(
                "--eval-data and --eval-share both choose the held-out records; give one of them"
            )
        for name in ("eval_every", "keep_best"):
            if getattr(self, name) and self.eval_data is None and not self.eval_share:
                raise ConfigError(
                    f"{option(name)} needs held-out records: add --eval-share 0.05, or --eval-data PATH"
                )

    def _check_choices(self) -> None:
        for name, choices in (
            ("data_format", DATA_FORMATS),
            ("objective", OBJECTIVES),
            ("loss_on", LOSS_ON),
            ("documents", DOCUMENTS),
            ("schedule", SCHEDULES),
            ("precision", PRECISIONS),
            ("state_dtype", STATE_DTYPES),
            ("policy", POLICIES),
            ("resume", RESUME),
            ("tiled_loss", tuple(TILED_LOSS)),
            ("quantize", QUANTIZE),
        ):
            if getattr(self, name) not in choices:
                raise ConfigError(
                    f"{option(name)} is {getattr(self, name)!r}; it must be one of {', '.join(choices)}"
                )
        if self.objective == DPO:
            self._check_preferences()
        parse_keys(self.data_keys)
        parse_trackers(self.report_to)
        if not self.packing and self.documents != AUTO:
            raise ConfigError(
                f"--documents {self.documents} packs documents, but --no-packing gives each its own "
                "row; give one of them"
            )

    def _check_targets(self) -> None:
        """Raise ConfigError if there are no targets for the adapters, or their kind does not support
        arrays."""
        if not self.lora_target_parameters:
            if names_of(self.lora_targets) in ([], [NO_TARGETS]):
                raise ConfigError(
                    f"--lora-targets {self.lora_targets} leaves no layer for adapters; name layers, "
                    "or give --lora-target-parameters"
                )
            return
        for name in ("dora", "lora_dropout"):
            if getattr(self, name):
                raise ConfigError(
                    f"{option(name)} does not go with --lora-target-parameters: for parameters PEFT "
                    "supports only plain LoRA and --rslora; leave it out"
                )

    def _check_quantize(self) -> None:
        """Raise ConfigError for options that are incompatible with a base in 4 or 8 bits."""
        if self.quantize == NO:
            return
        for wrong, why in (
            (not self.lora, "freezes the base model, so only adapters train; add --lora 16"),
            (
                self.merge,
                "and --merge do not go together: adapters cannot be merged into quantized weights; "
                "leave --merge out, then run gemini merge with the adapters and the base model in 16 "
                "bits",
            ),
        ):
            if wrong:
                raise ConfigError(f"--quantize {self.quantize} {why}")

    def _check_parts(self) -> None:
        """Raise ConfigError for options that need a whole copy of the model on each rank."""
        if self.num_parts == 1:
            return
        cut = ", ".join(f"--{name}" for name in PARTS if getattr(self, name) > 1)
        for wrong, what, why in (
            (self.objective == DPO, "--objective dpo", "the loss needs the logits of whole answers"),
            (self.quantize != NO, f"--quantize {self.quantize}", "quantized weights cannot be divided"),
            (
                bool(self.lora_target_parameters),
                "--lora-target-parameters",
                "adapters on expert arrays cannot be divided",
            ),
            (self.dora and self.tp > 1, "--dora", "DoRA trains norms of whole weights"),
        ):
            if wrong:
                raise ConfigError(
                    f"{what} does not go with {cut}: {why}; leave it out, or divide only the rows "
                    f"(--nproc {self.num_ranks})"
                )

    def _check_preferences(self) -> None:
        """Raise ConfigError for options that are incompatible with preference pairs."""
        for name, usual in (("loss_on", ANSWERS), ("documents", AUTO), ("tiled_loss", "no")):
            if getattr(self, name) != usual:
                raise ConfigError(
                    f"{option(name)} {getattr(self, name)} does not go with --objective dpo: each "
                    "row has one prompt and one answer, and the loss needs the logits of the answer; "
                    "leave it out"
                )
        if self.data_format not in (AUTO, PREFERENCE):
            raise ConfigError(
                f"--objective dpo needs preference pairs, but --data-format is {self.data_format}; "
                "leave --data-format out"
            )


def with_plan(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options in ``given`` combined with the settings of the plan that they name.

    Raises:
        ConfigError: the plan is invalid, or ``given`` contradicts it.
    """
    if given.get("plan") is None:
        return dict(given)
    from gemini.parallel.plan import ParallelPlan

    plan = ParallelPlan.load(given["plan"])
    if plan.dtype not in PRECISIONS:
        raise ConfigError(
            f"--plan {given['plan']} has dtype {plan.dtype}, but gemini finetune supports only "
            f"{', '.join(PRECISIONS)}; make another plan"
        )
    whole = plan.layout.world_size == 1  # then every ZeRO stage is the same
    said: dict[str, Any] = replace(plan, zero_stage=3 if whole else plan.zero_stage).budget_options()
    if said.pop("activation_offload", False):
        said["activations"] = "offload"
    said |= {name: getattr(plan.layout, name) for name in PARTS}
    # The plan counts the batches of one data rank, our options those of all data ranks.
    accumulate = plan.num_microbatches * plan.layout.dp
    said |= {"batch": plan.microbatch_size, "accumulate": accumulate, "nproc": plan.world_size}
    said |= {"recompute": text_of_names(plan.recomputed), "activation_checkpointing": False}
    said["precision"] = plan.dtype
    return plan.joined(said, given)


def names_of(text: str) -> list[str]:
    """Return the names in a comma-separated text."""
    return [name.strip() for name in text.split(",") if name.strip()]


def option(name: str) -> str:
    """Return the command line option of a field."""
    return f"--{name.replace('_', '-')}"
