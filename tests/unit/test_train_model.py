"""The GPT of the main job: its size, its initialization and its loss."""

from __future__ import annotations

import pytest
import torch

from gemini.errors import ConfigError
from gemini.jobs.gpt.model import GPT, GPTConfig, language_loss, num_parameters

SMALL = GPTConfig(vocab=256, layers=3, hidden=24, heads=4, seq=16)


@pytest.mark.parametrize(
    "config",
    [SMALL, GPTConfig(vocab=11, layers=1, hidden=2, heads=1, seq=1), GPTConfig(layers=5, hidden=40, heads=5)],
)
def test_num_parameters_is_exact(config: GPTConfig) -> None:
    assert num_parameters(config) == sum(p.numel() for p in GPT(config).parameters())


def test_meta_build_materialized_module_by_module_equals_plain_build() -> None:
    torch.manual_seed(7)
    want = GPT(SMALL)
    torch.manual_seed(7)
    with torch.device("meta"):
        got = GPT(SMALL)
    for module in got.modules():
        if list(module.parameters(recurse=False)):
            module.to_empty(device="cpu", recurse=False)
            for parameter in module.parameters(recurse=False):
                torch.nn.init.constant_(parameter, float("nan"))  # reset_parameters must leave nothing out
            module.reset_parameters()
    for (name, a), (_, b) in zip(want.named_parameters(), got.named_parameters(), strict=True):
        assert torch.equal(a, b), name


def test_same_torch_seed_gives_same_weights_and_another_seed_gives_others() -> None:
    def weights(seed: int) -> torch.Tensor:
        torch.manual_seed(seed)
        return torch.cat([p.detach().flatten() for p in GPT(SMALL).parameters()])

    assert torch.equal(weights(1), weights(1))
    assert not torch.equal(weights(1), weights(2))


def test_logits_of_a_position_depend_on_no_later_token() -> None:
    torch.manual_seed(0)
    model = GPT(SMALL).eval()
    tokens = torch.randint(0, 256, (1, 16))
    changed = tokens.clone()
    changed[0, 9] = (changed[0, 9] + 1) % 256
    before, after = model(tokens), model(changed)
    assert torch.equal(before[0, :9], after[0, :9])
    assert not torch.equal(before[0, 9:], after[0, 9:])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_activation_checkpointing_never_changes_gradients(dtype: torch.dtype) -> None:
    def gradients(checkpointing: bool) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = GPT(GPTConfig(layers=2, hidden=16, heads=2, seq=8, checkpoint_activations=checkpointing)).to(
            dtype
        )
        tokens = torch.arange(16).view(2, 8)
        language_loss(model(tokens), tokens).backward()
        return [p.grad for p in model.parameters() if p.grad is not None]

    plain, checkpointed = gradients(False), gradients(True)
    assert len(plain) == len(checkpointed) > 0
    assert all(torch.equal(a, b) for a, b in zip(plain, checkpointed, strict=True))


def test_heads_that_do_not_divide_hidden_are_refused_with_a_hidden_that_works() -> None:
    with pytest.raises(ConfigError, match=r"hidden 100 .* 8 heads; use hidden 104"):
        GPTConfig(hidden=100, heads=8)
    with pytest.raises(ConfigError, match="layers is 0"):
        GPTConfig(layers=0)
