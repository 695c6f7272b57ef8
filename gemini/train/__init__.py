"""The main job: a GPT on bytes of text, trained under byte budgets (``gemini train``)."""
