"""Looking at a module leaves nothing on it."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from gemini import ConfigError
from gemini.parallel.pipeline.stage import unchanged


class Remembering(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        self.register_buffer("mean", torch.zeros(2))
        self.register_buffer("table", torch.zeros(2**21 + 1))
        self.calls, self.last = 0, torch.zeros(2)
        self.seen, self.names, self.by_name = [1], {"a", "b"}, {"a": torch.zeros(1)}


def test_numbers_tensors_and_collections_are_as_before() -> None:
    module = Remembering()
    before = dict(module.__dict__), module.mean, module.last, module.by_name["a"]
    with unchanged([module, module]):
        module.calls += 1
        module.last += 1
        module.mean += 1
        module.mean = module.mean * 2
        module.seen.append(2)
        module.names.remove("a")
        module.names.add("c")
        module.by_name["a"] = torch.ones(1)
        module.by_name["b"] = torch.ones(1)
        module.fresh = 1
    attributes, mean, last, member = before
    assert module.__dict__.keys() == attributes.keys()
    assert all(module.__dict__[key] is value for key, value in attributes.items())
    assert module.mean is mean
    assert module.last is last
    assert not torch.cat((mean, last)).any()
    assert (module.calls, module.seen, module.names) == (0, [1], {"a", "b"})
    assert module.by_name == {"a": member}


def test_what_was_undone_is_so_after_an_exception_too() -> None:
    module = Remembering()
    with pytest.raises(IndexError), unchanged([module]):
        module.mean.add_(1)[2].item()
    assert not module.mean.any()


def test_a_write_to_a_large_tensor_is_refused_by_its_name() -> None:
    module = Remembering()
    with pytest.raises(ConfigError, match="the buffer 'table' of Remembering of 8 MiB"), unchanged([module]):
        module.table += 1
