"""Sharding: chunks cut among ranks (ZeRO-3), whole while they are used."""
