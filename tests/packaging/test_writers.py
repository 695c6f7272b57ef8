"""All that the library writes has its name only once it is on disk: names are given by one module, and what
opens a file for writing goes through it, or says here why not."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from import_graph import PYTHON_FILES, ROOT, tree_of

GIVES_NAMES = "gemini/system/durable.py"
# Modules whose files are written elsewhere than in a block of replacing() or scratch_directory().
WRITES = {
    GIVES_NAMES: "it writes for the others",
    "gemini/system/files.py": "lines added to a log, which has its name",
    "gemini/checkpoint/sealed_file.py": "synced by finish(), under a name that is not there yet",
    "gemini/checkpoint/convert.py": "in the scratch directory that convert() publishes",
    "gemini/jobs/after_training/adapter_merge.py": "in the scratch directory that published() publishes",
    "gemini/jobs/after_training/gguf_file.py": "in the file that published() publishes",
    "gemini/jobs/after_training/model_copy.py": "in the scratch directory that published() publishes",
    "gemini/jobs/finetune/engine.py": "in the directory that put_in_place() publishes",
    "gemini/jobs/finetune/parts_engine.py": "in the directory that put_in_place() publishes",
    "gemini/jobs/finetune/tuning.py": "in the directory that put_in_place() publishes",
    "gemini/integrations/transformers.py": "in the directory that put_in_place() publishes",
    "gemini/offload/mapped_tensors.py": "a file without a name, for this process",
    "gemini/memstats/monitor.py": "/proc",
    "gemini/cli/console.py": "/dev/null",
    "parallel/tensor/mode_speeds.py": "what processes that end together say to each other",
}
NO_FILES = {"gemini/runtime/arrivals.py", "gemini/runtime/storage/model_storage.py"}  # rename parameters
BLOCKS = {"replacing", "scratch_directory"}
SAVES = {
    "write_text",
    "write_bytes",
    "save_file",
    "savefig",
    "save_pretrained",
    "tofile",
    "FileIO",
    "mkstemp",
}
SAVES |= {"torch.save", "np.save", "json.dump", "pickle.dump", "NamedTemporaryFile"}
FLAGS = ("O_WRONLY", "O_RDWR", "O_CREAT")


def name_of(call: ast.Call) -> str:
    return call.func.id if isinstance(call.func, ast.Name) else getattr(call.func, "attr", "")


def opens_for_writing(call: ast.Call) -> bool:
    name, text = name_of(call), ast.unparse(call.func)
    if name in SAVES or text in SAVES:
        return name != "write_text" or isinstance(call.func, ast.Attribute)  # durable's own has no owner
    if name not in ("open", "fdopen"):
        return False
    given = [*call.args, *(keyword.value for keyword in call.keywords)]
    modes = [
        value.value for value in given if isinstance(value, ast.Constant) and isinstance(value.value, str)
    ]
    writes = any(len(mode) < 4 and set(mode) & set("wax+") for mode in modes)
    return writes or any(flag in ast.unparse(value) for value in given for flag in FLAGS)


def gives_a_name(call: ast.Call) -> bool:
    """Say whether a call renames or copies a file; ``str.replace`` has two arguments."""
    text = ast.unparse(call.func)
    if text in ("os.rename", "os.replace", "os.link", "os.renames") or text.startswith(
        ("shutil.copy", "shutil.move")
    ):
        return True
    if not isinstance(call.func, ast.Attribute) or text.startswith("dataclasses."):
        return False
    return (
        call.func.attr in ("rename", "replace", "hardlink_to") and len(call.args) == 1 and not call.keywords
    )


def calls_of(tree: ast.AST, *, within: bool = False) -> Iterator[tuple[ast.Call, bool]]:
    """Yield all calls, each with whether it is in a block that publishes what it writes."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Call):
            yield node, within
        blocks = [item.context_expr for item in node.items] if isinstance(node, ast.With) else []
        opened = any(isinstance(block, ast.Call) and name_of(block) in BLOCKS for block in blocks)
        yield from calls_of(node, within=within or opened)


def test_only_one_module_gives_names_to_files() -> None:
    wrong = []
    for path in PYTHON_FILES:
        name = str(path.relative_to(ROOT))
        if name not in NO_FILES and name != GIVES_NAMES:
            found = [call for call, _ in calls_of(tree_of(path)) if gives_a_name(call)]
            wrong += [
                f"{name}:{call.lineno} {ast.unparse(call)}: use gemini.system.durable" for call in found
            ]
    assert not wrong, "\n".join(wrong)


def test_files_are_written_where_they_are_published() -> None:
    wrong, used = [], set()
    for path in PYTHON_FILES:
        name = str(path.relative_to(ROOT))
        found = [call for call, inside in calls_of(tree_of(path)) if opens_for_writing(call) and not inside]
        if found and name in WRITES:
            used.add(name)
            continue
        wrong += [f"{name}:{call.lineno} {ast.unparse(call)}: write within replacing()" for call in found]
    assert not wrong, "\n".join(wrong)
    assert used == WRITES.keys(), "an exception that nothing needs"


def test_writers_that_go_another_way_are_found() -> None:
    text = """
path.write_text("x")
path.open("w")
open(path, mode="ab")
os.open(path, os.O_WRONLY | os.O_CREAT)
torch.save(state, path)
with replacing(path, "write") as made:
    made.write_text("x")
path.rename(other)
path.replace(other)
os.replace(path, other)
text.replace("a", "b")
path.open("rb")
write_text(path, "x", "write")
"""
    calls = list(calls_of(ast.parse(text)))
    assert sum(opens_for_writing(call) and not inside for call, inside in calls) == 5
    assert sum(gives_a_name(call) for call, _ in calls) == 3
