"""The figures of the paper on the conditioning of the Gauss-Newton matrix (GNC), and ours."""
