"""A program of somebody else's ends: by itself, or after so much processor time."""

from __future__ import annotations

import sys

import pytest

from gemini.errors import InputError
from gemini.system.input_files import seconds_in

LOOPS = "n = 0\nfor a in range(10**9):\n    n += 1\n"


def test_loops_end_with_the_refusal_and_others_with_their_result() -> None:
    refusal, names = InputError("it takes too long"), {}
    with pytest.raises(InputError) as caught, seconds_in("<theirs>", 0.05, refusal):
        exec(compile(LOOPS, "<theirs>", "exec"), names)
    assert caught.value is refusal
    assert 0 < names["n"] < 10**9
    with seconds_in("<theirs>", 5, refusal):
        exec(compile(LOOPS.replace("10**9", "10**3"), "<theirs>", "exec"), names)
    assert names["n"] == 1000


def test_a_function_that_loops_within_ends_too() -> None:
    source = "def inner():\n    while True:\n        pass\ninner()\n"
    with pytest.raises(InputError, match="too long"), seconds_in("<theirs>", 0.05, InputError("too long")):
        exec(compile(source, "<theirs>", "exec"), {})


def test_what_is_not_theirs_is_not_bounded_and_a_tracer_comes_back() -> None:
    before = sys.gettrace()
    with seconds_in("<theirs>", 0, InputError("never")):
        exec(compile("for a in range(1000):\n    pass\n", "<ours>", "exec"), {})
    assert sys.gettrace() is before
    with pytest.raises(InputError), seconds_in("<theirs>", 0, InputError("at once")):
        exec(compile("for a in range(1000):\n    pass\n", "<theirs>", "exec"), {})
    assert sys.gettrace() is before
