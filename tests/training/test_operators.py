"""Every way in which an operator can use a managed parameter gives the numbers of the unmanaged model."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint
from training_harness import KIB, Outcome, Recipe, assert_trains_alike, moved_bytes, tight
from training_models import Around, square_loss

BOTH = pytest.mark.parametrize("precision", [None, "bf16"])


def assert_alike(
    core: Callable[[], nn.Module],
    tmp_path: Path,
    precision: str | None = None,
    steps: int = 5,
    device_kib: int = 40,
) -> Outcome:
    """State law 1 for ``core`` on a DEVICE so small that its chunks are evicted."""
    got = assert_trains_alike(
        lambda: Around(core()),
        square_loss,
        tight(tmp_path, device_kib * KIB),
        Recipe(steps=steps, precision=precision),
    )
    assert moved_bytes(got.stats) > 0
    return got


class Calls(nn.Module):
    """Holds linear layers and uses them as ``use(self, x)`` says."""

    def __init__(self, use: Callable[[Any, Tensor], Tensor], layers: int = 3) -> None:
        super().__init__()
        self.use = use
        self.fc = nn.ModuleList(nn.Linear(32, 32) for _ in range(layers))
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        """Run ``use``, counting the training calls."""
        out = self.use(self, x)
        self.calls += torch.is_grad_enabled()
        return out


def in_order(m: Calls, x: Tensor) -> Tensor:
    for fc in m.fc:
        x = torch.tanh(fc(x))
    return x


def weight_outside_its_module(m: Calls, x: Tensor) -> Tensor:
    return F.linear(F.linear(x, m.fc[1].weight), m.fc[0].weight, m.fc[2].bias)


def twice_in_a_row(m: Calls, x: Tensor) -> Tensor:
    return m.fc[0](torch.tanh(m.fc[0](x)))


def another_order_every_step(m: Calls, x: Tensor) -> Tensor:
    for i in range(3):
        x = torch.tanh(m.fc[(i + m.calls) % 3](x))
    return x


def reversed_after_warmup(m: Calls, x: Tensor) -> Tensor:
    for fc in m.fc if m.calls == 0 else reversed(m.fc):
        x = torch.tanh(fc(x))
    return x


def only_in_some_steps(m: Calls, x: Tensor) -> Tensor:
    for i, fc in enumerate(m.fc):
        x = torch.tanh(fc(x)) if (m.calls + i) % 2 else x
    return x


def only_from_the_third_step(m: Calls, x: Tensor) -> Tensor:
    return in_order(m, x) if m.calls >= 2 else torch.tanh(m.fc[0](x))


def transposed_views(m: Calls, x: Tensor) -> Tensor:
    late = m.fc[0].weight.t()
    for fc in m.fc:
        x = torch.tanh(x @ fc.weight.t() + fc.bias)
    return x @ late + x @ m.fc[1].weight.T


def split_and_indexed(m: Calls, x: Tensor) -> Tensor:
    top, bottom = m.fc[0].weight.chunk(2)
    rows = torch.stack([m.fc[1].weight[i] for i in range(4)])
    joined = torch.cat([F.linear(x, top), F.linear(x, bottom)], dim=1)
    return joined + (x @ rows.t()).sum(1, keepdim=True) * m.fc[2].weight[:, None, 0].t()


def einsum_and_kwargs(m: Calls, x: Tensor) -> Tensor:
    x = torch.einsum("bi,oi->bo", x, m.fc[0].weight)
    return F.linear(input=x, weight=m.fc[1].weight, bias=m.fc[1].bias) * m.fc[2].bias


def in_place_result(m: Calls, x: Tensor) -> Tensor:
    y = x.clone()
    y *= m.fc[0].bias
    y[1:] += m.fc[1].bias
    y[0] = m.fc[2].bias
    return y


def one_weight_several_in_one_operator(m: Calls, x: Tensor) -> Tensor:
    return x @ torch.linalg.multi_dot([m.fc[0].weight, m.fc[1].weight, m.fc[0].weight])


class Pair(NamedTuple):
    """What a model may keep its weights in."""

    first: Any
    second: Any


class Pieces(list[Any]):
    """A list of one's own."""


def named_tuple_of_weights(m: Calls, x: Tensor) -> Tensor:
    both = torch.stack(Pair(m.fc[0].weight, m.fc[1].weight))
    return x @ both[0] @ both[1] @ m.fc[2].weight


def list_of_ones_own(m: Calls, x: Tensor) -> Tensor:
    joined = torch.cat(Pieces([m.fc[0].weight, m.fc[1].weight, x]))
    return x @ joined[:32] @ joined[32:64] + m.fc[2].bias


def foreach_in_place(m: Calls, x: Tensor) -> Tensor:
    rows = [x[:, :16].clone(), x[:, 16:].clone()]
    torch._foreach_mul_(rows, [m.fc[0].weight[:6, :16], m.fc[1].weight[:6, :16]])
    return torch.cat(rows, 1) + m.fc[2].bias


def in_place_without_result(m: Calls, x: Tensor) -> Tensor:
    rows = [x[:, :16].clone(), x[:, 16:].clone()]
    torch.ops.aten._foreach_mul_(rows, [m.fc[0].weight[:6, :16], m.fc[1].weight[:6, :16]])
    return torch.cat(rows, 1) + m.fc[2].bias


def compared_with_views_that_were_written(m: Calls, x: Tensor) -> Tensor:
    h = m.fc[0](x)
    first, second = h.unbind(0)[:2]
    with torch.no_grad():
        third = h[2]
        h.mul_(0.5)  # from here on it is an error to ask the views what made them
    masks = [(view > m.fc[0].bias).float().mean() for view in (first, second, third)]
    return torch.tanh(m.fc[2](m.fc[1](x))) + sum(masks)


class Secretive(Tensor):
    """A tensor that answers no question after its attributes."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") == "__get__":
            raise NotImplementedError(f"{cls.__name__} does not know {func.__self__}")
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


def beside_a_tensor_of_ones_own(m: Calls, x: Tensor) -> Tensor:
    own = torch.linspace(0, 1, 32).as_subclass(Secretive)
    return in_order(m, x) + (m.fc[0].bias * own).sum()


USES = (
    in_order,
    weight_outside_its_module,
    twice_in_a_row,
    another_order_every_step,
    reversed_after_warmup,
    only_in_some_steps,
    only_from_the_third_step,
    transposed_views,
    split_and_indexed,
    einsum_and_kwargs,
    in_place_result,
    one_weight_several_in_one_operator,
    named_tuple_of_weights,
    list_of_ones_own,
    foreach_in_place,
    in_place_without_result,
    compared_with_views_that_were_written,
    beside_a_tensor_of_ones_own,
)


@BOTH
@pytest.mark.parametrize("use", USES, ids=lambda use: use.__name__)
def test_any_use_of_a_weight_trains_alike(use: Any, precision: str | None, tmp_path: Path) -> None:
    assert_alike(partial(Calls, use), tmp_path, precision)


class Scale(torch.autograd.Function):
    """``x @ w.t()`` written by hand; saves the parameter itself."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        x, weight = ctx.saved_tensors
        return grads[0] @ weight, grads[0].t() @ x


class ScaleByView(torch.autograd.Function):
    """The same; saves a transposed view of the parameter, and another as an attribute."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight.t())
        ctx.row = weight[0]
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        x, view = ctx.saved_tensors
        return grads[0] @ view.t() + 0 * ctx.row, grads[0].t() @ x


@BOTH
@pytest.mark.parametrize("checkpointing", ["none", "reentrant", "non-reentrant"])
@pytest.mark.parametrize("function", [Scale, ScaleByView])
def test_a_custom_function_that_saves_a_parameter_trains_alike(
    function: Any, checkpointing: str, precision: str | None, tmp_path: Path
) -> None:
    def use(m: Calls, x: Tensor) -> Tensor:
        for fc in m.fc:
            if checkpointing == "none":
                x = torch.tanh(function.apply(x, fc.weight))
            else:
                x = torch.tanh(
                    checkpoint(function.apply, x, fc.weight, use_reentrant=checkpointing == "reentrant")
                )
        return x

    assert_alike(partial(Calls, use), tmp_path, precision)


class Attention(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(32, 4, batch_first=True, **options)

    def forward(self, x: Tensor) -> Tensor:
        """Attend over the batch as if it were a sequence, with and without weights."""
        y, _ = self.attention(x[None], x[None], x[None], need_weights=True)
        z, _ = self.attention(y, y, y, need_weights=False)
        return z[0]


@BOTH
@pytest.mark.parametrize(
    "options", [{}, {"kdim": 32, "vdim": 32, "bias": False}, {"add_bias_kv": True, "dropout": 0.1}]
)
def test_multihead_attention_trains_alike(
    options: dict[str, Any], precision: str | None, tmp_path: Path
) -> None:
    # in_proj_weight alone is 12 KiB in fp32: one update needs four of that
    assert_alike(partial(Attention, **options), tmp_path, precision, device_kib=64)


class Recurrent(nn.Module):
    def __init__(self, kind: Callable[..., nn.Module], **options: Any) -> None:
        super().__init__()
        self.rnn = kind(32, 16, batch_first=True, **options)

    def forward(self, x: Tensor) -> Tensor:
        """Run the batch as a sequence."""
        out: Tensor = self.rnn(x[None])[0][0]
        return torch.cat([out, out], dim=1)[:, :32]


class Conv(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv1d(1, 8, 3, padding=1),
            nn.BatchNorm1d(8),
            nn.ReLU(),
            nn.Conv1d(8, 16, 3, padding=1, groups=2),
            nn.GroupNorm(4, 16),
            nn.PReLU(16),
            nn.Conv1d(16, 1, 1),
        )

    def forward(self, x: Tensor) -> Tensor:
        """Run every row as a signal of one channel."""
        out: Tensor = self.net(x[:, None])
        return out[:, 0]


class Lookup(nn.Module):
    """Indices made from the input; the same table as embedding and as head."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.table = nn.Embedding(32, 32, **options)
        self.head = nn.Linear(32, 32, bias=False)
        self.head.weight = self.table.weight

    def forward(self, x: Tensor) -> Tensor:
        """Look rows up and map them back."""
        indices = x.float().abs().mul(4).long().clamp(0, 31)[:, 0]
        out: Tensor = self.head(self.table(indices) + x)
        return out


def _norms(kind: Callable[..., nn.Module]) -> nn.Module:
    return nn.Sequential(kind(nn.Linear(32, 32)), nn.Tanh(), kind(nn.Linear(32, 32)))


MODULES: dict[str, tuple[Callable[[], nn.Module], int]] = {
    "lstm": (partial(Recurrent, nn.LSTM), 96),
    "two-layer bidirectional lstm": (partial(Recurrent, nn.LSTM, num_layers=2, bidirectional=True), 192),
    "gru": (partial(Recurrent, nn.GRU), 96),
    "conv, batch norm, group norm, prelu": (Conv, 48),
    "tied embedding": (Lookup, 40),
    "tied embedding with max_norm": (partial(Lookup, max_norm=3.0), 40),
    "weight norm": (partial(_norms, parametrizations.weight_norm), 40),
    "spectral norm": (partial(_norms, parametrizations.spectral_norm), 40),
    "orthogonal": (partial(_norms, parametrizations.orthogonal), 40),
    "old weight norm": (partial(_norms, nn.utils.weight_norm), 40),
    "old spectral norm": (partial(_norms, nn.utils.spectral_norm), 40),
    "transformer layer": (partial(nn.TransformerEncoderLayer, 32, 4, 64, dropout=0.1, batch_first=True), 96),
    "bilinear": (
        partial(Calls, lambda m, x: F.bilinear(x, x, m.fc[0].weight.view(32, 1, 32).expand(32, 32, 32))),
        40,
    ),
}


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")
@pytest.mark.parametrize("name", MODULES)
def test_a_module_of_torch_trains_alike(name: str, tmp_path: Path) -> None:
    core, device_kib = MODULES[name]
    assert_alike(core, tmp_path, device_kib=device_kib)


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize(
    "name", ["lstm", "conv, batch norm, group norm, prelu", "tied embedding", "weight norm"]
)
def test_a_module_of_torch_trains_alike_in_bf16(name: str, tmp_path: Path) -> None:
    core, device_kib = MODULES[name]
    assert_alike(core, tmp_path, "bf16", device_kib=max(device_kib, 56))
