"""Losses that need less memory than torch's."""
