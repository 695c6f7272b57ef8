"""Refuse words that make a sentence hard to read: ``python scripts/prose.py FILE...``

Two lists: proselint's (cliches, archaisms, redundancies, repeated words), and INSTEAD, because proselint
takes no words of ours: phrases that this project once wrote again and again. Code is left out: fenced and
indented blocks, and text in backticks. Of a Python file only docstrings and comments are read.
Prints ``file:line: phrase: what to write``; the exit code is 1 after a hit.
"""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterator
from itertools import count
from pathlib import Path

from proselint.checks import __register__
from proselint.config import DEFAULT
from proselint.registry import CheckRegistry
from proselint.tools import LintFile

# Typography asks for characters that are not ASCII, dates take "1 am" for a time of day; "very" may stand.
LEFT_OUT = ("typography", "dates_times", "weasel_words")
# A phrase, as a regular expression without regard to case, and what to write instead.
INSTEAD = {
    r"of which": "a second sentence that names the thing",
    r"of whom": "a second sentence",
    r"whose": "'with ...', or a second sentence",
    r"such an? (?:one|thing)|such ones": "the noun",
    r"that which|those which": "the noun",
    r"whoever|whomever|whosoever": "the actor",
    r"what of": "the part, by its name",
    r"in (?:the )?place of": "'instead of' or 'replaces'",
    r"anew": "'again'",
    r"hears? of": "'is notified of', 'gets an error about'",
    r"told of": "'reported'",
    r"no more(?=[.,;:)])|(?:is|are|was|were) no more(?! than)": "'no longer'",
    r"others than": "'other ... than'",
    r"in silence|without a word": "'silently'",
    r"for good": "'permanently'",
    r"for ?ever": "'indefinitely'",
    r"(?:becomes?|became) of": "'happens to'",
    r"for want of": "'without' or 'if ... is missing'",
    r"puts? off": "'defer'",
    r"all the same(?! \w)": "'anyway'",
    r"(?:is|are|was|were) to be (?:\w+ed|\w+en|had|said|told)": "'must be'",
    r"so as to": "'to'",
    r"but for": "'except for'",
    r"one's own": "'your own'",
    r"one alone": "'only one'",
    r"(?:is|are) said (?:by|of|to)": "the actor and an active verb",
    r"thereof|therein|whereof|wherein|whereby": "a second sentence",
}
_PHRASES = [(re.compile(rf"\b(?:{phrase})\b", re.IGNORECASE), instead) for phrase, instead in INSTEAD.items()]


def prose_of(text: str) -> str:
    """Return a page with its code blanked, line by line."""
    fenced = False
    lines = []
    names = map("code{}".format, count())  # each another one: a repeated word would be a hit
    for line in text.splitlines():
        is_fence = line.lstrip().startswith("```")
        is_code = is_fence or fenced or line.startswith("    ")
        fenced ^= is_fence
        lines.append("" if is_code else re.sub(r"`[^`]*`", lambda code: next(names), line))
    return "\n".join(lines)


def python_prose(source: str) -> str:
    """Return the docstrings and comments of a Python file, without indent, each on its own lines; all other
    lines are code."""
    lines = ["`code`"] * len(source.splitlines())  # a word, so that a repeated word is one of neighbours
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, documented) and ast.get_docstring(node) is not None:
            text = node.body[0].value  # type: ignore[attr-defined]
            for number, line in enumerate(text.value.splitlines(), start=text.lineno - 1):
                lines[number] = line.strip()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            lines[token.start[0] - 1] = token.string.lstrip("#: ")
    return "\n".join(lines)


def hits(text: str) -> Iterator[tuple[int, str]]:
    """Return each hit in a page: its line and a description."""
    prose = prose_of(text)
    for number, line in enumerate(prose.splitlines(), start=1):
        for phrase, instead in _PHRASES:
            for found in phrase.finditer(line):
                yield number, f"{found[0]!r}: write {instead}"
    if not prose.strip():
        return
    checks = {**DEFAULT["checks"], **dict.fromkeys(LEFT_OUT, False)}
    registry = CheckRegistry()
    if not registry.checks:
        registry.register_many(__register__)
    for result in LintFile("page", prose).lint({"max_errors": 1000, "checks": checks}):
        yield result.pos[0], result.check_result.message


def main(paths: list[str]) -> int:
    """Print the hits of all pages; return the exit code."""
    num_hits = 0
    for path in paths:
        text = Path(path).read_text()
        for line, wrong in hits(python_prose(text) if path.endswith(".py") else text):
            print(f"{path}:{line}: {wrong}")
            num_hits += 1
    return 1 if num_hits else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
