"""Pages of studies: one for each result, and an index of all claims. They know what is stored, not how it came about."""
