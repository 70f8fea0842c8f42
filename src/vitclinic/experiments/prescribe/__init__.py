"""Prescriptions: which treatments help on the user's own data, by paired trials within a budget."""
