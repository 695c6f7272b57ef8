"""Text about a ParallelPlan: its settings with reasons, and the differences of two plans. Plans are passed as
the JSON documents of their files.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from gemini.errors import printable
from gemini.system.config import format_bytes

Document = Mapping[str, Any]
_FEW = 4  # up to so many names are all listed
_HELD = ("device", "host", "disk", "parameter", "gradient", "state", "activation")


def explanation(plan: Document) -> str:
    """See :meth:`ParallelPlan.explain`."""
    sections = (_settings, _reason, _seconds, _held, _sent, _runners_up, _left_out, _origin)
    return "\n".join(printable(line) for section in sections for line in section(plan)) + "\n"


def settings_of(plan: Document) -> str:
    """Return the settings in one line: the ranks of each kind, the ZeRO stage and the dtype."""
    layout = plan["layout"]
    sizes = [f"{name} {layout[name]}" for name in ("tp", "pp", "sp", "dp")]
    if layout["sp"] > 1:
        sizes[2] += f" ({plan['sp_mode']})"
    return f"{', '.join(sizes)}; ZeRO {plan['zero_stage']}; {plan['dtype']}"


def differences(one: Document, other: Document) -> str:
    """Return a line, with the full name, for each field that differs between two plans."""
    left, right = dict(_flat(one, "")), dict(_flat(other, ""))
    return "".join(
        printable(f"{name}: {left.get(name, 'absent')} -> {right.get(name, 'absent')}") + "\n"
        for name in [*left, *(name for name in right if name not in left)]
        if left.get(name) != right.get(name) or (name in left) != (name in right)
    )


def _flat(value: Any, name: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict) and (value or not name):
        for key, each in value.items():
            yield from _flat(each, f"{name}.{key}" if name else key)
    elif isinstance(value, (list, tuple)) and any(isinstance(each, dict) for each in value):
        for index, each in enumerate(value):
            yield from _flat(each, f"{name}[{index}]")
    else:
        yield name, list(value) if isinstance(value, tuple) else value


def _named(names: Sequence[str]) -> str:
    if len(names) <= _FEW:
        return ", ".join(names)
    return f"{', '.join(names[: _FEW - 1])}, ..., {names[-1]} ({len(names)} blocks)"


def _budgets(budgets: Document) -> str:
    device = budgets["device_bytes"]
    return (
        f"DEVICE {'what is free' if device is None else format_bytes(device)}, "
        f"HOST {format_bytes(budgets['host_bytes'])}, DISK {format_bytes(budgets['disk_bytes'])}"
    )


def _grouped(group: Any) -> str:
    return group if isinstance(group, str) else f"({' '.join(map(_grouped, group))})"


def _settings(plan: Document) -> Iterator[str]:
    layout, budgets = plan["layout"], plan["budgets"]
    ranks = layout["dp"] * layout["pp"] * layout["sp"] * layout["tp"]
    yield f"Plan for {ranks} rank{'' if ranks == 1 else 's'}: {settings_of(plan)}"
    count, size = plan["num_microbatches"], plan["microbatch_size"]
    yield (
        f"  batch: {count} micro-batches of {size} samples on each rank along dp, "
        f"{count * size * layout['dp']} samples a step"
    )
    if layout["pp"] > 1:
        yield f"  schedule: {plan['schedule']}, stages on each rank: {plan['stages_per_rank']}"
        yield f"  stages after the first begin with: {_named(plan['begins'])}"
    yield f"  recomputed in backward: {_named(plan['recompute']) or 'nothing'}"
    if groups := plan.get("groups"):
        yield f"  in groups that keep one input: {_named([_grouped(each) for each in groups])}"
    if plan.get("activation_offload"):
        yield "  activations may leave DEVICE when memory is short"
    if plan.get("stage_budgets") is None:
        yield f"  budgets of each rank: {_budgets(budgets)}"
    for rank, own in enumerate(plan.get("stage_budgets") or ()):
        yield f"  budgets of rank {rank} along pp: {_budgets(own)}"


def _reason(plan: Document) -> Iterator[str]:
    seconds, measured = plan["predicted"]["step_seconds"], plan["measured_seconds"]
    key = "step_seconds"
    if measured is None:
        yield f"Why: a step is predicted to take {seconds:.4g} s"
    else:
        key = "measured_seconds"
        yield f"Why: a step took {measured:.4g} s when plans were run; {seconds:.4g} s were predicted"
        seconds = measured
    others = sorted(
        (each for each in plan["runners_up"] if each[key] is not None), key=lambda each: float(each[key])
    )
    if others and seconds > 0:
        next_best = others[0][key]
        more, verb = next_best / seconds - 1, "takes" if measured is None else "took"
        yield f"  the next best, {others[0]['settings']}, {verb} {next_best:.4g} s ({more:+.1%})"
    elif not plan["runners_up"]:
        yield "  no other settings fit"


def _seconds(plan: Document) -> Iterator[str]:
    total, parts = plan["predicted"]["step_seconds"], plan["predicted"]["seconds"]
    if parts:
        yield "Where the time of a step goes (parts that overlap are both counted):"
    for name, seconds in sorted(parts.items(), key=lambda each: -each[1]):
        share = f" ({seconds / total:.0%})" if total > 0 else ""
        yield f"  {name}: {seconds:.4g} s{share}"


def _held(plan: Document) -> Iterator[str]:
    yield "What each rank along pp holds at most:"
    for index, rank in enumerate(plan["predicted"]["ranks"]):
        sizes = {name: format_bytes(rank[f"{name}_bytes"]) for name in _HELD}
        tiers = ", ".join(f"{name.upper()} {sizes[name]}" for name in _HELD[:3])
        kinds = ", ".join(f"{name}s {sizes[name]}" for name in _HELD[3:])
        yield f"  rank {index}: {tiers}; {kinds}"


def _sent(plan: Document) -> Iterator[str]:
    sent = {name: nbytes for name, nbytes in plan["predicted"]["sent_bytes"].items() if nbytes}
    if sent:
        said = ", ".join(f"{name} {format_bytes(nbytes)}" for name, nbytes in sent.items())
        yield f"What a rank sends in a step: {said}"


def _runners_up(plan: Document) -> Iterator[str]:
    if plan["runners_up"]:
        yield "Runners-up:"
    for each in plan["runners_up"]:
        took = "" if each["measured_seconds"] is None else f", measured {each['measured_seconds']:.4g} s"
        yield f"  {each['settings']}: {each['step_seconds']:.4g} s a step{took}; {each['why']}"


def _left_out(plan: Document) -> Iterator[str]:
    if plan["left_out"]:
        yield "Left out:"
    for each in plan["left_out"]:
        yield f"  {each['settings']}: {each['why']}"


def _origin(plan: Document) -> Iterator[str]:
    yield f"Made by gemini-runtime {plan['version']} for the model {plan['model']}, machine {plan['machine']}"
