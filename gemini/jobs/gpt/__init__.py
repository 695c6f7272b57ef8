"""A GPT on bytes of text, trained under byte budgets (``gemini train``)."""
