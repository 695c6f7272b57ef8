"""Integrations with trainers and libraries. Each file imports its library only when the file itself is
imported.
"""
