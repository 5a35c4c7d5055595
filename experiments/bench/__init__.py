"""Measurements of speed and accuracy; `records` keeps their figures."""
