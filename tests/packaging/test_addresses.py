"""Updates take the address of a tensor only where something keeps the tensor until the address was used."""

from __future__ import annotations

import ast
from collections.abc import Iterator

import pytest
from import_graph import ROOT, tree_of

PARTS = ("gemini/optim", "gemini/sharding", "parallel/zero")
FILES = sorted(path for part in PARTS for path in (ROOT / part).rglob("*.py"))

# Classes that keep the tensors whose addresses they take.
OWNERS = {
    "gemini/optim/kernels.py": {"AdamRow", "KeptAdamTable"},
    "gemini/optim/disk_states.py": {"StateRing", "_Transfer"},
    "parallel/zero/params.py": {"ParamShard"},  # which compares them alone
}
NATIVE = {"adam_step", "cuda_adam_step"}  # what reads rows
ROWS = "gemini/optim/kernels.py"


def addresses_outside(tree: ast.AST, owners: set[str]) -> Iterator[ast.Call]:
    """Yield the calls of ``data_ptr()`` that no owner makes. The argument of a native call and one side of a
    comparison are no such calls, on a variable: it lives until then, and a temporary tensor does not."""
    stack: list[tuple[ast.AST, ast.AST]] = [(tree, tree)]
    while stack:
        node, parent = stack.pop()
        if isinstance(node, ast.ClassDef) and node.name in owners:
            continue
        if isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "data_ptr":
            assert isinstance(node.func, ast.Attribute)
            reads = isinstance(parent, ast.Compare) or is_native(parent)
            if not (reads and isinstance(node.func.value, ast.Name)):
                yield node
        stack += [(child, node) for child in ast.iter_child_nodes(node)]


def is_native(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and ast.unparse(node.func).startswith("_C.")


def test_only_owners_take_addresses() -> None:
    wrong = []
    for path in FILES:
        name, tree = str(path.relative_to(ROOT)), tree_of(path)
        outside = addresses_outside(tree, OWNERS.get(name, set()))
        wrong += [
            f"{name}:{call.lineno} may outlive its tensor; make an AdamRow of tensors" for call in outside
        ]
        called = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
        if name != ROWS and called & NATIVE:
            wrong.append(f"{name} runs rows past AdamTable, which keeps their tensors")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    ("text", "num_found"),
    [
        ("row = (grad.data_ptr(), 0)", 1),
        ("addresses = {n: t.data_ptr() for n, t in states.items()}", 1),
        ("_C.sum_squares(copied(grad).data_ptr(), 3)", 1),
        ("class AdamRow:\n    def make(self): self.address = self.grad.data_ptr()", 0),
        ("class Other:\n    def make(self): self.address = self.grad.data_ptr()", 1),
        ("_C.sum_squares(grad.data_ptr(), 3)", 0),
        ("same = one.data_ptr() == other.data_ptr()", 0),
    ],
)
def test_the_rule_tells_addresses_apart(text: str, num_found: int) -> None:
    assert len(list(addresses_outside(ast.parse(text), {"AdamRow"}))) == num_found


def test_the_rule_sees_the_files() -> None:
    assert len(FILES) > 20
    assert all((ROOT / name).exists() for name in OWNERS)
