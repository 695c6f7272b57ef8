"""Placement: decides how much of each tier model data may take. Policies return plans; the runtime executes
them."""

from gemini.placement.policies import ModelDataSize, PlacementPlan, PlacementPolicy, TierCapacity, policies
from gemini.placement.report import PlanReport

__all__ = [
    "ModelDataSize",
    "PlacementPlan",
    "PlacementPolicy",
    "PlanReport",
    "TierCapacity",
    "policies",
]
