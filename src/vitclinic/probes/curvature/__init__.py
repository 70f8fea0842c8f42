"""The loss as a function of the weights."""
