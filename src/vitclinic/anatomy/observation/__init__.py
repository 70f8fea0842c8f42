"""Observation: the units of any network, from the record of one forward pass."""
