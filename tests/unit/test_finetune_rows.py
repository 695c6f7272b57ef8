"""Rows of tokens: how documents become rows, what is learned of them, and in which order they come."""

from __future__ import annotations

import tracemalloc
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gemini.errors import ConfigError
from gemini.jobs.finetune.encoding import EncodedDocument
from gemini.jobs.finetune.record_kinds import Document
from gemini.jobs.finetune.samples import IGNORED, Order, Samples, best_fit

TEXTS = [[1, 2, 3], [4], [5, 6, 7, 8], [9, 10]]


def document(ids: list[int], learned: list[bool] | None = None, kind: str = "text") -> EncodedDocument:
    return EncodedDocument(Document("somewhere", kind), ids, learned)


def samples(texts: list[list[int]], layout: str, seq: int = 4, kind: str = "text") -> Samples:
    documents = [document(text, kind=kind) for text in texts]
    return Samples(documents, seq=seq, layout=layout, pad=0, directory=None)


def test_joined_rows_are_all_tokens_in_their_order() -> None:
    made = samples(TEXTS, "joined")
    batch = made.rows(range(made.num_rows))
    assert batch.inputs["input_ids"].tolist() == [[1, 2, 3, 4], [5, 6, 7, 8], [9, 10, 0, 0]]
    assert batch.inputs["labels"].tolist() == [[1, 2, 3, 4], [5, 6, 7, 8], [9, 10, IGNORED, IGNORED]]
    assert batch.inputs.keys() == {"input_ids", "labels"}
    assert (batch.num_tokens, batch.num_learned) == (10, 7)


def test_cut_rows_are_the_same_with_positions_that_begin_at_documents() -> None:
    made = samples(TEXTS, "cut")
    inputs = made.rows(range(made.num_rows)).inputs
    joined = samples(TEXTS, "joined").rows(range(made.num_rows)).inputs
    assert inputs["input_ids"].equal(joined["input_ids"])
    assert inputs["position_ids"].tolist() == [[0, 1, 2, 0], [0, 1, 2, 3], [0, 1, 0, 1]]
    first = inputs["position_ids"] == 0
    assert (inputs["labels"][first] == IGNORED).all()
    assert inputs["labels"][~first].equal(joined["labels"][~first])


def test_whole_documents_are_never_split_and_no_row_has_two_where_one_is_enough() -> None:
    made = samples([[1, 2], [3, 4, 5], [6, 7], [8, 9, 10, 11, 12], [13]], "whole")
    inputs = made.rows(range(made.num_rows)).inputs
    assert inputs["input_ids"].tolist() == [[8, 9, 10, 11], [3, 4, 5, 0], [1, 2, 6, 7]]
    assert inputs["position_ids"].tolist() == [[0, 1, 2, 3], [0, 1, 2, 0], [0, 1, 0, 1]]
    assert inputs["labels"].tolist() == [
        [IGNORED, 9, 10, 11],
        [IGNORED, 4, 5, IGNORED],
        [IGNORED, 2, IGNORED, 7],
    ]
    assert (made.num_cut, made.num_lost) == (1, 1)  # a token alone teaches nothing


def test_rows_that_are_filled_up_learn_nothing_from_what_fills_them() -> None:
    made = samples([[1, 2, 3], [4], [5, 6, 7, 8, 9]], "padded")
    batch = made.rows([0, 1])
    assert batch.inputs["input_ids"].tolist() == [[1, 2, 3, 0], [5, 6, 7, 8]]
    assert batch.inputs["labels"].tolist() == [[1, 2, 3, IGNORED], [5, 6, 7, 8]]
    assert batch.inputs["attention_mask"].tolist() == [[1, 1, 1, 0], [1, 1, 1, 1]]
    assert (batch.num_tokens, batch.num_learned) == (7, 5)


@pytest.mark.parametrize("layout", ["padded", "whole", "cut", "joined"])
def test_tokens_that_are_not_learned_are_seen_and_have_no_label(layout: str) -> None:
    made = Samples(
        [document([0, 7, 8, 9], [False, False, True, True])], seq=6, layout=layout, pad=5, directory=None
    )
    inputs = made.rows([0]).inputs
    assert inputs["input_ids"].tolist() == [[0, 7, 8, 9, 5, 5]]
    assert inputs["labels"].tolist() == [[IGNORED, IGNORED, 8, 9, IGNORED, IGNORED]]
    if layout == "padded":
        assert inputs["attention_mask"].tolist() == [[1, 1, 1, 1, 0, 0]]


@pytest.mark.parametrize("layout", ["padded", "whole", "cut", "joined"])
@given(
    lengths=st.lists(st.integers(0, 9), min_size=1, max_size=8),
    seed=st.integers(0, 99),
    seq=st.integers(2, 6),
)
def test_every_row_has_something_to_learn(layout: str, lengths: list[int], seed: int, seq: int) -> None:
    chance = np.random.default_rng(seed)
    documents = [
        document([*range(1, length + 1)], (chance.random(length) < 0.3).tolist()) for length in lengths
    ]
    try:
        made = Samples(documents, seq=seq, layout=layout, pad=0, directory=None)
    except ConfigError:
        return
    for row in range(made.num_rows):
        assert made.rows([row]).num_learned > 0


@given(st.lists(st.integers(1, 9), max_size=30))
def test_rows_of_whole_documents_have_each_once_and_room_for_them(lengths: list[int]) -> None:
    rows = list(best_fit([(start, length) for start, length in enumerate(lengths)], 9))
    assert sorted(piece for row in rows for piece in row) == list(enumerate(lengths))
    totals = [sum(length for _, length in row) for row in rows]
    assert max(totals, default=0) <= 9
    assert sum(2 * total <= 9 for total in totals) <= 1  # two such rows would be one


def test_texts_are_cut_and_other_documents_stay_whole_unless_it_is_said() -> None:
    assert samples(TEXTS, "auto").layout == "cut"
    assert samples(TEXTS, "auto", kind="messages").layout == "whole"


def test_a_fingerprint_is_of_the_tokens_of_where_texts_end_and_of_what_is_learned() -> None:
    def fingerprint(*texts: list[int], learned: list[bool] | None = None) -> str:
        documents = [document(text, learned) for text in texts]
        return Samples(documents, seq=4, layout="cut", pad=0, directory=None).fingerprint

    whole = fingerprint([1, 2, 3, 4], [5, 6])
    unlike = [fingerprint([1, 2, 3, 9], [5, 6]), fingerprint([1, 2, 3], [4, 5, 6])]
    unlike.append(fingerprint([1, 2, 3, 4, 5, 6], learned=[False, True] * 3))
    assert fingerprint([1, 2, 3, 4], [5, 6]) == whole
    assert len({whole, *unlike}) == 4


@pytest.mark.parametrize("layout", ["whole", "cut", "padded"])
def test_too_little_data_is_refused_with_its_number_of_tokens(layout: str) -> None:
    with pytest.raises(ConfigError, match=r"--data has 1 tokens"):
        samples([[1], []], layout)


def test_answers_beyond_the_row_are_said_to_be_that() -> None:
    late = document([1, 2, 3, 4, 5, 6], [False] * 5 + [True], kind="messages")
    with pytest.raises(
        ConfigError, match="no answer starts within the 4 tokens of a row; give a longer --seq"
    ):
        Samples([late], seq=4, layout="auto", pad=0, directory=None)


def test_memory_does_not_grow_with_the_tokens() -> None:
    def many() -> Iterator[EncodedDocument]:
        for _ in range(4000):
            yield document([1] * 1000)

    tracemalloc.start()
    try:
        made = Samples(many(), seq=128, layout="whole", pad=0, directory=None)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert made.num_tokens == 4 * 10**6
    assert peak < 2 * 2**20  # 16 MB of tokens


def test_every_epoch_has_each_row_once_and_what_is_held_out_never() -> None:
    order = Order(20, eval_share=0.2, seed=3)
    epochs = [[order[index] for index in range(first, first + 16)] for first in (0, 16)]
    assert sorted(epochs[0]) == sorted(epochs[1]) == order.learned.tolist()
    assert epochs[0] != epochs[1]
    assert not set(order.learned.tolist()) & set(order.held_out.tolist())
    assert Order(20, eval_share=0.2, seed=3)[17] == epochs[1][1]  # without what was before
    with pytest.raises(ConfigError, match="holds out 1 of 1 rows"):
        Order(1, eval_share=0.5, seed=0)
