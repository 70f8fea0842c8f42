"""Studies: the same training over arms and seeds, every run made once and found again by its digest."""
