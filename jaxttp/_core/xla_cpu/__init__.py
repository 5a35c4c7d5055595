"""Networks as XLA for CPUs runs them quickly: the same functions, put differently where it helps.

`convolutions` are products where the compiler has a bad loop for them, maxima of `pooling` have
derivatives without one, and `fusion` keeps what residual blocks add up from being computed over and
over; `equations` puts them into the steps of a network (`jaxttp._core.traced`). On other backends
nothing changes.
"""
