"""Models of plain torch: its own layers, and conv nets built of them as torchvision's are."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

WIDTH = 48


class Checkpointed(nn.Module):
    """Layers in a list, whose activations are computed again in backward."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self.gradient_checkpointing = True

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False)
        return x


class Translator(nn.Module):
    """``nn.Transformer`` between embeddings and logits."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(96, WIDTH)
        self.core = nn.Transformer(WIDTH, 4, 2, 2, 96, dropout=0.1, batch_first=True)
        self.logits = nn.Linear(WIDTH, 96)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(target.shape[1])
        return self.logits(
            self.core(self.tokens(source), self.tokens(target), tgt_mask=mask, tgt_is_causal=True)
        )


class TextEncoder(nn.Module):
    """``nn.TransformerEncoder`` with padding, before or after its norms."""

    def __init__(self, norm_first: bool = False) -> None:
        super().__init__()
        self.tokens = nn.Embedding(96, WIDTH, padding_idx=0)
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 128, norm_first=norm_first, batch_first=True)
        self.core = nn.TransformerEncoder(layer, 3, nn.LayerNorm(WIDTH), enable_nested_tensor=False)
        self.logits = nn.Linear(WIDTH, 96)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.logits(self.core(self.tokens(tokens), src_key_padding_mask=tokens == 0))


class TextDecoder(nn.Module):
    """``nn.TransformerDecoder`` over a memory, checkpointed layer by layer."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(96, WIDTH)
        layer = partial(nn.TransformerDecoderLayer, WIDTH, 4, 128, batch_first=True, activation="gelu")
        self.layers = nn.ModuleList(layer() for _ in range(3))
        self.gradient_checkpointing = True
        self.logits = nn.Linear(WIDTH, 96, bias=False)
        self.logits.weight = self.tokens.weight

    def forward(self, tokens: Tensor, memory: Tensor) -> Tensor:
        x, memory = self.tokens(tokens), memory.to(self.tokens.weight.dtype)
        for layer in self.layers:
            x = checkpoint(layer, x, memory, use_reentrant=False)
        return self.logits(x)


class Recurrent(nn.Module):
    """Layers of RNN, LSTM or GRU, whose weights are all of one operator."""

    def __init__(self, kind: str, **options: bool) -> None:
        super().__init__()
        self.tokens = nn.Embedding(96, WIDTH)
        self.core = getattr(nn, kind)(WIDTH, WIDTH, num_layers=2, batch_first=True, dropout=0.1, **options)
        self.mix = nn.Sequential(nn.LazyLinear(160), nn.Tanh(), nn.Linear(160, 160), nn.Tanh())
        self.logits = nn.Linear(160, 96)
        self(torch.zeros(1, 2, dtype=torch.long))

    def forward(self, tokens: Tensor) -> Tensor:
        return self.logits(self.mix(self.core(self.tokens(tokens))[0]))


class Cells(nn.Module):
    """An LSTM and a GRU written out with their cells, weights used again at every token."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(96, WIDTH)
        self.lstm, self.gru = nn.LSTMCell(WIDTH, WIDTH), nn.GRUCell(WIDTH, WIDTH)
        self.logits = nn.Linear(WIDTH, 96)

    def forward(self, tokens: Tensor) -> Tensor:
        state, other, out = None, None, []
        for x in self.tokens(tokens).unbind(1):
            state = self.lstm(x, state)
            other = self.gru(state[0], other)
            out.append(self.logits(other))
        return torch.stack(out, 1)


class Bags(nn.Module):
    """A recommender: bags of many categories, whose rows are used a few at a time, and a factorization."""

    def __init__(self) -> None:
        super().__init__()
        self.bags = nn.ModuleList(nn.EmbeddingBag(400, 32, mode=mode) for mode in ("sum", "mean", "max"))
        self.dense = nn.Sequential(nn.Linear(8, 128), nn.ReLU(), nn.Linear(128, 32))
        self.cross = nn.Bilinear(32, 32, 16)
        self.top = nn.Sequential(nn.Linear(48, 64), nn.PReLU(), nn.Linear(64, 1))

    def forward(self, items: Tensor, numbers: Tensor) -> Tensor:
        dense = self.dense(numbers)
        bags = [bag(items) for bag in self.bags]
        return self.top(torch.cat([self.cross(dense, bags[0]), bags[1] + bags[2]], 1))


class Attention(nn.Module):
    """``nn.MultiheadAttention`` across two sequences of other widths, its weights returned."""

    def __init__(self) -> None:
        super().__init__()
        kinds = {"kdim": 32, "vdim": 32, "batch_first": True, "add_bias_kv": True}
        self.attend = nn.ModuleList(nn.MultiheadAttention(WIDTH, 4, **kinds) for _ in range(4))
        self.norm = nn.ModuleList(nn.RMSNorm(WIDTH) for _ in range(4))

    def forward(self, query: Tensor, memory: Tensor) -> tuple[Tensor, Tensor]:
        for attend, norm in zip(self.attend, self.norm, strict=True):
            out, weights = attend(norm(query), memory, memory)
            query = query + out
        return query, weights


def conv(of: int, to: int, size: int = 3, **options: int) -> nn.Sequential:
    """Return a convolution without bias, batch norm and ReLU."""
    convolution = nn.Conv2d(of, to, size, padding=size // 2, bias=False, **options)
    return nn.Sequential(convolution, nn.BatchNorm2d(to), nn.ReLU(inplace=True))


class Residual(nn.Module):
    """A bottleneck of ResNet, or of ResNeXt with ``groups``."""

    def __init__(self, of: int, to: int, stride: int, groups: int = 1) -> None:
        super().__init__()
        half = to // 2
        last = (nn.Conv2d(half, to, 1, bias=False), nn.BatchNorm2d(to))
        self.body = nn.Sequential(conv(of, half, 1), conv(half, half, 3, stride=stride, groups=groups), *last)
        self.skip = nn.Sequential(nn.Conv2d(of, to, 1, stride=stride, bias=False), nn.BatchNorm2d(to))

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.body(x) + self.skip(x))


class Inverted(nn.Module):
    """An inverted residual of MobileNet V3 with squeeze and excitation."""

    def __init__(self, of: int, to: int) -> None:
        super().__init__()
        wide = 3 * of
        self.expand, self.depthwise = conv(of, wide, 1), conv(wide, wide, 3, groups=wide, stride=2)
        narrow = (nn.AdaptiveAvgPool2d(1), nn.Conv2d(wide, 8, 1), nn.ReLU())
        self.squeeze = nn.Sequential(*narrow, nn.Conv2d(8, wide, 1), nn.Hardsigmoid())
        self.project = nn.Sequential(nn.Conv2d(wide, to, 1, bias=False), nn.BatchNorm2d(to))

    def forward(self, x: Tensor) -> Tensor:
        x = self.depthwise(self.expand(x))
        return self.project(x * self.squeeze(x))


class Dense(nn.Module):
    """A layer of DenseNet: its input and what it makes of that."""

    def __init__(self, of: int, growth: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.BatchNorm2d(of), nn.ReLU(), nn.Conv2d(of, growth, 3, padding=1, bias=False)
        )

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([x, self.body(x)], 1)


class Branches(nn.Module):
    """A block of Inception: convolutions of several sizes, and pooling, side by side."""

    def __init__(self, of: int, to: int) -> None:
        super().__init__()
        pool = nn.Sequential(nn.MaxPool2d(3, stride=1, padding=1), conv(of, to // 4, 1))
        paths = [conv(of, to // 4, 1), conv(of, to // 4, 3), conv(of, to // 4, 5), pool]
        self.paths = nn.ModuleList(paths)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([path(x) for path in self.paths], 1)


def classifier(width: int, *layers: nn.Module) -> nn.Sequential:
    """Return conv layers, pooling, dropout and a head."""
    head = (nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(0.2), nn.Linear(width, 10))
    return nn.Sequential(*layers, *head)


def resnet() -> nn.Module:
    blocks = (Residual(16, 48, 1), Residual(48, 96, 2), Residual(96, 160, 2), Residual(160, 192, 2))
    return classifier(192, conv(3, 16), Checkpointed(*blocks))


def resnext() -> nn.Module:
    blocks = (Residual(16, 64, 1, 4), Residual(64, 128, 2, 8), Residual(128, 192, 2, 8))
    return classifier(192, conv(3, 16), *blocks)


def mobilenet() -> nn.Module:
    return classifier(96, conv(3, 16), Inverted(16, 32), Inverted(32, 64), Inverted(64, 96))


def densenet() -> nn.Module:
    layers = [Dense(24 + 16 * i, 16) for i in range(8)]
    return classifier(152, conv(3, 24, stride=2), *layers)


def inception() -> nn.Module:
    return classifier(96, conv(3, 32, stride=2), Branches(32, 64), nn.MaxPool2d(2), Branches(64, 96))


def vgg() -> nn.Module:
    sizes = ((3, 32), (32, 64))
    layers = [(nn.Conv2d(of, to, 3, padding=1), nn.ReLU(inplace=True), nn.MaxPool2d(2)) for of, to in sizes]
    convs = [part for layer in layers for part in layer]
    dense = [nn.Flatten(), nn.Linear(4096, 40), nn.ReLU(inplace=True), nn.Dropout(), nn.Linear(40, 10)]
    return nn.Sequential(*convs, *dense)


class UNet(nn.Module):
    """Down, up by transposed convolutions, and across, with group norms."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.ModuleList([self.block(3, 24, 1), self.block(24, 48, 2), self.block(48, 96, 2)])
        self.up = nn.ModuleList(
            [nn.ConvTranspose2d(96, 48, 2, stride=2), nn.ConvTranspose2d(48, 24, 2, stride=2)]
        )
        self.out = nn.Conv2d(24, 2, 1)

    @staticmethod
    def block(of: int, to: int, stride: int) -> nn.Sequential:
        """Return a convolution with a group norm."""
        return nn.Sequential(nn.Conv2d(of, to, 3, stride, 1), nn.GroupNorm(8, to), nn.SiLU())

    def forward(self, x: Tensor) -> Tensor:
        first = self.down[0](x)
        second = self.down[1](first)
        x = self.up[0](self.down[2](second)) + second
        return self.out(self.up[1](x) + first)


class Generator(nn.Module):
    """A DCGAN's generator under spectral norm and weight norm."""

    def __init__(self) -> None:
        super().__init__()
        norm, weight = nn.utils.parametrizations.spectral_norm, nn.utils.parametrizations.weight_norm
        self.first = norm(nn.Linear(32, 64 * 4 * 4))
        self.up = weight(nn.ConvTranspose2d(64, 48, 4, 2, 1))
        self.norm, self.last = nn.BatchNorm2d(48), norm(nn.ConvTranspose2d(48, 3, 4, 2, 1))

    def forward(self, noise: Tensor) -> Tensor:
        x = F.leaky_relu(self.first(noise)).view(-1, 64, 4, 4)
        return torch.tanh(self.last(F.relu(self.norm(self.up(x)))))


class Temporal(nn.Module):
    """A dilated causal convolution over time, and one over volumes."""

    def __init__(self) -> None:
        super().__init__()
        self.time = nn.ModuleList(nn.Conv1d(WIDTH, WIDTH, 3, dilation=2**i) for i in range(4))
        self.norm = nn.ModuleList(nn.InstanceNorm1d(WIDTH, affine=True) for _ in range(4))
        self.volume = nn.Conv3d(1, 64, 3, padding=1)
        self.head = nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        for i, (time, norm) in enumerate(zip(self.time, self.norm, strict=True)):
            x = x + F.relu(norm(time(F.pad(x, (2 ** (i + 1), 0)))))
        return self.head(self.volume(x.unflatten(1, (1, 6, 8))).mean((2, 3, 4)))
