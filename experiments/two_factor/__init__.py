"""Two-factor cross-entropy dynamics and the geometry of representations, measured."""
