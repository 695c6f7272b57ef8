"""The gate that every use of managed memory passes, and its checks before an operator."""
