"""The verb `prescribe`: which treatments help on the data at hand, with the evidence."""
