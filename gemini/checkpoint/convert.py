"""Converts checkpoints to other formats: for transformers, ``torch.load`` and torch.distributed.checkpoint.

Tensors are assembled in memory-mapped files, so a conversion needs little memory.
"""

from __future__ import annotations

import io
import json
import math
import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import torch

from gemini.checkpoint import contents
from gemini.checkpoint.loading import CheckpointReader
from gemini.checkpoint.sealed_file import Staging
from gemini.checkpoint.tensor_file import TensorFile, TensorSpec
from gemini.errors import ConfigError
from gemini.offload.mapped_tensors import MappedTensors
from gemini.optim.kernels import StateFormat, step_count
from gemini.optim.rule import ABSENT
from gemini.system.durable import publish, scratch_directory
from gemini.system.files import io_errors

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def convert(checkpoint: Path, target: Path, form: str, *, dtype: str = "fp32") -> None:
    """Write the checkpoint in directory ``checkpoint`` to ``target``, which must not exist yet.

    The files get permissions from the umask, because they are meant to be shared.

    Args:
        checkpoint: the directory of one checkpoint.
        target: the file or directory to write.
        form: ``"hf"`` (a directory for transformers' ``from_pretrained``: weights in ``dtype``), ``"torch"``
            (one file for ``torch.load(weights_only=True)``) or ``"dcp"`` (a directory for
            ``torch.distributed.checkpoint``). The last two contain ``model``, ``optimizer``, ``step``.
        dtype: ``"fp32"``, or for ``"hf"`` also ``"bf16"`` or ``"fp16"``.

    Raises:
        DamagedError: a file differs from what was written.
        ConfigError: ``target`` exists, or ``dtype`` or ``form`` is unknown.
        IoError: ``target`` cannot be written.
    """
    if form not in FORMS:
        raise ConfigError(f"there is no form {form!r}; the forms are {', '.join(FORMS)}")
    if dtype not in DTYPES or (dtype != "fp32" and form != "hf"):
        raise ConfigError(f"dtype is {dtype!r}; it is fp32, or for hf also bf16 or fp16")
    with io_errors("look for the target", target):
        exists = target.exists()
    if exists:
        raise ConfigError(f"{target} exists; remove it or name another place")
    with CheckpointReader(checkpoint) as reader, io_errors("convert the checkpoint", target):
        reader.verify()
        target.parent.mkdir(parents=True, exist_ok=True)
        # Next to the target, so that one rename publishes it: complete or absent.
        with scratch_directory(target) as scratch, _causes_raised():
            made = scratch / "made"
            FORMS[form](reader, made, DTYPES[dtype])
            publish(made, target)


class _TorchFile(io.BufferedWriter):
    """A file for torch to write to. For files that torch opens itself its errors do not say the cause.

    When a save is interrupted, torch writes the rest from a destructor, and an error there ends the process.
    So writes after ``close`` do nothing.
    """

    def __init__(self, path: str | os.PathLike[str], mode: str) -> None:
        super().__init__(io.FileIO(path, mode))

    def write(self, data: Any) -> int:
        return memoryview(data).nbytes if self.closed else super().write(data)

    def flush(self) -> None:
        if not self.closed:
            super().flush()


@contextmanager
def _causes_raised() -> Iterator[None]:
    """Raise the OSError or KeyboardInterrupt that caused an error of torch."""
    try:
        yield
    except (OSError, KeyboardInterrupt):
        raise
    except BaseException as error:  # torch.distributed.checkpoint's error is not an Exception
        cause = _first(error, KeyboardInterrupt) or _first(error, OSError)
        if cause is None:
            raise
        try:
            raise cause from None
        finally:
            del cause  # it refers to this frame, which would keep mapped files until the next collection


def _first(error: BaseException, kind: type[BaseException]) -> BaseException | None:
    return next((cause for cause in _causes(error) if isinstance(cause, kind)), None)


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    """Yield the errors behind ``error``, including those that torch.distributed.checkpoint collected."""
    while error is not None:
        for failure, _trace in getattr(error, "failures", {}).values():
            yield from _causes(failure)
        yield error
        error = error.__cause__ or error.__context__


def _to_hf(reader: CheckpointReader, target: Path, dtype: torch.dtype) -> None:
    target.mkdir()
    total = 0
    for file in sorted(set(reader.weights.values())):
        names = [name for name, holder in reader.weights.items() if holder == file]
        kinds = {name: reader.spec(name) for name in names}
        specs = [
            # 8-bit floats are quantization codes: a cast would change their meaning.
            TensorSpec(name, dtype if kind.is_floating_point and kind.itemsize > 1 else kind, shape)
            for name, (kind, shape) in kinds.items()
        ]
        total += sum(spec.nbytes for spec in specs)
        with (
            closing(Staging()) as staging,
            closing(TensorFile(target / file, specs, {}, staging, private=False)) as written,
        ):
            for spec in specs:
                written.write(spec.name, 0, reader.weight(spec.name).to(spec.dtype))
            written.finish()
    index = {"metadata": {"total_size": total}, "weight_map": reader.weights}
    (target / contents.MODEL_INDEX).write_text(json.dumps(index, indent=1, sort_keys=True) + "\n")


def _to_torch(reader: CheckpointReader, target: Path, _dtype: torch.dtype) -> None:
    mapped = _Mapped(reader, target.parent)
    names = [name for group in reader.manifest["group_members"] for name in group]
    steps = reader.manifest["optimizer_steps"]
    state = {index: mapped.state(name) for index, name in enumerate(names) if name in steps}
    groups, first = [], 0
    for settings, members in _groups(reader):
        groups.append({**settings, "params": list(range(first, first + len(members)))})
        first += len(members)
    document = {
        "model": mapped.weights(),
        "optimizer": {"state": state, "param_groups": groups},
        "scheduler": reader.objects()["scheduler"],
        "step": reader.manifest["step"],
        "extra": reader.manifest["extra"],
    }
    with _TorchFile(target, "x") as file:
        torch.save(document, file)


def _to_dcp(reader: CheckpointReader, target: Path, _dtype: torch.dtype) -> None:
    from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemWriter
    from torch.distributed.checkpoint.state_dict_saver import save

    class Files(FileSystem):
        @contextmanager
        def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[io.IOBase]:
            with _TorchFile(path, mode) as stream:
                yield stream

    mapped = _Mapped(reader, target.parent)
    states = {name: mapped.state(name) for name in reader.manifest["optimizer_steps"]}
    groups = [{**settings, "params": members} for settings, members in _groups(reader)]
    document = {
        "model": mapped.weights(),
        "optimizer": {"state": states, "param_groups": groups},
        "step": reader.manifest["step"],
    }
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled", category=UserWarning)
        writer = FileSystemWriter(target)
        writer.fs = Files()
        save(document, storage_writer=writer, no_dist=True)


FORMS: dict[str, Callable[[CheckpointReader, Path, torch.dtype], None]] = {
    "hf": _to_hf,
    "torch": _to_torch,
    "dcp": _to_dcp,
}


_OF_ADAM = {"exp_avg", "exp_avg_sq"}  # Adam counts steps outside these arrays


class _Mapped:
    """Whole tensors of a checkpoint, in a memory-mapped file in ``scratch``."""

    def __init__(self, reader: CheckpointReader, scratch: Path) -> None:
        self._reader = reader
        specs = {name: reader.spec(name) for name in reader.weights}
        sizes = [dtype.itemsize * math.prod(shape) for dtype, shape in specs.values()]
        kept = len(reader.states)
        sizes += [kept * 8 * math.prod(specs[name][1]) for name in reader.manifest["optimizer_steps"]]
        self._file = MappedTensors(str(scratch), sum(sizes), max(kept, 1) * len(sizes))

    def weights(self) -> dict[str, torch.Tensor]:
        """Return all weights and buffers; tied names share one tensor."""
        found = {name: self._file.copy(self._reader.weight(name)) for name in self._reader.weights}
        aliases = self._reader.manifest["aliases"]
        return found | {alias: found[stored] for alias, stored in aliases.items()}

    def state(self, param: str) -> dict[str, torch.Tensor]:
        """Return the states of a parameter under the names of torch's optimizer."""
        arrays = self._reader.arrays(param)
        read = {state: self._reader.state(state, param) for state in arrays}
        small = dict(self._reader.objects().get("small_states", {}).get(param, {}))
        # NAdam, Lamb and Muon also have these moments, but keep their own step count.
        is_adam = read.keys() >= _OF_ADAM and "step" not in small
        if is_adam:
            read = _format_of(arrays["exp_avg"].dtype).exported(read)
        states = {state: self._file.copy(value) for state, value in read.items()}
        if not is_adam:
            absent = small.pop(ABSENT, ())
            return {**{name: value for name, value in states.items() if name not in absent}, **small}
        return {"step": step_count(self._reader.manifest["optimizer_steps"][param]), **states}


def _format_of(dtype: torch.dtype) -> StateFormat:
    """Return the format of moments if the first moment has ``dtype``."""
    return StateFormat({torch.int8: "int8", torch.bfloat16: "bf16"}.get(dtype, "fp32"))


def _groups(reader: CheckpointReader) -> list[tuple[dict[str, Any], list[str]]]:
    """Return settings and members of each parameter group, in the terms of torch's optimizer."""
    settings = reader.objects()["param_groups"]
    found = []
    for group, members in zip(settings, reader.manifest["group_members"], strict=True):
        decoupled = {"decoupled_weight_decay": group["adamw_mode"]} if "adamw_mode" in group else {}
        found.append(({**group, **decoupled}, list(members)))
    return found
