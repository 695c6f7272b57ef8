"""What an import of the package brings with it, and what its extension offers."""

from __future__ import annotations

import ast
import importlib
import json
import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

import gemini
from gemini import _C

STUBS = [Path(gemini.__file__).with_name(name) for name in ("_C.pyi", "_C_gpu.pyi")]
# Each costs a noticeable part of a second or of a small machine's memory, and is needed by one command only.
HEAVY = {"rich", "scipy", "matplotlib", "safetensors", "torch.distributed.fsdp", "torch.distributed.tensor"}
HEAVY |= {"transformers", "accelerate", "peft", "gemini.integrations"}


def modules_after(statement: str, cwd: Path) -> set[str]:
    """Return the names of the modules that a fresh interpreter has loaded after a statement."""
    code = f"import sys, json; {statement}; print(json.dumps(sorted(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], cwd=cwd, capture_output=True, text=True, check=True)
    return set(json.loads(done.stdout))


# What brings whole libraries with it.
ON_USE = {"autoparallelize", "from_pretrained"}


def test_public_names_are_lean(tmp_path: Path) -> None:
    names = ", ".join(sorted(set(gemini.__all__) - ON_USE))
    added = modules_after(f"import torch; from gemini import {names}", tmp_path)
    added -= modules_after("import torch", tmp_path)
    assert not {name for name in added if any(name == h or name.startswith(f"{h}.") for h in HEAVY)}
    assert not {name for name in added if name.startswith("torch.distributed")}


@pytest.mark.parametrize("name", ["gemini", "gemini.cli.main"])
def test_ctrl_c_need_not_wait_for_torch(name: str, tmp_path: Path) -> None:
    added = modules_after(f"import {name}", tmp_path) - modules_after("pass", tmp_path)
    assert {each for each in added if each.startswith("gemini")} <= {
        "gemini",
        "gemini.cli",
        "gemini.cli.main",
    }
    assert "torch" not in added


def test_public_names_are_those_that_types_are_read_from() -> None:
    body = ast.parse(Path(gemini.__file__).read_text()).body
    (typed,) = [node for node in body if isinstance(node, ast.If)]
    imports = [node for node in typed.body if isinstance(node, ast.ImportFrom)]
    homes = {alias.name: node.module for node in imports for alias in node.names}
    assert homes == gemini._HOMES
    assert sorted([*homes, "__version__"]) == gemini.__all__
    assert set(gemini.__all__) <= set(dir(gemini))


def test_names_are_had_on_use(tmp_path: Path) -> None:
    program = "import gemini; assert gemini.Lion is gemini.optim.Lion; gemini._C, gemini.errors.IoError"
    assert "gemini.runtime" in modules_after(program, tmp_path)
    for name in gemini.__all__:
        assert getattr(gemini, name) is not None
    for name in ("no_such_name", "__wrapped__"):
        with pytest.raises(AttributeError, match=f"module 'gemini' has no attribute '{name}'"):
            getattr(gemini, name)


def test_parallel_is_part_of_the_package(tmp_path: Path) -> None:
    assert "gemini.parallel" in modules_after("import gemini.parallel", tmp_path)


def test_folder_parallel_refuses_to_be_a_package_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(Path(__file__).parents[2])
    monkeypatch.delitem(sys.modules, "parallel", raising=False)
    with pytest.raises(ImportError, match=r"import it as gemini\.parallel"):
        importlib.import_module("parallel")


def test_package_extension_and_distribution_have_the_same_version() -> None:
    assert gemini.__version__ == _C.build_info()["version"] == metadata.version("gemini-runtime")


# --- the stub: the same names, members and argument names as the extension ---

STUB_BODY = [node for stub in STUBS for node in ast.parse(stub.read_text()).body]
CLASSES = [n for n in STUB_BODY if isinstance(n, ast.ClassDef) and not n.name.endswith("Info")]
FUNCTIONS = [n for n in STUB_BODY if isinstance(n, ast.FunctionDef)]
METHODS = [(c, n) for c in CLASSES for n in c.body if isinstance(n, ast.FunctionDef) and not n.decorator_list]


def public_names(owner: object) -> set[str]:
    return {name for name in dir(owner) if not name.startswith("_")}


def members(node: ast.ClassDef) -> set[str]:
    """Return the public methods, properties, constants and enum values of a stub's class."""
    names = {n.name for n in node.body if isinstance(n, ast.FunctionDef)}
    names |= {
        n.target.id for n in node.body if isinstance(n, ast.AnnAssign) and isinstance(n.target, ast.Name)
    }
    names |= {
        t.id for n in node.body if isinstance(n, ast.Assign) for t in n.targets if isinstance(t, ast.Name)
    }
    return {name for name in names if not name.startswith("_")}


def check_arguments(stub: ast.FunctionDef, bound: object) -> None:
    """Compare argument names with the signature that pybind11 writes into the docstring."""
    signature = (bound.__doc__ or "").splitlines()[0]
    written = [a.arg for a in (*stub.args.args, *stub.args.kwonlyargs)]
    assert written == re.findall(r"[(,] ?(\w+):", signature), f"{stub.name}: {signature}"


def test_stub_names_exactly_what_the_extension_has() -> None:
    assert {node.name for node in (*CLASSES, *FUNCTIONS)} == public_names(_C)


@pytest.mark.parametrize("node", CLASSES, ids=lambda node: node.name)
def test_stub_of_a_class_names_exactly_its_members(node: ast.ClassDef) -> None:
    bound = getattr(_C, node.name)
    added_by_pybind = {"name", "value"} if hasattr(bound, "__members__") else set()
    assert members(node) == public_names(bound) - added_by_pybind


@pytest.mark.parametrize("stub", FUNCTIONS, ids=lambda node: node.name)
def test_stub_of_a_function_has_its_arguments(stub: ast.FunctionDef) -> None:
    check_arguments(stub, getattr(_C, stub.name))


@pytest.mark.parametrize(("owner", "stub"), METHODS, ids=lambda node: node.name)
def test_stub_of_a_method_has_its_arguments(owner: ast.ClassDef, stub: ast.FunctionDef) -> None:
    check_arguments(stub, getattr(getattr(_C, owner.name), stub.name))
