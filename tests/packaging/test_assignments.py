"""An object changes by what it is asked to do: nobody assigns its attributes from another file."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from import_graph import PYTHON_FILES, tree_of
from test_layers import identify

# Torch's own, which are there to be assigned.
TORCHS = {"grad", "data", "__class__"}
# The context of an autograd function, what belongs to one thread; exceptions, modules, optimizers of torch.
BAGS = {"ctx", "self._threads", "error", "module", "mirror", "shell", "optim"}


def targets_of(node: ast.AST) -> Iterator[ast.expr]:
    """Yield what a statement assigns to, the parts of a tuple one by one."""
    if isinstance(node, ast.Assign):
        given = node.targets
    elif isinstance(node, (ast.AugAssign, ast.AnnAssign)):
        given = [node.target]
    else:
        return
    for target in given:
        yield from target.elts if isinstance(target, ast.Tuple) else [target]


def assigned_in(path: Path) -> tuple[set[str], list[tuple[str, str]]]:
    """Return the attributes of the classes of a file, and what it assigns of other objects."""
    own: set[str] = set()
    others = []
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.ClassDef):
            own |= {t.id for part in node.body for t in targets_of(part) if isinstance(t, ast.Name)}
        for target in targets_of(node):
            if isinstance(target, ast.Attribute):
                owner = ast.unparse(target.value)
                if owner in ("self", "cls"):
                    own.add(target.attr)
                elif owner not in BAGS and target.attr not in TORCHS:
                    others.append((owner, target.attr))
    return own, others


def test_attributes_are_assigned_in_the_file_of_their_class() -> None:
    assigned = {path: assigned_in(path) for path in PYTHON_FILES}
    files: dict[str, set[Path]] = defaultdict(set)
    for path, (own, _) in assigned.items():
        for name in own:
            files[name].add(path)
    wrong = [
        f"{identify(path)} assigns {owner}.{name}: give its class a method for it"
        for path, (own, others) in assigned.items()
        for owner, name in others
        if name not in own and files[name] - {path}
    ]
    assert not wrong, "\n".join(wrong)
    assert sum(len(own) for own, _ in assigned.values()) > 500
    assert sum(len(others) for _, others in assigned.values()) > 10  # in the file of their class
