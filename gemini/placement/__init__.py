"""Placement: how much of each tier model data may take. Policies return plans, the runtime carries them
out."""

from gemini.placement.plan import ModelDataSize, PlacementPlan, TierCapacity
from gemini.placement.policies import PlacementPolicy, make_policy, policies

__all__ = ["ModelDataSize", "PlacementPlan", "PlacementPolicy", "TierCapacity", "make_policy", "policies"]
