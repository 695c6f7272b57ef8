"""The import direction of the design: every file imports only from its own layer or below."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from import_graph import (
    BENCH_FILES,
    PYTHON_FILES,
    ROOT,
    imported_names,
    imports_of_files,
    module_of,
    tree_of,
)

# Lower imports nothing higher. A name not listed here is a new part: give it its layer. Rooms of the runtime
# are parts; "runtime" is what composes them.
PYTHON_LAYERS = [
    {"_C"},
    {"errors"},
    {"losses", "system"},
    {"comm", "memstats", "offload"},
    {"chunk"},
    {"placement"},
    {"runtime.config"},
    {"runtime.gate"},
    {"runtime.intercept"},
    {"runtime.storage"},
    {"sharding"},
    {"runtime.step"},
    {"runtime.activation"},
    {"runtime"},
    {"timeline"},
    {"model"},
    {"optim"},
    {"checkpoint"},
    {"parallel", "wrappers"},
    {"forecast"},
    {"planner"},
    {"integrations"},
    {"inference"},
    {"cli", "compat", "jobs"},
    {"__main__"},
]
# Neighbours that must not know each other, although they share a layer.
FORBIDDEN_NEIGHBOURS = {
    (one, other)
    for one in ("comm", "memstats", "offload")
    for other in ("comm", "memstats", "offload")
    if one != other
}
DISTRIBUTED = {"comm", "model", "checkpoint", "parallel"}  # who may use torch.distributed
RULES_FILES = {"gemini/planner/operators/rules.py"}  # asks DTensor's rules; talks to no process
TORCH_CUDA_FILES = {"gemini/system/device.py"}

CPP_ALLOWED = {
    "common": {"common"},
    "chunk": {"common", "chunk"},
    "comm": {"common", "comm"},
    "simulate": {"common", "chunk", "simulate"},
    "adam": {"common", "adam"},
    "aio": {"common", "aio"},
    "transfer": {"common", "chunk", "adam", "aio", "transfer"},
    "gpu": {"common", "aio", "transfer", "gpu"},
    "bindings": {"common", "comm", "chunk", "simulate", "adam", "aio", "transfer", "gpu", "bindings"},
}

LEVEL = {part: level for level, parts in enumerate(PYTHON_LAYERS) for part in parts}
# All but the file that re-exports the public names.
LAYERED_FILES = [p for p in PYTHON_FILES if p != ROOT / "gemini" / "__init__.py"]
CPP_FILES = sorted(p for p in (ROOT / "csrc").rglob("*") if p.suffix in {".cpp", ".h", ".cu", ".inc"})


def part_of(names: list[str]) -> str:
    """Return the part that a module, or what is imported, belongs to."""
    room = ".".join(names[1:3])
    return room if room in LEVEL else names[1]


def dotted_uses(path: Path) -> Iterator[str]:
    """Yield every import and every attribute chain (``torch.cuda.empty_cache``) of a file."""
    yield from imported_names(path)
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Attribute):
            yield ast.unparse(node)


def identify(path: Path) -> str:
    return str(path.relative_to(ROOT))


def test_python_imports_go_down_only() -> None:
    wrong = [fault for path in LAYERED_FILES for fault in faults_of_imports(path)]
    assert not wrong, "\n".join(wrong)


def faults_of_imports(path: Path) -> Iterator[str]:
    """Yield a line for each import of a file that the layers forbid."""
    part, file = part_of(module_of(path)), identify(path)
    if part not in LEVEL:
        yield f"{file}: give the new part {part!r} a layer in {Path(__file__).name}"
        return
    for name in imported_names(path):
        if name == "gemini" and LEVEL[part] < LEVEL["cli"]:
            yield f"{file} imports the whole of gemini"
        if name.split(".")[0] == "gemini_bench":
            yield f"{file} imports {name}, which is not installed"
        if not name.startswith("gemini."):
            continue
        target = part_of(name.split("."))
        if target not in LEVEL:
            yield f"{file} imports {name}: import from the module that defines it"
        elif LEVEL[target] > LEVEL[part]:
            yield f"{file} imports {name}, which is above it"
        elif (part, target) in FORBIDDEN_NEIGHBOURS:
            yield f"{file} imports {name}, a neighbour that it must not know"


def test_no_files_import_each_other() -> None:
    packages = {".".join(module_of(p)[:-1]) for p in PYTHON_FILES if p.name == "__init__.py"}
    imports = {m: found for m, found in imports_of_files(PYTHON_FILES).items() if m not in packages}
    ends = {""}
    while ends:  # what imports nothing that is left, or is imported by nothing
        imported = set().union(*imports.values())
        ends = {m for m, found in imports.items() if imports.keys().isdisjoint(found) or m not in imported}
        imports = {module: found for module, found in imports.items() if module not in ends}
    assert not imports, f"files that import each other, and those between them: {sorted(imports)}"


def test_torch_distributed_and_cuda_stay_where_they_belong() -> None:
    wrong = []
    for path in LAYERED_FILES + BENCH_FILES:
        may_distribute = path in BENCH_FILES or part_of(module_of(path)) in DISTRIBUTED
        for name in dotted_uses(path):
            is_rule = name.startswith(("torch.distributed.tensor", "torch.distributed.device_mesh"))
            is_rule &= identify(path) in RULES_FILES
            is_distributed = name.startswith("torch.distributed") and not (may_distribute or is_rule)
            is_cuda = f"{name}.".startswith("torch.cuda.") and identify(path) not in TORCH_CUDA_FILES
            if is_distributed or is_cuda:
                wrong.append(f"{identify(path)} uses {name}")
    assert not wrong, "\n".join(wrong)


def test_library_below_the_command_line_does_not_print() -> None:
    wrong = [
        f"{identify(path)} prints in line {node.lineno}"
        for path in PYTHON_FILES + BENCH_FILES
        if path.parent.name != "cli"
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print"
    ]
    assert not wrong, "\n".join(wrong)


def test_cpp_includes_go_down_only() -> None:
    wrong = []
    for path in CPP_FILES:
        part = path.relative_to(ROOT / "csrc").parts[0]
        text = path.read_text()
        ours = re.findall(r'^\s*#\s*include\s+"([^"]+)"', text, flags=re.MULTILINE)
        others = re.findall(r"^\s*#\s*include\s+<([^>]+)>", text, flags=re.MULTILINE)
        above = [n for n in ours if (n.split("/")[0] if "/" in n else part) not in CPP_ALLOWED[part]]
        torchs = [n for n in others if re.match(r"torch/|ATen/|c10/", n)]
        pythons = [n for n in others if part != "bindings" and re.match(r"pybind11/|Python\.h", n)]
        wrong += [f"{identify(path)} includes {name}" for name in above + torchs + pythons]
    assert not wrong, "\n".join(wrong)


def test_layer_rules_see_the_files() -> None:
    assert len(PYTHON_FILES) > 10
    assert len(BENCH_FILES) > 10
    assert len(CPP_FILES) > 10
    assert LEVEL["cli"] > LEVEL["model"] > LEVEL["runtime"] > LEVEL["errors"] > LEVEL["_C"]
