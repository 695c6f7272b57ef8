"""Mixtures of experts of your own (docs/parallel.md, "Experts")."""

from gemini.parallel.moe.experts import Experts, VanillaFFN, moe_env, moe_mlp_args, moe_set_seed
from gemini.parallel.moe.layer import MoeLayer, Widenet
from gemini.parallel.moe.losses import BiasBalance, MoeLoss, Moeloss, attach
from gemini.parallel.moe.router import (
    Capacity,
    NormalNoiseGenerator,
    Top1Router,
    Top2Router,
    TopKRouter,
    UniformNoiseGenerator,
)

__all__ = [
    "BiasBalance",
    "Capacity",
    "Experts",
    "MoeLayer",
    "MoeLoss",
    "Moeloss",
    "NormalNoiseGenerator",
    "Top1Router",
    "Top2Router",
    "TopKRouter",
    "UniformNoiseGenerator",
    "VanillaFFN",
    "Widenet",
    "attach",
    "moe_env",
    "moe_mlp_args",
    "moe_set_seed",
]
