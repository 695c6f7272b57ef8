"""A configuration of Accelerate, with FSDP or DeepSpeed in it, as our call."""

from __future__ import annotations

from typing import Any

from gemini.cli import deepspeed_config
from gemini.cli.conversion import AUTO, BY_HAND, DONE, NONE, NOT_NEEDED, Conversion, Keys
from gemini.errors import ConfigError

_LAUNCH = (BY_HAND, "torchrun, or accelerate launch as before")
_WRAPPING = (NOT_NEEDED, "chunks hold all parameters; none is wrapped by itself")
_STATE = (NOT_NEEDED, "gemini.checkpoint streams; state_dict() is whole")

_FSDP = {
    "auto_wrap_policy": _WRAPPING,
    "transformer_layer_cls_to_wrap": _WRAPPING,
    "min_num_params": _WRAPPING,
    "backward_prefetch": (NOT_NEEDED, "prefetch follows the recorded step"),
    "backward_prefetch_policy": (NOT_NEEDED, "prefetch follows the recorded step"),
    "forward_prefetch": (NOT_NEEDED, "prefetch follows the recorded step"),
    "limit_all_gathers": (NOT_NEEDED, "gather_bytes= bounds whole chunks"),
    "state_dict_type": _STATE,
    "use_orig_params": (NOT_NEEDED, "parameters keep their identity"),
    "sync_module_states": (NOT_NEEDED, "the first rank's weights are taken"),
    "cpu_ram_efficient_loading": (BY_HAND, "gemini.from_pretrained(directory) reads straight into chunks"),
    "activation_checkpointing": (
        BY_HAND,
        "model.gradient_checkpointing_enable(), or activation_recompute=True",
    ),
    "version": (NOT_NEEDED, "there is one"),
}

_SHARDS_WHOLE = {
    "FULL_SHARD": True,
    "1": True,
    "HYBRID_SHARD": True,
    "4": True,
    "SHARD_GRAD_OP": False,
    "2": False,
    "HYBRID_SHARD_ZERO2": False,
    "5": False,
    "NO_SHARD": False,
    "3": False,
}


def convert(document: Any, source: str) -> Conversion:
    """Return what a configuration of Accelerate becomes; ``source`` is the file's name.

    Raises:
        ConfigError: a value that Accelerate would refuse as well, by its key.
    """
    keys = Keys(document, "", source)
    if "deepspeed_config" in keys:
        found = _deepspeed(keys.under("deepspeed_config"), source)
    else:
        found = Conversion(source)
        found.say("(optimizer)", BY_HAND, "HybridAdam's defaults are printed, give what the script has")
        _fsdp(found, keys.under("fsdp_config"))
    precision = keys.take("mixed_precision", (str, bool), "no")
    if precision in ("bf16", "fp16"):
        found.model["mixed_precision"] = f'"{precision}"'
        found.say("mixed_precision", DONE, f'mixed_precision="{precision}", fp32 masters are kept')
    elif precision not in ("no", False):  # YAML reads an unquoted no as false
        found.say("mixed_precision", NONE, f"no {precision}: bf16 or fp16")
    times = keys.take("gradient_accumulation_steps", int)
    if times not in (None, AUTO):
        if times < 1:
            raise ConfigError(f"{source}: gradient_accumulation_steps is {times}; it is to be 1 or more")
        found.accumulate(times)
        found.say("gradient_accumulation_steps", DONE, "the loop: gradients stay until step()")
    for key in keys.left():
        found.say(key, *_LAUNCH)
    return found


def _deepspeed(keys: Keys, source: str) -> Conversion:
    """Convert what ``accelerate config`` asks of DeepSpeed, by DeepSpeed's own keys."""
    file = keys.take("deepspeed_config_file", str)
    if file is not None:
        raise ConfigError(
            f"{source} names deepspeed_config_file {file!r}; convert that file: it has all there is"
        )
    zero: dict[str, Any] = {"stage": keys.take("zero_stage", int, 2)}
    for part, path in (
        ("offload_param", "offload_param_nvme_path"),
        ("offload_optimizer", "offload_optimizer_nvme_path"),
    ):
        device, where = keys.take(f"{part}_device", str, "none"), keys.take(path, str)
        if device != "none":
            zero[part] = {"device": device, "nvme_path": where}
    document: dict[str, Any] = {"zero_optimization": zero}
    for key, kind in (("gradient_clipping", (float,)), ("gradient_accumulation_steps", int)):
        value = keys.take(key, kind)
        if value is not None:
            document[key] = value
    found = deepspeed_config.convert(document, source)
    for key in keys.left():
        found.say(keys.path(key), NOT_NEEDED, "of DeepSpeed's launch and engine")
    return found


def _fsdp(found: Conversion, keys: Keys) -> None:
    strategy = str(keys.take("fsdp_sharding_strategy", (str, int), "FULL_SHARD")).upper()
    if strategy not in _SHARDS_WHOLE:
        raise ConfigError(
            f"{found.source}: fsdp_sharding_strategy is {strategy!r}; there are {', '.join(_SHARDS_WHOLE)}"
        )
    text = "every chunk is cut among the ranks, parameters too (ZeRO-3)"
    if strategy in ("HYBRID_SHARD", "4", "HYBRID_SHARD_ZERO2", "5"):
        text += "; process_group= a DeviceMesh of two dimensions: a row per node"
    elif not _SHARDS_WHOLE[strategy]:
        text += "; LowLevelZeroPlugin(stage=2) keeps parameters whole"
    found.say(keys.path("fsdp_sharding_strategy"), DONE, text)
    reshard = keys.take("fsdp_reshard_after_forward", (bool, str))
    if reshard is not None:
        found.say(
            keys.path("fsdp_reshard_after_forward"), NOT_NEEDED, "gather_bytes= bounds what stays whole"
        )
    offload = keys.take("fsdp_offload_params", bool, False)
    if offload is True:
        found.say(keys.path("fsdp_offload_params"), DONE, "HOST is used where a GPU's memory is short")
    found.say("(budget)", BY_HAND, "device_bytes= and, for a DISK tier, disk_dir=")
    for key in keys.left():
        verdict, what = _FSDP.get(key.removeprefix("fsdp_"), (NONE, "not known here"))
        found.say(keys.path(key), verdict, what)
