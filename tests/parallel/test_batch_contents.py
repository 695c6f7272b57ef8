"""The digest by which ranks that share a model compare what their batches hold."""

import pytest
import torch

from gemini.parallel.pipeline.batches import contents_of

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.complex64]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(4096, 8), (8192, 7), (4096, 3, 5), (5, 1)], ids=str)
def test_contents_tell_any_column_and_the_order_of_samples(shape, dtype):
    batch = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)
    same = contents_of({"x": batch})
    assert contents_of({"x": batch.clone()}) == same
    for column in range(shape[1]):  # regular distances can be whole rows: one column alone
        other = batch.clone()
        other[:, column] *= 2
        assert contents_of({"x": other}) != same
    assert contents_of({"x": batch.flip(0)}) != same


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_contents_are_of_the_numbers_wherever_they_lie_in_memory(dtype):
    memory = torch.randn(41, 12, generator=torch.Generator().manual_seed(0)).to(dtype)
    views = [
        memory[1:, ::2],
        memory.t(),
        memory.reshape(-1)[1:36].view(5, 7),
        memory[3, 3],
        memory[:0],
        memory[0, 1:9],
    ]
    for view in views:
        aligned = torch.empty(view.shape, dtype=dtype).copy_(view)
        assert contents_of(view) == contents_of(aligned)
        assert contents_of((view, 1)) != contents_of((view, 2))
