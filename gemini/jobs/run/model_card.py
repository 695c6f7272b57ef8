"""Writes model cards (README.md beside weights) with the base, the data, the recipe and the losses, as the
files of a run record them. A card contains nothing that no file records."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from gemini import _C
from gemini.errors import InputError, printable
from gemini.system.input_files import InputDirectory

Row = tuple[str, str]
_RUN, _METRICS, _ADAPTER = "run.json", "metrics.jsonl", "adapter_config.json"
_SUMMARY = "summary.json"
_MAX_BYTES = 2**24  # limit for a run's record or an adapter's config; both have some hundred bytes
_MAX_METRICS_BYTES = 2**30
_SILENT = (
    "The files of the run record nothing else. The purpose, limits and license of the model follow "
    "from its base model and its data."
)


def tuned_card(run: Path, *, is_adapter: bool, best: tuple[int, float] | None = None) -> str:
    """Return the card of the model or adapters that the run of ``gemini finetune`` in directory ``run`` has
    trained.

    ``best``: (step, held-out loss) of the weights, if they are those of the step with the lowest loss.

    Raises:
        InputError: the files of the run cannot be read.
    """
    options = _options_of(run)
    base = name_of(options.get("model"))
    return _card(
        title=f"{base}, fine-tuned",
        base=base,
        library="peft" if is_adapter else "transformers",
        method="fine-tuned with `gemini finetune`",
        rows=[("base", base), *_recipe(options), *_losses(run), *_best_row(best)],
    )


def merged_card(base: Path, adapter: Path) -> str:
    """Return the card of the model in ``base`` with the adapters in ``adapter`` merged in. It has the recipe
    if the adapters are in the directory of a run of ``gemini finetune``.

    Raises:
        InputError: a file that the card needs cannot be read.
    """
    fields = InputDirectory(adapter).json(_ADAPTER, _MAX_BYTES)
    name = name_of(str(base))
    rows = [("base", name), *_adapter_rows(fields)]
    run = adapter.absolute().parent
    if adapter.name == "model" and _is_run(run):
        known = {key for key, _ in rows}
        said = (*_recipe(_options_of(run)), *_losses(run), *_best_row(_best_of(run)))
        rows += [row for row in said if row[0] not in known]
    return _card(
        title=f"{name} with adapters merged in",
        base=name_of(fields.get("base_model_name_or_path")) if name == "unknown" else name,
        library="transformers",
        method="made with `gemini merge`: the adapters are part of the weights",
        rows=rows,
    )


def adapters_named(*, dora: bool, rslora: bool) -> str:
    """Return the name of a kind of adapters."""
    if dora:
        return "DoRA adapters (rsLoRA)" if rslora else "DoRA adapters"
    return "rsLoRA adapters" if rslora else "LoRA adapters"


def name_of(path: Any) -> str:
    """Return the name of a model or data set for a card: a hub name unchanged, or the last part of a path,
    which reveals nothing about the user's machine."""
    if not isinstance(path, str) or not path.strip("/ "):
        return "unknown"
    is_hub_name = path.count("/") == 1 and not path.startswith((".", "/", "~")) and not Path(path).exists()
    return path if is_hub_name else Path(path).absolute().name


def _card(*, title: str, base: str, library: str, method: str, rows: Iterable[Row]) -> str:
    head = {"base_model": base, "library_name": library, "pipeline_tag": "text-generation"}
    lines = ["---", *(f"{key}: {json.dumps(value)}" for key, value in head.items()), "---", ""]
    lines += [
        f"# {_cell(title)}",
        "",
        f"This model was {method} (gemini-runtime {_C.build_info()['version']}).",
        "",
    ]
    lines += ["| | |", "|---|---|", *(f"| {key} | {_cell(value)} |" for key, value in rows), ""]
    return "\n".join([*lines, _SILENT, ""])


def _cell(text: str) -> str:
    return printable(text).replace("|", "\\|").replace("<", "&lt;")


def _is_run(directory: Path) -> bool:
    """Return whether a directory is that of a run of ``gemini finetune``; other programs write files with the
    same name."""
    try:
        return {"model", "data", "lora"} <= _options_of(directory).keys()
    except InputError:
        return False


def _options_of(run: Path) -> Mapping[str, Any]:
    found = InputDirectory(run).json(_RUN, _MAX_BYTES)
    options = found.get("options")
    if not isinstance(options, dict):
        raise InputError(f"{run / _RUN} has no options of a run; repair it, or move it to another place")
    return {**options, "seq": found.get("seq", options.get("seq"))}


def _recipe(options: Mapping[str, Any]) -> list[Row]:
    """Return the options of a run that its numbers depend on."""
    rows = [("data", name_of(options.get("data")))]
    if options.get("eval_data"):
        rows.append(("held out", name_of(options["eval_data"])))
    elif options.get("eval_share"):
        rows.append(("held out", f"{_shown(options['eval_share'])} of the rows"))
    is_dpo = options.get("objective") == "dpo"
    if is_dpo:
        rows.append(("objective", f"DPO on preference pairs, beta {_shown(options.get('dpo_beta'))}"))
    rank = options.get("lora")
    if rank:
        alpha = options.get("lora_alpha") or 2 * rank
        kind = adapters_named(dora=options.get("dora") is True, rslora=options.get("rslora") is True)
        said = {"rank": rank, "alpha": alpha, "dropout": options.get("lora_dropout")}
        said["on"] = options.get("lora_targets")
        said["on arrays"] = options.get("lora_target_parameters") or None
        parts = [f"{key} {value}" for key, value in said.items() if value is not None]
        rows.append(("trained", f"{kind}: {', '.join(parts)}"))
    else:
        rows.append(("trained", "all weights"))
    names = {
        "loss on": "loss_on",
        "tokens in a row": "seq",
        "packed": "packing",
        "rows in a pass": "batch",
        "passes in a step": "accumulate",
        "learning rate": "lr",
        "schedule": "schedule",
        "warmup, share of steps": "warmup",
        "weight decay": "weight_decay",
        "largest gradient norm": "clip",
        "precision": "precision",
        "optimizer states": "state_dtype",
        "seed": "seed",
    }
    if is_dpo:  # each answer is a row, and the learned tokens are fixed
        names = {text: key for text, key in names.items() if key not in ("packing", "loss_on")}
    return rows + [
        (text, _shown(options[key])) for text, key in names.items() if options.get(key) is not None
    ]


def _losses(run: Path) -> list[Row]:
    """Return the losses of the first and the last step, and the last held-out loss."""
    directory = InputDirectory(run)
    if _METRICS not in directory:
        return []
    first: dict[str, Any] | None = None
    last: dict[str, Any] = {}
    held_out: float | None = None
    directory.check(_METRICS, _MAX_METRICS_BYTES)
    with directory.file(_METRICS).open(encoding="ascii", errors="replace") as lines:
        for line in lines:
            try:
                record = json.loads(line)
            except (ValueError, RecursionError):
                continue  # a killed run leaves half a line
            if isinstance(record, dict) and _is_number(record.get("step")) and _is_number(record.get("loss")):
                first, last = first or record, record
                held_out = record["eval_loss"] if _is_number(record.get("eval_loss")) else held_out
    if first is None:
        return []
    rows = [("steps", f"{last['step']:,}")]
    rows.append(("loss, first and last step", f"{first['loss']:.4f}, {last['loss']:.4f}"))
    if held_out is not None:
        rows.append(("last held-out loss", f"{held_out:.4f}"))
    return rows


def _best_of(run: Path) -> tuple[int, float] | None:
    """Return (step, held-out loss) of the exported weights, if they are not those of the run's end."""
    directory = InputDirectory(run)
    if _SUMMARY not in directory:
        return None
    summary = directory.json(_SUMMARY, _MAX_BYTES)
    step, loss = summary.get("best_step"), summary.get("best_eval_loss")
    return (step, float(loss)) if type(step) is int and isinstance(loss, (int, float)) else None


def _best_row(best: tuple[int, float] | None) -> list[Row]:
    if best is None:
        return []
    step, loss = best
    return [("weights", f"of step {step:,}, which had the lowest held-out loss: {loss:.4f}")]


def _adapter_rows(fields: Mapping[str, Any]) -> list[Row]:
    said = {
        "adapters": "peft_type",
        "rank": "r",
        "alpha": "lora_alpha",
        "dropout": "lora_dropout",
        "on": "target_modules",
        "on arrays": "target_parameters",
        "replaced whole": "modules_to_save",
        "rsLoRA": "use_rslora",
        "DoRA": "use_dora",
    }
    rows = []
    for text, key in said.items():
        value = fields.get(key)
        if value is None or value is False:
            continue
        shown = ", ".join(sorted(map(str, value))) if isinstance(value, list) else _shown(value)
        rows.append((text, shown))
    return rows


def _shown(value: Any) -> str:
    return ("no", "yes")[value] if isinstance(value, bool) else str(value)


def _is_number(value: Any) -> bool:
    return type(value) in (int, float)
