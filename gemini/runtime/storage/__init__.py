"""Storage: which chunks hold which part of a model, and parameters that move there and back."""
