"""The planner: which layout, schedule, ZeRO stage, recomputation and tiers train a model fastest."""
