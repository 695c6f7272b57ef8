"""Converts a configuration of DeepSpeed to our options."""

from __future__ import annotations

from typing import Any

from gemini.cli import deepspeed_schedules
from gemini.cli.conversion import (
    AUTO,
    NOT_NEEDED,
    NOT_SUPPORTED,
    NUMBER,
    TAKEN,
    Conversion,
    Document,
    Kind,
    Target,
    auto,
    each,
    quoted,
    refuse_unknown,
    report,
)
from gemini.cli.deepspeed_keys import FILLED, KEYS, SWITCHED
from gemini.errors import ConfigError
from gemini.system.config import did_you_mean

_DEEPSPEEDS = ("Adam", "AdamW", "Lamb", "OneBitAdam", "ZeroOneAdam", "OneBitLamb", "MuAdam", "MuAdamW",
               "MuSGD", "Lion", "Muon")  # fmt: skip
_ADAMS = ("adam", "adamw", "cpuadam", "deepspeedcpuadam", "fusedadam")
_OURS = {"lion": "gemini.Lion", "lamb": "gemini.Lamb"}
# torch's optimizers, which DeepSpeed finds by name, with the options that a file may set besides the rate.
_DECAY, _MOMENTUM, _BETAS = ("weight_decay",), ("weight_decay", "momentum"), ("weight_decay", "eps", "betas")
_TORCH: dict[str, tuple[str, tuple[str, ...]]] = {
    "sgd": ("SGD", (*_MOMENTUM, "dampening", "nesterov")),
    "adagrad": ("Adagrad", (*_DECAY, "eps", "lr_decay", "initial_accumulator_value")),
    "rmsprop": ("RMSprop", (*_MOMENTUM, "eps", "alpha", "centered")),
    "nadam": ("NAdam", (*_BETAS, "momentum_decay", "decoupled_weight_decay")),
    "radam": ("RAdam", (*_BETAS, "decoupled_weight_decay")),
    "adamax": ("Adamax", _BETAS),
    "adadelta": ("Adadelta", (*_DECAY, "eps", "rho")),
}
_MUON = ("lr", "momentum", "weight_decay", "ns_steps", "adam_lr", "betas", "eps")
_OWN_OPTIONS = {
    "gemini.Muon": _MUON,
    "gemini.HybridAdam": ("lr", "eps", "weight_decay", "betas", "bias_correction", "state_dtype"),
    "gemini.Lion": ("lr", "weight_decay", "betas"),
    "gemini.Lamb": ("lr", "eps", "weight_decay", "betas", "bias_correction"),
    **{f"torch.optim.{name}": ("lr", *options) for name, options in _TORCH.values()},
}
_FLAGS = ("nesterov", "centered", "bias_correction", "decoupled_weight_decay")
_SPEED_ONLY = ("foreach", "fused", "capturable", "differentiable", "set_grad_none", "torch_adam")
_WITHOUT_RULE = {
    "muadam": (
        "scales the learning rate of each layer: use HybridAdam with parameter groups that have these rates"
    ),
    "muadamw": (
        "scales the learning rate of each layer: use HybridAdam with parameter groups that have these rates"
    ),
    "musgd": (
        "scales the learning rate of each layer: use torch.optim.SGD with parameter groups that have "
        "these rates"
    ),
}
# Optimizers that send one bit per value after a warmup -> our class with the rule of the warmup.
_ONE_BIT = {
    "onebitadam": "gemini.HybridAdam",
    "zerooneadam": "gemini.HybridAdam",
    "onebitlamb": "gemini.Lamb",
}
_OF_ONE_BIT = (
    *("freeze_step", "cuda_aware", "comm_backend_name", "coeff_beta", "factor_max", "factor_min"),
    *("factor_threshold", "var_freeze_step", "var_update_scaler", "local_step_scaler", "local_step_clipper"),
)


def convert(document: Any, source: str, target: Target) -> Conversion:
    """Convert a configuration of DeepSpeed; ``source`` is the file's name.

    Raises:
        ConfigError: a value that DeepSpeed would refuse as well; the message names its key.
    """
    found = Conversion(source, target)
    given = Document(document, source)
    fill(found, given)
    report(found, given, KEYS, SWITCHED)
    return found


def fill(found: Conversion, document: Document) -> None:
    """Convert all keys that have options here; ``report`` gives the others their verdicts."""
    for section in ("fp16", "bf16", "bfloat16", "activation_checkpointing", "zero_optimization", "optimizer"):
        document.section(section)  # raises if the value is not a section
    _precision(found, document)
    _batches(found, document)
    _zero(found, document)
    _optimizer(found, document)
    for key in KEYS.values():
        if key.path.split(".")[0] in SWITCHED and not document.is_on(key.path.split(".")[0]):
            if key.kind is not None:
                document.take_as(key.path, key.kind)
            continue
        group, _, name = key.option(found.target).partition(".")
        if group != "optimizer" or name in _OWN_OPTIONS[found.optimizer_class]:
            found.take(document, key)
    _communication(found, document)
    deepspeed_schedules.fill(found, document)
    if found.target is Target.TRAINER:
        _defaults(found, document)


def _defaults(found: Conversion, document: Document) -> None:
    """Set DeepSpeed's defaults explicitly if they differ from the Trainer's."""
    if not document.has("gradient_clipping"):
        found.put("arguments.max_grad_norm", "0.0")
    is_named = found.said.get(("optimizer", "type"), ("",))[0] == TAKEN
    if is_named and "lr" not in found.of("optimizer"):
        found.of("optimizer")["lr"] = "0.001"


# ------------------------------------------------------------------------------------- precision
def _precision(found: Conversion, document: Document) -> None:
    bf16 = "bf16" if document.has("bf16") else "bfloat16"
    enabled = {
        name: document.take(f"{section}.enabled", (bool,), False)
        for name, section in (("bf16", bf16), ("fp16", "fp16"))
    }
    if enabled == {"bf16": True, "fp16": True}:
        raise ConfigError(f"{document.source} enables both fp16 and bf16; keep one")
    for name, section in (("bf16", bf16), ("fp16", "fp16")):
        path = f"{section}.enabled"
        if enabled[name] == AUTO:
            verdict, _ = auto(found.target, name)
            found.say(path, verdict, _AUTO_PRECISION[found.target])
            if found.target is Target.TRAINER and "mixed_precision" not in found.of("model"):
                found.put("model.mixed_precision", "mixed_precision")
        elif enabled[name]:
            words = found.put("model.mixed_precision", f'"{name}"')
            found.say(path, TAKEN, f"{words}: {name} weights with masters in fp32")
        elif document.has(path):
            found.say(path, NOT_NEEDED, "this value changes nothing")
    fixed = document.take_as("fp16.loss_scale", NUMBER, 0)
    if enabled["fp16"] is True and document.has("fp16.loss_scale"):
        _loss_scale(found, fixed)
    if enabled["fp16"] is True:
        found.of("managed").setdefault("initial_scale", "2**16")  # DeepSpeed's default
    elif enabled["fp16"] == AUTO:
        _perhaps_scaled(found, document)


_AUTO_PRECISION = each(
    loop='only a Trainer fills in "auto"; give GeminiDDP mixed_precision="bf16" or "fp16"',
    trainer="mixed_precision= of gemini={...}: if TrainingArguments has bf16=True or fp16=True, "
    'remove that and set mixed_precision to "bf16" or "fp16"',
    accelerate='only DeepSpeed\'s plugin fills in "auto"; give gemini={...} mixed_precision="bf16" or "fp16"',
)


def _loss_scale(found: Conversion, fixed: Any) -> None:
    if fixed in (0, AUTO):
        found.say("fp16.loss_scale", NOT_NEEDED, "0: here the scale is dynamic, too")
        return
    for name in ("initial_scale", "min_scale", "max_scale"):
        words = found.put(f"managed.{name}", repr(fixed))
    found.say("fp16.loss_scale", TAKEN, f"{words}, and initial_scale= and min_scale=: the scale is constant")
    for name in ("loss_scale_window", "hysteresis", "initial_scale_power", "min_loss_scale"):
        found.say(f"fp16.{name}", NOT_NEEDED, "loss_scale is fixed")


def _perhaps_scaled(found: Conversion, document: Document) -> None:
    """Explain which loss scale options to set if fp16 is chosen later; only fp16 has a loss scale."""
    for path, default in _SCALES.items():
        key = KEYS.get(path)
        kind = NUMBER if key is None or key.kind is None else key.kind
        value = document.take_as(path, kind)
        if value in (None, AUTO, default):
            found.say(path, NOT_NEEDED, "it is the default here, too")
            continue
        name = "initial_scale" if key is None else key.option(found.target).partition(".")[2]
        call = "{managed}" if found.target is Target.LOOP else "gemini_optimizer={...}"
        text = f'with mixed_precision="fp16" give {call} {name}={kind.text(value)}'
        found.say(path, NOT_SUPPORTED, text.replace("{managed}", "GeminiOptimizer"))


_SCALES = {"fp16.loss_scale": 0, "fp16.loss_scale_window": 1000, "fp16.initial_scale_power": 15,
           "fp16.hysteresis": 2, "fp16.min_loss_scale": 1}  # fmt: skip


# --------------------------------------------------------------------------------------- batches
def _batches(found: Conversion, document: Document) -> None:
    whole = Kind((int,), least=1)
    total, micro, times = (
        document.take_as(key, whole)
        for key in ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    )
    for key, value in (("train_batch_size", total), ("train_micro_batch_size_per_gpu", micro),
                       ("gradient_accumulation_steps", times)):  # fmt: skip
        if value == AUTO:
            found.say(key, *auto(found.target, FILLED[key]))
    trains = found.target is Target.TRAINER
    batch = "arguments.per_device_train_batch_size" if trains else "loop.batch"
    steps = {
        Target.LOOP: "loop.accumulation",
        Target.TRAINER: "arguments.gradient_accumulation_steps",
        Target.ACCELERATE: "accelerator.gradient_accumulation_steps",
    }[found.target]
    if isinstance(micro, int):
        found.say("train_micro_batch_size_per_gpu", TAKEN, found.put(batch, repr(micro)))
    if isinstance(times, int):
        found.say("gradient_accumulation_steps", TAKEN, found.put(steps, repr(times)))
    if not isinstance(total, int):
        return
    if isinstance(micro, int) and isinstance(times, int):
        found.say("train_batch_size", NOT_NEEDED, "it is batch x accumulation x ranks")
    elif AUTO in (micro, times):
        found.say("train_batch_size", NOT_NEEDED, "it follows from the batch, the accumulation and the ranks")
    else:
        part = micro if micro is not None else times or 1
        if total % part:
            name = "train_micro_batch_size_per_gpu" if micro is not None else "gradient_accumulation_steps"
            raise ConfigError(
                f"{document.source}: train_batch_size is {total} and {name} is {part}: the first "
                "must be a multiple of the second; correct one of them"
            )
        option = steps if micro is not None else batch
        found.say("train_batch_size", TAKEN, found.put(option, f"max(1, {total // part} // ranks)"))


# ------------------------------------------------------------------------------------------ ZeRO
_CUT = "every chunk is sharded over the ranks, parameters too (ZeRO-3)"
_STAGES = {
    0: "one process holds the model in chunks; several ranks shard them",
    1: f"{_CUT}; the updates equal those of stage 1",
    2: f"{_CUT}; the updates equal those of stage 2",
    3: _CUT,
}
_HOST = "HOST holds what does not fit on the GPU; host_bytes= limits it"


def _zero(found: Conversion, document: Document) -> None:
    path = "zero_optimization.stage"
    stage = document.take(path, (int,), 0)
    if stage not in _STAGES and stage != AUTO:
        raise ConfigError(f"{document.source}: {document.name(path)} is {stage}; it must be 0, 1, 2 or 3")
    if stage == AUTO:
        found.say(path, *auto(found.target, ""))
    else:
        plugin = f"; LowLevelZeroPlugin(stage={stage}) of gemini.parallel.booster keeps parameters whole"
        whole = (
            stage in (1, 2)
            and found.target is Target.LOOP
            and not document.section("zero_optimization.offload_param")
        )
        found.say(path, TAKEN, _STAGES[stage] + (plugin if whole else ""))
    for name in ("offload_param", "offload_optimizer"):
        _offload(found, document, f"zero_optimization.{name}")
    for name in ("cpu_offload", "cpu_offload_param", "cpu_offload_params"):
        if document.take(f"zero_optimization.{name}", (bool,), False) is True:
            found.say(f"zero_optimization.{name}", TAKEN, _HOST)
        else:
            found.say(f"zero_optimization.{name}", NOT_NEEDED, "this value changes nothing")
    found.notes.append("device_bytes=, host_bytes= and disk_dir= limit the memory of the model on each tier")


def _offload(found: Conversion, document: Document, where: str) -> None:
    """Convert the offload section of parameters or states."""
    device = document.take(f"{where}.device", (str,), "none")
    path = document.take(f"{where}.nvme_path", (str,))
    pinned = document.take(f"{where}.pin_memory", (bool,))
    document.take_as(f"{where}.ratio", NUMBER)
    if device not in ("none", "cpu", "nvme", AUTO):
        name = document.name(f"{where}.device")
        raise ConfigError(f"{document.source}: {name} is {device!r}; it must be none, cpu or nvme")
    if device in ("none", AUTO):
        found.say(where, NOT_NEEDED, "with device none nothing is offloaded")
        return
    if device == "nvme" and path in (None, AUTO):
        raise ConfigError(
            f"{document.source}: {document.name(f'{where}.device')} is nvme, but nvme_path is "
            "missing; add nvme_path"
        )
    found.say(f"{where}.device", TAKEN, _HOST)
    if device == "nvme":
        _disk(found, where, quoted(path))
    elif path is not None:
        found.say(f"{where}.nvme_path", NOT_NEEDED, "the device is cpu")
    if pinned is not None:
        words = found.put("model.pin_memory", "False") if not pinned else ""
        found.say(f"{where}.pin_memory", TAKEN, words or "pin_memory= is True by default on a GPU")


def _disk(found: Conversion, where: str, path: str) -> None:
    chosen = found.of("model").setdefault("disk_dir", path)
    if chosen == path:
        words = found.put("model.disk_dir", path)
        found.say(f"{where}.device", TAKEN, f"{words}: it holds what does not fit on DEVICE and HOST")
        found.say(f"{where}.nvme_path", TAKEN, words)
    else:
        found.say(f"{where}.nvme_path", NOT_SUPPORTED, f"one DISK tier holds everything: disk_dir={chosen}")


def _communication(found: Conversion, document: Document) -> None:
    dtype = document.take("communication_data_type", (str,))
    if dtype in ("fp16", "bf16", "bfp16"):
        words = found.put("model.reduce_dtype", '"fp16"' if dtype == "fp16" else '"bf16"')
        found.say("communication_data_type", TAKEN, words)


# ------------------------------------------------------------------------------------- optimizer
_PARAMS = "optimizer.params"


def note_optimizer(found: Conversion, document: Document) -> None:
    """Add a comment to the program if the file has no optimizer."""
    if not document.section("optimizer") and found.target is not Target.TRAINER:
        found.notes.append("the file has no optimizer: replace HybridAdam by the optimizer of your script")


def _optimizer(found: Conversion, document: Document) -> None:
    note_optimizer(found, document)
    if not document.section("optimizer"):
        return
    kind = document.take("optimizer.type", (str,), "")
    params = document.section(_PARAMS)
    name = kind.lower()
    if name in _ADAMS:
        _adam(found, document, decouples=name == "adamw")
    elif name in _OURS:
        found.drive(_OURS[name])
    elif name in _ONE_BIT:
        _one_bit(found, params, _ONE_BIT[name])
    elif name == "muon" and found.target is Target.TRAINER:
        _adam_of_muon(found, document)
    elif name == "muon":
        _muon(found, document)
    elif name in _TORCH:
        found.drive(f"torch.optim.{_TORCH[name][0]}")
    else:
        if name not in _WITHOUT_RULE:
            import torch

            refuse_unknown(document, "optimizer.type", kind, _DEEPSPEEDS, torch.optim)
        says = _WITHOUT_RULE.get(
            name, f"{kind} is not supported: the program has HybridAdam, with the options of the file"
        )
        found.say("optimizer.type", NOT_SUPPORTED, says)
    if found.optimizer_class == "gemini.Lamb":  # DeepSpeed's defaults
        found.of("optimizer").update(eps="1e-08", bias_correction="True")
    if "optimizer.type" not in {".".join(path) for path in found.said}:
        found.say("optimizer.type", TAKEN, found.optimizer_class)
    for key in params:
        path = f"{_PARAMS}.{key}"
        if (*path.split("."),) not in found.said:
            _param(found, document, key, path)


def _param(found: Conversion, document: Document, key: str, path: str) -> None:
    """Convert a parameter of the optimizer."""
    options = _OWN_OPTIONS[found.optimizer_class]
    if key in _SPEED_ONLY:
        found.say(path, NOT_NEEDED, "it changes how torch computes the update, not the result")
        return
    if key not in options:
        guess = did_you_mean(key, options)
        way_out = "if so, correct it and convert again" if guess else "leave it out"
        found.say(path, NOT_SUPPORTED, f"{found.optimizer_class} has no option {key}{guess}; {way_out}")
        return
    value = _value(document, key, path)
    if value == AUTO and isinstance(value, str):
        found.say(path, *auto(found.target, FILLED.get(path, "")))
        if found.target is Target.TRAINER and path in FILLED:
            found.of("optimizer")[key] = AUTO
    elif value is not None:
        found.of("optimizer")[key] = repr(value)
        is_argument = found.target is Target.TRAINER and path in FILLED
        if is_argument and (key == "weight_decay" or _is_adamw(found)):
            found.say(path, TAKEN, f"{FILLED[path]} of TrainingArguments")
        else:
            found.say(path, TAKEN, f"{key}={value!r} of {found.optimizer_class}")


def _one_bit(found: Conversion, params: dict[str, Any], kind: str) -> None:
    """Convert an optimizer that compresses gradients. ``kind``: our class with the same rule, without
    compression."""
    found.drive(kind)
    found.say(
        "optimizer.type",
        TAKEN,
        f"{kind}, with the update rule of its warmup. The difference: after the warmup DeepSpeed "
        "freezes the second moment and sends one bit for each value; here ranks send whole "
        "gradients, and reduce_dtype= halves them",
    )
    for key in _OF_ONE_BIT:
        if key in params:
            found.say(f"{_PARAMS}.{key}", NOT_NEEDED, "ranks send whole gradients, so it has no effect")


def _muon(found: Conversion, document: Document) -> None:
    """Convert Muon with its Adam. ``lr`` is the rate of both, unless they have their own."""
    found.drive("gemini.Muon")
    found.of("model")["optimizer_rule"] = repr("muon")  # separate chunks for hidden matrices: one state each
    found.say(
        "optimizer.type",
        TAKEN,
        "gemini.Muon: Muon for hidden matrices, AdamW for all other parameters. The difference: "
        "matrices named wte, wpe, score or classifier, and weights with more than two dimensions, "
        "use AdamW",
    )
    path = f"{_PARAMS}.lr"
    shared = document.take_as(path, NUMBER)
    for own, name in (("muon_lr", "lr"), ("adam_lr", "adam_lr")):
        rate = document.take_as(f"{_PARAMS}.{own}", NUMBER)
        if isinstance(rate, int | float):
            found.of("optimizer")[name] = repr(rate)
            found.say(f"{_PARAMS}.{own}", TAKEN, f"{name}={rate!r} of gemini.Muon")
        elif isinstance(shared, int | float):
            found.of("optimizer")[name] = repr(shared)
            found.say(path, TAKEN, f"{name}={shared!r} of gemini.Muon")
    if document.has(f"{_PARAMS}.muon_lr") and document.has(f"{_PARAMS}.adam_lr"):
        found.say(path, NOT_NEEDED, "muon_lr and adam_lr replace it")
    found.say(f"{_PARAMS}.ns_method", NOT_NEEDED, "all methods compute the same matrix, up to rounding")
    says = "Muon orthogonalizes the whole matrix, not each head: remove this key"
    found.say(f"{_PARAMS}.per_head_muon", NOT_SUPPORTED, says)


def _adam_of_muon(found: Conversion, document: Document) -> None:
    """Report that Muon is not possible because the Trainer gives optimizers no names, and use the rate of
    Muon's Adam for Adam."""
    found.say(
        "optimizer.type",
        NOT_SUPPORTED,
        "gemini.Muon needs the names of parameters, and the Trainer does not pass them: the program "
        "has HybridAdam, with adam_lr if the file has it; to use Muon, convert with --for accelerate "
        "or --for loop",
    )
    for key in ("muon_lr", "momentum", "ns_steps", "ns_method", "per_head_muon"):
        found.say(f"{_PARAMS}.{key}", NOT_SUPPORTED, "only Muon uses it")
    rate = document.take_as(f"{_PARAMS}.adam_lr", NUMBER)
    if isinstance(rate, int | float):
        found.of("optimizer")["lr"] = repr(rate)
        found.say(f"{_PARAMS}.lr", NOT_SUPPORTED, "only Muon uses it: Adam has adam_lr")
        found.say(f"{_PARAMS}.adam_lr", TAKEN, f"learning_rate={rate!r} of TrainingArguments")


def _is_adamw(found: Conversion) -> bool:
    return found.optimizer_class == "gemini.HybridAdam" and "adamw_mode" not in found.of("optimizer")


def _value(document: Document, key: str, path: str) -> Any:
    if key in _FLAGS:
        return document.take(path, (bool,))
    if key == "ns_steps":
        return document.take_as(path, Kind((int,), least=1, most=99))
    if key != "betas":
        return document.take_as(path, NUMBER)
    betas = document.take(path, (list,))
    if betas is None or betas == AUTO:
        return betas
    if len(betas) != 2 or not all(type(beta) in (int, float) and 0 <= beta < 1 for beta in betas):
        raise ConfigError(
            f"{document.source}: {document.name(path)} is {betas!r:.100}; it must be two numbers, "
            "each at least 0 and below 1"
        )
    return tuple(betas)


def _adam(found: Conversion, document: Document, *, decouples: bool) -> None:
    """DeepSpeed's Adam decays weights as AdamW does, unless ``adam_w_mode`` is false."""
    path = f"{_PARAMS}.adam_w_mode"
    mode = document.take(path, (bool,), True)
    if not decouples and mode is False:
        found.of("optimizer")["adamw_mode"] = "False"
        found.say(path, TAKEN, "adamw_mode= of gemini.HybridAdam")
    elif document.has(path):
        found.say(path, NOT_NEEDED, "gemini.HybridAdam decays weights as AdamW by default")
    uses_torch = document.take(f"{_PARAMS}.torch_adam", (bool,), False) is True
    if (
        uses_torch
        and "adamw_mode" not in found.of("optimizer")
        and not document.has(f"{_PARAMS}.weight_decay")
    ):
        found.of("optimizer")["weight_decay"] = "0.01"  # default of torch.optim.AdamW
