"""Activations: tensors that autograd saves, kept in chunks or recomputed in backward."""
