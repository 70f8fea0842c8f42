"""Curvature probes: the loss as a function of the weights."""
