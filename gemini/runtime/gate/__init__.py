"""The gate: every use of managed memory goes through it, and what it asks first."""
