"""A managed model: what wraps or manages a module, its weights, steps repeated."""
