"""Wrappers and handles of managed modules, their state dicts, and the retry of a step."""
