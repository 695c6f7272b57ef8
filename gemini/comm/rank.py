"""How ranks agree that each has done its part of something, or hear which has failed."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from gemini.comm.messages import FAILED
from gemini.errors import CheckpointError, GeminiError

_DONE = "done: "
_Result = TypeVar("_Result")


def _alone(text: str) -> Sequence[str]:
    return [text]


@dataclass(frozen=True)
class Rank:
    """Process ``index`` of ``count`` that do something together, such as saving a checkpoint.

    ``exchange(text)`` waits until all of them have called it and returns what each said, in order of index
    (``torch.distributed.all_gather_object`` does). ``several_hosts``: not all run on this machine.

    ``parts``: this process among those with its index that hold the other parts of a model, which was cut
    over ranks. Then ``count`` processes hold this part, and all processes of all parts agree together, so
    that no part is saved or loaded without the others. None: the model is whole.
    """

    index: int = 0
    count: int = 1
    exchange: Callable[[str], Sequence[str]] = _alone
    several_hosts: bool = False
    failure: type[GeminiError] = CheckpointError  # what the others raise where one has failed
    parts: Rank | None = None

    @property
    def is_alone(self) -> bool:
        """Whether no other process takes part."""
        return self.count == 1 and self.parts is None

    @property
    def part(self) -> int:
        """Which part of the model this process holds."""
        return 0 if self.parts is None else self.parts.index

    def agree(self, action: Callable[[], str]) -> str:
        """Run ``action`` on every rank; return what it returned on rank 0 once all have succeeded. Raises as
        :meth:`collect`."""
        return self.collect(action)[0]

    def collect(self, action: Callable[[], str]) -> list[str]:
        """Run ``action`` on every rank; return what it returned on each of those that hold this part, once
        all have succeeded. Raises as :meth:`collect_parts`."""
        return self.collect_parts(action)[self.part]

    def collect_parts(self, action: Callable[[], str]) -> list[list[str]]:
        """Run ``action`` on every rank; return what it returned on each, by part, once all have succeeded.

        Raises:
            GeminiError: ``failure``: it failed on another rank. What it raises here is let through.
        """
        try:
            result = action()
        except BaseException as error:
            self.tell_failure(error)
            raise
        said = self._meet(_DONE + result)
        for part, texts in enumerate(said):
            for index, text in enumerate(texts):
                if text.startswith(FAILED):
                    raise self.failure(f"rank {index} of {self.count}{self._named(part)} {text}")
        return [[text.removeprefix(_DONE) for text in texts] for texts in said]

    def _meet(self, text: str) -> list[list[str]]:
        """Return what every rank says here, by part."""
        own = list(self.exchange(text))
        if self.parts is None:
            return [own]
        return [json.loads(said) for said in self.parts.exchange(json.dumps(own))]

    def _named(self, part: int) -> str:
        return "" if self.parts is None else f" with part {part} of {self.parts.count} of the model"

    def require_same_directory(self, directory: str | os.PathLike[str]) -> None:
        """Refuse ranks that name different directories: what the others name would not be looked at.

        Raises:
            CheckpointError: on all ranks.
        """

        def names() -> str:
            path = Path(os.fsdecode(directory))
            return json.dumps([str(path.absolute()), str(path.resolve())])

        said = [json.loads(text) for text in self.collect(names)]
        if any(len({each[kind] for each in said}) == 1 for kind in range(2)):  # links may differ by host
            return
        each = ", ".join(f"rank {rank} {name!r}" for rank, (name, _) in enumerate(said))
        raise CheckpointError(f"ranks name different directories: {each}; pass the same on all of them")

    def together(self, action: Callable[[], _Result]) -> _Result:
        """Run ``action`` on every rank; return what it returned here, once all have succeeded. Raises as
        :meth:`collect`."""
        results: list[_Result] = []

        def run() -> str:
            results.append(action())
            return ""

        self.collect(run)
        return results[0]

    def tell_failure(self, error: BaseException) -> None:
        """Make the others' next :meth:`agree` raise instead of waiting for this rank."""
        with suppress(RuntimeError):  # they are elsewhere, or gone: ``error`` is what there is to see
            self._meet(f"{FAILED}{type(error).__name__}: {error}")
