"""Models that would compute with parts of sequences as if they were whole ones are refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from processes import run_on_ranks
from sequence_harness import make_mesh

from gemini import ConfigError
from gemini.parallel.sequence import parallelize_sequence
from gemini.parallel.sequence.hugging_face import _is_at_the_end, refuse_unfit

transformers = pytest.importorskip("transformers", reason="models of transformers")

SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
}
LLAMA = {**SIZES, "num_key_value_heads": 2, "max_position_embeddings": 32}
DYNAMIC = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
# By what each computes with: the model, its configuration, options, and what the message says.
UNFIT: dict[str, tuple[str, str, dict[str, Any], str]] = {
    "convolutions": (
        "Lfm2ForCausalLM",
        "Lfm2Config",
        {**LLAMA, "layer_types": ["conv", "full_attention"]},
        "mixes tokens outside of attention",
    ),
    "losses of routers": (
        "MixtralForCausalLM",
        "MixtralConfig",
        {**LLAMA, "num_local_experts": 2, "output_router_logits": True},
        "output_router_logits",
    ),
    "rotation by length": (
        "LlamaForCausalLM",
        "LlamaConfig",
        {**LLAMA, "rope_parameters": DYNAMIC},
        "rotary positions by the length",
    ),
    "one class": ("BertForSequenceClassification", "BertConfig", SIZES, "loss from a whole sequence"),
    "answers": ("BertForQuestionAnswering", "BertConfig", SIZES, "loss from a whole sequence"),
    "scales by position": (
        "Llama4ForCausalLM",
        "Llama4TextConfig",
        {**LLAMA, "head_dim": 8, "num_local_experts": 2, "intermediate_size_mlp": 48, "pad_token_id": 0},
        "scales attention by positions",
    ),
}


def build(model: str, config: str, options: dict[str, Any]) -> Any:
    torch.manual_seed(4)
    return getattr(transformers, model)(getattr(transformers, config)(**options))


@pytest.mark.parametrize("case", UNFIT)
def test_what_needs_whole_sequences_is_refused(case: str) -> None:
    model, config, options, why = UNFIT[case]
    with pytest.raises(ConfigError, match=why):
        refuse_unfit(build(model, config, options), cuts_blocks=False)


@pytest.mark.parametrize("case", ["rotation by length", "one class", "answers"])
def test_whole_batches_suit_what_is_around_the_blocks(case: str) -> None:
    model, config, options, _ = UNFIT[case]
    refuse_unfit(build(model, config, options), cuts_blocks=True)


def _documents(window: int | None) -> str:
    options = {**LLAMA, "sliding_window": window, "use_cache": False}
    model = build("MistralForCausalLM", "MistralConfig", options)
    sequence = parallelize_sequence(model, make_mesh(sp=2))
    ids = torch.randint(64, (1, 16), generator=torch.Generator().manual_seed(1))
    places = torch.cat([torch.arange(9), torch.arange(7)]).unsqueeze(0)
    try:
        model(**sequence.cut({"input_ids": ids, "labels": ids, "position_ids": places}))
    except ConfigError as error:
        return str(error)
    return ""


def test_documents_side_by_side_and_windows_are_refused() -> None:
    assert all("several documents in one sequence" in said for said in run_on_ranks(_documents, 2, 4))
    assert run_on_ranks(_documents, 2, None) == ["", ""]


def _positions_of_padding() -> str:
    options: dict[str, Any] = {**SIZES, "max_position_embeddings": 40, "pad_token_id": 1}
    options["position_embedding_type"] = "absolute"
    model = build("EsmForMaskedLM", "EsmConfig", options)
    sequence = parallelize_sequence(model, make_mesh(sp=2))
    ids = torch.randint(2, 64, (1, 16), generator=torch.Generator().manual_seed(1))
    try:
        model(**sequence.cut({"input_ids": ids, "labels": ids}))
    except ConfigError as error:
        return str(error)
    return ""


def test_positions_that_a_model_makes_of_padding_are_asked_for() -> None:
    assert all(
        "computes position_ids from its input" in said for said in run_on_ranks(_positions_of_padding, 2)
    )


def _asked_for_later(cut: str, how: str) -> str:
    model = build("MixtralForCausalLM", "MixtralConfig", {**LLAMA, "num_local_experts": 2})
    sequence = parallelize_sequence(model, make_mesh(sp=2), cut=cut)
    ids = torch.randint(64, (1, 16), generator=torch.Generator().manual_seed(1))
    batch: dict[str, Any] = {"input_ids": ids, "labels": ids}
    model(**(batch if cut == "blocks" else sequence.cut(batch)))
    if how == "call":
        batch["output_router_logits"] = True
    else:
        model.config.output_router_logits = True
    try:
        model(**(batch if cut == "blocks" else sequence.cut(batch)))
    except ConfigError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(("cut", "how"), [("batch", "call"), ("blocks", "configuration"), ("blocks", "call")])
def test_losses_of_routers_are_refused_whenever_they_are_asked_for(cut: str, how: str) -> None:
    assert all("a loss of the routers" in said for said in run_on_ranks(_asked_for_later, 2, cut, how))


def test_padding_needs_no_mask_where_all_of_it_is_behind_what_counts() -> None:
    ends, begins = torch.tensor([[True, True], [True, False]]), torch.tensor([[True, True], [False, True]])
    assert _is_at_the_end(ends)
    assert not _is_at_the_end(begins)
    assert _is_at_the_end(begins.to("meta"))
