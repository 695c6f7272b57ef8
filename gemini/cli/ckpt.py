"""``gemini ckpt``: lists, verifies and converts checkpoints."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.markup import escape
from rich.table import Table

from gemini.cli.console import Console, print_json
from gemini.errors import GeminiError
from gemini.system.config import format_bytes

_SETTINGS = ("lr", "betas", "eps", "weight_decay")
_WIDTH = 110  # columns if the output is not a terminal


def render_checkpoints(found: Sequence[Mapping[str, Any]]) -> None:
    """Print one line per checkpoint, and the contents of the newest one that is not damaged."""
    console = _console()
    if found:
        console.print(f"{escape(str(Path(found[0]['path']).parent))}, newest first:", soft_wrap=True)
    table = Table(box=None)
    table.add_column("checkpoint", no_wrap=True)
    for name in ("step", "size", "files", "ranks"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("", overflow="fold")
    for entry in found:
        if entry["damage"] is not None:
            table.add_row(Path(entry["path"]).name, "", "", "", "", f"[red]{escape(entry['damage'])}[/]")
        else:
            cells = [
                f"{entry['step']:,}",
                format_bytes(entry["bytes"]),
                str(entry["files"]),
                str(entry["ranks"]),
            ]
            table.add_row(Path(entry["path"]).name, *cells, "")
    console.print(table)
    whole = next((entry for entry in found if entry["damage"] is None), None)
    if whole is not None:
        console.print(_details(whole))


def render_verdicts(found: Sequence[Mapping[str, Any]]) -> None:
    """Print one line per checkpoint."""
    console = _console()
    for entry in found:
        if entry["damage"] is None:
            console.print(f"[green]whole[/]    {escape(entry['path'])}, {format_bytes(entry['bytes'])}")
        else:
            console.print(f"[red]damaged[/]  {escape(entry['damage'])}")


def _details(entry: Mapping[str, Any]) -> Table:
    table = Table(title=f"\n{Path(entry['path']).name}", title_justify="left", box=None, show_header=False)
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    states = f"{entry['num_states']} with optimizer states"
    table.add_row("parameters", f"{entry['num_parameters']:,} in {entry['num_tensors']} tensors, {states}")
    for alias, stored in entry["aliases"].items():
        table.add_row("tied", escape(f"{alias} is {stored}"))
    table.add_row("buffers", str(entry["num_buffers"]))
    for index, group in enumerate(entry["param_groups"]):
        settings = ", ".join(f"{key} {group[key]}" for key in _SETTINGS if key in group)
        table.add_row(f"group {index}", escape(f"{group['num_tensors']} tensors: {settings}"))
    if entry["loss_scale"] is not None:
        table.add_row("loss scale", escape(str(entry["loss_scale"])))
    table.add_row("scheduler", "yes" if entry["scheduler"] else "no")
    if entry["extra"]:
        table.add_row("extra", escape(str(entry["extra"])))
    return table


def _console() -> Console:
    console = Console()
    return console if console.is_terminal else Console(width=_WIDTH)


EXIT_DAMAGED = 1

HELP = """\
PATH is a directory of checkpoints (the newest is used), one checkpoint (step-00000200), or the --checkpoint
directory of gemini train. PATH is never changed.

examples:
  gemini ckpt inspect out/book                list steps, sizes, parameters, settings
  gemini ckpt verify out/book                 read every byte and compare it with its checksum
  gemini ckpt convert out/book model --to hf --dtype bf16
"""

INSPECT_HELP = """\
exit codes:
  0 a checkpoint is readable    1 all are damaged    2 an error: there is none, or a file cannot be read
"""

VERIFY_HELP = """\
exit codes:
  0 every checkpoint is intact    1 one is damaged    2 an error: there is none, or a file cannot be read
"""

CONVERT_HELP = """\
formats:
  hf     a directory with weights in Hugging Face's format; put the model's config.json and tokenizer beside
         them, and from_pretrained() of transformers loads it
  torch  one file: torch.load(FILE, weights_only=True) gives "model", "optimizer", "scheduler", "step" and
         "extra"; the first two are for load_state_dict() of the module and of torch.optim.AdamW
  dcp    a directory: torch.distributed.checkpoint.load() fills {"model", "optimizer", "step"} as
         torch.distributed.checkpoint.state_dict returns them, sharded over any number of ranks

Weights are fp32 (the masters, if training was in 16 bits). TARGET appears when it is complete; every byte of
the checkpoint is verified on the way. Checkpoints are private to their owner; TARGET follows the umask.

examples:
  gemini ckpt convert out/book out/model --to hf --dtype bf16
  gemini ckpt convert out/book/checkpoint/step-00000200 state.pt --to torch
  gemini ckpt convert out/book out/dcp --to dcp
"""


def add_parser(subparsers: Any) -> None:
    """Add the ``ckpt`` command to ``subparsers``."""
    parser = subparsers.add_parser(
        "ckpt",
        help="list, verify or convert the contents of a checkpoint",
        description="Look at checkpoints, verify them, and write them in other formats.",
        epilog=HELP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    inspect = _add(commands, "inspect", "list the checkpoints, and the contents of the newest", INSPECT_HELP)
    inspect.set_defaults(run=run_inspect)
    verify = _add(commands, "verify", "read every byte and compare it with its checksum", VERIFY_HELP)
    verify.set_defaults(run=run_verify)
    convert = _add(commands, "convert", "write a checkpoint in another format", CONVERT_HELP)
    convert.add_argument("target", type=Path, metavar="TARGET", help="the output; must not exist")
    convert.add_argument("--to", required=True, choices=("hf", "torch", "dcp"), help="the format")
    convert.add_argument(
        "--dtype",
        choices=("fp32", "bf16", "fp16"),
        default="fp32",
        help="of the weights, for hf (default: fp32)",
    )
    convert.set_defaults(run=run_convert)


def run_inspect(options: argparse.Namespace) -> int:
    """Print the checkpoints, and return the exit code. Raises CheckpointError if a file could not be read."""
    from gemini.checkpoint.inspect import describe

    found, unread = _each(_checkpoints(options.path), describe)
    if options.json:
        print_json({"checkpoints": found})
    elif found:
        render_checkpoints(found)
    if unread is not None:
        raise unread
    return 0 if any(entry["damage"] is None for entry in found) else EXIT_DAMAGED


def run_verify(options: argparse.Namespace) -> int:
    """Verify every checkpoint, print the verdicts, and return the exit code. Raises CheckpointError if a file
    could not be read."""
    from gemini.checkpoint.inspect import verdict

    found, unread = _each(_checkpoints(options.path), verdict)
    if options.json:
        print_json({"checkpoints": found})
    elif found:
        render_verdicts(found)
    if unread is not None:
        raise unread
    return 0 if all(entry["damage"] is None for entry in found) else EXIT_DAMAGED


def run_convert(options: argparse.Namespace) -> int:
    """Convert the newest checkpoint; return 0."""
    from gemini.checkpoint import latest
    from gemini.checkpoint.convert import convert

    source = latest(_directory(options.path))
    convert(source, options.target, options.to, dtype=options.dtype)
    files = [path for path in (options.target, *options.target.rglob("*")) if path.is_file()]
    size = sum(path.stat().st_size for path in files)
    if options.json:
        print_json({"source": str(source), "target": str(options.target), "bytes": size})
    else:
        print(f"{source} -> {options.target}: {options.to}, {format_bytes(size)}")
    return 0


def _add(commands: Any, name: str, text: str, epilog: str) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = commands.add_parser(
        name,
        help=text,
        description=f"{text[0].upper()}{text[1:]}.",
        epilog=epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("path", type=Path, metavar="PATH", help="a checkpoint or a directory of them")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    return parser


def _each(
    paths: Sequence[Path], look: Callable[[Path], dict[str, Any]]
) -> tuple[list[dict[str, Any]], GeminiError | None]:
    """Return the results of ``look`` for the readable paths, and the error of the first unreadable one."""
    from gemini.checkpoint.sealed_file import UnreadableError

    found, unread = [], None
    for path in paths:
        try:
            found.append(look(path))
        except UnreadableError as error:
            unread = unread or error
    return found, unread


def _directory(path: Path) -> Path:
    """Return the directory of checkpoints for ``path``, which may be the directory of a run."""
    from gemini.checkpoint.directory import complete_checkpoints
    from gemini.checkpoint.sealed_file import reading

    inner = path / "checkpoint"  # if path is the directory of a run
    with reading(path):
        is_run = inner.is_dir()
    return inner if is_run and not complete_checkpoints(path) else path


def _checkpoints(path: Path) -> list[Path]:
    from gemini.checkpoint.directory import complete_checkpoints, no_checkpoint

    found = complete_checkpoints(_directory(path))
    if not found:
        raise no_checkpoint(path)
    return found
