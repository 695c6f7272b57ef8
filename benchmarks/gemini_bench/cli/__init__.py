"""The command ``gemini bench``: options, progress, the record that is printed and written."""
