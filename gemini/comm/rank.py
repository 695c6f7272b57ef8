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
    """

    index: int = 0
    count: int = 1
    exchange: Callable[[str], Sequence[str]] = _alone
    several_hosts: bool = False
    failure: type[GeminiError] = CheckpointError  # what the others raise where one has failed

    def agree(self, action: Callable[[], str]) -> str:
        """Run ``action`` on every rank; return what it returned on rank 0 once all have succeeded. Raises as
        :meth:`collect`."""
        return self.collect(action)[0]

    def collect(self, action: Callable[[], str]) -> list[str]:
        """Run ``action`` on every rank; return what it returned on each, once all have succeeded.

        Raises:
            GeminiError: ``failure``: it failed on another rank. What it raises here is let through.
        """
        try:
            result = action()
        except BaseException as error:
            self.tell_failure(error)
            raise
        said = self.exchange(_DONE + result)
        for index, text in enumerate(said):
            if text.startswith(FAILED):
                raise self.failure(f"rank {index} of {self.count} {text}")
        return [text.removeprefix(_DONE) for text in said]

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
            self.exchange(f"{FAILED}{type(error).__name__}: {error}")
