"""Adapters with the defaults and signatures of ColossalAI's documentation over our own classes."""
