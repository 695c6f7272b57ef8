"""Documents as tokens: what is learned of them, and what chat templates may do wrong."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from chat_tokenizers import make_tokenizer

from gemini.errors import ConfigError
from gemini.jobs.finetune import encoding
from gemini.jobs.finetune.encoding import PLAIN_TEMPLATE, EncodedDocument, Encoder
from gemini.jobs.finetune.record_kinds import Document
from gemini.jobs.finetune.samples import Samples

transformers = pytest.importorskip("transformers", reason="the extra 'hf' is not installed")

CHAT = [
    {"role": "user", "content": "Hello"},
    {"role": "assistant", "content": "Fine."},
    {"role": "user", "content": "Say it again."},
    {"role": "assistant", "content": "Fine."},
]
TURN = "<|{{ m['role'] }}|>{{ m['content'] }}<|end|>"
EACH = "{% for m in messages %}" + TURN + "{% endfor %}"
ASKED = "{% if add_generation_prompt %}<|assistant|>"


@pytest.fixture(scope="module")
def tokens() -> Any:
    made = make_tokenizer("gpt2")
    made.add_special_tokens(
        {"additional_special_tokens": ["<|user|>", "<|assistant|>", "<|end|>", "<think>"]}
    )
    return made


def encoder(tokens: Any, template: str | None, loss_on: str = "answers") -> Encoder:
    tokens.chat_template = template
    return Encoder(tokens, loss_on=loss_on, vocabulary=10**6, model="a model")


def chat(messages: list[dict[str, Any]] = CHAT, **more: Any) -> Document:
    return Document("line 7 of d.jsonl", "messages", messages=messages, **more)


def learned(tokens: Any, encoded: EncodedDocument) -> list[str]:
    """Return the texts of the runs of tokens that are learned."""
    runs: list[list[int]] = []
    was = False
    for token, now in zip(encoded.ids, encoded.learned or [], strict=True):
        if now:
            runs += [] if was else [[]]
            runs[-1].append(token)
        was = now
    return [tokens.decode(run) for run in runs]


TEMPLATES = {
    "a header": EACH + ASKED + "{% endif %}",
    "no header": EACH.replace("<|{{ m['role'] }}|>", ""),
    "an end of all": EACH + ASKED + "{% else %}{{ eos_token }}{% endif %}",
    "a thought of the last": "{% for m in messages %}<|{{ m['role'] }}|>"
    "{% if loop.last and m['role'] == 'assistant' %}<think>\n\n<think>\n\n{% endif %}"
    "{{ m['content'] }}<|end|>{% endfor %}" + ASKED + "{% endif %}",
    "a thought that is asked for": EACH + ASKED + "<think>\n{% endif %}",
    "the plain one": PLAIN_TEMPLATE,
}  # fmt: skip
WANTED = {
    "an end of all": ["Fine.<|end|>", "Fine.<|end|><|endoftext|>"],
    "a thought of the last": ["Fine.<|end|>", "<think>\n\n<think>\n\nFine.<|end|>"],
    "the plain one": ["Fine.<|endoftext|>", "Fine.<|endoftext|>"],
}


@pytest.mark.parametrize("name", TEMPLATES)
def test_answers_are_found_in_what_templates_make_of_them(name: str, tokens: Any) -> None:
    found = encoder(tokens, TEMPLATES[name]).encode(chat())
    assert learned(tokens, found) == WANTED.get(name, ["Fine.<|end|>", "Fine.<|end|>"])
    assert tokens.decode(found.ids) == tokens.apply_chat_template(CHAT, tokenize=False)
    everything = encoder(tokens, TEMPLATES[name], "all").encode(chat())
    assert (everything.ids, everything.learned) == (found.ids, None)


def test_a_message_of_no_weight_is_not_learned(tokens: Any) -> None:
    messages = [CHAT[0], {**CHAT[1], "weight": 0}, CHAT[2], {"role": "assistant", "content": "Yes."}]
    for template in (TEMPLATES["a header"], PLAIN_TEMPLATE):
        (run,) = learned(tokens, encoder(tokens, template).encode(chat(messages)))
        assert run.startswith("Yes.")


def test_answers_that_come_first_are_learned(tokens: Any) -> None:
    found = encoder(tokens, TEMPLATES["a header"]).encode(chat(CHAT[1:3]))
    assert learned(tokens, found) == ["Fine.<|end|>"]


def test_a_tokenizer_without_a_template_gets_the_plain_one(tokens: Any) -> None:
    made = encoder(tokens, None)
    assert not made.uses_plain_template
    made.encode(chat())
    assert made.uses_plain_template
    assert tokens.apply_chat_template(CHAT[:1], tokenize=False, add_generation_prompt=True) == (
        "### user\nHello\n\n### assistant\n"
    )


OTHER = [*CHAT[:3], {"role": "assistant", "content": "Yes."}]
MARKS = "{% for m in messages %}{% generation %}{% endgeneration %}"
NINES = "{{% for {} in range(99999) %}}"


@pytest.mark.parametrize(
    ("template", "messages", "message"),
    [
        ("{{ raise_exception('not so') }}", CHAT, "refuses line 7 of d.jsonl: not so"),
        ("{{ messages[0]['name'].x }}", CHAT, "refuses line 7 of d.jsonl"),
        (PLAIN_TEMPLATE, CHAT[:1], "line 7 of d.jsonl has no answer .* none of assistant"),
        (PLAIN_TEMPLATE, [CHAT[0], {"role": "assistant", "content": " "}], "its answers are empty"),
        ("{% for m in messages %}{{ m['role'] }}{% endfor %}", CHAT, "line 7 of d.jsonl: .* --loss-on all"),
        ("{{ messages[-1]['content'] }}", OTHER, "line 7 of d.jsonl: .* drops or rewrites message 2"),
        (MARKS + ".{% endfor %}", CHAT, "line 7 of d.jsonl has [0-9]+ tokens, none of them in the loss"),
        (NINES.format("a") + NINES.format("b") + "{% endfor %}" * 2, CHAT, "ran for more than 0.1 s on line"),
    ],
)  # fmt: skip
def test_conversations_that_cannot_be_learned_are_refused_by_line(
    template: str, messages: list[dict[str, Any]], message: str, tokens: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(encoding, "_MOST_SECONDS", 0.1)
    with pytest.raises(ConfigError, match=message) as raised:
        encoder(tokens, template).encode(chat(messages))
    assert "\n" not in str(raised.value)


def test_completions_are_learned_with_the_end_and_prompts_are_not(tokens: Any) -> None:
    made = encoder(tokens, None)
    found = made.encode(Document("here", "prompt-completion", prompt="Q: Hello\nA:", completion=" Fine."))
    assert learned(tokens, found) == [" Fine.<|endoftext|>"]
    with pytest.raises(ConfigError, match="here has an empty completion"):
        made.encode(Document("here", "prompt-completion", prompt="Q", completion=""))


KINDS = ["llama", "qwen2", "gemma", "phi3", "gpt2", "mistral", "gpt_neox"]
SMALL = {
    "vocab_size": 32, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 32,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 1,
}  # fmt: skip


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("kind", KINDS)
def test_packed_documents_do_not_see_each_other(kind: str, attention: str) -> None:
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(kind, **SMALL, attn_implementation=attention)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    model.config.use_cache = False  # as a run sets it: with a cache nobody looks for the ends of documents
    texts = [[3, 4, 5, 6, 7], [8, 9, 10], [11, 12, 13, 14], [15, 16]]
    documents = [EncodedDocument(Document("here", "messages"), text) for text in texts]
    packed = Samples(documents, seq=8, layout="whole", pad=0, directory=None)
    alone = Samples(documents, seq=8, layout="padded", pad=0, directory=None)
    with torch.no_grad():
        rows = [packed.rows([row]) for row in range(packed.num_rows)]
        assert len(rows) == 2
        losses = [model(**row.inputs).loss * row.num_learned for row in rows]
        want = [model(**(row := alone.rows([each])).inputs).loss * row.num_learned for each in range(4)]
    assert sum(losses).item() == pytest.approx(sum(want).item(), rel=1e-5)
