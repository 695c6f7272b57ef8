"""OperatorPlan: the layouts of each operator of a step on a mesh, as data and as text."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from torch import fx

from gemini.planner.operators.conversions import OperatorLayout, Path
from gemini.planner.operators.integer_problem import StepProblem
from gemini.planner.operators.local import tensors_of
from gemini.planner.operators.program import Solution, evaluate
from gemini.planner.operators.rules import Strategy, values_of
from gemini.system.config import format_bytes

_SHOWN = 24  # lines of a table in an explanation


@dataclass(frozen=True)
class Row:
    """One operator or parameter: its kind, the layouts of its outputs, the conversions of its inputs, and the
    seconds of both."""

    name: str
    operator: str
    layout: str
    communication: str
    seconds: float
    message_seconds: float


@dataclass(frozen=True)
class OperatorPlan:
    """The plan of a step on a mesh of ``sizes``.

    Attributes:
        choices: the chosen strategy of each node of the captured graph.
        seconds: predicted seconds of a step.
        bound_seconds: proven lower bound for any plan.
        whole_seconds: seconds of a step in which every rank does everything.
        peak_bytes: predicted peak memory of a rank.
        uncovered: operators that no rule covers, with their counts; they run whole on every rank.
        num_answers: number of truth values on which the model branched.
    """

    sizes: tuple[int, ...]
    choices: tuple[int, ...]
    seconds: float
    bound_seconds: float
    whole_seconds: float
    peak_bytes: int
    messages: dict[str, int]
    uncovered: dict[str, int]
    way: str
    num_answers: int
    rows: tuple[Row, ...] = field(repr=False)

    def to_json(self) -> dict[str, Any]:
        """Return the plan as a JSON document."""
        return asdict(self)

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> OperatorPlan:
        """Return the plan that :meth:`to_json` wrote."""
        lists = {name: tuple(document[name]) for name in ("sizes", "choices")}
        rows = tuple(Row(**row) for row in document["rows"])
        return cls(**{**document, **lists, "rows": rows})

    def explain(self) -> str:
        """Return the plan as text: the layouts of parameters, the operators that exchange most, and the
        operators that no rule covers."""
        mesh = " x ".join(map(str, self.sizes))
        lines = [
            f"{len(self.choices)} operators and tensors on a mesh of {mesh} ranks (captured by {self.way})",
            f"  predicted step: {self.seconds:.4g} s; whole on every rank: {self.whole_seconds:.4g} s; "
            f"proven bound: {self.bound_seconds:.4g} s",
            f"  each rank holds at most {format_bytes(self.peak_bytes)}",
            "  collectives: "
            + (", ".join(f"{count} {kind}" for kind, count in sorted(self.messages.items())) or "none"),
        ]
        if self.num_answers:
            lines.append(
                f"  the path depends on {self.num_answers} truth values of tensors (such as: is all of this "
                "mask set): batches that take another one are refused"
            )
        if self.uncovered:
            named = ", ".join(f"{count} {name}" for name, count in sorted(self.uncovered.items()))
            lines.append(f"  no rule covers these operators, which every rank runs whole: {named}")
        else:
            lines.append("  rules cover every operator")
        parameters = [row for row in self.rows if row.operator == "parameter"]
        cut = [row for row in parameters if "S" in row.layout]
        lines += ["", f"Parameters ({len(cut)} of {len(parameters)} are cut)", *_table(parameters)]
        senders = [row for row in self.rows if row.message_seconds > 0]
        senders.sort(key=lambda row: -row.message_seconds)
        lines += ["", "Operators that exchange most", *_table(senders)]
        return "\n".join(lines) + "\n"


def _table(rows: Sequence[Row]) -> list[str]:
    shown = rows[:_SHOWN]
    widths = [max((len(getattr(row, name)) for row in shown), default=0) for name in ("name", "layout")]
    lines = [
        f"  {row.name:<{widths[0]}}  {row.layout:<{widths[1]}}  {row.communication or '-'}" for row in shown
    ]
    if len(rows) > len(shown):
        lines.append(f"  and {len(rows) - len(shown)} more")
    return lines or ["  none"]


def conversion(problem: StepProblem, value: fx.Node, source: OperatorLayout, target: OperatorLayout) -> Path:
    """Return the path of a value from one layout to another."""
    at, out = problem.made(value)
    tensor = values_of(problem.nodes[at])[out]
    assert tensor is not None
    path = problem.converter.path(source, target, tensor.shape, tensor.element_size())
    assert path is not None
    return path


def plan_of(problem: StepProblem, solution: Solution) -> OperatorPlan:
    """Return a solution as a plan."""
    program, messages, rows = problem.program, Counter[str](), []
    chosen = [each[choice] for each, choice in zip(problem.choices, solution.choices, strict=True)]
    known: set[Any] = set()
    gradients = {node: name for name, node in problem.captured.gradients.items()}
    of_parameters = {at: name for name, at in problem.parameters.items()}
    for at, node in enumerate(problem.nodes):
        said: list[str] = []
        seconds = 0.0
        wanted = list(zip(tensors_of(node), chosen[at].inputs, strict=True))
        for value, target in wanted:
            seconds += _record_conversion(
                problem, chosen, value, target, problem.phase(at), known, said, messages
            )
        if (
            at in of_parameters
            and (gradient := problem.captured.gradients.get(of_parameters[at])) is not None
        ):
            layout = chosen[at].outputs[0]
            assert layout is not None
            seconds += _record_conversion(
                problem, chosen, gradient, layout, gradients[gradient], known, said, messages
            )
        kind = (
            "parameter"
            if at in of_parameters
            else node.op
            if node.op != "call_function"
            else str(node.target)
        )
        rows.append(
            Row(
                of_parameters.get(at, node.name),
                kind.removeprefix("aten."),
                ", ".join(str(each) for each in chosen[at].outputs if each is not None),
                "; ".join(said),
                float(program.seconds[at][solution.choices[at]]),
                seconds,
            )
        )
    return OperatorPlan(
        problem.sizes,
        solution.choices,
        solution.seconds,
        solution.bound,
        evaluate(program, problem.axes.whole)[0],
        int(solution.peak_bytes),
        dict(messages),
        dict(problem.uncovered),
        problem.captured.way,
        len(problem.captured.truth_values),
        tuple(rows),
    )


def _record_conversion(
    problem: StepProblem,
    chosen: Sequence[Strategy],
    value: fx.Node,
    target: OperatorLayout,
    phase: object,
    known: set[Any],
    said: list[str],
    messages: Counter[str],
) -> float:
    """Record the conversion of a value, once for all users that share it. Return its seconds; 0 if it is
    already in ``known``."""
    at, out = problem.made(value)
    source = chosen[at].outputs[out]
    assert source is not None
    path = conversion(problem, value, source, target)
    if not path.steps or (at, out, target, phase) in known:
        return 0.0
    known.add((at, out, target, phase))
    said.append(f"{value.name}: {source} " + " ".join(f"{step} {made}" for step, made in path.steps))
    messages.update(step.kind for step, _ in path.steps if problem.converter.links.sends(step))
    return path.seconds
