import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxttp.models import MLP, fresh_head


def params_of(module):
    return nnx.to_pure_dict(nnx.state(module, nnx.Param))


def test_only_the_head_is_new_and_the_old_module_is_untouched(key):
    old = MLP((6, 400, 3), rngs=nnx.Rngs(0))
    before = jax.tree.map(np.array, params_of(old))
    new = fresh_head(old, 7, key=key)
    assert type(new) is type(old)
    assert new.head.kernel.shape == (old.head.in_features, 7)
    assert new.head.out_features == 7
    assert not np.any(new.head.bias)
    after = params_of(new)
    new_body, old_body = (
        {name: part for name, part in params.items() if name != "head"}
        for params in (after, before)
    )
    jax.tree.map(np.testing.assert_array_equal, new_body, old_body)
    # The two share no variable: what happens to the new one leaves the old one alone.
    nnx.update(new, jax.tree.map(jnp.zeros_like, nnx.state(new)))
    jax.tree.map(np.testing.assert_array_equal, params_of(old), before)


def test_the_kernel_has_variance_scale_squared_over_fan_in(key):
    scale = 3.0
    kernel = fresh_head(MLP((6, 400, 3), rngs=nnx.Rngs(0)), 50, key=key, scale=scale).head.kernel
    # 20000 normals: their variance is off by 1 %, their mean by 1/141 standard deviations; four
    # times that is allowed.
    assert float(jnp.var(kernel[...])) == pytest.approx(scale**2 / 400, rel=0.04)
    assert abs(float(jnp.mean(kernel[...]))) < 4 * scale / 20 / 141
