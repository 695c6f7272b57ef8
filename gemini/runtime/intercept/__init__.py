"""Interception: how the runtime sees the operators that use managed memory."""
