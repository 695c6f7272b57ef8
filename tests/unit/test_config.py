"""Sizes as users write them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gemini import _C
from gemini.errors import ConfigError, OutOfBudgetError
from gemini.system.config import format_bytes, format_enough, parse_bytes


@pytest.mark.parametrize(
    ("text", "want"),
    [
        ("512MiB", 512 * 2**20),
        ("4GiB", 4 * 2**30),
        ("64 KiB", 64 * 2**10),
        ("1.5GB", 1_500_000_000),
        ("2tb", 2 * 10**12),
        (" 7 ", 7),
        ("0", 0),
        ("12B", 12),
        ("1.25KiB", 1280),
        ("0.3KiB", 307),
        ("9007199254740993B", 9007199254740993),
    ],
)
def test_sizes_are_read_exactly_and_fractions_of_a_byte_are_cut(text: str, want: int) -> None:
    assert parse_bytes(text) == want


@pytest.mark.parametrize("value", [0, 1, 10**15])
def test_an_integer_is_bytes(value: int) -> None:
    assert parse_bytes(value) == value


def test_none_stays_none() -> None:
    assert parse_bytes(None) is None


@pytest.mark.parametrize(
    "value",
    [
        "",
        "MiB",
        "-1",
        "-1MiB",
        -1,
        "4G",
        "4 gigs",
        "1,5GB",
        "1e9",
        "inf",
        "nan",
        "1_000",
        "1..5KB",
        ".5GB",
        "\u0664MiB",
        True,
        1.5,
        b"1",
    ],
)
def test_anything_else_is_refused_with_name_and_value(value: object) -> None:
    with pytest.raises(ConfigError) as refused:
        parse_bytes(value, name="device_bytes")  # type: ignore[arg-type]
    assert "device_bytes" in str(refused.value)
    assert repr(value) in str(refused.value)


@pytest.mark.parametrize(
    ("nbytes", "want"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (24 * 2**20, "24.0 MiB"),
        (2**20 - 1, "1.0 MiB"),
        (-24 * 2**20, "-24.0 MiB"),
        (5 * 2**60, "5120.0 PiB"),
    ],
)
def test_sizes_are_shown_in_the_largest_fitting_unit(nbytes: int, want: str) -> None:
    assert format_bytes(nbytes) == want


@given(st.integers(0, 2**50))
def test_a_shown_size_reads_back_within_the_shown_digit(nbytes: int) -> None:
    back = parse_bytes(format_bytes(nbytes))
    assert back is not None
    assert abs(back - nbytes) <= 0.05 * 1024 * max(nbytes, 1) / 1000


@pytest.mark.parametrize("power", [10, 20, 30, 40, 50, 60])
@given(st.data())
def test_the_core_writes_a_size_like_python(power: int, data: st.DataObject) -> None:
    """The sizes are near a change of unit or digit, or anywhere in between. DEVICE has one byte less."""
    hundredths = data.draw(st.integers(100, 102400))
    near = st.integers(-2, 2).map(lambda distance: 2**power * hundredths // 100 + distance)
    nbytes = data.draw(st.one_of(st.integers(2, 2**power), near.filter(lambda size: size < 2**62)))
    table = _C.ChunkTable(nbytes - 1, 0, 0)
    tensor = table.add_tensor(table.add_chunk(nbytes))
    with pytest.raises(OutOfBudgetError) as refused:
        table.access([tensor])
    start = f"this operator needs {format_bytes(nbytes)} on DEVICE at once but the budget is "
    asked = f"{format_bytes(nbytes - 1)}; raise device_bytes to at least {format_enough(nbytes)}, "
    assert str(refused.value).startswith(start + asked)


@given(st.integers(0, 2**50))
def test_a_size_to_be_given_is_enough_and_hardly_more(nbytes: int) -> None:
    asked = parse_bytes(format_enough(nbytes))
    assert asked is not None
    assert nbytes <= asked <= nbytes * 1.01


def test_a_size_to_be_given_is_short() -> None:
    assert [format_enough(n) for n in (0, 1023, 1024, 2**20 + 1, 2**20 - 1, 24 * 2**30)] == [
        "0B",
        "1023B",
        "1.0KiB",
        "1.01MiB",
        "1024.0KiB",
        "24.0GiB",
    ]
