"""Measurements of speed and accuracy; figures go into RESULTS.md with date and machine."""
