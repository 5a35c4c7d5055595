"""Measurements: time, peak memory, error."""
