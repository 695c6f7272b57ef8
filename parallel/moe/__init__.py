"""Mixtures of experts of your own (docs/parallel.md, "Experts")."""

from gemini.parallel.moe.divide import divide_experts, divided_experts, expert_ranks_of
from gemini.parallel.moe.experts import (
    ExpertArray,
    Experts,
    VanillaFFN,
    moe_env,
    moe_mlp_args,
    moe_set_seed,
)
from gemini.parallel.moe.layer import MoeLayer, Widenet
from gemini.parallel.moe.losses import BiasBalance, MoeLoss, Moeloss, RouterRecord, attach
from gemini.parallel.moe.router import (
    Capacity,
    NormalNoiseGenerator,
    Routing,
    Top1Router,
    Top2Router,
    TopKRouter,
    UniformNoiseGenerator,
)

__all__ = [
    "BiasBalance",
    "Capacity",
    "ExpertArray",
    "Experts",
    "MoeLayer",
    "MoeLoss",
    "Moeloss",
    "NormalNoiseGenerator",
    "RouterRecord",
    "Routing",
    "Top1Router",
    "Top2Router",
    "TopKRouter",
    "UniformNoiseGenerator",
    "VanillaFFN",
    "Widenet",
    "attach",
    "divide_experts",
    "divided_experts",
    "expert_ranks_of",
    "moe_env",
    "moe_mlp_args",
    "moe_set_seed",
]
