"""Measurements behind ``gemini bench``: each case runs in its own processes, watched from outside."""
