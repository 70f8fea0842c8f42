"""Attention: the maps of a network, and how they mix tokens."""
