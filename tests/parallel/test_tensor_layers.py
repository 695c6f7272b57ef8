"""A cut model computes what the whole one does: output, gradients of inputs and of weights."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from processes import run_on_ranks
from tensor_harness import (
    HEADS,
    LANGUAGE_PLAN,
    TOLERANCE,
    WIDTH,
    Language,
    Mlp,
    compare_to_whole,
    make_mesh,
    measure,
    relative,
)
from torch import Tensor, nn

from gemini import ConfigError
from gemini.parallel import parallelize
from gemini.parallel.mesh import counted
from gemini.parallel.tensor import (
    Column,
    EmbeddingColumns,
    PartialGradient,
    Row,
    vocabulary_cross_entropy,
)
from gemini.parallel.tensor.region import reduce

MLP_PLAN = {"up": "colwise", "down": "rowwise"}


def inputs(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(3))


def ids(*shape: int) -> Tensor:
    return torch.randint(Language.VOCABULARY, shape, generator=torch.Generator().manual_seed(4))


class Encoder(nn.Module):
    """Torch's own transformer, its masks included."""

    def __init__(self, *, batch_first: bool = True, norm_first: bool = False) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(
            WIDTH, HEADS, 2 * WIDTH, dropout=0.0, batch_first=batch_first, norm_first=norm_first
        )
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=not norm_first and batch_first)
        self.batch_first = batch_first

    def forward(self, x: Tensor) -> Tensor:
        length, batch = (x.size(1), x.size(0)) if self.batch_first else (x.size(0), x.size(1))
        causal = nn.Transformer.generate_square_subsequent_mask(length)
        hidden = torch.zeros(batch, length, dtype=torch.bool)
        hidden[0, -1] = True
        out: Tensor = self.encoder(x, causal, hidden)
        return out


class Decoder(nn.Module):
    """Attention to something else than the input."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerDecoderLayer(WIDTH, HEADS, 2 * WIDTH, dropout=0.0, batch_first=True)
        self.decoder = nn.TransformerDecoder(layer, 2)

    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        out: Tensor = self.decoder(x, memory)
        return out


class Attending(nn.Module):
    """Weights of attention beside its output, for a sequence that is no batch."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, HEADS)

    def forward(self, x: Tensor) -> Tensor:
        out, weights = self.attention(x, x, x)
        return torch.cat([out, weights.detach()], 1)


class Fused(nn.Module):
    """Query, key and value from one weight, with norms of each head and a bias of each head."""

    def __init__(self) -> None:
        super().__init__()
        self.head_dim = WIDTH // HEADS
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.norm = nn.LayerNorm(self.head_dim)
        self.bias = nn.Embedding(5, HEADS)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            part.unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1)
        )
        distance = torch.arange(x.size(1)).sub(torch.arange(x.size(1))[:, None]).abs().clamp_max(4)
        scores = self.norm(q) @ self.norm(k).transpose(-1, -2) + self.bias(distance).permute(2, 0, 1)
        out: Tensor = self.out((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))
        return out


FUSED_PLAN = {
    "qkv": Column(sections=3),
    "norm": PartialGradient(),
    "bias": EmbeddingColumns(),
    "out": Row(),
}

CASES: dict[str, tuple[Callable[[], nn.Module], object, tuple[Tensor, ...]]] = {
    "mlp": (Mlp, MLP_PLAN, (inputs(2, 5, WIDTH),)),
    "mlp without bias": (partial(Mlp, bias=False), MLP_PLAN, (inputs(1, WIDTH),)),
    "row alone": (Mlp, {"down": "rowwise_split_input"}, (inputs(3, WIDTH),)),
    "column alone": (Mlp, {"up": "colwise_gather_output"}, (inputs(3, WIDTH),)),
    "language, tied": (Language, LANGUAGE_PLAN, (ids(2, 6),)),
    "language": (partial(Language, tied=False), LANGUAGE_PLAN, (ids(2, 6),)),
    "fused attention": (Fused, FUSED_PLAN, (inputs(2, 6, WIDTH),)),
    "torch's encoder": (Encoder, "auto", (inputs(2, 6, WIDTH),)),
    "torch's encoder, norms first": (partial(Encoder, norm_first=True), "auto", (inputs(1, 6, WIDTH),)),
    "torch's encoder, batch second": (partial(Encoder, batch_first=False), "auto", (inputs(6, 2, WIDTH),)),
    "torch's decoder": (Decoder, "auto", (inputs(2, 6, WIDTH), inputs(2, 4, WIDTH))),
    "torch's attention": (Attending, "auto", (inputs(6, WIDTH),)),
}


def compare_case(case: str) -> dict[str, float]:
    return compare_to_whole(*CASES[case])


@pytest.mark.parametrize("case", CASES)
def test_cut_model_computes_what_the_whole_one_does(case: str) -> None:
    for errors in run_on_ranks(compare_case, 2, case):
        assert max(errors.values()) <= TOLERANCE, errors


@pytest.mark.parametrize("case", ["language, tied", "fused attention", "torch's encoder"])
def test_cut_model_computes_what_the_whole_one_does_on_four_ranks(case: str) -> None:
    for errors in run_on_ranks(compare_case, 4, case):
        assert max(errors.values()) <= TOLERANCE, errors


def evaluate_encoder() -> float:
    model = Encoder().eval()
    with torch.no_grad():
        wanted = model(inputs(2, 6, WIDTH))
        parallelize(model, make_mesh(tp=2))
        got = model(inputs(2, 6, WIDTH))
    hidden = slice(0, -1)  # torch's kernel fills in zeros where padding is
    return relative(got[:, hidden], wanted[:, hidden])


def test_torch_has_no_kernel_of_its_own_for_a_cut_layer() -> None:
    assert max(run_on_ranks(evaluate_encoder, 2)) <= TOLERANCE


class Attention(nn.Module):
    """Projections of one input, as in LLaMA."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.o(torch.tanh(self.q(x)) * self.k(x) + self.v(x))
        return out


def count_calls() -> tuple[dict[str, int], dict[str, int]]:
    mesh = make_mesh(tp=2)
    model = Attention()
    plan = {"q": "colwise", "k": "colwise", "v": "colwise", "o": "rowwise"}
    parallelize(model, mesh, plan, check=False)
    axis = mesh.axis("tp")
    assert axis is not None
    with counted(axis) as (calls, sent):
        measure(model, (inputs(2, 5, WIDTH),))
    return dict(calls), dict(sent)


def test_layers_that_take_one_tensor_share_one_sum_of_its_gradient() -> None:
    activation_bytes = 2 * 5 * WIDTH * 4
    for calls, sent in run_on_ranks(count_calls, 2):
        assert calls == {"all_reduce": 2}
        assert sent == {"all_reduce": 2 * 2 * activation_bytes // 2}  # 2 (P - 1) / P of each


def reduce_what_lies() -> tuple[bool, bool]:
    """Return whether a sum over two ranks is right, of what lies in order and of every second column."""
    axis = make_mesh(tp=2).axis("tp")
    assert axis is not None
    plain, every_second = inputs(3, 2), inputs(3, 4)[:, ::2]
    wanted = 2 * plain, 2 * every_second
    return torch.equal(reduce(plain, axis), wanted[0]), torch.equal(reduce(every_second, axis), wanted[1])


def test_a_sum_over_ranks_is_right_however_its_operands_lie_in_memory() -> None:
    assert run_on_ranks(reduce_what_lies, 2) == [(True, True)] * 2


def take_loss() -> tuple[float, float, int]:
    mesh = make_mesh(tp=2)
    axis = mesh.axis("tp")
    assert axis is not None
    vocabulary = Language.VOCABULARY
    logits = (5 * inputs(2, 6, vocabulary)).requires_grad_()
    labels = ids(2, 6)
    labels[0, 0] = -100
    wanted = nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
    wanted.backward()
    each = -(-vocabulary // 2)
    padded = nn.functional.pad(logits.detach(), (0, 2 * each - vocabulary))
    part = padded[..., axis.rank * each :][..., :each].clone().requires_grad_()
    with counted(axis) as (_calls, sent):
        loss = vocabulary_cross_entropy(part, labels, axis, vocabulary)
        loss.backward()
    grad = torch.cat(axis.all_gather(part.grad), -1)
    assert not grad[..., vocabulary:].any()
    return (
        relative(loss.detach(), wanted.detach()),
        relative(grad[..., :vocabulary], logits.grad),
        sent["all_reduce"],
    )


def test_loss_of_parts_of_the_vocabulary_sends_three_numbers_a_token() -> None:
    for loss, grad, sent in run_on_ranks(take_loss, 2):
        assert max(loss, grad) <= 1e-6
        assert sent == 3 * 4 * 2 * 6  # fp32, and 2 (P - 1) / P is 1


def refusals() -> list[str]:
    mesh = make_mesh(tp=2)

    def cut_before() -> nn.Module:
        model = nn.ModuleDict({"up": nn.Linear(4, 4), "down": nn.Linear(4, 4), "cut": Mlp()})
        parallelize(model["cut"], mesh, MLP_PLAN)
        return model

    frozen_names = {name: p.detach().clone() for name, p in Language().named_parameters()}
    said = []
    for build, plan in (
        (Mlp, {"up": "colwize"}),
        (Mlp, {"left": "colwise"}),
        (Mlp, "mine"),
        (Mlp, "auto"),
        (Mlp, {"norm": "colwise"}),
        (lambda: nn.Sequential(nn.Linear(4, 7)), {"0": "colwise"}),
        (lambda: nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(4, 8))), {"0": "colwise"}),
        (lambda: nn.MultiheadAttention(9, 3), {"": "auto"}),
        (Language, {"embedding": "embedding_rowwise"}),
        (cut_before, MLP_PLAN),
    ):
        model = build()
        with pytest.raises(ConfigError) as caught:
            parallelize(model, mesh, plan)
        said.append(str(caught.value))
        assert all(p.shape == frozen_names[n].shape for n, p in model.named_parameters() if n in frozen_names)
        changed = [n for n, m in model.named_modules() if hasattr(m, "tensor_region") and "cut" not in n]
        assert not changed
    return said


def test_what_cannot_be_cut_is_refused_before_anything_changes() -> None:
    wanted = [
        "plan has 'colwize' for 'up'; the styles are colwise",
        "plan names 'left', but no module of Mlp has such a name",
        "plan is 'mine'",
        "there is no plan for Mlp",
        "norm: it is a LayerNorm",
        "0: 7 outputs in 1 x 7 units of 1 are not divisible by 2 ranks; possible sizes: 1, 7",
        "0: its weight is computed from other parameters",
        "plan has 'auto'",
        "head.weight is tied to a weight that is cut, but the plan leaves head whole",
        "the model is already cut",
    ]
    for said in run_on_ranks(refusals, 2):
        for message, begins in zip(said, wanted, strict=True):
            assert message.startswith(begins), message
