"""Probes of attention maps: how dense they are, how far they reach, and where they look."""
