"""Activations: what autograd saves, in chunks or computed again."""
