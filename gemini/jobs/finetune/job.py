"""The job of ``gemini finetune``: fine-tunes a checkpoint under budgets, resumable, with export and summary;
or shows its tokens."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

from gemini import checkpoint
from gemini.comm.ranks import Rank
from gemini.errors import InputError, printable
from gemini.jobs.finetune.checkpoint_directory import ModelDirectory
from gemini.jobs.finetune.config import FineTuneConfig
from gemini.jobs.finetune.encoding import EncodedDocument
from gemini.jobs.finetune.engine import refuse_quantized
from gemini.jobs.finetune.preferences import DPO
from gemini.jobs.finetune.record_files import find_data
from gemini.jobs.finetune.record_kinds import Documents
from gemini.jobs.finetune.task import FineTuneTask
from gemini.jobs.run.display import Display, ReadingDisplay, SilentDisplay
from gemini.jobs.run.managed import make_disk_directory
from gemini.jobs.run.outcome import summarize, written
from gemini.jobs.run.report import Summary
from gemini.jobs.run.run_directory import FollowedDirectory, RunDirectory
from gemini.jobs.run.trackers import require_trackers
from gemini.jobs.run.training import StopRequest, Training, refuse_past
from gemini.system.device import repeatable_operators, resolve_device


@dataclass(frozen=True)
class FineTuneResult:
    """The result of a run. ``exit_code``: 0, or 128 + signal (stopped and saved)."""

    summary: Summary
    losses: tuple[float, ...]
    exit_code: int


def run(
    config: FineTuneConfig,
    *,
    show: Callable[[int], Display],
    forecast: Callable[[FineTuneConfig, int], Iterable[str]] | None = None,
    reading: ReadingDisplay | None = None,
    rank: Rank | None = None,
) -> FineTuneResult:
    """Train with ``config``, export the model and return the result.

    The first SIGINT, SIGTERM or SIGUSR1 ends the run after its step with a checkpoint; the second ends it at
    once.

    Raises a GeminiError before anything is trained if ``config`` cannot work. After a later failure, the last
    complete checkpoint is unchanged.

    Args:
        show: takes the number of steps and returns the display.
        forecast: takes the config and the length of rows, and returns lines to show before the model is
            loaded.
        reading: shows the progress of reading the data.
        rank: this process among those that train together. Only the first rank shows and writes anything.
    """
    rank = Rank() if rank is None else rank
    is_lead = rank.index == 0
    if is_lead:
        require_trackers(config.report_to)
    device = resolve_device(config.device)
    kind = RunDirectory if is_lead else FollowedDirectory
    directory = kind(config.output, checkpoint.is_complete, option="--output", exports=True)
    with contextlib.ExitStack() as scope:
        scope.callback(directory.release)
        resume = bool(rank.agree(lambda: _found(config, directory) if is_lead else ""))
        if config.disk_dir is not None:
            make_disk_directory(config.disk_dir)
        scratch = None if config.disk_dir is None else Path(config.disk_dir)
        with contextlib.nullcontext() if reading is None else reading:
            task = FineTuneTask(
                config,
                directory.model,
                resume=resume,
                scratch=scratch,
                rank=rank,
                refuse=lambda known: _refuse_another(config, directory, known) if resume else None,
                tell=(lambda _: None) if reading is None else reading.show,
            )
        display = show(task.options.steps) if is_lead else _FollowersDisplay()
        with display, StopRequest(display.stopping, rank) as stop, repeatable_operators(device):
            for line in task.describe():
                display.note(line)
            for line in [] if forecast is None else forecast(config, task.seq):
                display.note(line)
            progress = Training(task, directory, display, stop).run()
            written_to = directory if is_lead else None
            if rank.count > 1:
                progress.notes.append(_on_ranks(config, rank.count))
            cut_off = stop.requested and not task.finished
            summary = summarize(progress, task.num_parameters, written_to, interrupted=cut_off)
            summary = replace(summary, data=task.data, model=str(task.target) if task.finished else None)
            if task.best is not None:
                summary = replace(summary, best_step=task.best[0], best_eval_loss=task.best[1])
            summary = written(summary, progress, written_to)
        code = 0 if stop.signum is None else 128 + stop.signum
    return FineTuneResult(summary, tuple(progress.losses[step] for step in sorted(progress.losses)), code)


class _FollowersDisplay(SilentDisplay):
    """Shows nothing, because the first rank does."""

    def stopping(self) -> None:
        """Do nothing."""


def _found(config: FineTuneConfig, directory: RunDirectory) -> str:
    """Return "yes" to resume a run, else "", after all checks that need only the directory."""
    refuse_quantized(config)
    directory.refuse_unmakeable()
    directory.refuse_foreign_model(Path(config.model))
    return "yes" if directory.resumes(config.resume, overwrite=config.overwrite) else ""


def _on_ranks(config: FineTuneConfig, ranks: int) -> str:
    """Return the note about a run over several ranks."""
    cut = [f"{name} {size}" for name, size in config.part_sizes.items() if size > 1]
    how = f" ({', '.join([*cut, f'dp {config.data_ranks(ranks)}'])})" if cut else ""
    return f"trained on {ranks} ranks{how}; bytes and budgets are per rank"


def _refuse_another(config: FineTuneConfig, directory: RunDirectory, known: Mapping[str, Any]) -> None:
    """Raise ConfigError if the existing run has another identity, or is past its end."""
    directory.check_resume(known)
    if config.steps is not None:
        refuse_past(directory.path, directory.saved_step(), config.steps)


def preview(config: FineTuneConfig) -> Iterator[str]:
    """Yield lines about the first ``config.show`` documents.

    Raises:
        ConfigError: model, tokenizer or data cannot be used.
    """
    model = ModelDirectory(config)
    seq, tokenizer = model.seq(), model.tokenizer()
    encoder = model.encoder(tokenizer)
    is_dpo = config.objective == DPO
    documents = Documents(
        find_data(config.data), data_format=config.data_format, keys=config.data_keys, pairs=is_dpo
    )
    for document in islice(documents, config.show):
        for encoded in encoder.encode_pair(document) if is_dpo else (encoder.encode(document),):
            yield from _shown(tokenizer, encoded, seq)
    if not documents.counts:
        raise InputError(f"--data {config.data} has no records; put at least one into it")
    if encoder.uses_plain_template:
        yield "the tokenizer has no chat template: a plain one is used (docs/finetune.md)"


def _shown(tokenizer: Any, encoded: EncodedDocument, seq: int) -> Iterator[str]:
    document, ids = encoded.document, encoded.ids
    learned = encoded.learned or [True] * len(ids)
    yield f"{document.place}: {document.kind}, {len(ids)} tokens, {sum(learned)} of them in the loss"
    yield f"{'':>6}  {'token':>7}  loss  text"
    for place, (token, is_learned) in enumerate(zip(ids[:seq], learned, strict=False)):
        text = printable(repr(tokenizer.decode([token])))
        yield f"{place:>6}  {token:>7}  {'yes' if is_learned else '-':<4}  {text}"
    if len(ids) > seq:
        yield f"        and {len(ids) - seq} more tokens, beyond --seq {seq}"
    yield ""
