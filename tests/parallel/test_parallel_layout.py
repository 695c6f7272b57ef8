"""Which configurations of parallelism are accepted, and what they mean."""

from __future__ import annotations

from typing import Any

import pytest

from gemini import ConfigError
from gemini.parallel.layout import Layout


@pytest.mark.parametrize(
    ("parallel", "world", "wanted"),
    [
        ({"pipeline": {"size": 2}, "tensor": {"size": 4, "mode": "2d"}}, 8, Layout(1, 2, 1, 4, "2d")),
        ({"pipeline": 2, "tensor": {"size": 4, "mode": "2d"}}, 16, Layout(2, 2, 1, 4, "2d")),
        ({"pipeline": 2}, 8, Layout(4, 2)),
        ({"tensor": {"size": 4, "mode": "2d"}}, 4, Layout(tp=4, mode="2d")),
        ({"tensor": {"size": 2, "mode": "1d"}}, 2, Layout(tp=2, mode="1d")),
        ({"tensor": {"size": 8, "mode": "2.5d", "depth": 2}}, 8, Layout(tp=8, mode="2.5d", depth=2)),
        ({"tensor": {"size": 8, "mode": "3d"}}, 8, Layout(tp=8, mode="3d")),
        ({"tensor": {"size": 4, "mode": "sequence"}}, 8, Layout(dp=2, sp=4, mode="sequence")),
        ({"tensor": {"size": 1, "mode": None}, "data": 3}, 3, Layout(3)),
        ({"data": 2, "pipeline": 2}, 4, Layout(2, 2)),
        ({}, 5, Layout(5)),
        (None, 1, Layout()),
    ],
)
def test_what_is_absent_is_one_and_data_is_the_rest(
    parallel: dict[str, Any] | None, world: int, wanted: Layout
) -> None:
    assert Layout.from_config(parallel, world) == wanted
    assert wanted.world_size == world


@pytest.mark.parametrize(
    ("parallel", "world", "said"),
    [
        ({"pipeline": 2, "tensor": 4}, 8, r"tensor=4 has no mode.*mode='2d'.*depth=2"),
        ({"tensor": 1}, 1, "has no mode"),
        ({"tensor": {"size": 4}}, 4, "no mode"),
        ({"tensor": {"mode": "2d"}}, 4, "tensor has no size"),
        ({"tensor": {"size": int, "mode": "2d"}}, 4, "tensor size is <class 'int'>"),
        ({"tensor": {"size": 4.0, "mode": "2d"}}, 4, r"tensor size is 4\.0"),
        ({"tensor": {"size": True, "mode": "1d"}}, 1, "tensor size is True"),
        ({"tensor": {"size": 4, "mode": "4d"}}, 4, "mode '4d'; the modes are 1d, 2d, 2.5d, 3d"),
        ({"tensor": {"size": 8, "mode": "2d"}}, 8, r"q \* q, for example 16, 25, 9|q \* q, for example"),
        ({"tensor": {"size": 8, "mode": "2.5d"}}, 8, "needs depth"),
        ({"tensor": {"size": 8, "mode": "2.5d", "depth": 4}}, 8, r"q \* q \* depth"),
        ({"tensor": {"size": 4, "mode": "2d", "depth": 2}}, 4, "depth=2 works only with mode '2.5d'"),
        ({"tensor": {"size": 4, "mode": "3d"}}, 4, r"a cube"),
        ({"tensor": {"size": 4, "mode": "1d", "widht": 2}}, 4, "tensor has 'widht'"),
        ({"pipeline": {"size": 2, "mode": "1f1b"}}, 2, "pipeline has 'mode'"),
        ({"pipline": 2}, 2, "parallel has 'pipline'"),
        ({"pipeline": 0}, 2, "pipeline is 0"),
        ({"pipeline": "2"}, 2, "pipeline is '2'"),
        (
            {"pipeline": 3},
            8,
            "pipeline 3 x tensor 1 do not divide 8 processes; start a multiple of 3, or pipeline x tensor "
            "may be 1 x 1",
        ),
        ({"data": 2, "pipeline": 2}, 8, r"are 4 processes, and there are 8; start as many, leave data out"),
        ({"moe": {"size": 3}}, 8, "among 3 of 8 processes .*; choose 1 or 2 or 4 or 8"),
        ({"moe": {"sise": 1}}, 8, "moe has 'sise'"),
    ],
)
def test_what_is_refused_is_named_with_a_way_out(parallel: dict[str, Any], world: int, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        Layout.from_config(parallel, world)


@pytest.mark.parametrize("world", range(1, 17))
def test_every_factorisation_is_accepted_and_nothing_else(world: int) -> None:
    for pp in range(1, world + 2):
        for tp in range(1, world + 2):
            parallel = {"pipeline": pp, "tensor": {"size": tp, "mode": "1d"}}
            if world % (pp * tp):
                with pytest.raises(ConfigError, match="do not divide"):
                    Layout.from_config(parallel, world)
            else:
                assert Layout.from_config(parallel, world).dp == world // (pp * tp)
