"""A model's blocks: the repeated parts that are compiled, or recomputed, as wholes; and how often torch's
compiler has worked in this process: a pass in which it did takes memory and time that no other takes."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from torch import nn


def find_blocks(module: nn.Module) -> Sequence[tuple[str, nn.Module]]:
    """Return the names and modules of a model's blocks: the outermost members of lists and sequences that
    have a like beside them, and children."""
    found: list[tuple[str, nn.Module]] = []
    inside: tuple[str, ...] = ()
    for name, container in module.named_modules():
        if not isinstance(container, (nn.ModuleList, nn.Sequential)):
            continue
        if name.startswith(inside) and inside:
            continue
        kinds = [type(member) for member in container]
        members = [
            (f"{name}.{key}" if name else key, member)
            for key, member in container.named_children()
            if kinds.count(type(member)) > 1 and next(member.children(), None) is not None
        ]
        found += members
        inside += tuple(f"{member_name}." for member_name, _ in members)
    return list({id(block): (name, block) for name, block in reversed(found)}.values())[::-1]


def is_compiled(module: nn.Module) -> bool:
    """Say whether calling ``module`` calls code of torch.compile: after ``module.compile()``, as what
    ``torch.compile(module)`` returned, or because its class has a compiled ``forward``."""
    if module._compiled_call_impl is not None:
        return True
    forward = module.forward
    return hasattr(forward, "_torchdynamo_orig_callable") and not hasattr(forward, "_torchdynamo_disable")


def num_compilations() -> int:
    """Return how many frames the compiler has taken up, none where nobody uses it."""
    used = sys.modules.get("torch._dynamo.utils")
    return 0 if used is None else int(sum(used.counters["frames"].values()))
