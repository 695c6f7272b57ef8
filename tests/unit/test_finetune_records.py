"""Files of records: what is read of them, which kind each record is, and what is refused with its line."""

from __future__ import annotations

import gzip
import json
import os
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gemini.errors import ConfigError
from gemini.jobs.finetune import record_files
from gemini.jobs.finetune.record_files import find_data, read_records
from gemini.jobs.finetune.record_kinds import Document, Documents

CHAT = [{"role": "user", "content": "two"}, {"role": "assistant", "content": "three"}]
SPOKEN = [{"from": "human", "value": "two"}, {"from": "gpt", "value": "three"}]
RECORDS: dict[str, dict[str, Any]] = {
    "text": {"text": "one"},
    "prompt-completion": {"prompt": "one", "completion": "two"},
    "alpaca": {"instruction": "Add.", "input": "1 1", "output": "2"},
    "sharegpt": {"conversations": SPOKEN},
    "messages": {"messages": CHAT},
}


def written(directory: Path, name: str, text: str) -> Path:
    path = directory / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    return path


def lines_of(*records: Any) -> str:
    return "\n".join(map(json.dumps, records))


def read(path: Path, **options: str) -> list[Document]:
    return list(Documents(find_data(str(path)), **options))


@pytest.mark.parametrize("kind", RECORDS)
def test_a_record_is_of_the_kind_that_its_keys_say(kind: str, tmp_path: Path) -> None:
    noted = {"id": 7, "source": None, **RECORDS[kind]}
    (document,) = found = Documents(find_data(str(written(tmp_path, "d.jsonl", lines_of(noted)))))
    assert document.kind == kind
    assert document.place == f"line 1 of {tmp_path}/d.jsonl"
    assert found.describe().endswith(f"({kind}) in JSON lines, d.jsonl")
    assert read(tmp_path, data_format=kind) == [document]
    others = {*RECORDS} - {kind}
    for other in others:
        with pytest.raises(ConfigError, match=f"line 1 of .* is not a record of --data-format {other}"):
            read(tmp_path, data_format=other)


def test_speakers_instructions_and_columns_become_messages(tmp_path: Path) -> None:
    records = [
        {"conversations": SPOKEN, "system": "Be brief."},
        {"instruction": "Add.", "input": "1 1", "output": "2", "system": "Be brief."},
        {"instruction": "Add.", "input": "", "output": "2", "history": [["Hi", "Hello"]]},
        {
            "messages": [
                {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}
            ]
        },
        {"messages": json.dumps(CHAT)},
    ]
    made = [each.messages for each in read(written(tmp_path, "d.jsonl", lines_of(*records)))]
    system = {"role": "system", "content": "Be brief."}
    assert made == [
        [system, *CHAT],
        [system, {"role": "user", "content": "Add.\n\n1 1"}, {"role": "assistant", "content": "2"}],
        [
            {"role": "user", "content": "Hi"},
            {"role": "assistant", "content": "Hello"},
            {"role": "user", "content": "Add."},
            {"role": "assistant", "content": "2"},
        ],
        [{"role": "user", "content": "ab"}],
        CHAT,
    ]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 2 of .* is not valid JSON"),
        ("[]", "is not a JSON object"),
        ('"text"', "is not a JSON object"),
        ('{"prompt": "a", "answer": "b"}', "prompts with answers .*--data-keys completion=answer"),
        ('{"question": "a", "answer": "b"}', "--data-keys prompt=question,completion=answer"),
        ('{"left": "a", "right": "b"}', "not a known kind of record: it has 'left', 'right'"),
        ('{"text": ["a"]}', "line 2 of .* has 'text' of type list, not text"),
        ('{"messages": "hello"}', "line 2 of .* has 'messages' of type str, not a list"),
        ('{"text": null}', "line 2 of .* has no value for 'text'; fill it in"),
        ('{"instruction": "a", "output": null}', "line 2 of .* has no value for 'output'"),
        ('{"Prompt": "a", "Completion": "b"}', "--data-keys prompt=Prompt,completion=Completion"),
        ('{"data": [{"text": "a"}]}', r"may be the list under 'data': jq -c '\.data\[\]'"),
        ('{"input_ids": [1]}', "tokens already"),
        ('{"text": "a", "messages": [{}]}', "kinds of records, text and messages; .* --data-format messages"),
        ('{"messages": []}', "line 2 of .* has no messages"),
        ('{"conversations": []}', "line 2 of .* has no messages"),
        ('{"messages": [{"role": "user"}]}', "each message needs a role and a content"),
        ('{"messages": [{"role": "user", "content": [{"type": "image"}]}]}', "a part of type 'image'"),
        ('{"messages": ["hello"]}', "line 2 of .* the message 'hello'"),
        ('{"conversations": [{"from": "narrator", "value": "a"}]}', "speaker 'narrator'; use one of human"),
        ('{"instruction": "a", "output": " "}', "line 2 of .* an empty output"),
        ('{"instruction": "a", "output": 3}', "line 2 of .* output that is not text"),
        ('{"prompt": "a", "completion": 3}', "both text, or both lists"),
        ('{"prompt": "a", "chosen": "b", "rejected": "c"}', "line 2 of .* preference .*completion=chosen"),
        ('{"chosen": [], "rejected": []}', "line 2 of .* preference pair .*messages=chosen"),
        ('{"prompt": "a", "completion": "b", "label": true}', "line 2 of .* for KTO, which"),
        ('{"text": "a\\ud800b"}', "line 2 of .* half of a surrogate pair"),
    ],
)  # fmt: skip
def test_records_that_cannot_be_learned_are_refused_by_line(line: str, message: str, tmp_path: Path) -> None:
    file = written(tmp_path, "d.jsonl", f'{{"text": "fine"}}\n{line}\n')
    with pytest.raises(ConfigError, match=message) as raised:
        read(file)
    assert "\n" not in str(raised.value)


def test_keys_have_the_names_that_they_are_given(tmp_path: Path) -> None:
    file = written(tmp_path, "d.jsonl", lines_of({"q": "one", "a": "two", "prompt": "old"}))
    (document,) = read(file, keys="prompt=q,completion=a")
    assert (document.prompt, document.completion) == ("one", "two")


def test_records_are_the_same_in_every_kind_of_file(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow", reason="the extra 'data' is not installed")
    from pyarrow import ipc, parquet

    pairs = [{"prompt": 'one, "two"\n', "completion": "\u00e9"}, {"prompt": "three", "completion": "four"}]
    text = lines_of(*pairs)
    written(tmp_path, "a.JSONL", text)
    written(tmp_path, "b.JSON", json.dumps(pairs, indent=1))
    written(tmp_path, "c.json", f"\ufeff{text}")
    written(tmp_path, "d.csv", 'prompt,completion\r\n"one, ""two""\n",\u00e9\r\n\r\nthree,four\r\n')
    written(tmp_path, "e.tsv", 'prompt\tcompletion\n"one, ""two""\n"\t\u00e9\nthree\tfour')
    written(tmp_path, "f.csv", 'prompt;completion\n"one, ""two""\n";\u00e9\nthree;four')
    (tmp_path / "g.jsonl.gz").write_bytes(gzip.compress(text.encode()))
    table = pyarrow.Table.from_pylist(pairs)
    parquet.write_table(table, tmp_path / "h.parquet")
    with ipc.new_stream(tmp_path / "i.arrow", table.schema) as stream:
        stream.write_table(table)
    with ipc.new_file(tmp_path / "j.arrow", table.schema) as file:
        file.write_table(table)
    files = sorted(tmp_path.iterdir())
    assert len(files) == 10
    for each in files:
        found = [(document.prompt, document.completion) for document in read(each)]
        assert found == [('one, "two"\n', "\u00e9"), ("three", "four")], each.name


def test_lines_of_records_are_those_that_they_begin_in(tmp_path: Path) -> None:
    listed = written(tmp_path, "a.json", '[\n{"text": "a"},\n\n{"text":\n "b"}, {"text": "c"}\n]')
    table = written(tmp_path, "b.csv", 'text\n"a\nb"\nc\n')
    places = {file: [each.place.split()[1] for each in read_records(file)] for file in (listed, table)}
    assert places == {listed: ["2", "4", "5"], table: ["2", "4"]}


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("d.json", '[\n{"text": "a"},\n{"text" "b"}]', "line 3 of .* is not valid JSON"),
        ("d.json", '[{"text": "a"}\n', "line 2 of .* the list does not end"),
        ("d.json", '[{"text": "a"}]\n{}', "line 2 of .* something follows the list"),
        ("d.json", '[{"text": "a"}\n{"text": "b"}]', "line 2 of .* expecting ','"),
        ("d.json", '{"text": "a"}\n{"text": "a\\ud800b"}', "line 2 of .* half of a surrogate pair"),
        ("d.csv", "text,note\na,b\nc\n", "line 3 of .* has 1 values, and the first line names 2 columns"),
        ("d.csv", "text,note,text\na,b,c\n", "line 1 of .* names the column 'text' twice"),
        ("d.csv", 'text\na\n"b" c\n', "line 3 of .* is not valid CSV"),
        ("d.txt", '{"text": "a"}\n{"text": "b"}', "seems to hold JSON records .*--data-format text"),
        ("d", '[{"messages": []}]', "seems to hold JSON records"),
        ("d.parquet", "PAR1, then text", "cannot read --data .*d.parquet"),
        ("d.jsonl.gz", "no gzip", "cannot read --data .*d.jsonl.gz"),
        ("d.bin", "PAR1, then text", "seems to be parquet; name it .parquet"),
        ("d.xlsx", "PK\x03\x04", "a zip archive or a spreadsheet"),
    ],
)
def test_files_that_cannot_be_read_are_refused_in_one_line(
    name: str, text: str, message: str, tmp_path: Path
) -> None:
    if name.endswith(".parquet"):
        pytest.importorskip("pyarrow", reason="the extra 'data' is not installed")
    with pytest.raises(ConfigError, match=message) as raised:
        read(written(tmp_path, name, text))
    assert "\n" not in str(raised.value)


def test_text_that_looks_like_records_is_text_or_lines_where_that_is_said(tmp_path: Path) -> None:
    file = written(tmp_path, "d.txt", lines_of({"messages": CHAT}))
    assert [each.text for each in read(file, data_format="text")] == [file.read_text()]
    assert [each.messages for each in read(file, data_format="messages")] == [CHAT]


def test_a_directory_is_read_with_all_below_it_but_what_describes_the_data(tmp_path: Path) -> None:
    written(tmp_path, "b/x.txt", "second")
    written(tmp_path, "a.jsonl", '{"text": "first"}\n\n{"text": "next"}\n')
    written(tmp_path, "README.md", "about")
    written(tmp_path, ".hidden", "never")
    found = Documents(find_data(str(tmp_path)))
    assert [document.text for document in found] == ["first", "next", "second"]
    assert found.describe() == "3 texts (text) in JSON lines and plain text, 2 files, without README.md"
    (tmp_path / "a.jsonl").unlink()
    assert [document.text for document in Documents(find_data(str(tmp_path)))] == ["about", "second"]
    (tmp_path / "binary.txt").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match=r"binary\.txt is not UTF-8 text"):
        read(tmp_path)
    with pytest.raises(ConfigError, match="does not exist"):
        find_data(str(tmp_path / "none"))


@pytest.mark.parametrize(
    ("names", "learned", "held_out"),
    [
        (("train.jsonl", "test.jsonl"), {0}, {1}),
        (("data/train-00000-of-00002.jsonl", "data/validation-00000-of-00002.jsonl"), {0}, {1}),
        (("test/train.jsonl", "train/test.jsonl", "other.jsonl"), {0, 2}, {1, 2}),
        (("training/a.jsonl", "dev/a.jsonl", "eval/b.jsonl"), {0}, {1, 2}),
        (("test.jsonl", "valid.jsonl"), {0, 1}, {0, 1}),
        (("latest.jsonl", "train.jsonl", "contest.jsonl"), {0, 1, 2}, {0, 1, 2}),
    ],
)
def test_of_several_splits_in_a_directory_the_one_that_is_meant_is_read(
    names: tuple[str, ...], learned: set[int], held_out: set[int], tmp_path: Path
) -> None:
    files = [written(tmp_path, name, '{"text": "a"}') for name in names]
    for option, wanted in (("--data", learned), ("--eval-data", held_out)):
        found = find_data(str(tmp_path), option)
        assert set(found.files) == {files[index] for index in wanted}
        assert set(found.left_out) == set(files) - set(found.files)


def test_a_pattern_names_some_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("train-0.jsonl", "train-1.jsonl", "test-0.jsonl"):
        written(tmp_path, name, lines_of({"text": name}))
    monkeypatch.chdir(tmp_path)
    for pattern in ("train-*.jsonl", f"{tmp_path}/train-?.jsonl"):
        assert [each.name for each in find_data(pattern).files] == ["train-0.jsonl", "train-1.jsonl"]
    with pytest.raises(ConfigError, match="matches no file"):
        find_data("valid-*.jsonl")


def test_a_link_out_of_a_directory_of_data_is_refused(tmp_path: Path) -> None:
    written(tmp_path, "other.txt", "private")
    written(tmp_path, "data/a.txt", "text")
    (tmp_path / "data" / "b.txt").symlink_to("a.txt")
    assert len(find_data(str(tmp_path / "data")).files) == 2
    (tmp_path / "data" / "c.txt").symlink_to("../other.txt")
    with pytest.raises(ConfigError, match=r"c\.txt is a link out of its directory"):
        find_data(str(tmp_path / "data"))


def longer(path: Path) -> None:
    with path.open("a") as file:
        file.write('{"text": "more"}\n')


def replaced(path: Path) -> None:
    path.with_name("other").write_bytes(path.read_bytes())
    path.with_name("other").rename(path)


@pytest.mark.parametrize("change", [longer, replaced, lambda path: path.write_text('{"te')])
def test_a_file_that_changes_while_it_is_read_is_refused(
    change: Callable[[Path], None], tmp_path: Path
) -> None:
    file = written(tmp_path, "d.jsonl", '{"text": "a"}\n' * 10**5)
    records = iter(Documents(find_data(str(file))))
    next(records)
    change(file)
    with pytest.raises(ConfigError, match=r"changed while it was read, after line \d+ of .*d\.jsonl; wait"):
        list(records)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("d.jsonl", '{"text": "a"}\n{"text": "%s"}'),
        ("d.json", '[{"text": "a"},\n{"text": "%s"}]'),
        ("d.csv", 'text\n"%s'),
        ("d.txt", "a\n%s"),
    ],
)
def test_a_record_without_end_is_refused_before_memory_ends(
    name: str, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(record_files, "MAX_RECORD_BYTES", 2**20)
    monkeypatch.setattr(record_files, "_CHUNK", 2**16)
    head, tail = text.split("%s")
    file = written(tmp_path, name, head)
    with file.open("r+") as end:
        end.seek(0, os.SEEK_END)
        if name == "d.json":  # which takes no other letters
            end.write("a" * 2**25)
        else:
            end.seek(2**28)  # a hole, which takes no space
        end.write(tail or " ")
    tracemalloc.start()
    try:
        with pytest.raises(ConfigError, match=r"(line 2 of .*d\.|up to line )") as raised:
            read(file)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert "has more than 1 MiB" in str(raised.value)
    assert peak < 16 * 2**20
