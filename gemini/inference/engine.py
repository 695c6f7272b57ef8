"""Engine: answers requests of many threads with one thread that owns the model."""

from __future__ import annotations

import atexit
import os
import threading
import time
import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import torch

from gemini.errors import ConfigError, GeminiError, StateError, in_words
from gemini.inference.batching import Batching, rule_of
from gemini.inference.choice import Chooser
from gemini.inference.engine_model import SHARE_OF_KV, load
from gemini.inference.kv import Sequence
from gemini.inference.kv_chunks import keeper_of
from gemini.inference.packed_attention import attending
from gemini.inference.passes import PackedModel, RanksLostError, default_kv_bytes
from gemini.inference.ranks import LeadingModel
from gemini.inference.request import Generation, QueueFullError, Request
from gemini.inference.tensor_ranks import TensorRanks
from gemini.model.handle import ManagedModel, handle_around, handle_of
from gemini.system.config import parse_bytes
from gemini.system.device import default_budget_bytes


@dataclass
class _Running:
    """A request that has begun. ``fed``: prompt tokens that the model has processed."""

    generation: Generation
    sequence: Sequence
    chooser: Chooser
    stop_tokens: frozenset[int]
    fed: int = 0

    @property
    def is_in_prompt(self) -> bool:
        return self.fed < len(self.generation.request.tokens)

    def next_tokens(self, most: int) -> tuple[int, ...]:
        """Return the tokens of the next pass, at most ``most``."""
        if self.is_in_prompt:
            return self.generation.request.tokens[self.fed : self.fed + most]
        return (self.generation.last_token,)


class Engine:
    """Answers requests with a causal language model of transformers, many at a time, within byte budgets::

        with Engine.from_pretrained("llama-7b", device_bytes="4GiB", kv_bytes="512MiB") as engine:
            generation = engine.submit(Request(tokens, max_tokens=64, temperature=0.7))
            print(generation.result().tokens)

    Each pass computes the next token of every running answer and parts of waiting prompts, at most
    ``max_pass_tokens`` in all, so the weights are read once for all of them. A request's attention uses only
    its own keys and values. They are in ``kv_bytes`` of memory, reserved for the prompt and ``max_tokens``
    when a request begins: a request that has begun never lacks memory, and one that finds none waits. If
    ``kv_device_bytes`` is less, the rest is below DEVICE, in the tiers of the model.

    Args:
        model: the module, managed or not, with PEFT adapters or without. While the engine is open, only the
            engine may call it.
        kv_bytes: for keys and values; text such as "512MiB". None: room for ``max_batch`` sequences of 1,024
            tokens, at most a quarter of the free memory.
        kv_device_bytes: the part of ``kv_bytes`` that is DEVICE memory; None: all. Less than all needs a
            managed model, with ``device_bytes`` for weights and this part together.
        max_batch: the most requests that run at a time.
        max_pass_tokens: the most tokens of a pass. Longer prompts take several passes.
        queue_size: the most requests that wait.
        batching: "continuous": a request begins as soon as there is a free place. "bucket": a batch begins
            when the previous one has ended, with the first request and those right behind it with the same
            sampling settings and at most as many ``max_tokens``.
        ranks: the ranks that have the parts of ``model``; this one must be the first. The other ranks call
            :func:`gemini.inference.ranks.follow`; ``kv_bytes`` apply to each.

    Raises:
        ConfigError: the model's sequences cannot share a pass, or an option is invalid.
    """

    def __init__(
        self,
        model: Any,
        *,
        kv_bytes: int | str | None = None,
        kv_device_bytes: int | str | None = None,
        max_batch: int = 16,
        max_pass_tokens: int = 512,
        queue_size: int = 256,
        batching: Batching = "continuous",
        ranks: TensorRanks | None = None,
    ) -> None:
        for name, value in (
            ("max_batch", max_batch),
            ("max_pass_tokens", max_pass_tokens),
            ("queue_size", queue_size),
        ):
            if value < 1:
                raise ConfigError(f"{name} is {value}; it must be at least 1")
        self._rule = rule_of(batching)
        self._packed = PackedModel(model) if ranks is None else LeadingModel(model, ranks)
        model = self._packed.model
        given = parse_bytes(kv_bytes, name="kv_bytes")
        if given is None:
            most = int(default_budget_bytes() * SHARE_OF_KV)
            given = default_kv_bytes(model.config, max_batch, most)
        self._max_batch, self._max_pass_tokens, self._queue_size = max_batch, max_pass_tokens, queue_size
        self._waiting: deque[Generation] = deque()
        self._running: list[_Running] = []
        self._wakes = threading.Condition()
        self._is_closing = False
        self._fatal: BaseException | None = None
        self._handle: ManagedModel | None = None  # None if the model is not managed
        with suppress(ConfigError):
            self._handle = handle_around(model)
        on_device = parse_bytes(kv_device_bytes, name="kv_device_bytes")
        self._kv = keeper_of(model, self._handle, self._packed.device, given, on_device)
        if isinstance(self._packed, LeadingModel):
            self._kv = self._packed.keeping(self._kv)
        self._owns_model = False
        self._counts: Counter[str] = Counter()
        self._pass_seconds = 0.0
        self._attention = ExitStack()
        try:
            self._attention.enter_context(attending(model))
        except BaseException:
            self._kv.close()
            raise
        self._closing = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="gemini-engine", daemon=True)
        self._thread.start()
        # Close at exit: a daemon thread must not be inside torch while the interpreter shuts down.
        atexit.register(_close_at_exit, weakref.ref(self))

    @classmethod
    def from_pretrained(
        cls,
        directory: str | os.PathLike[str],
        *,
        device: str = "cpu",
        device_bytes: int | str | None = None,
        host_bytes: int | str | None = None,
        disk_dir: str | None = None,
        kv_bytes: int | str | None = None,
        kv_device_bytes: int | str | None = None,
        adapter: str | os.PathLike[str] | None = None,
        max_batch: int = 16,
        ranks: TensorRanks | None = None,
        **options: Any,
    ) -> Engine:
        """Return an engine for a directory from ``save_pretrained()``.

        Weights are read from the checkpoint's files (:func:`gemini.from_pretrained`).

        Args:
            directory: the model.
            device, host_bytes, disk_dir: as for :func:`gemini.from_pretrained`.
            device_bytes: for weights, and for keys and values on DEVICE, together.
            adapter: a directory of adapters saved by PEFT; they stay in ordinary memory.
            kv_bytes, kv_device_bytes, max_batch, options: as for the class.
            ranks: each rank has its part of the weights, and its own budgets.

        Raises:
            OutOfBudgetError: the model cannot fit.
            ConfigError: the directory has no such model, or the budget is smaller than the share for keys and
                values.
        """
        loaded = load(
            directory,
            device=device,
            device_bytes=device_bytes,
            host_bytes=host_bytes,
            disk_dir=disk_dir,
            kv_bytes=kv_bytes,
            kv_device_bytes=kv_device_bytes,
            adapter=adapter,
            max_batch=max_batch,
            ranks=ranks,
        )
        try:
            engine = cls(
                loaded.model,
                kv_bytes=loaded.kv_bytes,
                kv_device_bytes=loaded.kv_device_bytes,
                max_batch=max_batch,
                ranks=ranks,
                **options,
            )
        except BaseException:
            loaded.handle.close()
            raise
        engine._owns_model = True
        return engine

    @property
    def model(self) -> Any:
        """The module. It may be called after the engine is closed."""
        return self._packed.model

    @property
    def longest(self) -> int | None:
        """The most tokens of a prompt and its answer together; None without a limit."""
        return self._packed.longest

    def submit(self, request: Request, notify: Callable[[], object] | None = None) -> Generation:
        """Queue a request. Thread-safe. ``notify``: see :class:`Generation`.

        Raises:
            ConfigError: a token is outside the model's vocabulary, or the answer could exceed the model's
                length.
            OutOfBudgetError: keys and values of so many tokens can never fit ``kv_bytes``.
            QueueFullError: ``queue_size`` requests are waiting.
            StateError: the engine is closed, or its thread has died.
        """
        self._check(request)
        generation = Generation(request, notify)
        with self._wakes:
            self.refuse_dead()
            if self._is_closing:
                raise StateError("the engine is closed; make a new one")
            if len(self._waiting) >= self._queue_size:
                self._counts["refused"] += 1
                raise QueueFullError(
                    f"{len(self._waiting)} requests are waiting, the maximum (queue_size); try again later"
                )
            self._counts["submitted"] += 1
            self._waiting.append(generation)
            self._wakes.notify_all()
        return generation

    @property
    def is_alive(self) -> bool:
        """Whether the engine answers requests."""
        return self._thread.is_alive() and self._fatal is None

    def refuse_dead(self) -> None:
        """Raise StateError if the engine's thread has died."""
        if self._fatal is not None:
            raise self._stopped()

    def close(self, *, drain: bool = True) -> None:
        """Refuse new requests, finish the present ones (``drain``) or cancel them, and restore the model.

        A model that :meth:`from_pretrained` loaded is closed. Idempotent and thread-safe.

        Raises:
            StateError: called by a request's ``notify``, on the thread that it would wait for.
        """
        if threading.current_thread() is self._thread:
            raise StateError("close() was called by notify, and would wait for itself; call it elsewhere")
        with self._wakes:
            self._is_closing = True
            if not drain:
                for generation in [*self._waiting, *(one.generation for one in self._running)]:
                    generation.cancel()
            self._wakes.notify_all()
        with self._closing:
            self._thread.join()
            self._packed.close()
            self._attention.close()
            self._kv.close()
            if self._owns_model:
                handle_of(self.model).close()
                self._owns_model = False

    def __enter__(self) -> Engine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(drain=kind is None)

    def stats(self) -> dict[str, Any]:
        """Return counts since the start, and the present state.

        ``requests``: submitted, refused, and ended by reason. ``waiting``, ``running``: now. ``passes``,
        ``pass_seconds``, ``prompt_tokens``, ``tokens``: totals. ``kv``: used, peak and budget in bytes.
        ``runtime``: the statistics of a managed model.
        """
        with self._wakes:
            counts = dict(self._counts)
            waiting, running = len(self._waiting), len(self._running)
        numbers = {name: counts.pop(name, 0) for name in ("passes", "prompt_tokens", "tokens")}
        return {
            "requests": counts,
            "waiting": waiting,
            "running": running,
            **numbers,
            "pass_seconds": self._pass_seconds,
            "kv": {
                "used_bytes": self._kv.used_bytes,
                "peak_bytes": self._kv.peak_bytes,
                "budget_bytes": self._kv.nbytes,
            },
            "runtime": self._handle.stats() if self._handle is not None else None,
        }

    def _check(self, request: Request) -> None:
        vocabulary = self._packed.config.vocab_size
        wrong = next((token for token in request.tokens if not 0 <= token < vocabulary), None)
        if wrong is not None:
            raise ConfigError(
                f"token {wrong} is not one of the model's {vocabulary:,}; use the tokenizer of the model"
            )
        total = len(request.tokens) + request.max_tokens
        longest = self.longest
        if longest is not None and total > longest:
            raise ConfigError(
                f"the prompt has {len(request.tokens):,} tokens and the answer may have "
                f"{request.max_tokens:,}, and the model takes {longest:,}; shorten the prompt, or lower "
                "max_tokens"
            )
        self._kv.check(total)

    # Everything below runs on the engine's thread.

    def _run(self) -> None:
        try:
            while self._wait():
                self._end_unwanted()
                self._begin()
                if self._running:
                    self._pass()
        except BaseException as error:
            self._fatal = error
            self._end_all(self._stopped())

    def _wait(self) -> bool:
        """Wait for work. Return False once the engine is closing and nothing is left."""
        while True:
            with self._wakes:
                if self._wakes.wait_for(
                    lambda: self._is_closing or self._waiting or self._running, self._packed.idle_seconds
                ):
                    return bool(self._waiting or self._running)
            self._packed.idle()

    def _end_unwanted(self) -> None:
        """End requests that were cancelled or have timed out."""
        now = time.monotonic()
        with self._wakes:
            waiting = list(self._waiting)
        for generation in [*waiting, *(one.generation for one in self._running)]:
            timeout = generation.request.timeout_s
            if generation.is_cancelled:
                self._end(generation, "cancelled")
            elif timeout is not None and now - generation.submitted_at > timeout:
                self._end(generation, "timeout")

    def _begin(self) -> None:
        """Begin waiting requests in order, as the batching rule and the memory allow."""
        with self._wakes:
            waiting = list(self._waiting)
        requests = (generation.request for generation in waiting)
        for generation in waiting[: self._rule(requests, len(self._running), self._max_batch)]:
            request = generation.request
            try:
                sequence = self._kv.reserve(len(request.tokens) + request.max_tokens)
            except GeminiError as error:
                self._end(generation, "error", error)
                continue
            if sequence is None:
                return
            stops = self._packed.stop_tokens if request.stop_tokens is None else request.stop_tokens
            with self._wakes:
                self._waiting.remove(generation)
                self._running.append(_Running(generation, sequence, Chooser(request), stops))

    def _parts(self) -> Iterator[tuple[_Running, tuple[int, ...]]]:
        """Yield (request, tokens) for the next pass: one token of each answer first, then prompts."""
        left = min(self._max_pass_tokens, self._kv.first_tokens or self._max_pass_tokens)
        for one in sorted(self._running, key=lambda one: one.is_in_prompt):
            if left <= 0:
                return
            tokens = one.next_tokens(left)
            left -= len(tokens)
            yield one, tokens

    def _pass(self) -> None:
        parts = list(self._parts())
        for one, tokens in parts:
            if one.is_in_prompt:
                one.fed += len(tokens)
                self._counts["prompt_tokens"] += len(tokens)
        ended = [not one.is_in_prompt for one, _ in parts]
        started = time.perf_counter()
        try:
            logits = iter(self._packed.logits([(one.sequence, tokens) for one, tokens in parts], ended))
        except RanksLostError:
            raise
        except Exception as error:  # the model's code may raise anything
            for one, _ in parts:
                self._end(one.generation, "error", _known(error))
            return
        finally:
            self._pass_seconds += time.perf_counter() - started
            self._counts["passes"] += 1
        for (one, _), is_ended in zip(parts, ended, strict=True):
            if is_ended:
                self._take(one, next(logits))

    def _take(self, one: _Running, logits: torch.Tensor) -> None:
        """Choose a token, and end the answer if it was the last one."""
        generation = one.generation
        try:
            token = one.chooser.choose(logits)
        except (GeminiError, RuntimeError) as error:
            self._end(generation, "error", error)
            return
        if token in one.stop_tokens:
            self._end(generation, "stop")
            return
        self._counts["tokens"] += 1
        try:
            generation.add(token)
        except Exception as error:  # raised by the request's notify
            self._end(generation, "error", _known(error))
            return
        if generation.num_tokens == generation.request.max_tokens:
            self._end(generation, "length")

    def _end(self, generation: Generation, reason: Any, error: BaseException | None = None) -> None:
        with self._wakes:
            if generation in self._waiting:
                self._waiting.remove(generation)
            for one in [one for one in self._running if one.generation is generation]:
                self._running.remove(one)
                one.sequence.close()
            self._counts[reason] += 1
        generation.end(reason, error)

    def _stopped(self) -> StateError:
        error = StateError(f"the engine has stopped: {in_words(self._fatal or StateError())}; start it again")
        error.__cause__ = self._fatal
        return error

    def _end_all(self, error: BaseException) -> None:
        with self._wakes:
            left = [*self._waiting, *(one.generation for one in self._running)]
        for generation in left:
            self._end(generation, "error", error)


def _known(error: Exception) -> Exception:
    """Return ``error``, or a RuntimeError with its text if its class is not one that results raise."""
    if isinstance(error, (GeminiError, OSError, MemoryError, RuntimeError)):
        return error
    known = RuntimeError(f"{type(error).__name__}: {in_words(error)}")
    known.__cause__ = error
    return known


def _close_at_exit(engine: weakref.ref[Engine]) -> None:
    found = engine()
    if found is not None:
        found.close(drain=False)
