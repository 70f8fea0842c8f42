"""Probes of behaviour: accuracy, calibration, and robustness to modified images."""
