"""Small models of blocks whose forward passes use what other stages of a pipeline have, each in its way."""

from __future__ import annotations

from functools import cache

import torch
from pipeline_harness import ADAM
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from gemini import CPUAdam

WIDTH, VOCAB = 16, 37


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        y = torch.tanh(self.inner(x))
        return x + (y if mask is None else y * mask.unsqueeze(-1).to(y.dtype))


class Model(nn.Module):
    """Blocks between an embedding and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.head = nn.Linear(WIDTH, VOCAB)
        self.calls = 0

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.through(self.embed(ids)))

    def through(self, x: Tensor) -> Tensor:
        """Run the blocks."""
        for block in self.blocks:
            x = block(x)
        return x


class MaskOfTheFront(Model):
    def through(self, x: Tensor) -> Tensor:
        mask = x[..., 0] > 0
        for block in self.blocks:
            x = block(x, mask)
        return x


class MaskBetweenBlocks(Model):
    def through(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x, x[..., 0] > 0)
        return x


class Routed(Model):
    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, 3)

    def forward(own, ids: Tensor) -> Tensor:
        x = own.embed(ids)
        expert = own.router(x).argmax(-1)
        for block in own.blocks:
            x = block(x, expert)
        return own.head(x)


class Counting(Model):
    def forward(self, ids: Tensor) -> Tensor:
        self.calls += 1
        return self.head(self.through(self.embed(ids) / self.calls))


class Catching(Model):
    def through(self, x: Tensor) -> Tensor:
        try:
            return super().through(x)
        except Exception as error:
            raise ValueError("within the blocks") from error


class Normed(Model):
    """Statistics in buffers, which each pass changes."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.BatchNorm1d(6), Block()) for _ in range(4))


class Writing(Model):
    """Blocks that write to what they are given."""

    def __init__(self) -> None:
        super().__init__()
        linear = [nn.Linear(WIDTH, WIDTH) for _ in range(4)]
        self.blocks = nn.ModuleList(layer for each in linear for layer in (each, nn.ReLU(inplace=True)))


class ScalingInPlace(Model):
    """Writes to what an embedding returns."""

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        x *= 4.0
        x[:, 0] = 1.0
        return self.head(self.through(x))


class MaskBehind(Model):
    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        return self.head(self.through(x) * (x[..., :1] > 0))


class Branching(Model):
    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        return self.head(self.through(x)) * (2.0 if x.mean() > -100 else 0.5)


class NumberOfTheFront(Model):
    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        scale = max(1.0, float(x.norm()))
        return self.head(self.through(x) / scale)


class WithoutNaN(Model):
    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        return self.head(self.through(x) + torch.nan_to_num(x.mean(1, keepdim=True)))


class PaddingOfTheFront(Model):
    """Looks for rows of zeros."""

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        return self.head(self.through(x).masked_fill(x.abs().sum(-1, keepdim=True) == 0, 0.0))


class Loss(nn.Module):
    """A block that leaves a loss behind."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Block()

    def forward(self, x: Tensor) -> Tensor:
        x = self.inner(x)
        self.loss = x.square().mean()
        return x


class LossesOfBlocks(Model):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Loss() for _ in range(4))

    def forward(self, ids: Tensor) -> Tensor:
        output = super().forward(ids)
        return output + sum(block.loss for block in self.blocks)  # type: ignore[misc]


class AllWeightsBehind(Model):
    """Adds up the weights of all stages."""

    def forward(self, ids: Tensor) -> Tensor:
        penalty = sum((param.square().sum() for param in self.parameters()), torch.zeros(()))
        return self.head(self.through(self.embed(ids))) + penalty * ids.unsqueeze(-1)


class TypesOfWeights(Model):
    """Asks modules that are in other stages for the type and place of their weights."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Module()
        self.inner.blocks = self.blocks
        del self.blocks

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids).to(next(self.inner.parameters()).dtype)
        for block in self.inner.blocks:
            x = block(x)
        x = x.to(self.embed.weight.device).to(next(self.embed.parameters()))
        return self.head(x.to(next(self.parameters()).dtype))


class Places(nn.Embedding):
    """Positions, which a method gives as well."""

    def behind(self, ids: Tensor, by: int) -> Tensor:
        return super().forward(torch.arange(ids.shape[1]) + by).expand(*ids.shape, -1)


class InMethods(Model):
    """Registers behind the blocks what runs in front, and calls it in methods, by index, by a method."""

    def __init__(self) -> None:
        super().__init__()
        self.scales = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.places = Places(16, WIDTH)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.begin(ids)
        x = self.through(x)
        return self.head(x)

    def begin(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for index in range(len(self.scales)):
            x = x + self.scales[index](x)
        return x + self.places(ids % 16) + self.places.behind(ids, 1)


class Checkpointed(Model):
    """Computes its blocks again in backward, one by one, called in several ways."""

    def through(self, x: Tensor) -> Tensor:
        for index, block in enumerate(self.blocks):
            if index % 2:
                x = checkpoint(lambda y, block=block: block(y), x, use_reentrant=False)
            else:
                x = checkpoint(block, x, use_reentrant=False)
        return x


class Reentrant(Model):
    def through(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=True)
        return x


class CheckpointedAcross(Model):
    """Computes two blocks at once again, between which stages are cut."""

    def through(self, x: Tensor) -> Tensor:
        first, *middle, last = self.blocks
        x = checkpoint(lambda y: middle[1](middle[0](first(y))), x, use_reentrant=False)
        return last(x)


class Thin(Block):
    """A block of another class."""


class OfTwoKinds(Model):
    """Looks of what class a block is."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(kind() for _ in range(2) for kind in (Block, Thin))

    def through(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = 0.5 * block(x) if isinstance(block, Thin) else block(x)
        return x


SENT = (
    Model,
    MaskOfTheFront,
    MaskBetweenBlocks,
    Routed,
    Counting,
    Catching,
    Normed,
    Writing,
    ScalingInPlace,
    TypesOfWeights,
    InMethods,
    Checkpointed,
    OfTwoKinds,
)
_OF_LOSS, _DECIDES = "the loss depends on a value", "the model makes a decision from a value"
REFUSED = {
    MaskBehind: _OF_LOSS,
    Branching: _DECIDES,
    NumberOfTheFront: _DECIDES,
    WithoutNaN: _OF_LOSS,
    PaddingOfTheFront: _OF_LOSS,
    LossesOfBlocks: _OF_LOSS,
    AllWeightsBehind: _OF_LOSS,
}


def batch_of(step: int) -> Tensor:
    return torch.randint(VOCAB, (8, 6), generator=torch.Generator().manual_seed(step))


def loss_of(output: Tensor, ids: Tensor) -> Tensor:
    return nn.functional.cross_entropy(output.flatten(0, 1), ids.roll(-1, 1).flatten())


def build(kind: type[Model]) -> Model:
    torch.manual_seed(5)
    return kind()


@cache
def whole(kind: type[Model]) -> list[float]:
    """The losses of one process that runs one micro-batch after another."""
    model, losses = build(kind), []
    optimizer = CPUAdam(model.parameters(), **ADAM)
    for step in range(3):
        parts = [loss_of(model(part), part) / 4 for part in batch_of(step).chunk(4)]
        sum(parts, torch.zeros(())).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
        losses.append(sum(part.item() for part in parts))
    return losses
