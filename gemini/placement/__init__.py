"""Placement: how much of each tier model data may take. Policies return plans, the runtime carries them
out."""

from gemini.placement.plan import ModelDataSize, PlacementPlan, TierCapacity
from gemini.placement.policies import PlacementPolicy, make_policy, policies
from gemini.placement.report import PlanReport

__all__ = [
    "ModelDataSize",
    "PlacementPlan",
    "PlacementPolicy",
    "PlanReport",
    "TierCapacity",
    "make_policy",
    "policies",
]
