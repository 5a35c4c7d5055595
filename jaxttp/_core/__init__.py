"""What all layers share and no user imports: checks, results, compilation, progress."""
