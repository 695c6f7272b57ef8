"""Recorded steps: what happened when, as data, as a trace file and as an HTML page."""
