"""What the table records of a step says when chunks have content, whatever the step does."""

from __future__ import annotations

from itertools import dropwhile

from hypothesis import given, settings
from hypothesis import strategies as st
from num_examples import num_examples

from gemini import _C

NUM_CHUNKS = 4
# ("use", tensors, tensors written to) or ("free", tensors, ()); two tensors per chunk.
TENSORS = st.lists(st.integers(0, 2 * NUM_CHUNKS - 1), min_size=1, max_size=3, unique=True)
CALLS = st.lists(st.tuples(st.sampled_from(["use", "use", "free"]), TENSORS, TENSORS), max_size=25)


class Program:
    """A table whose transfers end at once, and what each period did to the content of its chunks."""

    def __init__(self, device_bytes: int) -> None:
        self.table = _C.ChunkTable(device_bytes, 2, 4)
        for _ in range(NUM_CHUNKS):
            chunk = self.table.add_chunk(1)
            for _ in range(2):
                self.table.add_tensor(chunk)
        self.contents: list[set[int]] = []  # at the end of each period

    def run(self, calls: list[tuple[str, list[int], list[int]]]) -> None:
        for what, tensors, written in calls:
            if what == "free":
                self.table.free(tensors)
                if self.contents:
                    self.contents[-1] = self.content()
            else:
                self.use(tensors, [tensor for tensor in tensors if tensor in written])
                self.contents.append(self.content())

    def use(self, tensors: list[int], written: list[int]) -> None:
        actions = self.table.access(tensors) or ()
        while True:
            for action in actions:
                if action.id:
                    self.table.complete(action.id)
            if self.table.ready(tensors):
                break
            actions = self.table.ensure(tensors)
        self.table.release(written, True)
        self.table.release([tensor for tensor in tensors if tensor not in written], False)

    def content(self) -> set[int]:
        return {chunk for chunk in range(NUM_CHUNKS) if self.table.valid_tiers(chunk)}


@settings(derandomize=True, max_examples=num_examples(300))
@given(st.integers(3, NUM_CHUNKS), CALLS, CALLS)
def test_replaying_modes_and_frees_gives_the_content_of_every_period(
    device_bytes: int, before: list, calls: list
) -> None:
    program = Program(device_bytes)
    program.run(before)
    content = program.content()
    program.contents.clear()
    program.table.begin_step()
    # What is freed before the first moment counts to the last period: such steps have a test of their own.
    program.run(list(dropwhile(lambda call: call[0] == "free", calls)))
    table = program.table
    for chunks, modes, freed, want in zip(
        table.record(), table.record_modes(), table.record_frees(), program.contents, strict=True
    ):
        assert all((mode == "w") == (chunk not in content) for chunk, mode in zip(chunks, modes, strict=True))
        content = (content | set(chunks)) - set(freed)
        assert content == want


@settings(derandomize=True, max_examples=num_examples(200))
@given(st.integers(3, NUM_CHUNKS), CALLS)
def test_modified_are_the_chunks_with_content_that_a_use_wrote_to(device_bytes: int, calls: list) -> None:
    program = Program(device_bytes)
    program.run(calls)
    uses = [(tensors, written) for what, tensors, written in calls if what == "use"]
    for (tensors, written), chunks, modes in zip(
        uses, program.table.record(), program.table.record_modes(), strict=True
    ):
        touched = {tensor // 2 for tensor in tensors if tensor in written}
        for chunk, mode in zip(chunks, modes, strict=True):
            assert mode == "w" or (mode == "m") == (chunk in touched)
