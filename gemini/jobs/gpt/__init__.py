"""Trains a GPT on bytes of text under byte budgets (``gemini train``)."""
