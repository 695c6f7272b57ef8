"""``gemini trace``: records the timeline of real training steps, of a job or a user's script, as a trace
file, a page and a table."""

from __future__ import annotations

import argparse
import re
import runpy
import signal
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any
from weakref import WeakKeyDictionary

import torch
from rich import box
from rich.table import Table
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook

from gemini.cli import train
from gemini.cli.console import Console, print_json
from gemini.cli.options import add_memory_options, options_named
from gemini.errors import ConfigError, GeminiError
from gemini.jobs.gpt.config import TrainConfig
from gemini.model.ddp import GeminiDDP
from gemini.system.config import format_bytes
from gemini.system.files import io_errors
from gemini.timeline.event_recorder import TimelineRecorder
from gemini.timeline.summary import LINK_TITLES, PART_TITLES, StepSummary, parts, seconds_text

EPILOG = """\
examples:
  gemini trace --device-bytes 24MiB --disk-dir out/disk --layers 8 --hidden 256 --heads 8 --out out/trace
      record three steps of the GPT of gemini train in 24 MiB, the rest on disk
  gemini trace --out out/mine --script train.py --epochs 1
      run your own script as `python train.py --epochs 1` does, and record every GeminiDDP in it

in the --out directory (files of an earlier recording are removed, other files stay):
  trace.html   a page for any browser: where the time went, what waited for which transfer, which link was
               busy when, how full each tier was; needs no network
  trace.json   the same events for https://ui.perfetto.dev or chrome://tracing
  trace-step.json
               the order of a step, for gemini simulate
  trace-2.html, trace-2.json, ... for further models of a script

The first step of a model only records its order, and the second still adapts the plan: skip both (--warmup).
Ctrl-C ends after the step and writes the recorded events; a second Ctrl-C ends at once.

exit codes:
  0 done    2 an error    130, 143 Ctrl-C or SIGTERM
  with --script also the exit code of the script: 1 if it ends with an error

Sizes are bytes: 65536, 64KiB, 512MiB, 4GiB. All options come before --script.
"""

EXIT_UNWRITTEN = 2


def add_parser(subparsers: Any) -> None:
    """Add the ``trace`` command to ``subparsers``."""
    parser = subparsers.add_parser(
        "trace",
        help="record training steps and show their timeline as a page",
        description="Record real training steps: every operator and its waits, every transfer, and the fill "
        "of every tier. Trains the GPT of `gemini train`, or runs your own script.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    group = parser.add_argument_group("recording")
    group.add_argument(
        "--warmup", type=int, default=3, metavar="N", help="steps before the recording starts (default: 3)"
    )
    group.add_argument("--record", type=int, default=3, metavar="N", help="steps to record (default: 3)")
    group.add_argument(
        "--out",
        default="gemini-trace",
        metavar="DIR",
        help="output directory, created if missing (default: gemini-trace)",
    )
    group.add_argument("--json", action="store_true", help="print the summary as JSON on standard output")
    group.add_argument("--quiet", action="store_true", help="print only the summary, no progress")
    group.add_argument(
        "--script",
        nargs=argparse.REMAINDER,
        metavar="FILE ...",
        help="a Python file and its arguments, to run instead of the built-in training; the options of "
        "model, training and memory then have no effect",
    )
    train.add_model_options(parser.add_argument_group("model and text"))
    train.add_training_options(parser.add_argument_group("training"))
    add_memory_options(parser.add_argument_group("memory"), TrainConfig)
    parser.set_defaults(run=run)


def split_script(arguments: Sequence[str]) -> tuple[list[str], list[str] | None]:
    """Return the command's arguments up to ``--script``, and the script with its arguments, or None.

    argparse cannot do this: it would read options of the script as its own, and ``--`` as an end of options.
    """
    for index, argument in enumerate(arguments):
        option, has_value, value = argument.partition("=")
        if option == "--script":
            return [*arguments[:index], option], [*([value] if has_value else []), *arguments[index + 1 :]]
    return list(arguments), None


def run(options: argparse.Namespace) -> int:
    """Record, write the files, print the summary, and return the exit code."""
    for name, least in (("warmup", 0), ("record", 1)):
        if getattr(options, name) < least:
            raise ConfigError(f"--{name} is {getattr(options, name)}; it must be at least {least}")
    out = _Output(Path(options.out), as_json=options.json)
    if options.script is not None:
        return _run_script(options, out)
    from gemini.jobs.gpt.task import record_training
    from gemini.jobs.run.display import LineDisplay, SilentDisplay

    config = train.config_from(options, steps=options.warmup + options.record)
    out.prepare()
    display = SilentDisplay() if options.quiet else LineDisplay(Console(stderr=True), config.steps)
    with options_named():
        code = record_training(
            config,
            warmup=options.warmup,
            display=display,
            keep=lambda recorder: out.keep(recorder, _title(config)),
        )
    return code or out.exit_code


def _run_script(options: argparse.Namespace, out: _Output) -> int:
    if not options.script:
        raise ConfigError("--script needs a file to run, followed by the file's arguments")
    path, *arguments = options.script
    if not Path(path).is_file():
        raise ConfigError(f"--script {path}: the file does not exist")
    out.prepare()
    recording = ScriptRecording(warmup=options.warmup, steps=options.record)
    try:
        with recording:
            code = run_script(path, arguments)
    finally:
        for recorder, model in recording.recorders:
            out.keep(recorder, f"{model} of {path}")
        if not recording.recorders:
            out.warn(
                f"nothing was recorded: in {path} no GeminiDDP started a training step after "
                f"--warmup {options.warmup}, except steps that the script recorded itself; try "
                "--warmup 0"
            )
    return code or out.exit_code


# Hint for the user about each file of a recording.
_USES = {"html": "open it in a browser", "chrome": "for ui.perfetto.dev", "step": "for gemini simulate"}
_OWN_NAME = re.compile(r"trace(-\d+)?(-step)?\.(html|json)", re.ASCII)


class _Output:
    """Writes the files and prints the summaries of one command."""

    def __init__(self, directory: Path, *, as_json: bool) -> None:
        self.exit_code = 0
        self._directory = directory.absolute()  # a script may change the working directory
        self._as_json = as_json
        self._num_written = 0

    def prepare(self) -> None:
        """Create the directory and test writing to it, before any work that could be lost.

        Raises:
            ConfigError: it cannot be created or written.
        """
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=self._directory) as file:
                file.write(b"tried")
        except OSError as error:
            raise ConfigError(
                f"cannot write to --out {self._directory}: {error.strerror}; name a directory that "
                "you can write to or create"
            ) from error

    def keep(self, recorder: TimelineRecorder, title: str) -> None:
        """Write the files of a recording, and print its summary. A failure is printed and sets ``exit_code``
        to 2, but is not raised: an error of the training or further recordings may follow."""
        try:
            files = self._write(recorder, title)
            self._print(files, title, recorder.summary())
        except BrokenPipeError:
            return  # nobody reads the summary, but the files were written
        except (GeminiError, OSError) as error:
            self.exit_code = EXIT_UNWRITTEN
            self.warn(f"gemini: error: {error}")

    def _write(self, recorder: TimelineRecorder, title: str) -> dict[str, Path]:
        if not self._num_written:
            self._remove_older()
        self._num_written += 1
        name = "trace" if self._num_written == 1 else f"trace-{self._num_written}"
        files = {"html": self._directory / f"{name}.html", "chrome": self._directory / f"{name}.json"}
        recorder.save_html(files["html"], title=title)
        recorder.save_chrome(files["chrome"])
        if recorder.trace is not None:
            files["step"] = self._directory / f"{name}-step.json"
            recorder.trace.save(files["step"])
        return files

    def _remove_older(self) -> None:
        """Remove the files of an earlier command, which would be mistaken for new ones."""
        with io_errors("remove the files of an earlier recording", self._directory):
            for path in self._directory.iterdir():
                if _OWN_NAME.fullmatch(path.name) and path.is_file():
                    path.unlink()

    def _print(self, files: Mapping[str, Path], title: str, steps: Sequence[StepSummary]) -> None:
        if self._as_json:
            paths = {kind: str(path) for kind, path in files.items()}
            print_json({"title": title, **paths, "steps": [step.to_dict() for step in steps]}, indent=None)
            return
        console = Console()
        console.print(step_table(title, steps))
        wrote = [f"{path} ({_USES[kind]})" for kind, path in files.items()]
        console.print(f"wrote {', '.join(wrote)}", soft_wrap=True, highlight=False, markup=False)

    def warn(self, text: str) -> None:
        """Print a message on standard error."""
        Console(stderr=True).print(text, soft_wrap=True, highlight=False, markup=False)


def _title(config: TrainConfig) -> str:
    limit = "no limit" if config.device_bytes is None else format_bytes(config.device_bytes)
    return f"GPT of {config.layers} x {config.hidden}, {config.precision}, DEVICE {limit}"


class ScriptRecording:
    """Context manager that records ``steps`` steps of every GeminiDDP that trains, after ``warmup`` of its
    steps.

    It detects forward passes by torch's global module hook, so the script needs no change. A model that the
    script records itself is left alone; if the script begins to record later, the steps recorded until then
    are kept. ``recorders``: (recorder, class name of its model).
    """

    def __init__(self, *, warmup: int, steps: int) -> None:
        self.recorders: list[tuple[TimelineRecorder, str]] = []
        self._warmup = warmup
        self._steps = steps
        self._first_step: WeakKeyDictionary[GeminiDDP, int] = WeakKeyDictionary()
        self._recorded: WeakKeyDictionary[GeminiDDP, bool] = WeakKeyDictionary()

    def __enter__(self) -> ScriptRecording:
        self._hook = register_module_forward_pre_hook(self._before_forward)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._hook.remove()
        for recorder, _ in self.recorders:
            recorder.stop()

    def _before_forward(self, module: nn.Module, _inputs: Any) -> None:
        if not isinstance(module, GeminiDDP) or not torch.is_grad_enabled() or module in self._recorded:
            return
        first = self._first_step.setdefault(module, module.manager.step)
        if module.manager.step - first >= self._warmup and module.manager.observer is None:
            recorder = TimelineRecorder(module.storage, module.manager, steps=self._steps, gives_way=True)
            recorder.start()
            self._recorded[module] = True
            self.recorders.append((recorder, type(module.module).__name__))


def run_script(path: str, arguments: Sequence[str]) -> int:
    """Run ``path`` as ``python path arguments...`` would, and return its exit code.

    An exception is printed as Python does, with the lines of the script; a GeminiError too, because the
    remedy is in the script. KeyboardInterrupt passes. SIGTERM ends the script as ``sys.exit`` does.
    """
    argv, search = sys.argv, list(sys.path)
    sys.argv = [path, *arguments]
    sys.path.insert(0, str(Path(path).resolve().parent))
    try:
        with _sigterm_exits():
            runpy.run_path(path, run_name="__main__")
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            return end.code or 0
        print(end.code, file=sys.stderr)
        return 1
    except Exception as error:  # print it as the interpreter would
        frames = _frames_of_script(error.__traceback__)
        sys.excepthook(type(error), error.with_traceback(frames), frames)
        return 1
    finally:
        sys.argv, sys.path[:] = argv, search
    return 0


def _frames_of_script(traceback: TracebackType | None) -> TracebackType | None:
    """Return ``traceback`` without the frames before the script's first line."""
    ours = (__file__, runpy.run_path.__code__.co_filename)
    while traceback is not None and traceback.tb_frame.f_code.co_filename in ours:
        traceback = traceback.tb_next
    return traceback


@contextmanager
def _sigterm_exits() -> Iterator[None]:
    """Context manager in which SIGTERM raises SystemExit, unless it has another handler."""
    is_ours = threading.current_thread() is threading.main_thread()
    if not is_ours or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return
    signal.signal(signal.SIGTERM, _exit)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _exit(signum: int, _frame: FrameType | None) -> None:
    raise SystemExit(128 + signum)


def step_table(title: str, steps: Sequence[StepSummary]) -> Table:
    """Return a table with one column per step: how its time was spent, the bytes transferred, and the share
    of transfers hidden behind computing."""
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD)
    table.add_column("")
    table.add_column("share", justify="right")
    for step in steps:
        table.add_column(f"step {step.number}" + ("" if step.complete else " (part)"), justify="right")
    whole = sum(step.seconds for step in steps)
    table.add_row("a step", "", *(seconds_text(step.seconds) for step in steps), style="bold")
    each = [parts(step) for step in steps]
    for name, what in PART_TITLES.items():
        seconds = [part.get(name, 0.0) for part in each]
        if any(seconds):
            table.add_row(what, f"{sum(seconds) / whole:.1%}", *map(seconds_text, seconds))
    table.add_section()
    for link, what in LINK_TITLES.items():
        if any(link in step.links for step in steps):
            table.add_row(what, "", *(_moved(step, link) for step in steps))
    table.add_row("transfers overlapped with computing", "", *(f"{step.overlap_share:.0%}" for step in steps))
    table.add_row("operators", "", *(str(step.num_operators) for step in steps))
    table.add_row("deferred updates", "", *(str(step.num_updates) for step in steps))
    return table


def _moved(step: StepSummary, link: str) -> str:
    use = step.links.get(link)
    return "" if use is None else format_bytes(use.nbytes)
