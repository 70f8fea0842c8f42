"""Pages of studies: one for each result, and an index of all claims. They know only what is stored."""
