"""What the documents' programs take from elsewhere, small and generated: model zoos and data sets.

Names and signatures are those of torchvision, timm and the documents' model zoo, as far as programs use them.
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset
from transformers import GPT2Config

from gemini.parallel.engine import get_dataloader
from gemini.parallel.trainer.hooks import BaseHook

CLASSES = 10


# -- pictures --------------------------------------------------------------------------------------


class _Residual(nn.Module):
    """Two convolutions and a way around them."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(channels)

    def forward(self, x: Tensor) -> Tensor:
        out = torch.relu(self.bn1(self.conv1(x)))
        return torch.relu(x + self.bn2(self.conv2(out)))


class ResNet(nn.Module):
    """A residual network with so many blocks in each of its four layers."""

    def __init__(self, blocks: int, num_classes: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 8, 7, stride=4, padding=3, bias=False)
        self.bn1 = nn.BatchNorm2d(8)
        self.relu = nn.ReLU()
        self.maxpool = nn.MaxPool2d(2)
        for number in range(1, 5):
            setattr(self, f"layer{number}", nn.Sequential(*(_Residual(8) for _ in range(blocks))))
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(8, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        out = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        out = self.layer4(self.layer3(self.layer2(self.layer1(out))))
        return self.fc(torch.flatten(self.avgpool(out), 1))


def resnet18(num_classes: int = 1000) -> ResNet:
    """Return a small one instead of torchvision's."""
    return ResNet(1, num_classes)


def resnet34(num_classes: int = 1000) -> ResNet:
    """Return one that is a little larger."""
    return ResNet(2, num_classes)


def resnet50(num_classes: int = 1000) -> ResNet:
    """Return the largest."""
    return ResNet(3, num_classes)


class VisionTransformer(nn.Module):
    """A small one over patches of 8 x 8, which has timm's names."""

    def __init__(self, drop_rate: float, num_classes: int) -> None:
        super().__init__()
        self.patch_embed = nn.Conv2d(3, 32, 8, stride=8)
        self.cls_token = nn.Parameter(torch.zeros(1, 1, 32))
        layers = (nn.TransformerEncoderLayer(32, 4, 64, drop_rate, batch_first=True) for _ in range(2))
        self.blocks = nn.Sequential(*layers)
        self.norm = nn.LayerNorm(32)
        self.head = nn.Linear(32, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        patches = self.patch_embed(x).flatten(2).transpose(1, 2)
        tokens = torch.cat([self.cls_token.expand(len(x), -1, -1), patches], 1)
        return self.head(self.norm(self.blocks(tokens)[:, 0]))


def vit_base_patch16_224(drop_rate: float = 0.0, num_classes: int = 1000) -> VisionTransformer:
    """Return a small one instead of timm's."""
    return VisionTransformer(drop_rate, num_classes)


def pictures(count: int = 256, size: int = 32, *, seed: int = 0) -> TensorDataset:
    """Return labelled pictures that can be told apart, instead of CIFAR10 and Caltech101."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(CLASSES, (count,), generator=generator)
    patterns = torch.randn(CLASSES, 3, size, size, generator=torch.Generator().manual_seed(1))
    noise = torch.randn(count, 3, size, size, generator=generator)
    return TensorDataset(patterns[labels] + 0.5 * noise, labels)


def build_cifar(batch_size: int, root: str, **sizes: int) -> tuple[DataLoader[Any], DataLoader[Any]]:
    """Return loaders of such pictures instead of titans' ones of CIFAR10."""
    train, test = pictures(256), pictures(64, seed=1)
    return get_dataloader(train, batch_size=batch_size, shuffle=True), get_dataloader(
        test, batch_size=batch_size
    )


# -- language --------------------------------------------------------------------------------------


def small_gpt2(**sizes: Any) -> GPT2Config:
    """Return the configuration of a GPT-2 of a few thousand parameters; ``sizes`` are given up but for what
    the test of a program needs."""
    small = {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 64, "vocab_size": 512}
    return GPT2Config(**{**small, **sizes})


class Webtext(Dataset[dict[str, Tensor]]):
    """Sequences of tokens that follow each other by a rule, instead of a tokenized text of the web."""

    def __init__(self, count: int = 64, seq_len: int = 16, vocab_size: int = 512) -> None:
        starts = torch.randint(vocab_size, (count, 1), generator=torch.Generator().manual_seed(0))
        self.data = (starts + 3 * torch.arange(seq_len)) % vocab_size

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input_ids": self.data[index], "attention_mask": torch.ones_like(self.data[index])}


# -- what is looked at ---------------------------------------------------------------------------


class Losses(BaseHook):
    """Keeps the loss of every iteration of training."""

    def __init__(self) -> None:
        self.seen: list[float] = []

    def after_train_iter(self, trainer: Any, output: Any, label: Any, loss: Any) -> None:
        self.seen.append(float(loss))


def printed(function: Callable[..., object], *arguments: object) -> list[str]:
    """Call a function and return the lines that it has printed, which are shown as well."""
    with contextlib.redirect_stdout(io.StringIO()) as text:
        function(*arguments)
    print(text.getvalue(), end="")
    return text.getvalue().splitlines()
