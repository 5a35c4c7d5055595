"""Networks with random values drawn by NumPy: no compilation for every shape."""

import jax.numpy as jnp
import numpy as np
from flax import nnx


def filled(build, seed=0):
    """What `build` makes, every parameter random: kernels ~ N(0, 1/fan_in), biases not zero."""
    draw = np.random.default_rng(seed)
    model = nnx.eval_shape(build)

    def value(path, leaf):
        name = str(path[-1])
        if name in ("scale", "var"):
            return draw.uniform(0.7, 1.3, leaf.shape)
        if name == "kernel":
            return draw.standard_normal(leaf.shape) / np.sqrt(np.prod(leaf.shape[:-1]))
        return 0.2 * draw.standard_normal(leaf.shape)

    state = nnx.to_flat_state(nnx.state(model))
    new = [(p, leaf.replace(jnp.asarray(value(p, leaf), leaf.dtype))) for p, leaf in state]
    nnx.update(model, nnx.from_flat_state(new))
    return model
