"""Case ``llama`` of ``gemini bench inference``: 16-bit weights on the disk, read here and by llama.cpp.

llama.cpp runs in a memory cgroup, which counts the page cache as well: its limit is what DEVICE has here, and
beside that all that llama.cpp takes besides weights. Files have left the page cache before a contender opens
them. Each uses one thread. Bytes are those that the process had the disk read (``/proc/self/io``).
"""

from __future__ import annotations

import dataclasses
import importlib
import os
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

import gemini
from gemini.errors import ConfigError, StateError
from gemini.system.process import MEMBERSHIP, MOUNTS
from gemini_bench.inference_models import cpu_seconds, weight_bytes
from gemini_bench.paired import Spread, spread_row, unmeasured_row
from gemini_bench.record import Row
from gemini_bench.session import TIMING_SAMPLE_SECONDS, CaseResult, Session

READ = {1: 1.0, 8: 0.6}  # bytes of a pass, of llama.cpp's, by batch
PACKAGE = "llama_cpp"
_WHAT = "bytes read by a pass, ours / llama.cpp"
_Q4_K_M = 15  # of llama.cpp's enum llama_ftype
_PROMPT = 8


@dataclass(frozen=True)
class Settings:
    """A Llama of ``layers`` of ``width`` in bf16; ``share``: of its weights in memory; ``passes`` that count,
    after ``left_out``."""

    layers: int = 12
    width: int = 1024
    inner: int = 2816
    heads: int = 16
    vocabulary: int = 4096
    share: float = 1 / 3
    left_out: int = 8
    passes: int = 12
    batches: tuple[int, ...] = (1, 8)


QUICK = Settings(layers=4, width=512, inner=1024, heads=4, vocabulary=1024, passes=2, batches=(1,))


def llama(session: Session) -> CaseResult:
    """Decode with a third of the weights in memory, here and with llama.cpp."""
    settings = QUICK if session.quick else Settings()
    if reason := lacking():
        rows = [unmeasured_row(f"batch {one}: {_WHAT}", "x", READ[one], reason) for one in settings.batches]
        return CaseResult(rows, dataclasses.asdict(settings), {})
    options = {**dataclasses.asdict(settings), "disk_dir": str(session.disk_dir)}
    session.progress("llama: the files")
    files = session.run("inference.llama_files", options).data()
    options["device_bytes"] = int(settings.share * files["weight_bytes"])
    files["read_ahead_kib"] = _read_ahead_kib(session.disk_dir)
    found: dict[str, dict[str, Any]] = {"files": files}
    for batch in settings.batches:
        options["batch"] = batch
        session.progress(f"llama: ours, batch {batch}")
        found[f"ours {batch}"] = _run(session, "llama_ours", options)
        for kind in ("16-bit", "4-bit"):
            session.progress(f"llama: llama.cpp, {kind}, batch {batch}")
            found[f"{kind} {batch}"] = _peer(session, {**options, "file": files[kind]})
        if found[f"ours {batch}"]["tokens"][0] != found[f"16-bit {batch}"]["tokens"][0]:
            raise StateError("the first tokens differ, so the files do not hold the same model")
    return CaseResult(rows_of(found, settings.batches), dataclasses.asdict(settings), found)


def _read_ahead_kib(directory: Path) -> int | None:
    """Return the kernel's read-ahead on the disk of a directory: what llama.cpp reads depends on it."""
    device = directory.stat().st_dev
    disk = Path(f"/sys/dev/block/{os.major(device)}:{os.minor(device)}").resolve()
    found = [place / "queue/read_ahead_kb" for place in (disk, disk.parent)]
    return next((int(file.read_text()) for file in found if file.is_file()), None)


def _run(session: Session, task: str, options: Mapping[str, Any]) -> dict[str, Any]:
    return session.run(f"inference.{task}", dict(options), sample_seconds=TIMING_SAMPLE_SECONDS).data()


def _peer(session: Session, options: dict[str, Any]) -> dict[str, Any]:
    """Return what llama.cpp takes in the memory of DEVICE, beside what a run without a limit takes besides
    weights."""
    with MemoryGroup() as group:
        free = _run(session, "llama_peer", {**options, "group": str(group.path), "passes": 1, "left_out": 1})
    with MemoryGroup(options["device_bytes"] + free["heap_bytes"]) as group:
        return _run(session, "llama_peer", {**options, "group": str(group.path)})


def rows_of(found: Mapping[str, Mapping[str, Any]], batches: Sequence[int]) -> list[Row]:
    """Return bytes and time of a pass of each contender, by batch."""
    files = found["files"]
    rows = [Row("weights", files["weight_bytes"], "bytes")]
    for batch in batches:
        ours, peer, small = (found[f"{kind} {batch}"] for kind in ("ours", "16-bit", "4-bit"))
        read = statistics.median(ours["read_bytes"]) / statistics.median(peer["read_bytes"])
        rows.append(Row(f"batch {batch}: {_WHAT}", read, "x", READ.get(batch)))
        for name, run in (("ours", ours), ("llama.cpp", peer)):
            of_weights = Spread.of([nbytes / files["weight_bytes"] for nbytes in run["read_bytes"]])
            rows.append(spread_row(f"batch {batch}: bytes read by a pass / weights, {name}", of_weights, "x"))
        for key, name in (("seconds", "seconds"), ("cpu_seconds", "processor time")):
            own = statistics.median(ours[key])
            rows.append(Row(f"batch {batch}: {name} of a pass, ours", own, "s"))
            for kind, run in (("", peer), (" in 4 bits", small)):
                taken = statistics.median(run[key])
                rows.append(Row(f"batch {batch}: {name}, llama.cpp{kind} / ours", taken / own, "x"))
        four = statistics.median(small["read_bytes"]) / files["weight_bytes"]
        rows.append(Row(f"batch {batch}: bytes read by a pass / weights, llama.cpp in 4 bits", four, "x"))
    return rows


# -- the memory of llama.cpp ---------------------------------------------------------------------


def lacking() -> str | None:
    """Return why llama.cpp cannot be compared with here, and what would change that; None where it can."""
    if find_spec(PACKAGE) is None:
        return "llama.cpp is not installed: pip install 'llama-cpp-python>=0.3.36'"
    if find_spec("gguf") is None:
        return "the package gguf is not installed: pip install 'gemini-runtime[gguf]'"
    try:
        MemoryGroup().close()
    except ConfigError as error:
        return str(error)
    return None


class MemoryGroup:
    """A memory cgroup (version 1) below that of this process, for a process that enters it. It has a limit of
    its own, of page cache and all else, and goes when its process has ended. A context manager."""

    def __init__(self, limit_bytes: int | None = None) -> None:
        """Make the group. Raise ConfigError where this process may not."""
        lines = [line.split(":", 2) for line in MEMBERSHIP.read_text().splitlines()]
        own = next((path for _, controllers, path in lines if "memory" in controllers.split(",")), None)
        if own is None:
            raise ConfigError("there is no memory cgroup of version 1 to limit the page cache: mount one")
        self.path = MOUNTS / "memory" / own.lstrip("/") / f"gemini-bench-{os.getpid()}"
        try:
            self.path.mkdir()
            if limit_bytes is not None:
                (self.path / "memory.limit_in_bytes").write_text(str(limit_bytes))
        except OSError as error:
            raise ConfigError(f"a memory cgroup cannot be made ({error.strerror}): run as root") from error

    def close(self) -> None:
        """Remove the group; no process may be in it."""
        self.path.rmdir()

    def __enter__(self) -> MemoryGroup:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _enter(group: Path) -> None:
    (group / "cgroup.procs").write_text(str(os.getpid()))


def _heap_bytes(group: Path) -> int:
    """Return what the group counts besides page cache."""
    words = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
    return int((group / "memory.usage_in_bytes").read_text()) - int(words["cache"])


# -- in the worker -------------------------------------------------------------------------------


class _Meter:
    """What each pass took. Called behind each, as a processor of logits in ``generate()``."""

    def __init__(self) -> None:
        self.taken: list[tuple[float, float, int]] = []
        self._since = self._now()

    @staticmethod
    def _now() -> tuple[float, float, int]:
        lines = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
        return time.perf_counter(), cpu_seconds(), int(lines["read_bytes"])

    def __call__(self, _ids: Tensor | None = None, scores: Tensor | None = None) -> Tensor | None:
        now, since = self._now(), self._since
        self.taken.append((now[0] - since[0], now[1] - since[1], now[2] - since[2]))
        self._since = self._now()
        return scores

    def counted(self, left_out: int) -> dict[str, list[Any]]:
        """Return seconds, processor time and bytes of the passes behind the first ``left_out``."""
        columns = zip(*self.taken[left_out:], strict=True)
        return {
            name: list(column)
            for name, column in zip(("seconds", "cpu_seconds", "read_bytes"), columns, strict=True)
        }


def _prompt(options: Mapping[str, Any]) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randint(2, options["vocabulary"], (options["batch"], _PROMPT), generator=generator)


def make_files(options: dict[str, Any]) -> dict[str, Any]:
    """Write a Llama with random weights for each contender; return their names, and its bytes."""
    from gemini.jobs.after_training.gguf_file import export_gguf

    transformers = importlib.import_module("transformers")
    directory = Path(options["disk_dir"])
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=options["vocabulary"],
        hidden_size=options["width"],
        intermediate_size=options["inner"],
        num_hidden_layers=options["layers"],
        num_attention_heads=options["heads"],
        max_position_embeddings=256,
        bos_token_id=0,
        eos_token_id=1,
    )
    model = transformers.LlamaForCausalLM(config).to(torch.bfloat16)
    model.save_pretrained(directory / "model")
    _tokenizer().save_pretrained(directory / "model")
    export_gguf(directory / "model", directory / "16-bit.gguf", "bf16")
    library = importlib.import_module(PACKAGE)
    how = library.llama_model_quantize_default_params()
    how.ftype, how.nthread = _Q4_K_M, 1
    files = {kind: f"{kind}.gguf" for kind in ("16-bit", "4-bit")}
    wide, narrow = (os.fsencode(directory / name) for name in files.values())
    if library.llama_model_quantize(wide, narrow, how):
        raise StateError("llama.cpp did not quantize the model")
    return {**files, "weight_bytes": weight_bytes(model)}


def _tokenizer() -> Any:
    """Return a tokenizer of bytes with one merge, the fewest that GGUF has a name for."""
    tokenizers, transformers = (importlib.import_module(name) for name in ("tokenizers", "transformers"))
    pieces = tokenizers.pre_tokenizers.ByteLevel
    letters = ["<begin>", "<end>", *sorted(pieces.alphabet())]
    numbers = {token: number for number, token in enumerate([*letters, "ab"])}
    inner = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=numbers, merges=[("a", "b")]))
    inner.pre_tokenizer = pieces(add_prefix_space=False)
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=inner, bos_token="<begin>", eos_token="<end>"
    )


def measure_ours(options: dict[str, Any]) -> dict[str, Any]:
    """Return what passes over the safetensors took."""
    torch.set_num_threads(1)
    directory = Path(options["disk_dir"]) / "model"
    _drop_from_cache(directory)
    model = gemini.from_pretrained(directory, trains=False, device_bytes=options["device_bytes"]).eval()
    meter = _Meter()
    passes = options["left_out"] + options["passes"]
    count = {"max_new_tokens": passes, "min_new_tokens": passes, "do_sample": False}
    processors = importlib.import_module("transformers").LogitsProcessorList([meter])
    out = model.generate(_prompt(options), logits_processor=processors, pad_token_id=1, **count)
    handle = gemini.handle_of(model)
    peak = handle.stats()["device"]["peak_bytes"]
    handle.close()
    return {
        "tokens": out[0, _PROMPT:].tolist(),
        "peak_bytes": peak,
        **meter.counted(options["left_out"]),
    }


def measure_peer(options: dict[str, Any]) -> dict[str, Any]:
    """Return what passes of llama.cpp over its file took, in the memory of a group."""
    file, group = Path(options["disk_dir"]) / options["file"], Path(options["group"])
    _drop_from_cache(file.parent)
    library = importlib.import_module(PACKAGE)
    library.llama_backend_init()
    prompt = _prompt(options).numpy()
    passes = options["left_out"] + options["passes"]
    _enter(group)
    decoder = _Decoder(library, file, len(prompt), _PROMPT + passes)
    meter = _Meter()
    tokens = [decoder.next_tokens(prompt, 0)]
    meter()
    for number in range(1, passes):
        tokens.append(decoder.next_tokens(tokens[-1][:, None], _PROMPT + number - 1))
        meter()
    heap = _heap_bytes(group)
    return {
        "tokens": [int(row[0]) for row in tokens],
        "heap_bytes": heap,
        **meter.counted(options["left_out"]),
    }


class _Decoder:
    """A model of llama.cpp over mmap, with one thread and room for texts of equal length."""

    def __init__(self, library: Any, file: Path, texts: int, length: int) -> None:
        self._library = library
        how = library.llama_model_default_params()
        how.load_mode, how.n_gpu_layers = library.LLAMA_LOAD_MODE_MMAP, 0
        how.use_extra_bufts = False  # which copy weights to other places, out of the mapping
        self._model = library.llama_model_load_from_file(str(file).encode(), how)
        own = library.llama_context_default_params()
        own.n_ctx = texts * (-(-length // 256) * 256)
        own.n_batch = own.n_ubatch = texts * _PROMPT
        own.n_seq_max = texts
        own.n_threads = own.n_threads_batch = 1
        self._context = self._model and library.llama_init_from_model(self._model, own)
        if not self._context:
            raise StateError(f"llama.cpp does not open {file.name}")
        self._vocabulary = library.llama_vocab_n_tokens(library.llama_model_get_vocab(self._model))

    def next_tokens(self, tokens: np.ndarray[Any, Any], begin: int) -> np.ndarray[Any, Any]:
        """Return the likeliest token of each text behind ``tokens`` ``[texts, new]``, which begin at the
        place ``begin``."""
        library = self._library
        texts, new = tokens.shape
        batch = library.llama_batch_init(texts * new, 0, 1)
        try:
            batch.n_tokens = texts * new
            for at, (text, place) in enumerate(np.ndindex(texts, new)):
                batch.token[at], batch.pos[at] = int(tokens[text, place]), begin + place
                batch.n_seq_id[at], batch.seq_id[at][0] = 1, text
                batch.logits[at] = place == new - 1
            if library.llama_decode(self._context, batch):
                raise StateError("llama.cpp did not decode")
        finally:
            library.llama_batch_free(batch)
        last = [library.llama_get_logits_ith(self._context, (text + 1) * new - 1) for text in range(texts)]
        logits = [np.ctypeslib.as_array(row, shape=(self._vocabulary,)) for row in last]
        return np.array([int(row.argmax()) for row in logits])


def _drop_from_cache(folder: Path) -> None:
    """Have what a contender reads of the files in ``folder`` come from the disk."""
    for path in folder.iterdir():
        if path.is_dir():
            continue
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)  # pages that are not written yet stay
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)
