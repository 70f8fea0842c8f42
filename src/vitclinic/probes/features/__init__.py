"""Probes of representations: what the states after the units of a network hold."""
