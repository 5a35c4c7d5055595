"""Small networks of every kind that the kernel must be right for: (apply_fn, params, x)."""

import functools

import jax
import jax.numpy as jnp

from tests.draws import normal


def as_users_write(make):
    """People's networks broadcast over ranks; the library's own code must not."""

    @functools.wraps(make)
    def made(*sizes):
        with jax.numpy_rank_promotion("allow"):
            apply_fn, params, x = make(*sizes)

        def allowed(params, x):
            with jax.numpy_rank_promotion("allow"):
                return apply_fn(params, x)

        return allowed, params, x

    return made


def _normal(seed, *shape):
    return normal(seed, shape, max(shape[0], 1) ** -0.5)


def _images(n=5, size=6, channels=2):
    return normal(99, (n, size, size, channels))


def _tokens(n=5, length=4, vocabulary=7):
    return jax.random.randint(jax.random.key(98), (n, length), 0, vocabulary)


def _conv(x, w, strides=(1, 1), padding="SAME", **options):
    return jax.lax.conv_general_dilated(
        x, w, strides, padding, dimension_numbers=("NHWC", "HWIO", "NHWC"), **options
    )


@as_users_write
def mlp(n=5):
    params = [
        {"w": _normal(1, 4, 6), "b": _normal(2, 6)},
        {"w": _normal(3, 6, 5), "b": _normal(4, 5)},
        {"w": _normal(5, 5, 3), "b": _normal(6, 3)},
    ]

    def apply_fn(params, x):
        for layer in params[:-1]:
            x = jax.nn.relu(x @ layer["w"] + layer["b"])
        return x @ params[-1]["w"] + params[-1]["b"]

    return apply_fn, params, normal(0, (n, 4))


@as_users_write
def ntk_parametrisation(n=5):
    """Scaled, transposed, negated and reshaped weights: views, still in layerwise form."""
    params = {"a": _normal(1, 6, 4), "b": _normal(2, 6), "c": _normal(3, 18), "d": _normal(4, 3)}

    def apply_fn(params, x):
        h = jnp.tanh(x @ (params["a"] * 0.5).T + 0.1 * params["b"])
        return h @ (-params["c"].reshape(6, 3) / 2.0) - params["d"]

    return apply_fn, params, normal(0, (n, 4))


@as_users_write
def conv_net():
    """Strided, dilated, grouped, transposed convolutions, asymmetric and negative padding."""
    params = {
        "strided": _normal(1, 3, 3, 2, 4),
        "dilated": _normal(2, 3, 2, 4, 4),
        "grouped": _normal(3, 2, 2, 2, 6),
        "depthwise": _normal(4, 3, 3, 1, 12),
        "transposed": _normal(5, 2, 2, 12, 3),
        "bias": _normal(6, 4),
        "scale": _normal(7, 1, 1, 1, 6),
        "head": _normal(8, 3, 2),
    }

    def apply_fn(p, x):
        h = jnp.tanh(
            _conv(x, p["strided"], (2, 1), [(1, 1), (2, 0)]) + p["bias"].reshape(1, 1, 1, 4)
        )
        h = jnp.tanh(_conv(h, p["dilated"], rhs_dilation=(1, 2)))
        h = _conv(h, p["grouped"], feature_group_count=2) * p["scale"]
        h = jnp.tanh(_conv(h, p["depthwise"], padding=[(1, 1), (-1, 1)], feature_group_count=6))
        h = _conv(h, p["transposed"], padding=[(1, 1), (1, 1)], lhs_dilation=(2, 2))
        return h.mean((1, 2)) @ p["head"]

    return apply_fn, params, _images()


@as_users_write
def conv_channels_first():
    params = {"w": _normal(1, 4, 2, 3, 3), "b": _normal(2, 4, 1, 1), "head": _normal(3, 3, 4)}

    def apply_fn(p, x):
        numbers = ("NCHW", "OIHW", "NCHW")
        h = jax.lax.conv_general_dilated(x, p["w"], (2, 2), "VALID", dimension_numbers=numbers)
        return jnp.einsum("oc,nchw->no", p["head"], jax.nn.softplus(h + p["b"]))

    return apply_fn, params, _images().transpose(0, 3, 1, 2)


@as_users_write
def attention():
    """Embedding, learned positions, multi-head attention, feed-forward block, two readouts."""
    width, heads, length = 6, 2, 4
    params = {
        "embed": _normal(1, 7, width),
        "position": _normal(2, length, width),
        "qkv": _normal(3, width, 3, heads, width // heads),
        "out": _normal(4, heads, width // heads, width),
        "up": {"w": _normal(5, width, 8), "b": _normal(6, 8)},
        "down": _normal(7, 8, width),
        "head": _normal(8, width, 3),
    }

    def apply_fn(p, tokens):
        h = p["embed"][tokens] + p["position"]
        q, k, v = jnp.moveaxis(jnp.einsum("nld,dthe->nlthe", h, p["qkv"]), 2, 0)
        scores = jax.nn.softmax(jnp.einsum("nlhe,nmhe->nhlm", q, k), axis=-1)
        mixed = jnp.einsum("nhlm,nmhe->nlhe", scores, v)
        h = h + jnp.einsum("nlhe,hed->nld", mixed, p["out"])
        h = h + jax.nn.gelu(h @ p["up"]["w"] + p["up"]["b"]) @ p["down"]
        return h.mean(1) @ p["head"]

    return apply_fn, params, _tokens()


@as_users_write
def embedding_bag():
    """A large table and few tokens: the embedding by equality of tokens; negative ones wrap."""
    params = {"table": _normal(1, 60, 4), "head": _normal(2, 4, 3)}

    def apply_fn(p, tokens):
        return jnp.tanh(jnp.take(p["table"], tokens, axis=0).sum(1)) @ p["head"]

    tokens = jnp.array([[0, 3, 3], [3, -1, 59], [7, 8, 9], [7, 7, 7], [1, 2, 0]])
    return apply_fn, params, tokens


@as_users_write
def batched_dense():
    """A weight for each group (as in mixtures of experts), with and without positions."""
    params = {"a": _normal(1, 3, 4, 5), "b": _normal(2, 3, 5, 2)}

    def apply_fn(p, x):
        h = jnp.tanh(jnp.einsum("nlgi,gio->nlgo", x, p["a"]))
        return jnp.einsum("ngo,goc->nc", h.sum(1), p["b"])

    return apply_fn, params, normal(0, (5, 2, 3, 4))


@as_users_write
def tied_weights():
    """The same matrix twice, transposed once, and once more in the readout."""
    params = {"w": _normal(1, 4, 4), "b": _normal(2, 4)}

    def apply_fn(p, x):
        h = jnp.tanh(x @ p["w"] + p["b"].reshape(1, 4))
        h = jnp.tanh(h @ p["w"].T + p["b"].reshape(1, 4))
        return (h @ p["w"])[:, :3]

    return apply_fn, params, normal(0, (5, 4))


@as_users_write
def scanned():
    params = {"layers": {"w": _normal(1, 3, 4, 4), "b": _normal(2, 3, 4)}, "head": _normal(3, 4, 2)}

    def apply_fn(p, x):
        def body(h, layer):
            return jnp.tanh(h @ layer["w"] + layer["b"].reshape(1, 4)), None

        h, _ = jax.lax.scan(body, x, p["layers"])
        return h @ p["head"]

    return apply_fn, params, normal(0, (5, 4))


@as_users_write
def rematerialised():
    """The same block with weights of its own, then with weights that are used twice."""
    shapes = {"a": (4, 6), "b": (6, 4), "c": (4, 5), "d": (5, 4), "head": (4, 2)}
    params = {name: _normal(seed, *shape) for seed, (name, shape) in enumerate(shapes.items())}

    def apply_fn(p, x):
        @jax.checkpoint
        def block(h, a, b):
            return h + jnp.tanh(h @ a) @ b

        h = jax.jit(block)(block(x, p["a"], p["b"]), p["c"], p["d"])
        return block(h, p["d"].T, p["c"].T) @ p["head"]

    return apply_fn, params, normal(0, (5, 4))


@as_users_write
def custom_derivatives():
    """A custom_vjp whose gradient is NOT that of its body, with data and with a parameter."""

    @jax.custom_vjp
    def straight_through(h, w):
        return jnp.round(h @ w)

    straight_through.defvjp(
        lambda h, w: (straight_through(h, w), (h, w)),
        lambda saved, g: (g @ saved[1].T, saved[0].T @ g),
    )

    @jax.custom_jvp
    def clipped(h):
        return jnp.clip(h, -0.5, 0.5)

    clipped.defjvp(lambda primals, tangents: (clipped(*primals), 2.0 * tangents[0]))
    params = {"a": _normal(1, 4, 6), "b": _normal(2, 6, 4), "head": _normal(3, 4, 2)}

    def apply_fn(p, x):
        h = clipped(x @ p["a"])
        return straight_through(h, p["b"]) @ p["head"]

    return apply_fn, params, normal(0, (5, 4))


@as_users_write
def odd_uses():
    """A bias used twice, an output that ignores the data, a dead weight, a cond, an lhs weight."""
    params = {
        "w": _normal(1, 3, 4),
        "twice": _normal(2, 3),
        "alone": _normal(3, 3),
        "dead": _normal(4, 2),
        "gate": _normal(5, 3),
    }

    def apply_fn(p, x):
        _ = p["dead"] * 2.0
        h = (p["w"] @ x.T).T + p["twice"].reshape(1, 3)
        h = jax.vmap(lambda row: jax.lax.cond(row[0] > 0, jnp.tanh, lambda r: r * p["gate"], row))(
            h
        )
        return h * p["twice"].reshape(1, 3) + jnp.broadcast_to(jnp.sin(p["alone"]), h.shape)

    return apply_fn, params, normal(0, (5, 4))


NETWORKS = {
    function.__name__: function
    for function in (
        mlp,
        ntk_parametrisation,
        conv_net,
        conv_channels_first,
        attention,
        embedding_bag,
        batched_dense,
        tied_weights,
        scanned,
        rematerialised,
        custom_derivatives,
        odd_uses,
    )
}
