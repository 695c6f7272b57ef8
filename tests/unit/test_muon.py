"""gemini.Muon: torch's Muon for hidden matrices, torch's AdamW for the rest, in one optimizer."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from gemini import ConfigError, Muon

_TORCH = pytest.importorskip("torch.optim._muon", reason="torch before 2.9 has no Muon")


class Small(nn.Module):
    """Has a parameter of each kind."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed_tokens = nn.Embedding(5, 4)
        self.up, self.down = nn.Linear(4, 9), nn.Linear(9, 4, bias=False)
        self.mix = nn.Conv1d(4, 4, 1)
        self.lm_head = nn.Linear(4, 5, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return logits."""
        hidden = self.down(self.up(self.embed_tokens(tokens)).tanh())
        logits: torch.Tensor = self.lm_head(self.mix(hidden.transpose(1, 2)).transpose(1, 2))
        return logits


def train(model: nn.Module, optimizers: list[Any]) -> None:
    for step in range(4):
        tokens = torch.arange(6).add(step).remainder(5).view(2, 3)
        nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten()).backward()
        for optimizer in optimizers:
            optimizer.step()
        model.zero_grad()


def test_each_parameter_has_the_steps_of_torchs_optimizers() -> None:
    ours, theirs = Small(), Small()
    settings: dict[str, Any] = {"lr": 0.02, "momentum": 0.9, "weight_decay": 0.1}
    train(
        ours,
        [Muon(ours.named_parameters(), **settings, ns_steps=4, adam_lr=1e-2, betas=(0.8, 0.9), eps=1e-8)],
    )
    hidden = [theirs.up.weight, theirs.down.weight]
    rest = [param for param in theirs.parameters() if all(param is not each for each in hidden)]
    adam = torch.optim.AdamW(rest, lr=1e-2, betas=(0.8, 0.9), eps=1e-8, weight_decay=0.1)
    train(theirs, [_TORCH.Muon(hidden, **settings, ns_steps=4), adam])
    for (name, got), want in zip(ours.state_dict().items(), theirs.state_dict().values(), strict=True):
        assert torch.allclose(got, want, rtol=1e-5, atol=1e-7), name
    assert not torch.equal(ours.up.weight, Small().up.weight)


def test_a_step_of_matrices_has_the_bits_of_torchs() -> None:
    for shape in ((7, 5), (5, 7), (6, 6)):
        grads = [torch.randn(shape, generator=torch.Generator().manual_seed(step)) for step in range(3)]
        params = [nn.Parameter(torch.ones(shape)) for _ in range(2)]
        own = Muon([{"params": params[0], "use_muon": True}], lr=0.1, weight_decay=0.2)
        other = _TORCH.Muon(params[1:], lr=0.1, weight_decay=0.2)
        for grad in grads:
            params[0].grad, params[1].grad = grad.clone(), grad.clone()
            own.step()
            other.step()
            assert torch.equal(params[0].grad, grad)
        assert torch.equal(*params), shape


def test_it_goes_on_from_its_state_and_says_which_group_is_whose() -> None:
    model = Small()
    optimizer = Muon(model.named_parameters())
    assert [(group["use_muon"], len(group["params"]), group["lr"]) for group in optimizer.param_groups] == [
        (True, 2, 0.02),
        (False, 5, 3e-4),
    ]
    train(model, [optimizer])
    other = Small()
    other.load_state_dict(model.state_dict())
    again = Muon(other.named_parameters())
    again.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for each, own in ((model, optimizer), (other, again)):
        train(each, [own])
    for name, value in model.state_dict().items():
        assert torch.equal(other.state_dict()[name], value), name


def ones(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.ones(shape))


def kinds_of(optimizer: Muon) -> list[tuple[bool, float, int]]:
    """Return of each group whether Muon updates it, its rate, and how many parameters it has."""
    return [
        (group["use_muon"], group["lr"], len(group["params"]))
        for group in copy.deepcopy(optimizer).param_groups
    ]


def test_a_named_group_has_a_rate_for_each_of_its_two_rules() -> None:
    groups = [
        {"params": [("a.weight", ones(2, 2)), ("a.bias", ones(2))], **rates}
        for rates in ({}, {"lr": 0.05}, {"adam_lr": 0.06}, {"lr": 0.07, "adam_lr": 0.08})
    ]
    optimizer = Muon(groups, lr=0.1, adam_lr=0.2)
    wanted = [(0.1, 0.2), (0.05, 0.2), (0.1, 0.06), (0.07, 0.08)]
    assert kinds_of(optimizer) == [
        each for muon, adam in wanted for each in ((True, muon, 1), (False, adam, 1))
    ]
    assert not any("adam_lr" in group for group in optimizer.param_groups)


def test_a_group_that_comes_later_is_as_one_of_the_first() -> None:
    first = copy.deepcopy(Muon([("weight", ones(2, 2))], lr=0.1, adam_lr=0.2))
    assert kinds_of(first) == [(True, 0.1, 1)]
    first.add_param_group({"params": ones(3, 2), "use_muon": True})
    first.add_param_group({"params": [("b", ones(2))], "use_muon": False})
    first.add_param_group({"params": [("c", ones(2, 2)), ("d", ones(2))]})
    assert kinds_of(first) == [
        (True, 0.1, 1),
        (True, 0.1, 1),
        (False, 0.2, 1),
        (True, 0.1, 1),
        (False, 0.2, 1),
    ]
    for group, message in (
        ({"params": ones(2, 2, 2), "use_muon": True}, "has shape"),
        ({"params": ones(2, 2)}, "names"),
        ({"params": ones(2, 2), "use_muon": True, "adam_lr": 0.1}, "give it as lr"),
        ({"params": ones(2, 2), "use_muon": True, "momentum": 1.0}, "momentum is 1"),
    ):
        with pytest.raises(ConfigError, match=message):
            first.add_param_group(group)
    assert len(first.param_groups) == 5


@pytest.mark.parametrize(
    ("name", "uses_muon"),
    [
        ("transformer.wte.weight", False),  # of GPT-2, tied to the head
        ("transformer.wpe.weight", False),
        ("score.weight", False),
        ("classifier.out_proj.weight", False),
        ("model.embed_tokens.weight", False),
        ("lm_head.weight", False),
        ("transformer.h.0.attn.c_attn.weight", True),
        ("scorer.weight", True),
    ],
)
def test_names_of_embeddings_and_heads_have_adamw(name: str, uses_muon: bool) -> None:
    assert kinds_of(Muon([(name, ones(2, 2))])) == [(uses_muon, 0.02 if uses_muon else 3e-4, 1)]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lr": -1.0}, "lr is -1"),
        ({"momentum": 1.0}, "momentum is 1"),
        ({"ns_steps": 0}, "ns_steps is 0"),
        ({"betas": (0.9, 1.0)}, "betas"),
        ({"params": [nn.Parameter(torch.ones(2, 2))]}, r"names .* model\.named_parameters\(\)"),
        ({"params": [{"params": [nn.Parameter(torch.ones(2))], "use_muon": True}]}, r"has shape \(2,\)"),
    ],
)
def test_what_cannot_be_is_refused(options: dict[str, Any], message: str) -> None:
    given = {"params": [("weight", nn.Parameter(torch.ones(2, 2)))], **options}
    with pytest.raises(ConfigError, match=message):
        Muon(**given)
