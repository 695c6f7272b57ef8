"""Measurements behind ``gemini bench``: every case in processes of its own, watched from outside."""
