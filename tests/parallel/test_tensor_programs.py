"""What programs do to cut models: compute blocks again, unfreeze, give tokens that there are not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from processes import run_on_ranks
from torch import Tensor, nn

from gemini import ConfigError
from gemini.parallel import Layout, Mesh, parallelize

transformers = pytest.importorskip("transformers", reason="models of transformers")

SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "max_position_embeddings": 32,
}
NO_DROPOUT = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)


def build(name: str, **options: Any) -> nn.Module:
    t = transformers
    torch.manual_seed(8)
    if name == "llama":
        return t.LlamaForCausalLM(t.LlamaConfig(**SIZES, num_key_value_heads=2, **options))
    if name == "one key head":
        return t.LlamaForCausalLM(t.LlamaConfig(**SIZES, num_key_value_heads=1))
    if name == "qwen3":
        return t.Qwen3ForCausalLM(t.Qwen3Config(**SIZES, num_key_value_heads=2, head_dim=8))
    if name == "phi":
        return t.PhiForCausalLM(t.PhiConfig(**SIZES, qk_layernorm=True))
    if name == "apertus":
        return t.ApertusForCausalLM(t.ApertusConfig(**SIZES, num_key_value_heads=2))
    options = {**NO_DROPOUT, **options}
    config = t.GPT2Config(vocab_size=64, n_embd=48, n_layer=2, n_head=4, n_positions=32, **options)
    return t.GPT2LMHeadModel(config)


def ids(seed: int = 3) -> Tensor:
    return torch.randint(64, (2, 10), generator=torch.Generator().manual_seed(seed))


def _loss(name: str, model: nn.Module) -> Tensor:
    more = {}
    if name == "captioner":
        more["encoder_hidden_states"] = torch.linspace(-1, 1, 2 * 5 * 48).view(2, 5, 48)
    loss: Tensor = model(input_ids=ids(), labels=ids(), **more).loss
    return loss


def _freeze(model: nn.Module, *, trains: bool) -> None:
    for param in model.parameters():
        param.requires_grad_(trains)


def _whole(name: str, **options: Any) -> dict[str, Tensor]:
    model = build(name, **options)
    _loss(name, model).backward()  # type: ignore[no-untyped-call]
    return {key: param.grad for key, param in model.named_parameters() if param.grad is not None}


def _gradients(name: str, options: dict[str, Any], frozen: bool, norms: bool) -> dict[str, Tensor]:
    """Those of a model that is cut, and frozen meanwhile."""
    model = build(name, **options)
    _freeze(model, trains=not frozen)
    partition = parallelize(model, Mesh(Layout(tp=2)), sequence_norms=norms)
    _freeze(model, trains=True)
    _loss(name, model).backward()  # type: ignore[no-untyped-call]
    found: dict[str, Tensor] = partition.gather_state(
        {key: param.grad for key, param in model.named_parameters() if param.grad is not None}
    )
    return found


@pytest.mark.parametrize(
    ("name", "options"),
    [("captioner", {"add_cross_attention": True}), ("phi", {}), ("apertus", {})],
)
def test_gradients_are_those_of_one_process(name: str, options: dict[str, Any]) -> None:
    """Cross-attention projects keys and values alone; norms and activations within are of a rank's part."""
    expected = _whole(name, **options)
    for found in run_on_ranks(_gradients, 2, name, options, False, False):
        for key, grad in expected.items():
            torch.testing.assert_close(
                found[key], grad, rtol=1e-4, atol=1e-6, msg=lambda m, k=key: f"{k}: {m}"
            )


@pytest.mark.parametrize(("name", "norms"), [("qwen3", False), ("one key head", False), ("llama", True)])
def test_what_was_frozen_when_it_was_cut_trains_later(name: str, norms: bool) -> None:
    expected = _whole(name)
    for found in run_on_ranks(_gradients, 2, name, {}, True, norms):
        for key, grad in expected.items():
            torch.testing.assert_close(
                found[key], grad, rtol=1e-4, atol=1e-6, msg=lambda m, k=key: f"{k}: {m}"
            )


def _with_and_without_checkpoints(name: str, options: dict[str, Any], reentrant: bool) -> list[Tensor]:
    gradients: list[list[Tensor]] = []
    for checkpoints in (False, True):
        model = build(name, **options).train()
        if checkpoints:
            how = {"use_reentrant": reentrant}
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=how)  # type: ignore[operator]
        parallelize(model, Mesh(Layout(tp=2)))
        torch.manual_seed(7)
        for _ in range(2):
            _loss(name, model).backward()  # type: ignore[no-untyped-call]
        gradients.append([param.grad for param in model.parameters() if param.grad is not None])
    return [(one - other).abs().max() for one, other in zip(*gradients, strict=True)]


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize(
    ("name", "options"), [("llama", {"attention_dropout": 0.3}), ("gpt2", {"attn_pdrop": 0.3})]
)
def test_masks_are_the_same_where_blocks_are_computed_again(
    name: str, options: dict[str, Any], reentrant: bool
) -> None:
    for apart in run_on_ranks(_with_and_without_checkpoints, 2, name, options, reentrant):
        assert max(apart) < 1e-5


def _use_within(freezes: bool) -> str:
    torch.manual_seed(8)
    layer = nn.TransformerEncoderLayer(16, 4, 32, 0.0, nn.PReLU(), batch_first=True)
    if freezes:
        layer.activation.requires_grad_(False)
    parallelize(layer, Mesh(Layout(tp=2)))
    try:
        layer(torch.randn(2, 3, 16))[..., :5].sum().backward()  # a norm has a sum that nothing changes
    except ConfigError as error:
        return str(error)
    return ""


def test_weights_between_cut_layers_are_refused_unless_frozen() -> None:
    for said in run_on_ranks(_use_within, 2, False):
        assert "the gradients of 'activation.weight'" in said
    assert run_on_ranks(_use_within, 2, True) == ["", ""]


def _out_of_range(where: str) -> str:
    model = build("llama")
    parallelize(model, Mesh(Layout(tp=2)), gather_logits=False)
    tokens = {"input_ids": ids(), "labels": ids()}
    tokens[where] = tokens[where].clone()
    tokens[where][0, 3] = 64
    try:
        model(**tokens)
    except IndexError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("where", ["input_ids", "labels"])
def test_tokens_out_of_the_vocabulary_are_refused_as_by_torch(where: str) -> None:
    assert all("out of" in said for said in run_on_ranks(_out_of_range, 2, where))
