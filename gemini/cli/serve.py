"""``gemini serve``: answers over HTTP with a model that need not fit in memory."""

from __future__ import annotations

import argparse
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gemini.cli.options import options_named, size
from gemini.errors import ConfigError

if TYPE_CHECKING:
    from gemini.jobs.serve.config import ServeConfig

EPILOG = """\
examples:
  gemini serve out/tuned/model
      answer at http://127.0.0.1:8020, in the free memory
  gemini serve ./llama --device-bytes 4GiB --kv-bytes 512MiB --max-batch 32
      a model of any size in 4 GiB: 512 MiB for keys and values, the rest for weights
  gemini serve ./llama --device-bytes 4GiB --kv-bytes 16GiB --kv-device-bytes 1GiB --disk-dir /fast
      long texts: 16 GiB of keys and values, 1 GiB of them in memory, the rest on disk
  gemini serve ./llama --tp 2 --device-bytes 4GiB --kv-bytes 512MiB
      two processes on this machine, each with half of every layer in 4 GiB
  gemini serve --config opt_config.py --batching bucket
      a configuration of ColossalAI's OPT service, with its batching

ask it:
  curl http://127.0.0.1:8020/v1/completions -H 'Content-Type: application/json' \\
      -d '{"prompt": "Once upon a time", "max_tokens": 32, "temperature": 0}'

Endpoints: /v1/completions, /v1/chat/completions and /v1/models (for OpenAI clients), /generation,
/health, /ready, /metrics, and /docs, which describes them. There is no access control: to listen on
another address than 127.0.0.1, put a proxy that authenticates in front.

After Ctrl-C or SIGTERM, started answers have --drain seconds to finish. With --tp the loss of one process
ends all of them.

exit codes:
  0 done    2 an error

Sizes are bytes: 65536, 64KiB, 512MiB, 4GiB.
"""

_SIZES = {
    "device-bytes": "budget of DEVICE, for weights and --kv-bytes; default: the free memory, less a margin",
    "kv-bytes": "part of --device-bytes for keys and values; default: for --max-batch texts of 1,024 tokens, "
    "at most a quarter",
    "kv-device-bytes": "part of --kv-bytes on DEVICE, the rest on --host-bytes or --disk-dir; default: all",
    "host-bytes": "budget of HOST, memory of the CPU; default: chosen by the runtime",
    "body-bytes": "maximum size of a request (default: 4MiB)",
}
_NUMBERS: dict[str, tuple[type, str, str]] = {
    "port": (int, "N", "port to listen on; 0: any free port (default: 8020)"),
    "max-batch": (int, "N", "maximum requests per forward pass (default: 16)"),
    "max-pass-tokens": (
        int,
        "N",
        "maximum tokens per forward pass; longer prompts take several (default: 512)",
    ),
    "queue-size": (int, "N", "maximum waiting requests; further requests get status 429 (default: 256)"),
    "max-tokens": (int, "N", "maximum tokens of an answer (default: 1024)"),
    "timeout": (float, "S", "seconds after which an answer is cut off (default: never)"),
    "cache-size": (int, "N", "number of queries with cached answers (default: 0, no cache)"),
    "cache-list-size": (
        int,
        "N",
        "cached answers per query; once all are cached, one is returned at random (default: 1)",
    ),
    "tp": (int, "N", "tensor parallelism: number of processes, each with its own budgets (default: 1)"),
    "drain": (int, "S", "seconds for started answers to finish at shutdown (default: 30)"),
}
_FIELDS = {"timeout": "timeout_s", "drain": "drain_s"}


def add_parser(subparsers: Any) -> None:
    """Add the ``serve`` command to ``subparsers``."""
    parser = subparsers.add_parser(
        "serve",
        help="serve a model over HTTP within byte budgets",
        description="Serve a causal language model from a directory in the format of save_pretrained(). "
        "Requests share forward passes, and weights that do not fit in memory are read when they are needed.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "model",
        type=Path,
        nargs="?",
        metavar="MODEL",
        help="the model: config.json, safetensors, a tokenizer",
    )
    parser.add_argument("--adapter", type=Path, metavar="DIR", help="adapters that PEFT has saved")
    parser.add_argument(
        "--config",
        type=Path,
        metavar="FILE",
        help="read options from a file such as opt_config.py, without executing it",
    )
    for title, names in (
        ("answers", ("name", "max-tokens", "timeout", "cache-size", "cache-list-size")),
        ("batches", ("batching", "max-batch", "max-pass-tokens", "queue-size")),
        ("memory", ("device", "device-bytes", "kv-bytes", "kv-device-bytes", "host-bytes", "disk-dir", "tp")),
        ("network", ("host", "port", "body-bytes", "drain")),
    ):
        group = parser.add_argument_group(title)
        for name in names:
            _add(group, name)
    parser.set_defaults(run=run)


def _add(group: argparse._ArgumentGroup, name: str) -> None:
    """Add an option. Options that are not given keep the value of the configuration file or of
    ServeConfig."""
    field = _FIELDS.get(name, name.replace("-", "_"))
    given: dict[str, Any] = {"default": argparse.SUPPRESS, "dest": field}
    if name in _SIZES:
        group.add_argument(f"--{name}", type=size, metavar="SIZE", help=_SIZES[name], **given)
    elif name in _NUMBERS:
        kind, metavar, text = _NUMBERS[name]
        group.add_argument(f"--{name}", type=kind, metavar=metavar, help=text, **given)
    elif name == "batching":
        group.add_argument(
            "--batching",
            choices=("continuous", "bucket"),
            help="continuous: a request starts as soon as a batch has room (default); bucket: it starts "
            "after the previous batch, together with requests of equal sampling options and no more "
            "tokens",
            **given,
        )
    else:
        texts = {
            "name": ("NAME", "name of the model (default: the name of the directory)"),
            "device": ("DEVICE", "where operators compute: cpu, cuda, cuda:1 (default: cpu)"),
            "disk-dir": (
                "DIR",
                "DISK tier for keys and values, for weights that cannot be read from the checkpoint "
                "directly, and for a GPU",
            ),
            "host": ("ADDRESS", "address to listen on (default: 127.0.0.1)"),
        }
        metavar, text = texts[name]
        group.add_argument(f"--{name}", metavar=metavar, help=text, **given)


def run(options: argparse.Namespace) -> int:
    """Serve until a signal, and return the exit code."""
    from gemini.jobs.run.ranks import errors_of_rank, num_ranks, place_among_ranks, run_on_ranks

    ranks = num_ranks()
    with errors_of_rank():
        config = _config_from(options, ranks)
        if ranks > 1 or config.tp == 1:
            from gemini.cli.console import silence_transformers
            from gemini.jobs.serve.job import serve

            silence_transformers()
            with options_named(), place_among_ranks() as rank:
                serve(config, _say, rank)
            return 0
    code = run_on_ranks(options.called, config.tp, "Run the command again")
    return 0 if code in (128 + signal.SIGINT, 128 + signal.SIGTERM) else code


def _config_from(options: argparse.Namespace, ranks: int) -> ServeConfig:
    """Return the config of the server, for one of ``ranks`` running ranks. Raises ConfigError."""
    from gemini.jobs.serve.config import ServeConfig, read_config_file

    given = {name: value for name, value in vars(options).items() if name in ServeConfig.__dataclass_fields__}
    given = {name: value for name, value in given.items() if value is not None}
    if options.config is not None:
        file = read_config_file(options.config)
        if file.ignored and ranks == 1:
            _say(f"{options.config}: not used here: {', '.join(file.ignored)}")
        given = {**file.options, **given}
    if "model" not in given:
        raise ConfigError("no model is given; name a directory, or a --config with a checkpoint")
    if ranks > 1 and given.get("tp", ranks) != ranks:
        raise ConfigError(f"--tp is {given['tp']}, but torchrun started {ranks} ranks; leave --tp out")
    return ServeConfig(**{**given, **({"tp": ranks} if ranks > 1 else {})})


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
