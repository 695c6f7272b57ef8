"""``gemini serve``: answers over HTTP with a model that need not fit in memory."""

from __future__ import annotations

import argparse
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gemini.cli.sample import size
from gemini.cli.train import options_named
from gemini.errors import ConfigError

if TYPE_CHECKING:
    from gemini.jobs.serve.config import ServeConfig

EPILOG = """\
examples:
  gemini serve out/tuned/model
      answer at http://127.0.0.1:8020, with what memory is free
  gemini serve ./llama --device-bytes 4GiB --kv-bytes 512MiB --max-batch 32
      a model of any size in 4 GiB: half a GiB for keys and values, the rest for weights
  gemini serve ./llama --device-bytes 4GiB --kv-bytes 16GiB --kv-device-bytes 1GiB --disk-dir /fast
      long texts: of 16 GiB of keys and values 1 GiB is in memory, the rest on a disk
  gemini serve ./llama --tp 2 --device-bytes 4GiB --kv-bytes 512MiB
      two processes of this machine, each with half of every layer in 4 GiB of its own
  gemini serve --config opt_config.py --batching bucket
      a configuration of ColossalAI's OPT service, and its batches

ask it:
  curl http://127.0.0.1:8020/v1/completions -H 'Content-Type: application/json' \\
      -d '{"prompt": "Once upon a time", "max_tokens": 32, "temperature": 0}'

Endpoints: /v1/completions, /v1/chat/completions and /v1/models (as OpenAI's clients use them), /generation,
/health, /ready, /metrics, and /docs, which describes them. Everybody who reaches the port may ask: listen on
other addresses than 127.0.0.1 only behind something that checks who asks.

Ctrl-C and SIGTERM let answers end that have begun, for --drain seconds. With --tp the loss of one process
ends all of them.

exit codes:
  0 done    2 an error, with its reason

Sizes are bytes: 65536, 64KiB, 512MiB, 4GiB.
"""

_SIZES = {
    "device-bytes": "budget of DEVICE, for weights and --kv-bytes; default: the free memory, less a margin",
    "kv-bytes": "of it, for keys and values; default: for --max-batch texts of 1,024 tokens, at most a "
    "quarter",
    "kv-device-bytes": "of --kv-bytes, what --device-bytes has room for: the rest needs --host-bytes or "
    "--disk-dir; default: all",
    "host-bytes": "budget of HOST, memory of the CPU; default: chosen by the runtime",
    "body-bytes": "most bytes of a request (default: 4MiB)",
}
_NUMBERS: dict[str, tuple[type, str, str]] = {
    "port": (int, "N", "where to listen; 0: any that is free (default: 8020)"),
    "max-batch": (int, "N", "most requests that share a pass (default: 16)"),
    "max-pass-tokens": (int, "N", "most tokens of a pass; longer prompts take several (default: 512)"),
    "queue-size": (int, "N", "most requests that wait; others get status 429 (default: 256)"),
    "max-tokens": (int, "N", "most tokens of an answer (default: 1024)"),
    "timeout": (float, "S", "seconds after which an answer ends where it is (default: never)"),
    "cache-size": (int, "N", "queries whose answers are kept and given again (default: 0, none)"),
    "cache-list-size": (int, "N", "answers kept of each; any is given, when all are there (default: 1)"),
    "tp": (int, "N", "processes that each have a part of every layer, and sizes of their own (default: 1)"),
    "drain": (int, "S", "seconds for answers that have begun, at the end (default: 30)"),
}
_FIELDS = {"timeout": "timeout_s", "drain": "drain_s"}


def add_parser(subparsers: Any) -> None:
    """Add the ``serve`` command to ``subparsers``."""
    parser = subparsers.add_parser(
        "serve",
        help="answer over HTTP, within byte budgets",
        description="Serve a causal language model from a directory that save_pretrained() has made. "
        "Requests share passes, and weights that do not fit in memory are read when they are needed.",
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
        help="options from a file such as opt_config.py; read, not executed",
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
            help="continuous: a request begins when there is a place (default); bucket: when the batch "
            "before has ended, with others that draw alike and ask for at most as many tokens",
            **given,
        )
    else:
        texts = {
            "name": ("NAME", "what the model is called (default: the directory's name)"),
            "device": ("DEVICE", "where operators compute: cpu, cuda, cuda:1 (default: cpu)"),
            "disk-dir": (
                "DIR",
                "for keys and values below DEVICE, weights that cannot be read from the checkpoint as they "
                "are, and on a GPU",
            ),
            "host": ("ADDRESS", "address to listen at (default: 127.0.0.1)"),
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
        raise ConfigError("there is no model; name a directory, or a --config that has a checkpoint")
    if ranks > 1 and given.get("tp", ranks) != ranks:
        raise ConfigError(
            f"--tp is {given['tp']} and torchrun has started {ranks} ranks; leave --tp out there"
        )
    return ServeConfig(**{**given, **({"tp": ranks} if ranks > 1 else {})})


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
