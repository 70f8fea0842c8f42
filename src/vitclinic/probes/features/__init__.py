"""Features: what the units of a network pass on."""
