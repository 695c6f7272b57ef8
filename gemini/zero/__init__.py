"""Chunks cut among ranks (ZeRO-3): whole only while they are used, their gradients exchanged as shards."""
