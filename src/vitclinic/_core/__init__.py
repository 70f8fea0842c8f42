"""Foundations that all of vitclinic shares: errors, configs, files, statistics, records. Private to the package."""
