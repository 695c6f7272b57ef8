"""What a model collects from all its blocks beside their outputs, in lists that belong to one forward pass:
losses of routers, hidden states. Stages hand it on.
"""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from pipeline_harness import ADAM, CHUNKS
from pipeline_models import VOCAB, Block, Model, batch_of, build, loss_of
from processes import run_on_ranks
from torch import Tensor, nn

from gemini import CPUAdam
from gemini.parallel import Booster, HybridParallelPlugin

STEPS, MICRO = 3, 4
Batch = dict[str, Any]


def _one_process(
    model: Any, batches: Callable[[int], Batch], criterion: Callable[..., Tensor]
) -> list[float]:
    optimizer, losses = CPUAdam(model.parameters(), **ADAM), []
    for step in range(STEPS):
        total = 0.0
        for part in range(MICRO):
            batch = {
                key: value.chunk(MICRO)[part] if isinstance(value, Tensor) else value
                for key, value in batches(step).items()
            }
            loss = criterion(model(**batch), batch) / MICRO
            loss.backward()
            total += loss.item()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    return losses


def _in_stages(
    make: Callable[[], Any],
    batches: Callable[[int], Batch],
    criterion: Callable[..., Tensor],
    layout: dict[str, Any],
) -> list[float] | str:
    booster, model, losses = (
        Booster(plugin=HybridParallelPlugin(num_microbatches=MICRO, **layout)),
        make(),
        [],
    )
    model, optimizer, *_ = booster.boost(model, CPUAdam(model.parameters(), **ADAM))
    try:
        for step in range(STEPS):
            run = booster.execute_pipeline(iter([batches(step)]), model, criterion, optimizer)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(float(run["loss"]))
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return losses


def _own_loss(output: Any, _batch: Batch) -> Tensor:
    loss: Tensor = output.loss
    return loss


# -- models of transformers ----------------------------------------------------------------------------------


def _experts(kind: str, *, asks: bool) -> Any:
    import transformers

    torch.manual_seed(8)
    sizes: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 4}
    sizes |= {"num_attention_heads": 2, "num_key_value_heads": 2, "vocab_size": VOCAB}
    sizes |= {"router_aux_loss_coef": 0.5, "output_router_logits": asks}
    if kind == "Mixtral":
        config = transformers.MixtralConfig(num_local_experts=4, **sizes)
        return transformers.MixtralForCausalLM(config)
    own = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "head_dim": 8}
    return transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(**own, **sizes))


def _tokens(asks: dict[str, bool], step: int) -> Batch:
    ids = batch_of(step)
    return {"input_ids": ids, "labels": ids, **asks}


def _of_hidden_states(output: Any, _batch: Batch) -> Tensor:
    states = enumerate(output.hidden_states, 1)
    return output.loss + torch.stack([index * state.square().mean() for index, state in states]).sum()


@pytest.mark.parametrize(
    ("kind", "layout", "in_config"),
    [
        ("Mixtral", {"pp_size": 2}, True),
        ("Mixtral", {"pp_size": 2, "pp_style": "zbv"}, False),
        ("Qwen3Moe", {"pp_size": 2}, False),
        ("Qwen3Moe", {"pp_size": 4}, True),
    ],
)
def test_the_loss_of_the_routers_of_all_layers_is_that_of_one_process(
    kind: str, layout: dict[str, Any], in_config: bool
) -> None:
    pytest.importorskip("transformers", reason="models of transformers")
    make = partial(_experts, kind, asks=in_config)
    asking = partial(_tokens, {} if in_config else {"output_router_logits": True})
    wanted = _one_process(make(), asking, _own_loss)
    without = _one_process(make(), partial(_tokens, {"output_router_logits": False}), _own_loss)
    assert min(has - lacks for has, lacks in zip(wanted, without, strict=True)) > 0.1
    for losses in run_on_ranks(_in_stages, layout["pp_size"], make, asking, _own_loss, layout):
        assert losses == pytest.approx(wanted, rel=1e-5)


@pytest.mark.parametrize("style", ["1f1b", "zbv"])
def test_hidden_states_of_all_layers_are_those_of_one_process(style: str) -> None:
    pytest.importorskip("transformers", reason="models of transformers")
    make = partial(_experts, "Qwen3Moe", asks=False)
    asking = partial(_tokens, {"output_hidden_states": True})
    wanted = _one_process(make(), asking, _of_hidden_states)
    layout = {"pp_size": 2, "pp_style": style}
    for losses in run_on_ranks(_in_stages, 2, make, asking, _of_hidden_states, layout):
        assert losses == pytest.approx(wanted, rel=1e-5)


# -- models of one's own -------------------------------------------------------------------------------------

_COLLECTED: ContextVar[Any] = ContextVar("collected", default=None)
_ALSO_CALLED_SO: ContextVar[Any] = ContextVar("collected", default=None)


class Leaving(Block):
    """Leaves what it has computed in a context variable."""

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        x = super().forward(x, mask)
        self.leave(_COLLECTED.get(), x)
        return x

    def leave(self, collected: Any, x: Tensor) -> None:
        collected.append(x.square().mean())


class InAList(Model):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(self.block() for _ in range(4))

    def block(self) -> Block:
        return Leaving()

    def collector(self) -> Any:
        return []

    def forward(self, ids: Tensor) -> Any:
        token = _COLLECTED.set(self.collector())
        try:
            logits = super().forward(ids)
            return SimpleNamespace(logits=logits, more=self.sum_of(_COLLECTED.get()))
        finally:
            _COLLECTED.reset(token)

    def sum_of(self, collected: Any) -> Tensor:
        values = enumerate(collected, 1)
        return torch.stack([index * value for index, value in values]).sum()


class LeavingByName(Leaving):
    def leave(self, collected: Any, x: Tensor) -> None:
        collected.seen.setdefault("means", []).append(x.square().mean())
        collected.last = x


class InAnObject(InAList):
    def block(self) -> Block:
        return LeavingByName()

    def collector(self) -> Any:
        return SimpleNamespace(seen={}, last=None)

    def sum_of(self, collected: Any) -> Tensor:
        return super().sum_of(collected.seen["means"]) + collected.last.mean()


class ByHooks(InAList):
    """Registers hooks in its first forward pass, as transformers does: each must be there once."""

    def block(self) -> Block:
        return Block()

    def forward(self, ids: Tensor) -> Any:
        if not hasattr(self, "is_hooked"):
            self.is_hooked = True
            for module in self.modules():
                if isinstance(module, (Block, nn.Linear)):
                    module.register_forward_hook(_collect)
        return super().forward(ids)


def _collect(_module: nn.Module, _args: Any, output: Tensor) -> None:
    if _COLLECTED.get() is not None:
        _COLLECTED.get().append(output.square().mean())


class Deciding(Leaving):
    """Decides on values, so that no stage can run it without its numbers."""

    def leave(self, collected: Any, x: Tensor) -> None:
        if float(x.sum()) < 1e9:
            super().leave(collected, x)


class ByValue(InAList):
    def block(self) -> Block:
        return Deciding()


class ByOneName(InAList):
    def forward(self, ids: Tensor) -> Any:
        token = _ALSO_CALLED_SO.set([self.embed.weight[0]])
        try:
            return super().forward(ids)
        finally:
            _ALSO_CALLED_SO.reset(token)


def _ids(step: int) -> Batch:
    return {"ids": batch_of(step)}


def _with_more(output: Any, batch: Batch) -> Tensor:
    return loss_of(output.logits, batch["ids"]) + output.more


@pytest.mark.parametrize("style", ["1f1b", "interleaved"])
@pytest.mark.parametrize("kind", [InAList, InAnObject, ByHooks])
def test_what_blocks_leave_in_context_variables_is_that_of_one_process(kind: type[Model], style: str) -> None:
    wanted = _one_process(build(kind), _ids, _with_more)
    layout = {"pp_size": 2, "pp_style": style, **CHUNKS}
    for losses in run_on_ranks(_in_stages, 2, partial(build, kind), _ids, _with_more, layout):
        assert losses == pytest.approx(wanted, rel=1e-5)


@pytest.mark.parametrize(
    ("kind", "why"), [(ByValue, "does not know it"), (ByOneName, "two context variables are named")]
)
def test_what_no_stage_can_know_of_context_variables_is_refused(kind: type[Model], why: str) -> None:
    layout = {"pp_size": 2, **CHUNKS}
    for said in run_on_ranks(_in_stages, 2, partial(build, kind), _ids, _with_more, layout):
        assert isinstance(said, str)
        assert why in said
