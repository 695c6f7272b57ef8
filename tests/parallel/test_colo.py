"""Tensors and parameters that say how they lie: what they compute, what a model becomes by its records."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from processes import run_on_ranks
from tensor_harness import TOLERANCE, measure, relative
from torch import Tensor, nn
from torch import distributed as dist

import gemini
from gemini import ConfigError, CPUAdam, GeminiOptimizer
from gemini.parallel.colo import (
    ColoInitContext,
    ColoParameter,
    ColoTensor,
    ColoTensorSpec,
    ComputePattern,
    ComputeSpec,
    GeminiDDP,
    ProcessGroup,
    ReplicaSpec,
    ShardSpec,
    apply_specs,
)

WIDTH, VOCABULARY = 16, 13


def shapes_of_the_example() -> list[tuple[int, ...]]:
    group = ProcessGroup(tp_degree=2, dp_degree=2)
    part = torch.randn(2, 3, 1, generator=torch.Generator().manual_seed(0))
    spec = ColoTensorSpec(group, ShardSpec(dims=[-1], num_partitions=[2]), ComputeSpec(ComputePattern.TP1D))
    tensor = ColoTensor.from_torch_tensor(part, spec)
    found = [tuple(tensor.shape)]
    with pytest.raises(ConfigError, match="the tensor is laid out over"):
        tensor.set_process_group(ProcessGroup(tp_degree=4))
    tensor = tensor.to_replicate()
    found.append(tuple(tensor.shape))
    tensor.set_dist_spec(ShardSpec([0], [2]))
    found.append(tuple(tensor.data.shape))
    assert tuple(tensor.size_global()) == (2, 3, 2)
    assert isinstance(tensor, torch.Tensor)
    return found


def test_tensor_changes_how_it_lies_as_the_example_prints() -> None:
    assert run_on_ranks(shapes_of_the_example, 4) == [[(2, 3, 1), (2, 3, 2), (1, 3, 2)]] * 4


def compute() -> tuple[float, float, float]:
    group = ProcessGroup(tp_degree=2)
    rank = group.tp_local_rank()
    whole_x, whole_w = (torch.randn(4, 4, generator=torch.Generator().manual_seed(n)) for n in (1, 2))
    x = whole_x.chunk(2, 1)[rank].clone().requires_grad_()
    w = whole_w.chunk(2, 0)[rank].clone().requires_grad_()
    spec_x, spec_w = (ColoTensorSpec(group, ShardSpec([dim], [2])) for dim in (-1, 0))
    product = ColoTensor.from_torch_tensor(x, spec_x) @ ColoTensor.from_torch_tensor(w, spec_w)
    assert product.dist_spec == ReplicaSpec()
    out = torch.nn.functional.gelu(product + 1.0).to_replicate()
    out.square().sum().backward()
    whole_x.requires_grad_()
    whole_w.requires_grad_()
    wanted = torch.nn.functional.gelu(whole_x @ whole_w + 1.0)
    wanted.square().sum().backward()
    return (
        relative(out.data, wanted.detach()),
        relative(x.grad, whole_x.grad.chunk(2, 1)[rank]),
        relative(w.grad, whole_w.grad.chunk(2, 0)[rank]),
    )


def test_operators_compute_with_the_whole_tensor_and_gradients_reach_the_parts() -> None:
    for errors in run_on_ranks(compute, 2):
        assert max(errors) <= TOLERANCE


@pytest.mark.parametrize(("device", "said"), [("gpu", "'gpu' is none of torch's"), ("cuda:99", "cuda:99")])
def test_a_context_on_no_device_is_refused(device: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said), ColoInitContext(device=device):
        pass
    with ColoInitContext(device="meta"):
        assert nn.Linear(2, 2).weight.is_meta


def test_one_process_has_the_whole() -> None:
    group = ProcessGroup()
    spec = ColoTensorSpec(group, ShardSpec([0], [1]))
    tensor = ColoTensor.from_torch_tensor(torch.ones(2, 3), spec)
    assert (tensor * 2).to_replicate().data.sum() == 12
    with ColoInitContext(device="cpu"):
        model = nn.Linear(2, 2)
    assert isinstance(model.weight, ColoParameter)
    with pytest.raises(
        ConfigError, match=r"GeminiDDP of gemini\.parallel\.colo, or call its apply_specs first"
    ):
        gemini.GeminiDDP(model)
    model.weight.set_tensor_spec(ShardSpec([-1], [1]), ComputeSpec(ComputePattern.TP1D))
    apply_specs(model)
    assert type(model.weight) is nn.Parameter


class Conv1D(nn.Module):
    """Linear with a weight of (in, out), as that of transformers."""

    def __init__(self, nf: int, nx: int) -> None:
        super().__init__()
        self.nf, self.nx = nf, nx
        self.weight, self.bias = nn.Parameter(torch.randn(nx, nf) / 4), nn.Parameter(torch.randn(nf))

    def forward(self, x: Tensor) -> Tensor:
        out = torch.addmm(self.bias, x.view(-1, x.size(-1)), self.weight)
        return out.view(*x.shape[:-1], self.nf)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.c_attn, self.attn_proj = Conv1D(3 * WIDTH, WIDTH), Conv1D(WIDTH, WIDTH)
        self.c_fc, self.c_proj = Conv1D(4 * WIDTH, WIDTH), Conv1D(WIDTH, 4 * WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.c_attn(self.norm(x)).chunk(3, -1)
        x = x + self.attn_proj(torch.nn.functional.scaled_dot_product_attention(q, k, v))
        out: Tensor = x + self.c_proj(torch.nn.functional.gelu(self.c_fc(x)))
        return out


class Gpt(nn.Module):
    """Made like GPT-2: Conv1D, and a head tied to the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(6, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.wte.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.wte(ids) + self.wpe(torch.arange(ids.size(1)))
        for block in self.blocks:
            x = block(x)
        out: Tensor = self.head(x)
        return out


def split(dim: int, param: Any, group: ProcessGroup) -> None:
    param.set_tensor_spec(ShardSpec([dim], [group.tp_world_size()]), ComputeSpec(ComputePattern.TP1D))


def record_as_megatron(model: nn.Module, group: ProcessGroup) -> None:
    """Do as the program of the example."""
    for name, module in model.named_modules():
        for key, param in module.named_parameters(recurse=False):
            if hasattr(param, "visited"):
                continue
            param.set_process_group(group)
            param.set_dist_spec(ReplicaSpec())
            if "c_fc" in name:
                split(-1, param, group)
                param.compute_spec.set_output_replicate(False)
            elif name.endswith("c_proj"):
                if key == "weight":
                    split(0, param, group)
            elif any(part in name for part in ("wte", "wpe", "c_attn", "attn_proj")):
                split(-1, param, group)
            param.visited = True


def ids(step: int = 0) -> Tensor:
    return torch.randint(VOCABULARY, (4, 5), generator=torch.Generator().manual_seed(step))


def build(group: ProcessGroup) -> nn.Module:
    torch.manual_seed(3)
    with ColoInitContext(device="cpu", default_pg=group, default_dist_spec=ShardSpec([-1], [2])):
        model = Gpt()
    record_as_megatron(model, group)
    return model


def compare() -> dict[str, float]:
    torch.manual_seed(3)
    wanted = measure(Gpt(), (ids(),))
    model = build(ProcessGroup(tp_degree=2))
    partition = apply_specs(model)
    assert {len(cut.shape) for cut in partition.cuts.values()} == {1, 2}
    assert partition.cuts.keys() >= {"wte.weight", "head.weight", "blocks.1.c_proj.weight"}
    got = measure(model, (ids(),))
    grads = partition.gather_state(got.grads)
    errors = {name: relative(grads[name], wanted.grads[name]) for name in grads}
    return errors | {"output": relative(got.output, wanted.output)}


def test_model_is_cut_as_its_parameters_record() -> None:
    for errors in run_on_ranks(compare, 2):
        assert max(errors.values()) <= TOLERANCE, errors


def loss_of(model: nn.Module, step: int) -> Tensor:
    return nn.functional.cross_entropy(model(ids(step)).flatten(0, 1), ids(step + 50).flatten())


def train(device_bytes: str) -> tuple[list[float], list[float], int]:
    torch.manual_seed(3)
    whole = Gpt()
    plain = CPUAdam(whole.parameters(), lr=1e-2, eps=1e-6)
    options = {
        "host_bytes": "4MiB",
        "non_model_bytes": 0,
        "min_chunk_size_mb": 0.004,
        "search_range_mb": 0.004,
    }
    model = GeminiDDP(build(ProcessGroup(tp_degree=2)), device_bytes=device_bytes, **options)
    optimizer = GeminiOptimizer(CPUAdam(model.parameters(), lr=1e-2, eps=1e-6), model)
    wanted, losses = [], []
    with model:
        for step in range(3):
            loss, other = loss_of(model, step), loss_of(whole, step)
            optimizer.backward(loss)
            optimizer.step()
            other.backward()
            plain.step()
            plain.zero_grad()
            losses.append(loss.item())
            wanted.append(other.item())
        return losses, wanted, model.stats()["d2h"]["bytes"]


def test_recorded_model_trains_under_gemini_whatever_the_budget() -> None:
    roomy, tight = run_on_ranks(train, 2, "64MiB"), run_on_ranks(train, 2, "32KiB")
    for (losses, wanted, moved), (same, _, moved_tight) in zip(roomy, tight, strict=True):
        assert losses == pytest.approx(wanted, rel=1e-5)
        assert same == losses
        assert moved == 0 < moved_tight


def refusals() -> list[str]:
    group = ProcessGroup(tp_degree=2)
    said = []

    def note(make: Any, *args: Any, **options: Any) -> None:
        with pytest.raises(ConfigError) as caught:
            make(*args, **options)
        said.append(str(caught.value))

    def recorded(
        module: nn.Module, *keys: str, dim: int = -1, pattern: Any = ComputePattern.TP1D
    ) -> nn.Module:
        with ColoInitContext(default_pg=group):
            made = module()  # type: ignore[operator]
        for key in keys:
            made.get_parameter(key).set_tensor_spec(ShardSpec([dim], [2]), ComputeSpec(pattern))
        return made

    note(ShardSpec, [0, 1], [2, 2])
    note(ProcessGroup, tp_degree=3)
    note(recorded(lambda: nn.Linear(4, 4)).weight.set_dist_spec, ShardSpec([0], [4]))
    note(apply_specs, recorded(lambda: nn.LayerNorm(4), "weight"))
    note(apply_specs, recorded(lambda: nn.Linear(4, 4), "bias"))
    note(apply_specs, recorded(lambda: nn.Linear(4, 4), "weight", "bias"))
    note(apply_specs, recorded(lambda: nn.Linear(4, 4), "weight", pattern=ComputePattern.TP2D))
    unequal = recorded(lambda: nn.Linear(3, 4), "weight")
    note(apply_specs, unequal)
    assert isinstance(unequal.weight, ColoParameter)
    assert unequal.weight.dist_spec == ShardSpec([-1], [2])
    return said


def test_combinations_without_a_style_are_refused_by_name() -> None:
    wanted = [
        "ShardSpec(dims=(0, 1), num_partitions=(2, 2)): a tensor is cut along one dimension",
        "ProcessGroup(tp_degree=3, dp_degree=None) does not fit 2 processes; choose tp 1 x dp 2, tp 2 x dp 1",
        "ShardSpec(dims=(0,), num_partitions=(4,)): ProcessGroup(tp_degree=2, dp_degree=1) cuts a",
        "the model itself, a LayerNorm with weight ShardSpec(dims=(-1,), num_partitions=(2,)): only Linear",
        "the model itself, a Linear with bias ShardSpec(dims=(-1,), num_partitions=(2,)): a layer is cut",
        "the model itself, a Linear with weight ShardSpec(dims=(-1,), num_partitions=(2,)), bias",
        "the model itself, a Linear with weight ShardSpec(dims=(-1,), num_partitions=(2,)): ComputePattern",
        "3 inputs are not divisible by 2 ranks",
    ]
    for said in run_on_ranks(refusals, 2):
        for message, begins in zip(said, wanted, strict=True):
            assert begins in message, message


def degrees() -> tuple[list[int], list[int]]:
    group = ProcessGroup(tp_degree=2)
    assert group.mesh is not None
    members = [dist.get_process_group_ranks(group.mesh[axis].get_group()) for axis in ("tp", "dp")]
    assert (group.tp_local_rank(), group.dp_local_rank()) == (dist.get_rank() % 2, dist.get_rank() // 2)
    return members[0], members[1]


def test_parts_of_a_tensor_lie_on_neighbours() -> None:
    assert run_on_ranks(degrees, 4)[1] == ([0, 1], [1, 3])
