"""Parses JSON, YAML and TOML from other people.

The result is plain data that is safe to walk and print: at most :data:`MAX_DEPTH` levels deep, with integers
of at most 4,300 digits. Everything else raises a :class:`SyntaxProblem` with its line.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from typing import Any

from gemini.errors import in_words

MAX_DEPTH = 100  # copying takes several Python frames per level, of 1,000
_MOST_DIGITS = 4300  # the limit of Python's int()
# An unterminated string matches to the end, so that a search takes one pass over any text.
_BRACKETS = re.compile(r'"(?:[^"\\]|\\.)*(?:"|\Z)|[\[{}\]]', re.DOTALL)
_LONG_NUMBER = re.compile(rf"[0-9]{{{_MOST_DIGITS + 1}}}")
_HALF_OF_A_PAIR = re.compile(r"\\u[dD][89a-fA-F]")
_TOML_PLACE = re.compile(r"\(at (?:line (\d+), column \d+|end of document)\)")


class SyntaxProblem(ValueError):
    """An error in a text, and its ``line`` (from 1; None: unknown)."""

    def __init__(self, reason: str, line: int | None = None) -> None:
        super().__init__(reason if line is None else f"line {line}: {reason}")
        self.reason = reason
        self.line = line

    def of(self, where: str, language: str) -> str:
        """Return the message for a text in ``language``; ``where`` names it."""
        line = "" if self.line is None else f"line {self.line} of "
        return f"{line}{where} is not valid {language}: {self.reason}"


class AliasProblem(SyntaxProblem):
    """YAML aliases are refused: they are valid, but their expansion can be unboundedly large."""

    def __init__(self, line: int) -> None:
        super().__init__("it has aliases (*name), which may grow without bound; write them out", line)

    def of(self, where: str, language: str) -> str:
        """Return the message; the text is valid in ``language``."""
        return f"line {self.line} of {where} {self.reason.removeprefix('it ')}"


def parse_json_input(text: bytes | str, *, keys_once: bool = False) -> Any:
    """Return the value of JSON text. Of a repeated key the last value counts; with ``keys_once`` it is
    refused. Raises SyntaxProblem.
    """
    text = _decoded(text)
    try:
        value = json.loads(text, object_pairs_hook=_once if keys_once else None)
    except json.JSONDecodeError as error:
        raise SyntaxProblem(error.msg, error.lineno) from None
    except RecursionError:
        raise _too_deep(text) from None
    except SyntaxProblem:
        raise
    except ValueError as error:  # a number has too many digits
        raise _too_long(text, error) from None
    if text.count("[") + text.count("{") > MAX_DEPTH and _is_deeper(value, MAX_DEPTH):
        raise _too_deep(text)
    return value


def parse_record(text: str) -> Any:
    """Return the value of JSON text; all strings in it must be encodable as UTF-8. Raises SyntaxProblem."""
    value = parse_json_input(text)
    if _HALF_OF_A_PAIR.search(text):
        _require_text(text, value)
    return value


def parse_records(text: str) -> Iterator[tuple[int, Any]]:
    """Yield (line, value) for each value of a JSON list, or of a sequence of JSON values.

    Raises:
        SyntaxProblem: at the first invalid value, after those before it were yielded.
    """
    decoder, place, line = json.JSONDecoder(), 0, 1
    place, line = _skip(text, place, line, " \t\r\n\ufeff")
    is_list = text[place : place + 1] == "["
    place += is_list
    first = True
    while True:
        place, line = _skip(text, place, line, " \t\r\n")
        if place == len(text):
            if is_list:
                raise SyntaxProblem("the list does not end", line)
            return
        if is_list and text[place] == "]":
            place, line = _skip(text, place + 1, line, " \t\r\n")
            if place < len(text):
                raise SyntaxProblem("something follows the list", line)
            return
        if is_list and not first:
            if text[place] != ",":
                raise SyntaxProblem("expecting ',' or ']'", line)
            place, line = _skip(text, place + 1, line, " \t\r\n")
        first = False
        end = _end_of(decoder, text, place, line)
        try:
            value = parse_record(text[place:end])
        except SyntaxProblem as problem:
            raise SyntaxProblem(problem.reason, line - 1 + (problem.line or 1)) from None
        yield line, value
        line += text.count("\n", place, end)
        place = end


def parse_yaml(text: bytes | str) -> Any:
    """Return the value of YAML text. Aliases and repeated keys are refused. Raises SyntaxProblem; ImportError
    if PyYAML is not installed.
    """
    import yaml

    text = _decoded(text)
    try:
        _look_through(yaml, text)
        return yaml.load(text, _plain_loader(yaml))
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        raise SyntaxProblem(
            in_words(ValueError(error.problem or error.context or "")), mark and mark.line + 1
        ) from None
    except yaml.reader.ReaderError as error:
        raise SyntaxProblem(error.reason, text.count("\n", 0, error.position) + 1) from None
    except (yaml.YAMLError, OverflowError) as error:
        raise SyntaxProblem(in_words(error)) from None
    except ValueError as error:  # an invalid escape, or a version with too many digits
        raise error if isinstance(error, SyntaxProblem) else SyntaxProblem(in_words(error)) from None


def parse_toml(text: bytes | str) -> Any:
    """Return the value of TOML text. Raises SyntaxProblem; ImportError if Python is older than 3.11 and tomli
    is not installed.
    """
    if sys.version_info >= (3, 11):
        import tomllib as toml
    else:
        import tomli as toml
    text = _decoded(text)
    try:
        value = toml.loads(text)
    except toml.TOMLDecodeError as error:
        place = _TOML_PLACE.search(str(error))
        line = int(place[1]) if place and place[1] else None
        raise SyntaxProblem(_TOML_PLACE.sub("", str(error)).strip(), line) from None
    except RecursionError:
        raise _too_deep(text) from None
    except ValueError as error:
        raise _too_long(text, error) from None
    if _is_deeper(value, MAX_DEPTH):
        raise _too_deep(text)
    return value


def _decoded(text: bytes | str) -> str:
    if isinstance(text, str):
        return text
    try:
        return text.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise SyntaxProblem(
            f"no text in UTF-8 ({error.reason})", text.count(b"\n", 0, error.start) + 1
        ) from None


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        seen: set[str] = set()
        for name, _ in pairs:
            if name in seen:
                raise SyntaxProblem(f"{name!r:.200} is given twice")
            seen.add(name)
    return found


def _skip(text: str, place: int, line: int, blanks: str) -> tuple[int, int]:
    begun = place
    while place < len(text) and text[place] in blanks:
        place += 1
    return place, line + text.count("\n", begun, place)


def _end_of(decoder: json.JSONDecoder, text: str, place: int, line: int) -> int:
    """Return the end of the value that starts at ``place``."""
    try:
        return decoder.raw_decode(text, place)[1]
    except json.JSONDecodeError as error:
        raise SyntaxProblem(error.msg, error.lineno) from None
    except RecursionError:
        raise SyntaxProblem("it is nested too deeply", line) from None
    except ValueError:
        raise SyntaxProblem(f"a number has more than {_MOST_DIGITS} digits", line) from None


def _is_deeper(value: Any, depth: int) -> bool:
    """Return whether ``value`` is nested deeper than ``depth``. Iterative, because it may be deeper than
    Python's recursion limit.
    """
    level = [value]
    for _ in range(depth + 1):
        level = [
            inner
            for each in level
            if isinstance(each, (dict, list))
            for inner in (each.values() if isinstance(each, dict) else each)
        ]
        if not level:
            return False
    return True


def _too_deep(text: str) -> SyntaxProblem:
    depth = 0
    for found in _BRACKETS.finditer(text):
        depth += {"[": 1, "{": 1, "]": -1, "}": -1}.get(found[0], 0)
        if depth > MAX_DEPTH:
            return SyntaxProblem("it is nested too deeply", text.count("\n", 0, found.start()) + 1)
    return SyntaxProblem("it is nested too deeply")


def _too_long(text: str, error: ValueError) -> SyntaxProblem:
    found = _LONG_NUMBER.search(text.replace("_", ""))
    if found is None:
        return SyntaxProblem(in_words(error))
    line = text.replace("_", "").count("\n", 0, found.start()) + 1
    return SyntaxProblem(f"a number has more than {_MOST_DIGITS} digits", line)


def _require_text(text: str, value: Any) -> None:
    """Raise SyntaxProblem for an unpaired surrogate, which no file can contain."""
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        for number, line in enumerate(text.split("\n"), 1):
            if _HALF_OF_A_PAIR.search(_without_pairs(line)):
                raise SyntaxProblem("half of a surrogate pair is not a character", number) from None
        raise SyntaxProblem("half of a surrogate pair is not a character") from None


def _without_pairs(line: str) -> str:
    return re.sub(r"\\u[dD][89abAB]..\\u[dD][c-fC-F]..|\\[^u]", "", line)


def _look_through(yaml: Any, text: str) -> None:
    """Raise an error for input that would take unbounded time or memory, before anything is built."""
    depth = 0
    for event in yaml.parse(text, Loader=yaml.SafeLoader):
        line = event.start_mark.line + 1
        if isinstance(event, yaml.AliasEvent):
            raise AliasProblem(line)
        if isinstance(event, yaml.CollectionStartEvent):
            depth += 1
            if depth > MAX_DEPTH:
                raise SyntaxProblem("it is nested too deeply", line)
        elif isinstance(event, yaml.CollectionEndEvent):
            depth -= 1


def _plain_loader(yaml: Any) -> Any:
    """Return a SafeLoader that reports the line of errors in constructors and of repeated keys."""
    marked = yaml.constructor.ConstructorError

    class PlainLoader(yaml.SafeLoader):  # type: ignore[misc]
        def construct_object(self, node: Any, deep: bool = False) -> Any:
            try:
                return super().construct_object(node, deep=deep)
            except yaml.YAMLError:
                raise
            except Exception as error:  # int() of a word, day 99 of a month, an unhashable key
                raise marked(None, None, in_words(error), node.start_mark) from None

        def construct_mapping(self, node: Any, deep: bool = False) -> Any:
            seen = set()
            for key, _ in node.value:
                if isinstance(key, yaml.ScalarNode) and key.value in seen:
                    raise marked(None, None, f"{key.value!r:.200} is given twice", key.start_mark)
                seen.add(key.value if isinstance(key, yaml.ScalarNode) else id(key))
            return super().construct_mapping(node, deep=deep)

    return PlainLoader
