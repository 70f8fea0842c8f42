"""Tests of vitclinic.functional: every formula against another route to its number."""
