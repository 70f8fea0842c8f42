"""Experiments of many runs: studies of the papers' claims, prescriptions for one's own data, and the demo."""
