"""Files and directories of others come through one door: which are read, and what is said of the rest."""

from __future__ import annotations

import errno
import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from gemini.cli.main import main
from gemini.errors import CheckpointError, ConfigError, GeminiError, InputError
from gemini.integrations.model_directory import check_adapters, check_model
from gemini.integrations.safetensors_files import TensorReads
from gemini.system.input_files import InputDirectory, errors_of, read_document, why_unread
from gemini.system.parsing import MAX_DEPTH, SyntaxProblem, parse_record, parse_records

DEEP = "[" * (MAX_DEPTH + 1) + "]" * (MAX_DEPTH + 1)
WRONG = [
    ("a.json", "{\n\n  x", 3, "is not valid JSON: Expecting property name"),
    ("a.json", f'{{"a":\n{DEEP}}}', 2, "nested too deeply"),
    ("a.json", "[" * 100_000, 1, "nested too deeply"),
    ("a.json", '["[[[",\n' + "[" * 2000, 2, "nested too deeply"),
    ("a.json", f'{{"a": 1,\n"b": {"9" * 5000}}}', 2, "a number has more than 4300 digits"),
    ("a.json", b'{"a": "\n\xff"}', 2, "no text in UTF-8"),
    ("a.yaml", "a: 1\nb: [\n", 3, "is not valid YAML"),
    ("a.yaml", "a: 1\nb: &x {c: *x}\n", 2, "has aliases"),
    ("a.yaml", "a: 1\nb: 2001-99-99\n", 2, "month must be in 1..12"),
    ("a.yaml", "a: 1\nb: !!int x\n", 2, "invalid literal for int"),
    ("a.yaml", "a: 1\nb: " + "9" * 5000, 2, "4300 digits"),
    ("a.yaml", "a: 1\na: 2\n", 2, "'a' is given twice"),
    ("a.yaml", f"a:\n  {DEEP}", 2, "nested too deeply"),
    ("a.yaml", "a: 1\n? [b]\n: 2\n", 2, "unhashable"),
    ("a.yaml", "a: 1\nb: !!python/object/apply:os.system [x]\n", 2, "could not determine a constructor"),
    ("a.yaml", "a: 1\nb: \x01\n", 2, "special characters"),
    ("a.yaml", b"a: 1\n\xff", 2, "no text in UTF-8"),
    ("a.toml", "a = 1\nb = \n", 2, "is not valid TOML: Invalid value"),
    ("a.toml", f"a = 1\nb = {DEEP}\n", 2, "nested too deeply"),
    ("a.toml", "a = 1\nb = " + "9" * 5000, 2, "4300 digits"),
    ("a.toml", "[" + ".".join(f"k{n}" for n in range(300)) + "]\nb = 1", None, "nested too deeply"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "text", "line", "reason"), WRONG)
def test_what_is_wrong_in_a_document_is_one_line_with_its_own(
    name: str, text: str | bytes, line: int | None, reason: str, tmp_path: Path
) -> None:
    path = tmp_path / name
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(InputError, match=reason) as caught:
        read_document(path, "the file")
    where = f"line {line} of the file {path}" if line else f"the file {path}"
    assert str(caught.value).startswith(where)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("number", "way_out"),
    [
        (errno.ENOENT, "check the path"),
        (errno.ENAMETOOLONG, "check the path"),
        (errno.EACCES, "read it as its owner, or have its permissions changed"),
        (errno.EISDIR, "name another file"),
        (errno.EIO, "copy or download the file again"),
    ],
)
def test_what_cannot_be_read_has_a_remedy_by_its_reason(number: int, way_out: str) -> None:
    error = OSError(number, os.strerror(number), "x")
    assert why_unread(error) == f"{os.strerror(number)}; {way_out}"


@pytest.mark.parametrize(
    "arguments",
    [
        ["plan", "{}.json"],
        ["plan", "gpt2", "--machine", "{}.json"],
        ["simulate", "{}.json"],
        ["convert-config", "{}.json"],
    ],
)
def test_a_command_that_is_given_a_file_that_is_not_there_says_what_to_do(
    arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "nope"
    assert main([each.format(path) for each in arguments]) == 2
    said = capsys.readouterr().err
    assert said.startswith("gemini: error: cannot read the ")
    assert said.endswith(f"{path}.json: No such file or directory; check the path\n")


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("a.json", '\ufeff{"a": [NaN, 1e999]}', None),
        ("a.json", '{"a": 1, "a": 2}', {"a": 2}),
        ("a.json", "[" * MAX_DEPTH + "]" * MAX_DEPTH, None),
        ("a.json", '"' + "[" * 5000 + '"', "[" * 5000),
        ("a.yaml", "a: 1\nb: [x, 2.5]\nc: 2001-02-03\n", None),
        ("a.toml", "a = 1\n[b]\nc = 2\n", {"a": 1, "b": {"c": 2}}),
    ],
)
def test_what_a_language_allows_is_read(name: str, text: str, value: Any, tmp_path: Path) -> None:
    (tmp_path / name).write_text(text)
    found = read_document(tmp_path / name, "the file")
    assert found == value if value is not None else found


def test_records_come_with_their_lines_and_what_is_none_with_its_own() -> None:
    assert list(parse_records('[\n {"a": 1},\n\n {"b":\n 2}\n]\n')) == [(2, {"a": 1}), (4, {"b": 2})]
    assert list(parse_records('{"a": 1}\n{"b": 2}\n3')) == [(1, {"a": 1}), (2, {"b": 2}), (3, 3)]
    assert list(parse_records(" [] ")) == []
    wrong = [("[1,\n2", 2), ("[1\n2]", 2), ("[1]\nx", 2), ("[1,\n]", 2), ('[\n"\\ud800"]', 2), ("[\n\n{]", 3)]
    for text, line in wrong:
        with pytest.raises(SyntaxProblem) as caught:
            list(parse_records(text))
        assert caught.value.line == line, text


def test_half_of_a_surrogate_pair_is_no_text_and_a_whole_pair_is() -> None:
    assert parse_record('{"a": "\\ud83d\\ude00 \\\\ud800"}') == {"a": "\U0001f600 \\ud800"}
    for text in ('"\\ud800"', '{"\\udc00": 1}', '{"a": ["\\ud83d\\ud83d\\ude00"]}'):
        with pytest.raises(SyntaxProblem, match="surrogate"):
            parse_record(text)


def test_a_refusal_is_what_callers_of_either_kind_expect(tmp_path: Path) -> None:
    with pytest.raises(InputError) as caught:
        InputDirectory(tmp_path / "a\nb\udcff")
    assert isinstance(caught.value, CheckpointError)
    assert isinstance(caught.value, ConfigError)
    assert "a\\nb\\udcff" in str(caught.value)


class PanicException(BaseException):
    """As what a library in Rust raises."""


def test_errors_of_libraries_are_said_in_one_line_and_ours_and_interrupts_stay() -> None:
    for error in (TypeError("a\nb"), KeyError("a"), RecursionError(), PanicException("gone")):
        with (
            pytest.raises(InputError, match=r"^doing: [^\n]+; do that$"),
            errors_of("doing", way_out="do that"),
        ):
            raise error
    for error in (GeminiError("ours"), KeyboardInterrupt()):
        with pytest.raises(type(error)) as caught, errors_of("doing"):
            raise error
        assert caught.value is error


@pytest.fixture
def cached(tmp_path: Path) -> Path:
    """A snapshot as the cache of Hugging Face has it."""
    model = tmp_path / "models--a--b"
    snapshot = model / "snapshots" / "0123"
    snapshot.mkdir(parents=True)
    (model / "blobs").mkdir()
    (model / "blobs" / "77").write_text('{"model_type": "llama"}')
    (snapshot / "config.json").symlink_to("../../blobs/77")
    return snapshot


def test_links_of_a_cache_are_followed_to_the_blobs_of_their_model(cached: Path, tmp_path: Path) -> None:
    check_model(cached)
    assert InputDirectory(cached).json("config.json", 99) == {"model_type": "llama"}
    link = tmp_path / "link"  # the directory itself may be one
    link.symlink_to(cached)
    assert InputDirectory(link).file("config.json") == link / "config.json"
    other = tmp_path / "models--a--c" / "blobs"
    other.mkdir(parents=True)
    (other / "77").write_text("{}")
    (cached / "generation_config.json").symlink_to(other / "77")
    with pytest.raises(InputError, match=r"is a link out of its directory, to .*models--a--c"):
        check_model(cached)


def test_blobs_that_lead_elsewhere_are_no_blobs(cached: Path, tmp_path: Path) -> None:
    blobs = cached.parent.parent / "blobs"
    blobs.rename(tmp_path / "elsewhere")
    blobs.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(InputError, match="out of its directory"):
        check_model(cached)


@pytest.mark.parametrize("name", ["..", "../a", "/etc/passwd", "a/b", "", ".", "a\0", "\ud800", None, 3])
def test_no_name_leads_out_of_a_directory(name: Any, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="is not the name of a file in it"):
        InputDirectory(tmp_path).file(name)


@pytest.mark.parametrize("kind", ["fifo", "directory", "loop", "nowhere", "zero"])
def test_what_is_no_file_is_refused_by_its_name(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "model-00001-of-00002.safetensors"
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "directory":
        path.mkdir()
    else:
        path.symlink_to({"loop": path.name, "nowhere": "nowhere", "zero": "/dev/zero"}[kind])
    with pytest.raises(InputError, match=r"model-00001-of-00002"):
        check_model(tmp_path)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ('{"num_hidden_layers": 100000}', "1e\\+05, more than the 10000"),
        ('{"text_config": {"depths": [2, 20000]}}', "2e\\+04, more than"),
        ('{"attn_implementation": "org/kernel"}', "a kernel to fetch and run"),
        ('{"vision_config": {"_attn_implementation": "org/kernel:f"}}', "a kernel to fetch and run"),
        ('{"transformers_weights": "../x.safetensors"}', "is not the name of a file"),
        ("[]", "is a list"),
    ],
)
def test_a_config_that_cannot_be_built_or_would_run_code_is_refused(
    text: str, reason: str, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(InputError, match=reason):
        check_model(tmp_path)


def test_an_index_beside_a_whole_file_may_lack_its_shards(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin.index.json").write_text('{"weight_map": {"a": "pytorch_model-1.bin"}}')
    index = tmp_path / "model.safetensors.index.json"
    index.write_text('{"weight_map": {"a": "missing.safetensors"}}')
    with pytest.raises(InputError, match=r"missing\.safetensors: No such file"):
        check_model(tmp_path)
    (tmp_path / "model.safetensors").touch()
    check_model(tmp_path)
    index.write_text('{"weight_map": {"a": "../missing.safetensors"}}')
    with pytest.raises(InputError, match="is not the name of a file"):
        check_model(tmp_path)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ('{"megatron_config": {"a": 1}, "megatron_core": "os"}', "whose module PEFT would run"),
        ('{"base_model_name_or_path": ["a"]}', "no name"),
        ("{", "is not valid JSON"),
    ],
)
def test_adapters_that_would_run_code_are_refused(text: str, reason: str, tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text(text)
    with pytest.raises(InputError, match=reason):
        check_adapters(tmp_path)


class _Empty:
    """A tensor without elements, as a file may have any number of."""

    nbytes = 0

    def __init__(self, name: str) -> None:
        self.name = name

    def read(self, memory: torch.UntypedStorage | None = None) -> torch.Tensor:
        return torch.empty(0)


def _seconds(count: int) -> float:
    reads, tensors = TensorReads(), [_Empty(str(number)) for number in range(count)]
    begun = time.process_time()
    reads.expect(tensors)
    for tensor in tensors[::100]:  # most are no model's
        reads.take(tensor)
    reads.close()
    return time.process_time() - begun


def test_reading_takes_time_by_the_number_of_tensors() -> None:
    assert _seconds(40_000) < 10  # by the square it takes a minute
