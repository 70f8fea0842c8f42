"""Studies: re-test a claim over arms and seeds, with what counts as evidence fixed beforehand."""
