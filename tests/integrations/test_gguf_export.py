"""``gemini export``: GGUF as its own reader and its own rotation see it, or a refusal by name."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from test_adapter_merge import adapt
from tiny_trained import SIZES, TEXT, HeldTensors, byte_level, entries, llama, save

from gemini.cli.main import main
from gemini.errors import ConfigError
from gemini.jobs.after_training.gguf_file import export_gguf
from gemini.jobs.after_training.model_copy import export_safetensors

transformers = pytest.importorskip("transformers", reason="the extra 'hf' is not installed")
tokenizers = pytest.importorskip("tokenizers", reason="comes with transformers")
gguf = pytest.importorskip("gguf", reason="the extra 'gguf' is not installed")

SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
EXPERTS: dict[str, Any] = {
    "num_experts": 4,
    "moe_intermediate_size": 32,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "head_dim": 16,
}
VECTORS = ("norm", "ln_", "bias", "position_embd", "ffn_gate_inp")


def qwen(kind: str, **options: Any) -> Callable[[Path], Path]:
    def make(directory: Path) -> Path:
        sizes = {"vocab_size": 300, "tie_word_embeddings": True, **SIZES, **options}
        config = getattr(transformers, f"{kind}Config")(**sizes)
        pieces = tokenizers.pre_tokenizers
        split = pieces.Split(tokenizers.Regex(SPLIT), "isolated", False)
        rule = pieces.Sequence([split, pieces.ByteLevel(add_prefix_space=False, use_regex=False)])
        model = getattr(transformers, f"{kind}ForCausalLM")(config).to(torch.bfloat16)
        return save(directory, model, byte_level(rule))

    return make


def mixtral(directory: Path) -> Path:
    config = transformers.MixtralConfig(vocab_size=300, num_local_experts=11, **SIZES)
    return save(directory, transformers.MixtralForCausalLM(config), shard="60KB")


def gpt2(directory: Path) -> Path:
    config = transformers.GPT2Config(vocab_size=300, n_embd=64, n_layer=2, n_head=4, n_positions=48)
    return save(directory, transformers.GPT2LMHeadModel(config))


def mistral(directory: Path) -> Path:
    config = transformers.MistralConfig(vocab_size=420, sliding_window=32, **SIZES)
    return save(directory, transformers.MistralForCausalLM(config), sentence_piece())


def sentence_piece() -> Any:
    """Return a tokenizer as converters make it of SentencePiece: every way to split a token is a merge."""
    inner = tokenizers.Tokenizer(tokenizers.models.BPE(unk_token="<unk>", byte_fallback=True))
    inner.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace()
    letters = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=340, special_tokens=letters, show_progress=False)
    inner.train_from_iterator([TEXT] * 3, trainer)
    said = json.loads(inner.to_str())
    vocab, ranks = said["model"]["vocab"], {}
    for one, other in said["model"]["merges"]:
        ranks.setdefault(one + other, len(ranks))
    splits = ((token[:at], token[at:]) for token in ranks for at in range(1, len(token)))
    said["model"]["merges"] = [[one, other] for one, other in splits if one in vocab and other in vocab]
    said["pre_tokenizer"]["split"] = False
    said["added_tokens"] = [each for each in said["added_tokens"] if "<0x" not in each["content"]]
    inner = tokenizers.Tokenizer.from_str(json.dumps(said))
    inner.post_processor = tokenizers.processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 1)]
    )
    options = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    return transformers.PreTrainedTokenizerFast(tokenizer_object=inner, **options)


MODELS: dict[str, tuple[Callable[[Path], Path], str]] = {
    "llama": (lambda path: llama(path, attention_bias=True), "llama"),
    "mistral": (mistral, "llama"),
    "mixtral": (mixtral, "llama"),
    "qwen3moe": (qwen("Qwen3Moe", **EXPERTS), "qwen3moe"),
    "qwen2": (qwen("Qwen2"), "qwen2"),
    "qwen3": (qwen("Qwen3"), "qwen3"),
    "gpt2": (gpt2, "gpt2"),
}


@pytest.fixture(scope="module", params=MODELS)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    make, name = MODELS[request.param]
    torch.manual_seed(0)
    return make(tmp_path_factory.mktemp("exported") / request.param), name


def stored(directory: Path) -> dict[str, torch.Tensor]:
    return {
        name: value for file in directory.glob("*.safetensors") for name, value in load_file(file).items()
    }


def rows_of(name: str, values: torch.Tensor, heads: dict[str, int]) -> torch.Tensor:
    """Return a tensor of transformers as GGUF has it, of Llama each head's rows 0, n, 1, n + 1, ..."""
    if name.endswith(("c_attn.weight", "c_proj.weight", "c_fc.weight")):
        return values.t()
    count = next((count for part, count in heads.items() if part in name), None)
    if count is None:
        return values
    size = len(values) // count
    order = [head * size + at // 2 + at % 2 * (size // 2) for head in range(count) for at in range(size)]
    return values[order]


def together(values: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return tensors by name, with those of all experts as one."""
    found: dict[str, dict[int, torch.Tensor]] = {}
    for name, value in values.items():
        parts = re.fullmatch(r"(.*experts)\.(\d+)(\..*)", name)
        own, number = (parts[1] + parts[3], int(parts[2])) if parts else (name, -1)
        found.setdefault(own, {})[number] = value
    return {
        name: each[-1] if -1 in each else torch.stack([each[number] for number in range(len(each))])
        for name, each in found.items()
    }


@pytest.mark.parametrize("kind", ["f16", "bf16", "q8_0"])
def test_the_reader_of_gguf_finds_every_value(model: tuple[Path, str], kind: str, tmp_path: Path) -> None:
    source, arch = model
    exported = export_gguf(source, tmp_path / "model.gguf", kind)
    reader = gguf.GGUFReader(tmp_path / "model.gguf")
    found = {tensor.name: tensor for tensor in reader.tensors}
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[arch.upper()], 2)
    values = together(stored(source))
    assert len(found) == len(values) == exported.copied.num_tensors
    heads = {"q_proj": 4, "k_proj": 2} if arch == "llama" else {}
    for name, value in values.items():
        tensor = found[names.get_name(name, try_suffixes=(".weight", ".bias"))]
        want = rows_of(name, value, heads).float().contiguous().numpy()
        is_vector = any(part in tensor.name for part in VECTORS)
        own = "F32" if is_vector else kind.upper()
        assert tensor.tensor_type.name == own
        assert tuple(tensor.shape) == want.shape[::-1]
        expected = gguf.quants.quantize(want, tensor.tensor_type)
        assert np.array_equal(tensor.data.view(np.uint8).reshape(-1), expected.view(np.uint8).reshape(-1)), (
            name
        )


def test_rotated_neighbours_give_the_attention_of_rotated_halves(tmp_path: Path) -> None:
    source = llama(tmp_path / "base", dtype=torch.float32)
    export_gguf(source, tmp_path / "model.gguf", "f16")
    values = stored(source)
    reader = {tensor.name: tensor for tensor in gguf.GGUFReader(tmp_path / "model.gguf").tensors}
    hidden = torch.randn(6, 64, generator=torch.Generator().manual_seed(1))
    attention = transformers.AutoModelForCausalLM.from_pretrained(source).model
    cos, sin = attention.rotary_emb(hidden[None], torch.arange(6)[None])
    apply = transformers.models.llama.modeling_llama.apply_rotary_pos_emb

    def scores(queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        return torch.einsum("qhd,khd->hqk", queries, keys.repeat_interleave(2, dim=1))

    def of(weight: torch.Tensor) -> torch.Tensor:
        return (hidden @ weight.float().t()).view(6, -1, 16)

    prefix = "model.layers.0.self_attn"
    halves = [of(values[f"{prefix}.{name}_proj.weight"].half()) for name in "qk"]
    want = scores(
        *(each[0].transpose(0, 1) for each in apply(*(h.transpose(0, 1)[None] for h in halves), cos, sin))
    )
    turns = torch.polar(torch.ones(6, 8), torch.arange(6)[:, None] * 10000.0 ** (-torch.arange(8) / 8))
    pairs = [of(torch.from_numpy(reader[f"blk.0.attn_{name}.weight"].data)) for name in "qk"]
    rotated = [
        torch.view_as_real(torch.view_as_complex(each.view(6, -1, 8, 2)) * turns[:, None]).flatten(2)
        for each in pairs
    ]
    torch.testing.assert_close(scores(*rotated), want, rtol=1e-4, atol=1e-4)


def fields(path: Path) -> dict[str, Any]:
    return {name: field.contents() for name, field in gguf.GGUFReader(path).fields.items()}


def test_hyperparameters_and_tokenizer_are_written(model: tuple[Path, str], tmp_path: Path) -> None:
    source, arch = model
    assert main(["export", str(source), str(tmp_path / "model.gguf")]) == 0
    said = fields(tmp_path / "model.gguf")
    tokenizer = tokenizers.Tokenizer.from_file(str(source / "tokenizer.json"))
    size = {"llama": 320, "mistral": 420}.get(source.name, 300)
    assert said["general.architecture"] == arch
    assert (said[f"{arch}.block_count"], said[f"{arch}.embedding_length"]) == (2, 64)
    assert said[f"{arch}.context_length"] == {"gpt2": 48, "mistral": 32}.get(source.name, 128)
    tokens = said["tokenizer.ggml.tokens"]
    known = tokenizer.get_vocab_size()
    assert tokens[:known] == [tokenizer.id_to_token(number) for number in range(known)]
    assert len(tokens) == size
    assert tokens[said["tokenizer.ggml.eos_token_id"]] in ("<end>", "</s>")
    rules = {"llama": "gpt-2", "gpt2": "gpt-2", "mixtral": "gpt-2", "mistral": "default"}
    rule = rules.get(source.name, "qwen2")
    assert said["tokenizer.ggml.pre"] == rule
    is_piece = source.name == "mistral"
    assert said["tokenizer.ggml.model"] == ("llama" if is_piece else "gpt2")
    assert said["tokenizer.ggml.add_bos_token"] is is_piece
    assert ("tokenizer.ggml.merges" in said) is not is_piece
    counts = {"mixtral": (11, 2, 96), "qwen3moe": (4, 2, 32)}.get(source.name, (None, None, None))
    keys = ("expert_count", "expert_used_count", "expert_feed_forward_length")
    assert tuple(said.get(f"{arch}.{key}") for key in keys) == counts


def test_what_the_tokenizer_does_not_name_the_config_may(tmp_path: Path) -> None:
    source = llama(tmp_path / "base", eos_token_id=[7, 8])
    path = source / "tokenizer_config.json"
    templates = [{"name": "tool_use", "template": "a"}, {"name": "default", "template": "b"}]
    settings = {**json.loads(path.read_text()), "chat_template": templates}
    del settings["eos_token"]
    path.write_text(json.dumps(settings))
    export_gguf(source, tmp_path / "model.gguf", "f16")
    said = fields(tmp_path / "model.gguf")
    assert (said["tokenizer.ggml.eos_token_id"], said["tokenizer.chat_template"]) == (7, "b")
    assert "tokenizer.ggml.bos_token_id" not in said


def test_scores_merge_a_text_as_the_merges_do(tmp_path: Path) -> None:
    source = mistral(tmp_path / "base")
    export_gguf(source, tmp_path / "model.gguf", "f16")
    said = fields(tmp_path / "model.gguf")
    scores = dict(zip(said["tokenizer.ggml.tokens"], said["tokenizer.ggml.scores"], strict=True))
    for text in ("The capital of France.", "It rains in Paris; Name"):
        pieces = list("\u2581" + text.replace(" ", "\u2581"))
        while True:  # as SentencePiece: the pair with the best score, the first of equal ones
            joined = {at: one + other for at, (one, other) in enumerate(pairwise(pieces))}
            known = [at for at, token in joined.items() if token in scores]
            if not known:
                break
            at = max(known, key=lambda place: (scores[joined[place]], -place))
            pieces[at : at + 2] = [joined[at]]
        assert ["<s>", *pieces] == transformers.AutoTokenizer.from_pretrained(source).tokenize(
            text, add_special_tokens=True
        )


@pytest.mark.parametrize("make", [llama, mixtral])
def test_one_tensor_is_in_memory_at_a_time(
    make: Callable[[Path], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = make(tmp_path / "base")
    held = HeldTensors(monkeypatch, source)
    largest_bytes = max(value.nbytes for value in stored(source).values())
    export_gguf(source, tmp_path / "model.gguf", "q8_0")
    assert held.most_bytes == largest_bytes
    export_safetensors(source, tmp_path / "half", torch.float16)
    assert held.most_bytes == largest_bytes


def test_long_rope_of_llama_3_divides_slow_frequencies(tmp_path: Path) -> None:
    rope = {
        "rope_type": "llama3", "rope_theta": 500.0, "factor": 8.0, "low_freq_factor": 1.0,
        "high_freq_factor": 4.0, "original_max_position_embeddings": 64,
    }  # fmt: skip
    source = llama(tmp_path / "base", rope_parameters=rope)
    export_gguf(source, tmp_path / "model.gguf", "f16")
    (factors,) = (
        t.data for t in gguf.GGUFReader(tmp_path / "model.gguf").tensors if t.name == "rope_freqs.weight"
    )
    plain = 1 / 500.0 ** (torch.arange(0, 16, 2) / 16)
    scaled = transformers.AutoModelForCausalLM.from_pretrained(source).model.rotary_emb.inv_freq
    torch.testing.assert_close(plain / torch.from_numpy(factors.copy()), scaled)


def test_a_rule_without_a_name_and_rows_without_blocks_are_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rule = tokenizers.pre_tokenizers.Sequence(
        [tokenizers.pre_tokenizers.Punctuation(), tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    config = transformers.LlamaConfig(vocab_size=300, **{**SIZES, "intermediate_size": 40})
    source = save(tmp_path / "base", transformers.LlamaForCausalLM(config), byte_level(rule))
    assert main(["export", str(source), str(tmp_path / "m.gguf"), "--type", "q8_0"]) == 0
    shown = capsys.readouterr().out
    assert "note: the tokenizer splits texts by a rule without a known name in GGUF" in shown
    assert "note: 2 matrices stay f16, because their row length is not a multiple of 32" in shown


@pytest.mark.parametrize("dtype", [None, torch.float16])
def test_a_copy_of_another_type_loads_as_a_cast_of_the_original(
    dtype: torch.dtype | None, tmp_path: Path
) -> None:
    source = llama(tmp_path / "base")
    export_safetensors(source, tmp_path / "copy", dtype)
    auto = transformers.AutoModelForCausalLM
    got, want = (
        auto.from_pretrained(tmp_path / "copy"),
        auto.from_pretrained(source, dtype=dtype or torch.bfloat16),
    )
    assert got.dtype == want.dtype
    assert all(torch.equal(value, want.state_dict()[name]) for name, value in got.state_dict().items())
    assert entries(tmp_path / "copy") == entries(source)


def test_a_copy_of_one_shard_with_an_index_loads(tmp_path: Path) -> None:
    source = llama(tmp_path / "base")
    values = stored(source)
    for file in source.glob("*.safetensors"):
        file.unlink()
    only = "model-00001-of-00001.safetensors"
    save_file(values, source / only, metadata={"format": "pt"})
    index = {"metadata": {}, "weight_map": dict.fromkeys(values, only)}
    (source / "model.safetensors.index.json").write_text(json.dumps(index))
    export_safetensors(source, tmp_path / "copy", None)
    assert entries(tmp_path / "copy") == entries(source)
    transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "copy")


def _config(source: Path, **fields: Any) -> None:
    path = source / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


def _change(source: Path, name: str, value: torch.Tensor | None) -> None:
    (file,) = (file for file in source.glob("*.safetensors") if name in load_file(file))
    save_file({**load_file(file), name: value} if value is not None else {}, file)


def _tokenizer(source: Path, **fields: Any) -> None:
    path = source / "tokenizer.json"
    said = json.loads(path.read_text())
    path.write_text(json.dumps({**said, "model": {**said["model"], **fields}}))


NORM, LAST = "model.norm.weight", "lm_head.weight"


@pytest.mark.parametrize(
    ("spoil", "kind", "message"),
    [
        (
            lambda path: _config(path, architectures=["BloomForCausalLM"]),
            "f16",
            "is a BloomForCausalLM, which gemini cannot export",
        ),
        (
            lambda path: _config(path, hidden_act="gelu"),
            "f16",
            "has the activation 'gelu', which GGUF does not support",
        ),
        (lambda path: _config(path, rope_parameters={"rope_type": "yarn"}), "f16", "has rope of type 'yarn'"),
        (lambda path: _config(path, vocab_size=310), "f16", "but config.json has vocab_size 310"),
        (lambda path: _config(path, head_dim=32), "f16", "but config.json has [24] heads of size 32"),
        (lambda path: _config(path, num_hidden_layers=3), "f16", r"lacks 9 tensors .* as 'blk\.2\."),
        (lambda path: _config(path, num_hidden_layers=1), "f16", r"has 'model\.layers\.1\..* no name in"),
        (lambda path: _config(path, quantization_config={"a": 1}), "f16", "has quantized weights"),
        (
            lambda path: _config(path, num_attention_heads="x"),
            "f16",
            "num_attention_heads is 'x', not a size",
        ),
        (
            lambda path: _change(path, LAST, torch.full((320, 64), 7e4)),
            "f16",
            "above 65504, the largest of f16",
        ),
        (lambda path: _change(path, NORM, None), "bf16", "does not hold"),
        (lambda path: (path / "tokenizer.json").unlink(), "f16", "has no tokenizer.json; load its tokenizer"),
        (lambda path: _tokenizer(path, type="Unigram"), "f16", "of type 'Unigram'; gemini exports only BPE"),
        (lambda path: _tokenizer(path, merges=[]), "f16", "has no merges, which every GGUF tokenizer needs"),
        (lambda path: _tokenizer(path, merges=["a b c"]), "f16", "has a merge 'a b c', which is not a pair"),
        (
            lambda path: _tokenizer(path, vocab={"a": 320}),
            "f16",
            "has token 320, but the model has only",
        ),
    ],
)
def test_what_gguf_cannot_hold_is_refused_in_one_line_and_nothing_is_written(
    spoil: Callable[[Path], object], kind: str, message: str, tmp_path: Path
) -> None:
    source = llama(tmp_path / "base", dtype=torch.float32)
    spoil(source)
    with pytest.raises(ConfigError, match=message) as refused:
        export_gguf(source, tmp_path / "model.gguf", kind)
    assert "\n" not in str(refused.value)
    assert entries(tmp_path) == ["base"]


def test_what_is_missing_or_there_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    source = llama(tmp_path / "base")
    adapter = adapt(source, tmp_path / "adapter")
    for arguments, message in (
        ([str(source), str(tmp_path / "base")], "base exists; remove it"),
        (
            [str(adapter), str(tmp_path / "out")],
            "holds adapters, not a model; merge them into their base first",
        ),
        (
            [str(source), str(tmp_path / "out"), "--type", "q8_0"],
            "--type q8_0 is a type of GGUF; give --format gguf",
        ),
    ):
        assert main(["export", *arguments]) == 2
        assert message in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "gguf", None)
    assert main(["export", str(source), str(tmp_path / "out.gguf")]) == 2
    assert "pip install 'gemini-runtime[gguf]'" in capsys.readouterr().err
    assert entries(tmp_path) == ["adapter", "base"]


def test_biases_that_llama_cpp_does_not_take_are_refused(tmp_path: Path) -> None:
    config = transformers.Qwen3Config(vocab_size=300, attention_bias=True, **SIZES)
    source = save(tmp_path / "base", transformers.Qwen3ForCausalLM(config))
    with pytest.raises(ConfigError, match=r"_proj\.bias', for which GGUF has no name in 'qwen3'"):
        export_gguf(source, tmp_path / "model.gguf", "f16")


EXPERT = "model.layers.1.mlp.experts.3.down_proj.weight"


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda path: _config(path, norm_topk_prob=False), "not normalized .norm_topk_prob is not true"),
        (lambda path: _config(path, num_experts_per_tok=5), "num_experts_per_tok is 5, of 4 experts"),
        (lambda path: _config(path, num_local_experts=3), "has .*, and config.json says 3 experts"),
        (
            lambda path: _config(path, num_local_experts=5),
            r"mlp\.gate\.weight.*says 5 experts and a width of 64",
        ),
        (lambda path: _config(path, moe_intermediate_size=16), "experts of width 16 in a model of width 64"),
        (lambda path: _rename(path, EXPERT, None), r"has 3 of 4 experts in 'blk\.1\.ffn_down_exps"),
        (lambda path: _rename(path, EXPERT, EXPERT.replace("3", "02")), "experts with one such matrix each"),
        (lambda path: _rename(path, EXPERT, EXPERT.replace(".3", "")), "has no name in 'qwen3moe'"),
        (
            lambda path: _rename(path, EXPERT, EXPERT.replace("experts.3.", "")),
            "has no name in 'qwen3moe'",
        ),
        (lambda path: _without_experts(path), r"lacks 3 tensors .* as 'blk\.0\.ffn_down_exps"),
    ],
)
def test_experts_that_are_not_those_of_the_config_are_refused(
    spoil: Callable[[Path], object], message: str, tmp_path: Path
) -> None:
    source = qwen("Qwen3Moe", **EXPERTS)(tmp_path / "base")
    spoil(source)
    with pytest.raises(ConfigError, match=message):
        export_gguf(source, tmp_path / "model.gguf", "f16")
    assert entries(tmp_path) == ["base"]


def _rename(source: Path, name: str, to: str | None) -> None:
    (file,) = source.glob("*.safetensors")
    values = load_file(file)
    value = values.pop(name)
    save_file({**values, to: value} if to is not None else values, file)


def _without_experts(source: Path) -> None:
    (file,) = source.glob("*.safetensors")
    save_file({name: each for name, each in load_file(file).items() if ".0.mlp.experts" not in name}, file)
