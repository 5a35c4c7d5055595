import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxttp.adapters import from_nnx
from jaxttp.models import MLP, load_params, save_params, with_params
from tests.draws import normal


def test_round_trip_is_exact_in_structure_dtype_and_bits(tmp_path, key):
    params = {
        "blocks": {
            "0": {"kernel": normal(key, (3, 4), dtype=jnp.float32)},
            "10": jnp.arange(3),
        },
        "head": {
            "kernel": normal(key, (2, 5), dtype=jnp.float64),
            "scale": jnp.asarray(1.5, jnp.bfloat16),
        },
        "odd": jnp.asarray([0.0, -0.0, jnp.nan, jnp.inf, 1e-45], jnp.float32),
    }
    path = tmp_path / "a.safetensors"
    save_params(path, params, {"made_by": "a test", "größe": "3"})
    loaded = load_params(path)
    assert loaded.metadata == {"made_by": "a test", "größe": "3"}
    assert jax.tree.structure(loaded.params) == jax.tree.structure(params)
    for given, read in zip(jax.tree.leaves(params), jax.tree.leaves(loaded.params), strict=True):
        assert isinstance(read, jax.Array)
        assert (read.dtype, read.shape) == (given.dtype, given.shape)
        assert np.asarray(read).tobytes() == np.asarray(given).tobytes()


def test_what_from_nnx_gives_saves_loads_and_evaluates(tmp_path, key):
    model = MLP((4, 8, 8, 3), rngs=nnx.Rngs(0))
    apply_fn, params = from_nnx(model)
    save_params(tmp_path / "a", params)
    loaded = load_params(tmp_path / "a").params
    assert jax.tree.structure(loaded) == jax.tree.structure(params)
    x = normal(key, (5, 4), dtype=jnp.float32)
    np.testing.assert_array_equal(apply_fn(loaded, x), apply_fn(params, x))
    other = MLP((4, 8, 8, 3), rngs=nnx.Rngs(1))
    np.testing.assert_array_equal(with_params(other, params)(x), model(x))


@pytest.mark.parametrize(
    ("params", "error", "message"),
    [
        ({}, ValueError, "holds no array"),
        ({"a": {}}, ValueError, "holds no array"),
        ({"a": {"b": 1.0}}, TypeError, "a.b is a float, not an array"),
        ({"a.b": jnp.ones(1)}, ValueError, "the key 'a.b' is empty or has a dot"),
        ({"": jnp.ones(1)}, ValueError, "the key '' is empty or has a dot"),
        ({"a": {0: jnp.ones(1), "0": jnp.ones(1)}}, ValueError, "0 is there twice"),
        ({"a": {0: {"b": jnp.ones(1)}, "0": {"b": jnp.ones(1)}}}, ValueError, "0.b is there"),
        ({(0, 1): jnp.ones(1)}, TypeError, "keys must be strings or ints"),
    ],
)
def test_what_cannot_come_back_is_not_saved(tmp_path, params, error, message):
    with pytest.raises(error, match=message):
        save_params(tmp_path / "a", params)
    assert not (tmp_path / "a").exists()


def test_float64_is_not_narrowed_silently(tmp_path):
    save_params(tmp_path / "a", {"w": jnp.ones(2, jnp.float64)})
    with jax.enable_x64(False), pytest.raises(ValueError, match=r"w is float64.*enable_x64"):
        load_params(tmp_path / "a")


def test_a_mismatch_lists_everything_at_once():
    model = MLP((4, 8, 3), rngs=nnx.Rngs(0))
    params = {
        "hidden": {"0": {"kernel": jnp.zeros((4, 9))}},
        "head": {"kernel": jnp.zeros((8, 3)), "bias": jnp.zeros(3), "scale": jnp.zeros(3)},
        "extra": jnp.zeros(1),
    }
    with pytest.raises(ValueError, match="params do not fit this MLP") as error:
        with_params(model, params)
    text = str(error.value)
    assert "missing: hidden.0.bias;" in text
    assert "unexpected: head.scale, extra;" in text
    assert "of another shape: hidden.0.kernel (4, 9) instead of (4, 8)." in text
    assert "head.kernel" not in text
