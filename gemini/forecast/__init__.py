"""Forecasts the time and memory of a model's training step, without its weights."""
