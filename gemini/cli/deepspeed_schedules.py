"""DeepSpeed's learning rate schedules as Python source lines with the same rates.

DeepSpeed's engine steps its scheduler after each update. A warmup scheduler counts from -1: the first update
has the lowest rate, and the n-th update after it (from 1) has the rate of step ``n - 1``.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from gemini.cli.conversion import (
    AUTO,
    NOT_NEEDED,
    NOT_SUPPORTED,
    NUMBER,
    TAKEN,
    Conversion,
    Document,
    Kind,
    Schedule,
    Target,
    auto,
    refuse_unknown,
)
from gemini.errors import ConfigError

_PARAMS = "scheduler.params"
_WARMUPS = ("WarmupLR", "WarmupDecayLR", "WarmupCosineLR")
_DEEPSPEEDS = (*_WARMUPS, "OneCycle", "LRRangeTest")
_HAS_BETAS = ("gemini.HybridAdam", "gemini.Lion", "gemini.Lamb", "torch.optim.NAdam", "torch.optim.RAdam",
              "torch.optim.Adamax")  # fmt: skip
# Key -> (expression in create_scheduler() that the Trainer fills in for "auto", its description).
_OF_TRAINER = {
    "warmup_min_lr": ("0.0", "0, as the Trainer filled in"),
    "warmup_max_lr": ("self.args.learning_rate", "learning_rate= of TrainingArguments"),
    "warmup_num_steps": (
        "max(1, self.args.get_warmup_steps(num_training_steps))",
        "warmup_steps= of TrainingArguments",
    ),
    "total_num_steps": ("num_training_steps", "the number of updates, which the Trainer computes"),
}
_DEFAULT_RATE = "0.001"


def fill(found: Conversion, document: Document) -> None:
    """Convert the scheduler of a configuration, after its optimizer.

    Raises:
        ConfigError: a value is invalid; the message names its key.
    """
    if not document.section("scheduler"):
        return
    kind = document.take("scheduler.type", (str,), "")
    params = document.section(_PARAMS)
    if kind not in _DEEPSPEEDS:
        import torch

        if kind:
            refuse_unknown(document, "scheduler.type", kind, _DEEPSPEEDS, torch.optim.lr_scheduler)
        way_out = f"create it for the optimizer: torch.optim.lr_scheduler.{kind}(optimizer, ...)"
        says = f"{kind} is torch's; {way_out}" if kind else "without a type DeepSpeed creates no scheduler"
        found.say("scheduler", NOT_SUPPORTED, says)
        return
    lists = [key for key, value in params.items() if isinstance(value, list) and not _is_one_number(value)]
    if lists:
        found.say(
            "scheduler",
            NOT_SUPPORTED,
            f"{lists[0]} has a rate for each parameter group, and your script makes the groups: give "
            "the optimizer groups with these rates, and torch's LambdaLR one function for each group",
        )
        return
    for key, value in params.items():
        if type(value) in (int, float) and key != "last_batch_iteration":
            document.take_as(f"{_PARAMS}.{key}", NUMBER)
    values, before = _Values(found, document), dict(found.of("optimizer"))
    if kind in _WARMUPS:
        schedule, words = _warmup(values, kind)
    elif kind == "OneCycle":
        schedule, words = _one_cycle(values), "rates and momentum of DeepSpeed's cycle"
    else:
        schedule, words = _range_test(values), "the rates of DeepSpeed's range test"
    if values.unknown:
        _leave_out(found, params, values.unknown)
        found.groups["optimizer"] = before
        return
    found.follow(schedule)
    found.say("scheduler.type", TAKEN, f"torch's LambdaLR: {words}")


def _is_one_number(values: list[Any]) -> bool:
    """Return whether a list of parameter groups' rates has a single distinct value."""
    return all(type(each) in (int, float) for each in values) and len({*values}) == 1


def _leave_out(found: Conversion, params: Iterable[str], unknown: list[str]) -> None:
    """Report that the schedule is left out, because the values of these keys are unknown."""
    for key in params:
        found.say(f"{_PARAMS}.{key}", NOT_SUPPORTED, "the schedule is left out: see scheduler.type")
    names = " and ".join(unknown)
    found.say("scheduler.type", NOT_SUPPORTED, f'nothing fills in "auto" here; write numbers for {names}')


class _Values:
    """Reads the numbers of a schedule as texts, which may be expressions of the Trainer."""

    def __init__(self, found: Conversion, document: Document) -> None:
        self.found = found
        self.document = document
        self.unknown: list[str] = []  # keys with an "auto" that is not filled in

    def number(self, key: str, default: str = "", kind: Kind = NUMBER) -> str:
        """Return a number as text. Raises ConfigError if it is missing and has no default."""
        path = f"{_PARAMS}.{key}"
        value = self._rate_of_groups(key, kind)
        if value is None:
            value = self.document.take_as(path, kind)
        if value is None:
            if not default:
                raise ConfigError(
                    f"{self.document.source}: {path} is missing, and the scheduler has no default "
                    "for it; add it"
                )
            return default
        if value == AUTO and isinstance(value, str):
            return self._auto(key, path, default)
        self.found.say(path, TAKEN, "part of the schedule in the program")
        return kind.text(value)

    def _rate_of_groups(self, key: str, kind: Kind) -> float | None:
        """Return the common rate of all groups if the value is a list, otherwise None. Raises ConfigError if
        it is out of range."""
        given = self.document.section(_PARAMS).get(key)
        if not isinstance(given, list):
            return None
        rate = float(given[0])
        if not kind.least <= rate <= kind.most:
            raise ConfigError(
                f"{self.document.source}: {_PARAMS}.{key} is {given!r:.100}; each must be {kind.least:g} or "
                "more"
            )
        return rate

    def steps(self, key: str, default: str = "") -> str:
        """Return a number of steps as text."""
        return self.number(key, default, Kind((float,), least=0, text=lambda value: f"{int(value)}"))

    def flag(self, key: str, *, default: bool) -> bool:
        """Return a boolean value."""
        value = self.document.take(f"{_PARAMS}.{key}", (bool,), default)
        self.found.say(f"{_PARAMS}.{key}", TAKEN, "part of the schedule in the program")
        return value is True

    def peak(self, key: str, default: str = "") -> str:
        """Return the rate to which shares refer, and make it the optimizer's rate. Raises ConfigError if it
        is 0."""
        text = self.number(key, default)
        if _is_number(text) and float(text) == 0:
            raise ConfigError(
                f"{self.document.source}: {_PARAMS}.{key} is 0: no update would change the weights; raise it"
            )
        self._set_rate(text, over=text != default)
        return text

    def _set_rate(self, text: str, *, over: bool) -> None:
        """Set the optimizer's rate to that of the schedule. As in DeepSpeed, it applies to all groups."""
        for key in ("lr", "muon_lr", "adam_lr"):
            if over and self.document.take(f"optimizer.params.{key}", (float,)) not in (None, AUTO):
                self.found.say(
                    f"optimizer.params.{key}", NOT_NEEDED, "scheduler.params sets the learning rate"
                )
        options = self.found.of("optimizer")
        if self.found.optimizer_class == "gemini.Muon" and (over or "lr" not in options):
            options["adam_lr"] = text
        options["lr"] = AUTO if text.startswith("self.") else text

    def _auto(self, key: str, path: str, default: str) -> str:
        if self.found.target is Target.TRAINER and key in _OF_TRAINER:
            text, words = _OF_TRAINER[key]
            self.found.say(path, TAKEN, words)
            return text
        self.unknown.append(key)
        self.found.say(path, *auto(self.found.target, ""))
        return default or "1"


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _share_of(part: str, whole: str) -> str:
    """Return a quotient as text; a number if both are numbers."""
    if _is_number(part) and _is_number(whole):
        return repr(float(part) / float(whole))
    return "0.0" if part == "0.0" else f"{part} / {whole}"


# --------------------------------------------------------------------------------------- warmups
_FALLING = {  # the schedule after a warmup: source lines, and a description
    "WarmupLR": (("return 1.0",), "then the rate is constant"),
    "WarmupDecayLR": (
        (
            "way = max(0.0, (total_steps - step) / max(1, total_steps - warmup_steps))",
            "return lowest + (1 - lowest) * way",
        ),
        "then the rate falls linearly",
    ),
    "WarmupCosineLR": (
        (
            "way = min(1.0, (step - warmup_steps + 1) / max(1, total_steps - warmup_steps))",
            "return least + (1 - least) * (1 + math.cos(math.pi * way)) / 2",
        ),
        "then the rate falls as a cosine",
    ),
}


def _warmup(values: _Values, kind: str) -> tuple[Schedule, str]:
    steps = values.steps("warmup_num_steps", "1000")
    steps = f"{max(2, int(steps))}" if _is_number(steps) else f"max(2, {steps})"
    settings = [("warmup_steps", steps)]
    if kind != "WarmupLR":
        total = values.steps("total_num_steps")
        _check_falls(values, steps, total)
        settings.append(("total_steps", total))
    if kind == "WarmupCosineLR":
        lowest = values.number("warmup_min_ratio", "0.0")
        settings.append(("least", values.number("cos_min_ratio", "0.0001")))
    else:
        rate = values.found.of("optimizer").get("lr", _DEFAULT_RATE)
        own = "self.args.learning_rate" if rate == AUTO else rate
        peak = values.peak("warmup_max_lr", own if kind == "WarmupLR" else _DEFAULT_RATE)
        lowest = _share_of(values.number("warmup_min_lr", "0.0"), peak)
    settings.append(("lowest", lowest))
    shape = values.document.take(f"{_PARAMS}.warmup_type", (str,), "log")
    is_log = shape != "linear"
    values.found.say(f"{_PARAMS}.warmup_type", TAKEN, "a logarithmic warmup" if is_log else "a linear warmup")
    rising = "math.log(step + 1) / math.log(warmup_steps)" if is_log else "step / warmup_steps"
    share = [
        "step = max(0, update - 1)  # DeepSpeed's scheduler takes its first step after the first update",
        "if step < warmup_steps:",
        f"    return lowest + (1 - lowest) * {rising}",
    ]
    if kind == "WarmupCosineLR":
        share[:0] = ["if update == 0:", "    return 0.0"]
    falling, words = _FALLING[kind]
    shape = "logarithmic" if is_log else "linear"
    return (
        Schedule(tuple(settings), (*share, *falling)),
        f"a {shape} warmup by DeepSpeed's formula, {words}",
    )


def _check_falls(values: _Values, steps: str, total: str) -> None:
    if values.unknown or not (_is_number(steps) and _is_number(total)):
        return
    if int(total) <= int(steps):
        raise ConfigError(
            f"{values.document.source}: {_PARAMS}.total_num_steps is {total} and warmup_num_steps is "
            f"{steps}: no steps are left after the warmup; correct one of them"
        )


# ---------------------------------------------------------------------------------------- cycles
def _range_test(values: _Values) -> Schedule:
    values.peak("lr_range_test_min_lr", _DEFAULT_RATE)
    size = _positive(values, "lr_range_test_step_size", "2000")
    rate = values.number("lr_range_test_step_rate", "1.0")
    stairs = values.flag("lr_range_test_staircase", default=False)
    interval = "update // step_size" if stairs else "update / step_size"
    return Schedule((("step_size", size), ("step_rate", rate)), (f"return 1 + step_rate * ({interval})",))


def _positive(values: _Values, key: str, default: str) -> str:
    text = values.steps(key, default)
    if _is_number(text) and int(text) < 1:
        raise ConfigError(f"{values.document.source}: {_PARAMS}.{key} is {text}; it must be 1 or more")
    return text


def _one_cycle(values: _Values) -> Schedule:
    lowest = values.number("cycle_min_lr")
    peak = values.peak("cycle_max_lr")
    first = _positive(values, "cycle_first_step_size", "2000")
    second = _positive(values, "cycle_second_step_size", first)
    settings = [("first", first), ("second", second), ("lowest", _share_of(lowest, peak))]
    up = values.steps("cycle_first_stair_count", "0")
    down = values.steps("cycle_second_stair_count", up)
    decay_steps = values.number("decay_step_size", "0")
    rate = values.number("decay_lr_rate", "0.0")
    decays = float(decay_steps) > 0
    if decays:
        settings.append(("decay_steps", decay_steps))
    after = "return lowest"
    if decays and float(rate) > 0:
        settings.append(("decay_rate", rate))
        after = "return lowest / (1 + decay_rate * (update - first - second) / decay_steps)"
    share = (
        "if update > first + second:",
        f"    {after}",
        "return lowest + (1 - lowest) * height(update)",
    )
    height = (
        "place = update % (first + second)",
        "if place <= first:",
        f"    return {_part('place', 'first', up)}",
        f"return {_part('(first + second - place)', 'second', down)}",
    )
    momentum = _momentum(values, settings, decays=decays)
    return Schedule(tuple(settings), share, height, momentum)


def _part(place: str, size: str, stairs: str) -> str:
    """Return the expression for half a cycle with this number of stairs; "0" means no stairs."""
    return f"{place} / {size}" if stairs == "0" else f"{place} * {stairs} // {size} / {stairs}"


def _momentum(values: _Values, settings: list[tuple[str, str]], *, decays: bool) -> tuple[str, ...]:
    """Return the body of a function for the optimizer's first beta; () if it is constant."""
    cycles = values.flag("cycle_momentum", default=True)
    kind = Kind((float,), least=0, most=1)
    least = values.number("cycle_min_mom", "0.8", kind)
    most = values.number("cycle_max_mom", "0.9", kind)
    rate = values.number("decay_mom_rate", "0.0")
    if not cycles or values.found.optimizer_class not in _HAS_BETAS:
        return ()
    settings.extend((("least_momentum", least), ("most_momentum", most)))
    after = "return most_momentum"
    if decays and float(rate) > 0:
        settings.append(("momentum_rate", rate))
        after = "return most_momentum * (1 + momentum_rate * (update - first - second) / decay_steps)"
    return (
        "if update == 0:",
        "    return least_momentum  # as DeepSpeed's scheduler begins",
        "if update > first + second:",
        f"    {after}",
        "return most_momentum - (most_momentum - least_momentum) * height(update)",
    )
