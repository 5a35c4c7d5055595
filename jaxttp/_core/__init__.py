"""Private modules that all layers share: checks, results, compilation, progress."""
