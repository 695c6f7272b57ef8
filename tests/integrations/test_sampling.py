"""``gemini sample``: transformers' tokens, within a budget, as they come."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from test_adapter_merge import adapt
from tiny_trained import TEXT, byte_level, llama

from gemini.cli.main import main
from gemini.jobs.after_training.sampling import SampleConfig, Sampled, sample

transformers = pytest.importorskip("transformers", reason="the extra 'hf' is not installed")
peft = pytest.importorskip("peft", reason="the extra 'hf' is not installed")

PROMPT = "The capital"
TEMPLATE = "Q: {{ messages[0].content }}\nA:"


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return llama(tmp_path_factory.mktemp("sampled") / "base", vocab_size=300, dtype=torch.float32)


def texts(config: SampleConfig) -> tuple[list[str], Sampled]:
    said: list[str] = []
    sampled = Sampled()
    sample(config, said.append, sampled)
    return said, sampled


def generated(model: Any, tokenizer: Any, prompt: str, **options: Any) -> str:
    ids = torch.tensor([tokenizer(prompt)["input_ids"]])
    made = model.generate(input_ids=ids, max_new_tokens=16, pad_token_id=0, **options)
    text: str = tokenizer.decode(made[0, ids.shape[1] :], skip_special_tokens=True)
    return text


def test_a_tight_budget_says_what_transformers_says(base: Path) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(base)
    tokenizer = transformers.AutoTokenizer.from_pretrained(base)
    budget = 100 * 2**10
    said, sampled = texts(SampleConfig(base, [PROMPT, "It rains"], max_new_tokens=16, device_bytes=budget))
    want = [generated(model, tokenizer, prompt, do_sample=False) for prompt in (PROMPT, "It rains")]
    assert "".join(said) == f"{PROMPT}{want[0]}\nIt rains{want[1]}\n"
    assert len(said) > 8, "it comes in pieces"
    assert sampled.peak_bytes <= budget < sampled.model_data_bytes
    assert sampled.read_bytes > sampled.model_data_bytes
    assert (sampled.num_prompts, sampled.num_tokens) == (2, 32)


def test_draws_are_those_of_transformers_with_the_same_seed(base: Path) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(base)
    tokenizer = transformers.AutoTokenizer.from_pretrained(base)
    options: dict[str, Any] = {"temperature": 0.8, "top_p": 0.9}
    said = {
        seed: "".join(texts(SampleConfig(base, [PROMPT], max_new_tokens=16, seed=seed, **options))[0])
        for seed in (1, 2)
    }
    torch.manual_seed(1)
    assert said[1] == PROMPT + generated(model, tokenizer, PROMPT, do_sample=True, top_k=0, **options) + "\n"
    assert said[1] != said[2]


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_adapters_and_the_chat_template_of_their_tokenizer_are_used(base: Path, tmp_path: Path) -> None:
    adapter = adapt(base, tmp_path / "adapter", r=8, lora_alpha=64)
    tokenizer = transformers.AutoTokenizer.from_pretrained(base)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(adapter)
    plain = transformers.AutoModelForCausalLM.from_pretrained(base)
    want = generated(peft.PeftModel.from_pretrained(plain, adapter), tokenizer, "Q: It?\nA:", do_sample=False)
    config = SampleConfig(base, ["It?"], adapter=adapter, chat=True, max_new_tokens=16, device_bytes=2**17)
    assert "".join(texts(config)[0]) == f"> It?\n{want}\n"
    assert want != "".join(texts(SampleConfig(base, ["It?"], max_new_tokens=16))[0])


def test_no_character_is_shown_before_its_last_byte(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = "caf\u00e9 \u4f60\u597d"
    ids = byte_level()(text)["input_ids"]

    def generate(model: Any, streamer: Any, **_: Any) -> None:
        for each in (torch.tensor([[1]]), *torch.tensor(ids)[:, None]):
            streamer.put(each)
        streamer.end()

    monkeypatch.setattr(transformers.LlamaForCausalLM, "generate", generate)
    said, _ = texts(SampleConfig(base, [TEXT]))
    assert "".join(said) == f"{TEXT}{text}\n"
    assert not any("\ufffd" in piece for piece in said)


def test_ctrl_c_ends_the_line_and_says_what_was_done(
    base: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def generate(model: Any, streamer: Any, **_: Any) -> None:
        for number in (5, 70, 71):
            streamer.put(torch.tensor([number]))
        raise KeyboardInterrupt

    monkeypatch.setattr(transformers.LlamaForCausalLM, "generate", generate)
    assert main(["sample", str(base), "--prompt", "It", "--device-bytes", "1MiB"]) == 130
    shown = capsys.readouterr()
    assert shown.out.startswith("It")
    assert shown.out.endswith("\n")
    assert "2 tokens in " in shown.err
    assert shown.err.endswith("gemini: interrupted\n")
    assert "Traceback" not in shown.err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--chat"], "--chat needs a chat template"),
        (["--temperature", "-1"], "--temperature is -1.0; it must be at least 0"),
        (["--top-p", "0"], "--top-p is 0.0; it must be above 0"),
        (["--max-new-tokens", "0"], "it must be at least 1"),
        (["--adapter", "nowhere"], "cannot look into the directory nowhere"),
        (["--device-bytes", "1KiB"], "raise --device-bytes to at least"),
        (["--prompt", ""], "has no tokens; give a text"),
    ],
)
def test_what_cannot_be_sampled_is_refused_in_one_line(
    options: list[str], message: str, base: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["sample", str(base), "--prompt", "It", *options]) == 2
    shown = capsys.readouterr()
    assert message in shown.err
    assert shown.err.startswith("gemini: error: ")
    assert shown.err.count("\n") == 1
    assert not shown.out
