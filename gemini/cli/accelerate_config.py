"""Converts a configuration of Accelerate, with FSDP or DeepSpeed in it, to our options.

``accelerate config`` writes such a file. A JSON for ``fsdp_config=`` of TrainingArguments has the same FSDP
keys without a prefix.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gemini.cli import deepspeed_config
from gemini.cli.conversion import (
    NOT_NEEDED,
    NOT_SUPPORTED,
    TAKEN,
    WHOLE,
    Conversion,
    Document,
    Key,
    Path,
    Target,
    each,
    report,
)
from gemini.cli.deepspeed_keys import KEYS as OF_DEEPSPEED
from gemini.cli.deepspeed_keys import SWITCHED
from gemini.errors import ConfigError

_FSDP = "fsdp_config"
_PLUGIN = "deepspeed_config"
# Key of DeepSpeed -> key of Accelerate's DeepSpeed plugin.
_OF_PLUGIN = {
    "zero_optimization.stage": "zero_stage",
    "zero_optimization.offload_param.device": "offload_param_device",
    "zero_optimization.offload_param.nvme_path": "offload_param_nvme_path",
    "zero_optimization.offload_optimizer.device": "offload_optimizer_device",
    "zero_optimization.offload_optimizer.nvme_path": "offload_optimizer_nvme_path",
    "zero_optimization.stage3_gather_16bit_weights_on_model_save": "zero3_save_16bit_model",
    "gradient_clipping": "gradient_clipping",
    "gradient_accumulation_steps": "gradient_accumulation_steps",
}
_STRATEGIES = (
    "FULL_SHARD",
    "SHARD_GRAD_OP",
    "NO_SHARD",
    "HYBRID_SHARD",
    "HYBRID_SHARD_ZERO2",
)  # numbered from 1

_WRAPPING = "chunks hold all parameters; no module is wrapped"
_NO_XLA = "TPUs are not supported: each rank computes on CPUs or one GPU"
_PREFETCH = "prefetch follows the recorded step"
_LAUNCH = "unchanged: accelerate launch, or torchrun, starts the processes"
_OF_LAUNCHER = "only DeepSpeed's launcher uses it: accelerate launch, or torchrun, starts the processes"
_TABLE = (
    *(Key(f"{_FSDP}.fsdp_{name}", _WRAPPING, NOT_NEEDED)
      for name in ("auto_wrap_policy", "transformer_layer_cls_to_wrap", "min_num_params", "ignored_modules",
                   "use_orig_params")),
    *(Key(f"{_FSDP}.fsdp_{name}", _PREFETCH, NOT_NEEDED)
      for name in ("backward_prefetch", "backward_prefetch_policy", "forward_prefetch")),
    Key(f"{_FSDP}.fsdp_limit_all_gathers", "gather_bytes= of {model} limits gathered chunks", NOT_NEEDED),
    Key(f"{_FSDP}.fsdp_reshard_after_forward", "gather_bytes= of {model} limits gathered chunks", NOT_NEEDED),
    Key(f"{_FSDP}.fsdp_sync_module_states", "all ranks use the weights of the first rank", NOT_NEEDED),
    Key(f"{_FSDP}.fsdp_cpu_ram_efficient_loading",
        "gemini.from_pretrained(directory) reads a checkpoint straight into chunks", NOT_NEEDED),
    Key(f"{_FSDP}.fsdp_version", "version 1 and version 2 are converted alike", NOT_NEEDED),
    Key(f"{_FSDP}.fsdp_enable_fsdp_float8_all_gather", "fp8 is not supported: remove this key and use bf16"),
    Key(f"{_FSDP}.fsdp_activation_checkpointing_offload", "give {model} activation_offload='auto'"),
    Key(f"{_FSDP}.fsdp_activation_cpu_offload", "give {model} activation_offload='auto'"),
    *(Key(f"{_FSDP}.fsdp_{name}", _NO_XLA) for name in ("xla", "xla_fsdp_v2", "xla_fsdp_settings")),
    Key(f"{_FSDP}.fsdp_xla_fsdp_grad_ckpt", "give gradient_checkpointing=True"),
    *(Key(name, _LAUNCH, NOT_NEEDED) for name in (
        "compute_environment", "num_processes", "num_machines", "machine_rank", "main_process_ip",
        "main_process_port", "rdzv_backend", "same_network", "gpu_ids", "main_training_function", "debug",
        "enable_cpu_affinity", "use_cpu", "mpirun_config", "command_file", "commands",
    )),
    Key("zero3_init_flag", "build the model on meta: gemini.init_on('meta'), or gemini.from_pretrained()",
        NOT_NEEDED),
    *(Key(f"deepspeed_{name}", _OF_LAUNCHER, NOT_NEEDED)
      for name in ("hostfile", "inclusion_filter", "exclusion_filter", "multinode_launcher")),
    Key("deepspeed_moe_layer_cls_names", "a managed model transfers experts one by one (docs/experts.md)",
        NOT_NEEDED),
    Key("dynamo_config", each(
        loop="{handle}.compile() compiles each block",
        trainer="give TrainingArguments torch_compile=True: each block is compiled",
        accelerate="unchanged: prepare() compiles each block",
    )),
    Key("megatron_lm_config", "use tensor parallelism: parallelize() of gemini.parallel (docs/parallel.md)"),
    Key("parallelism_config", "use HybridParallelPlugin (docs/parallel.md)", off=(1,)),
    Key("fp8_config", "fp8 is not supported: give {model} mixed_precision='bf16'"),
    *(Key(name, _NO_XLA)
      for name in ("tpu_name", "tpu_zone", "tpu_use_cluster", "tpu_use_sudo", "tpu_vm", "tpu_env",
                   "downcast_bf16")),
    *(Key(name, "start the job with torchrun in its container (docs/containers.md)")
      for name in ("ec2_instance_type", "iam_role_name", "image_uri", "profile", "region", "base_job_name",
                   "pytorch_version", "transformers_version", "py_version", "sagemaker_inputs_file",
                   "sagemaker_metrics_file", "additional_args")),
)  # fmt: skip
KEYS: dict[str, Key] = {**OF_DEEPSPEED, **{key.path: key for key in _TABLE}}
_FSDP_NAMES = frozenset(key.path.split(".fsdp_")[1] for key in _TABLE if ".fsdp_" in key.path) | {
    "sharding_strategy", "offload_params", "cpu_offload", "state_dict_type", "activation_checkpointing"
}  # fmt: skip


def is_accelerates(document: Any) -> bool:
    """Return whether ``accelerate config`` has written a document."""
    return isinstance(document, dict) and bool(
        document.keys() & {"distributed_type", _FSDP, "compute_environment", _PLUGIN}
    )


def is_of_fsdp(document: Any) -> bool:
    """Return whether a document is for ``fsdp_config=`` of TrainingArguments."""
    return isinstance(document, dict) and any(
        str(key).removeprefix("fsdp_") in _FSDP_NAMES - {"version", "activation_checkpointing"}
        for key in document
    )


def convert(document: Any, source: str, target: Target) -> Conversion:
    """Convert a configuration of Accelerate; ``source`` is the file's name.

    Raises:
        ConfigError: a value that Accelerate would refuse as well; the message names its key.
    """
    values, names = _in_words_of_deepspeed(document, source)
    found, given = Conversion(source, target), Document(values, source, names)
    _processes(found, given)
    _precision(found, given)
    if _PLUGIN in document:
        deepspeed_config.fill(found, given)
        found.groups.get("arguments", {}).pop("max_grad_norm", None) if not given.has(
            "gradient_clipping"
        ) else None
    else:
        _fsdp(found, given)
        _steps(found, given)
        deepspeed_config.note_optimizer(found, given)
    report(found, given, KEYS, SWITCHED)
    return found


def convert_fsdp(document: dict[str, Any], source: str, target: Target) -> Conversion:
    """Convert a JSON for ``fsdp_config=`` of TrainingArguments. Raises the errors of :func:`convert`."""
    names: dict[Path, Path] = {
        (_FSDP, f"fsdp_{str(key).removeprefix('fsdp_')}"): (str(key),) for key in document
    }
    values = {f"fsdp_{str(key).removeprefix('fsdp_')}": value for key, value in document.items()}
    found, given = Conversion(source, target), Document({_FSDP: values}, source, names)
    _fsdp(found, given)
    deepspeed_config.note_optimizer(found, given)
    report(found, given, KEYS, SWITCHED)
    return found


def _in_words_of_deepspeed(document: Any, source: str) -> tuple[Any, Mapping[Path, Path]]:
    """Return the document with the plugin's keys moved to DeepSpeed's paths, and the user's name of each
    moved key."""
    if not isinstance(document, dict) or _PLUGIN not in document:
        return document, {}
    plugin = dict(Document(document, source).section(_PLUGIN))
    file = plugin.get("deepspeed_config_file")
    if file is not None:
        raise ConfigError(
            f"{source}: deepspeed_config_file is {file!r:.200}, and all options are in that file; "
            "convert it: gemini convert-config FILE --for accelerate"
        )
    values = {key: value for key, value in document.items() if key != _PLUGIN}
    names: dict[Path, Path] = {}
    own = {key: tuple(path.split(".")) for path, key in _OF_PLUGIN.items()}
    for name, value in plugin.items():
        key = str(name)
        path = own.get(key, (key,))
        if path[0] in document:  # Accelerate has a key of that name
            path = (_PLUGIN, key)
        names[path] = (_PLUGIN, key)
        _set(values, path, None if key.endswith("nvme_path") and value == "none" else value)
    if not plugin:
        values[_PLUGIN] = plugin
    return values, names


def _set(values: dict[str, Any], path: Path, value: Any) -> None:
    for section in path[:-1]:
        values = values.setdefault(section, {})
    values[path[-1]] = value


def _processes(found: Conversion, document: Document) -> None:
    kind = document.take("distributed_type", (str, bool), "NO")  # YAML reads an unquoted NO as false
    if kind in ("FSDP", "DEEPSPEED"):
        found.say("distributed_type", TAKEN,
                  "chunks are sharded over the ranks; write MULTI_GPU there (NO for one process) and "
                  "remove the plugin's section: accelerate launch still starts the processes")  # fmt: skip
    elif kind in ("MEGATRON_LM", "XLA", "TPU"):
        found.say("distributed_type", NOT_SUPPORTED, "write MULTI_GPU, or NO for one process")
    else:
        found.say("distributed_type", NOT_NEEDED, _LAUNCH)


def _precision(found: Conversion, document: Document) -> None:
    precision = document.take("mixed_precision", (str, bool), "no")
    if precision in ("bf16", "fp16"):
        words = found.put("model.mixed_precision", f'"{precision}"')
        more = (
            "" if found.target is Target.LOOP else "; write no in the file, or Accelerate turns autocast on"
        )
        found.say("mixed_precision", TAKEN, f"{words}: {precision} weights with masters in fp32{more}")
    elif precision in ("no", False):  # YAML reads an unquoted no as false
        found.say("mixed_precision", NOT_NEEDED, "this value changes nothing")
    else:
        found.say("mixed_precision", NOT_SUPPORTED, f"{precision!r:.20} is not supported: give bf16 or fp16")


def _steps(found: Conversion, document: Document) -> None:
    times = document.take_as("gradient_accumulation_steps", WHOLE)
    if isinstance(times, int):
        option = {
            Target.LOOP: "loop.accumulation",
            Target.TRAINER: "arguments.gradient_accumulation_steps",
            Target.ACCELERATE: "accelerator.gradient_accumulation_steps",
        }[found.target]
        found.say("gradient_accumulation_steps", TAKEN, found.put(option, repr(times)))
    norm = document.take("gradient_clipping", (float,))
    if isinstance(norm, float):
        found.take(document, OF_DEEPSPEED["gradient_clipping"])


def _fsdp(found: Conversion, document: Document) -> None:
    path = f"{_FSDP}.fsdp_sharding_strategy"
    strategy = str(document.take(path, (str, int), "FULL_SHARD")).upper()
    if strategy.isdigit() and 1 <= int(strategy) <= len(_STRATEGIES):
        strategy = _STRATEGIES[int(strategy) - 1]
    if strategy not in _STRATEGIES:
        raise ConfigError(
            f"{found.source}: {document.name(path)} is {strategy!r:.50}; it must be one of "
            f"{', '.join(_STRATEGIES)}, or 1 to 5"
        )
    text = "every chunk is sharded over the ranks, parameters too (ZeRO-3)"
    if strategy.startswith("HYBRID"):
        text += "; give process_group= a DeviceMesh of two dimensions: a row for each node"
    elif strategy != "FULL_SHARD" and found.target is Target.LOOP:
        text += "; LowLevelZeroPlugin(stage=2) of gemini.parallel.booster keeps parameters whole"
    found.say(path, TAKEN, text)
    for name in ("offload_params", "cpu_offload"):
        if _flag(document, f"{_FSDP}.fsdp_{name}"):
            words = "HOST holds what does not fit on the GPU; host_bytes= limits it"
            found.say(f"{_FSDP}.fsdp_{name}", TAKEN, words)
        else:
            found.say(f"{_FSDP}.fsdp_{name}", NOT_NEEDED, "this value changes nothing")
    path = f"{_FSDP}.fsdp_activation_checkpointing"
    if _flag(document, path):
        option = (
            "arguments.gradient_checkpointing" if found.target is Target.TRAINER else "loop.checkpointing"
        )
        found.say(path, TAKEN, found.put(option, "True"))
    else:
        found.say(path, NOT_NEEDED, "this value changes nothing")
    kind = document.take(f"{_FSDP}.fsdp_state_dict_type", (str,), "SHARDED_STATE_DICT")
    found.say(f"{_FSDP}.fsdp_state_dict_type", *_state_dict_type(str(kind), found.target))
    found.notes.append("device_bytes=, host_bytes= and disk_dir= limit the memory of the model on each tier")


def _state_dict_type(kind: str, target: Target) -> tuple[str, str]:
    saved = each(
        loop="gemini.checkpoint.save()",
        trainer="checkpoint-N of the Trainer",
        accelerate="save_state()",
    )[target]
    if kind == "FULL_STATE_DICT":
        return NOT_NEEDED, f"state_dict() returns whole weights in fp32; {saved} streams them"
    return NOT_NEEDED, f"{saved} streams the part of each rank; any number of ranks can load it"


def _flag(document: Document, path: str) -> bool:
    value = document.take(path, (bool, str), False)
    return value is True or (isinstance(value, str) and value.lower() in ("true", "1", "yes"))
