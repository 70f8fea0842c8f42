"""Probes of representations: the states after the units of a network."""
