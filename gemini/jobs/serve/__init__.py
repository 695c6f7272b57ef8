"""The program behind ``gemini serve``: an inference engine behind HTTP."""
