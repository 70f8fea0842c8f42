"""Probes of attention maps: how dense they are, how far they reach, what they look at."""
