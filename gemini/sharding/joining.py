"""Joining: ranks that have no batches left, and serve those that have, until nobody has any."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from gemini.comm.peers import Share
from gemini.errors import ConfigError, StateError
from gemini.sharding.rounds import Round

Follow = Callable[[str], None]  # makes the call that other ranks make with gradients, as they describe it


@dataclass(frozen=True)
class Joining:
    """Within ``join()``: how ranks that have left count. ``all_count``: gradients are divided by the number
    of all ranks, else of those that still train. ``throws``: all raise when the first one has left."""

    all_count: bool = True
    throws: bool = False

    @property
    def said(self) -> int:
        """What ranks tell each other of it; not 0."""
        return 1 + self.all_count + 2 * self.throws

    def refuse(self, share: Share) -> None:
        """Raise ConfigError where it cannot be had."""
        if not self.all_count and share.replicas > 1:
            raise ConfigError(
                "join(divide_by_initial_world_size=False) does not go with copies of the model (hybrid "
                "sharding), each of which has a mean of its own; leave it out"
            )


def count_present(joining: Joining | None, said: Round, share: Share) -> int:
    """Return by how many ranks gradients are divided from now on.

    Raises:
        StateError: on all ranks: none may leave before the others.
    """
    if not said.joined or len(said.joined) == share.world:
        return share.size
    assert joining is not None, "ranks outside would have been refused"
    if joining.throws:
        raise StateError(
            f"ranks {list(said.joined)} have no batches left, and join(throw_on_early_termination=True) ends "
            "training with the first of them; leave that out to go on without them"
        )
    return share.size if joining.all_count else share.size - len(said.joined)
