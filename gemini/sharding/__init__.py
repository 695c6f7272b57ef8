"""Sharding (ZeRO-3): chunks are cut among ranks, and gathered while they are used."""
