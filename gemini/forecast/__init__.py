"""Forecast: what a step of a model would take, found out without its weights."""
