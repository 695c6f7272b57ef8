"""Cases ``search`` and ``architectures``: the time and memory of planning, and the models that can be
planned.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from gemini.cli.plan_layout import run_on
from gemini.cli.plan_model import ModelOptions, find_model
from gemini.errors import ConfigError, GeminiError
from gemini.parallel.layout_plan import Run
from gemini.planner.chunks import StageCapacity
from gemini.planner.search import Question, search
from gemini_bench import plan_jobs as jobs
from gemini_bench.programs_model import LlamaSizes, require_packages
from gemini_bench.record import Row
from gemini_bench.session import CaseResult, Session

MAX_SECONDS = 5.0
RANKS = (2, 4, 8)

_DEEP = LlamaSizes(hidden=4096, intermediate=11008, layers=48, heads=32, vocab=32_000)
_CAPACITY = StageCapacity(80 * 2**30, 0, 2**42)
_TOKENS = 16
# Every architecture that training is tested with: built small, a table by groups.
ZOO = Path(__file__).resolve().parents[2] / "tests" / "zoo" / "models.toml"
_QUICK_MODELS = 4


def planning(session: Session) -> CaseResult:
    """Search for a deep model over 8 ranks, on one core.

    Raises:
        ConfigError: transformers is missing.
    """
    require_packages("search", "transformers")
    options = {"layers": 4 if session.quick else _DEEP.layers, "ranks": 8, "batch": 64, "seq": 2048}
    session.progress(f"search: {options['layers']} layers, {options['ranks']} ranks")
    run = session.run("plan_search.plan_deep", options)
    found = run.data()
    rows = [
        Row("planning", found["seconds"], "s", MAX_SECONDS),
        Row("planning: of the processor", found["processor_seconds"], "s"),
        Row("combinations", found["combinations"], "combinations"),
        Row("combinations that were priced", found["priced"], "combinations"),
        Row("peak memory of the process", run.peak_rss_bytes, "bytes"),
    ]
    return CaseResult(rows, options, found)


def architectures(session: Session) -> CaseResult:
    """Search for every architecture of transformers in the zoo, small, over 2, 4 and 8 ranks.

    Raises:
        ConfigError: transformers or the checkout is missing.
    """
    require_packages("architectures", "transformers")
    models = dict(zoo())
    if session.quick:
        models = dict(list(models.items())[:_QUICK_MODELS])
    session.progress(f"architectures: {len(models)} models over {', '.join(map(str, RANKS))} ranks")
    options = {"models": models, "ranks": RANKS, "place": os.fspath(session.disk_dir)}
    found = session.run("plan_search.plan_zoo", options).data()
    outcomes = [outcome for each in found.values() for outcome in each.values()]
    rows = [Row("architectures", len(found), "models")]
    for ranks in RANKS:
        planned = sum(each[str(ranks)] == PLANNED for each in found.values())
        rows.append(Row(f"planned over {ranks} ranks", planned, "models"))
    refused = sum(each.startswith(REFUSED) for each in outcomes)
    rows.append(Row("refused with the reason", refused, "searches"))
    rows.append(
        Row("ended with another error", sum(each.startswith(ERROR) for each in outcomes), "searches", 0)
    )
    return CaseResult(rows, {"ranks": RANKS, "batch": jobs.BATCH, "tokens": _TOKENS}, found)


def zoo() -> Iterator[tuple[str, tuple[str, dict[str, Any]]]]:
    """Yield the architectures: the name of each, its class of transformers and the options of its
    configuration.

    Raises:
        ConfigError: the table is not there.
    """
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib
    try:
        table = tomllib.loads(ZOO.read_text())
    except OSError as error:
        raise ConfigError(
            f"the models are those of {ZOO.name} in a checkout: run from one ({error})"
        ) from error
    for group in table["group"]:
        for name, model in group["models"].items():
            both = {**group, **model}
            if both["library"] != "transformers":
                continue
            options = {**group.get("options", {}), **model.get("options", {})}
            if "sizes" in both:
                options = {"sizes": both["sizes"], **options}
            yield name, (both["build"], _sized(options, table["sizes"]))


def _sized(options: Mapping[str, Any], sizes: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Return options with those of the ``sizes`` that they name; in objects within them, too."""
    own: dict[str, Any] = {
        name: _sized(each, sizes) if isinstance(each, dict) else each for name, each in options.items()
    }
    if "sizes" not in own:
        return own
    named: str = own.pop("sizes")
    return {**sizes[named], **own}


# -- in the workers ------------------------------------------------------------------------------


def plan_deep(options: dict[str, Any]) -> dict[str, Any]:
    """Return the seconds of one search, its counts of combinations, and the best ones."""
    import transformers

    torch.set_num_threads(1)
    config = LlamaSizes(
        _DEEP.hidden, _DEEP.intermediate, options["layers"], _DEEP.heads, _DEEP.vocab
    ).config()
    with torch.device("meta"):
        model: nn.Module = transformers.LlamaForCausalLM(config).train()
    question = Question(options["ranks"], options["batch"], jobs.supposed_machine(), _CAPACITY)
    start, busy = time.perf_counter(), time.process_time()
    found = search(model, lambda samples: jobs.run_of(samples, options["seq"]), question)
    return {
        "seconds": time.perf_counter() - start,
        "processor_seconds": time.process_time() - busy,
        "combinations": found.num_combinations,
        "priced": found.num_priced,
        "best": [str(each.combination) for each in found.prices],
        "left_out": found.left_out,
    }


PLANNED, REFUSED, ERROR = "planned", "refused: ", "error: "


def plan_zoo(options: dict[str, Any]) -> dict[str, Any]:
    """Return the outcome of planning each architecture, by number of ranks."""
    torch.set_num_threads(1)
    return {
        name: {str(ranks): _outcome(kind, fields, ranks, options["place"]) for ranks in options["ranks"]}
        for name, (kind, fields) in options["models"].items()
    }


def _outcome(kind: str, fields: dict[str, Any], ranks: int, place: str) -> str:
    """Plan as ``gemini plan CONFIG --search`` does."""
    import transformers

    question = Question(ranks, jobs.BATCH, jobs.supposed_machine(), _CAPACITY)
    try:
        config = getattr(transformers, kind).config_class(**fields, architectures=[kind])
        file = Path(place, "config.json")
        file.write_text(json.dumps(config.to_dict()))
        source = find_model(os.fspath(file), ModelOptions(_TOKENS, checkpointing=False, seq_is_asked=False))
        example = source.example(1)
        model = source.example(1).model

        def run_of(samples: int) -> Run:
            return run_on(example, source.example(samples).inputs, source.loss)

        found = search(model, run_of, question)
    except GeminiError as error:
        return f"{REFUSED}{error}"
    except Exception as error:  # what is counted here
        return f"{ERROR}{type(error).__name__}: {error}"
    return PLANNED if found.prices else REFUSED + "; ".join(found.left_out.values())


TASKS = {"plan_deep": plan_deep, "plan_zoo": plan_zoo}
