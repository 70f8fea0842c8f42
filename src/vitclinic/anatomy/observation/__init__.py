"""Anatomy by observation: the units of any network, from the record of one forward pass.

Residual steps are units; their kind follows from how they mix cells. What lies between two of them is a `pool` where
the grid changes, and a chain of convolutions or attentions where there is more to it, as in a network without
residuals. What comes before the first unit is the stem, with the position embedding, and what comes after the last is
the head.
"""
