"""The program behind ``gemini serve``: an engine behind HTTP."""
