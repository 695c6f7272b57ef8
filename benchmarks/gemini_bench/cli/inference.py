"""``gemini bench inference``: the command."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from gemini_bench.cli.output import EXIT_CODES, add_common, check_paths, command, progress, publish

HELP = f"""\
cases:
  decode      an OPT of 149 MiB generates with a third of its weights on DEVICE and the rest on DISK: bytes
              that a pass reads, and its processor time beyond that of the resident model, beside
              accelerate's disk_offload, whose files leave the page cache before each pass
  checkpoint  the same from a checkpoint that is the DISK tier (from_pretrained(trains=False)): bytes until
              the first token, bytes written
  experts     a Qwen3-MoE that uses the experts of three shipped routings, a third of its weights on DEVICE:
              bytes that a pass reads, of those of the experts that it uses
  engine      gemini.inference.Engine answers 1 client and 16 from a checkpoint, with a third of the weights
              on DEVICE and with all of them: time and bytes per token, what the engine adds to its passes
              and to generate(), and what a thousand requests leave behind
  kv          8 texts of 640 tokens grow, a third of the weights and of the keys and values on DEVICE: bytes
              that a pass reads and writes, and its processor time beside keys and values in memory
  llama       a Llama of 310 MiB in bf16, a third of it in memory, beside llama.cpp over mmap with the same
              weights and in 4 bits: bytes that a pass reads, and its time. Needs llama-cpp-python, gguf and
              a memory cgroup (version 1, root), which limits the page cache; else its targets are not
              measured

All contenders must give the same tokens, llama.cpp the same first token. Figures are bytes and processor
time, which other programs on the machine disturb less than wall clock.

examples:
  gemini bench inference --out benchmarks/results/inference.json
  gemini bench inference --only checkpoint

{EXIT_CODES.format(tiny="with --quick")}
A run takes some minutes and 1 GB of disk. It needs transformers and accelerate
(pip install "gemini-runtime[hf]").
"""


def add_inference(kinds: Any) -> None:
    """Add ``gemini bench inference`` to ``kinds``."""
    parser = kinds.add_parser(
        "inference",
        help="answering with weights below DEVICE: bytes and processor time, beside accelerate and llama.cpp",
        description="Measure what generation with weights below DEVICE moves and takes.",
        epilog=HELP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--quick", action="store_true", help="tiny settings: see that every case runs, no figures"
    )
    add_common(parser)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Run the cases of ``gemini bench inference``, print the record, and return the exit code."""
    from gemini_bench import inference
    from gemini_bench.session import Session

    names = inference.chosen(options.only)
    check_paths(Path(), options.out)
    session = Session(disk_dir=Path().resolve(), quick=options.quick, progress=progress(), record=options.out)
    return publish(inference.run(session, names, command()), options)
