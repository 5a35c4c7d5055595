"""Adapters: evaluation mode whatever was hard-coded, purity, plain parameters, clear refusals.

Tolerances: an adapter runs the very layers of the framework on the very same numbers, so outputs
agree to rounding in float64; 1e-12 leaves room for operations that jit reorders.
"""

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import core, nnx, traverse_util

import jaxttp
from jaxttp._core.types import notes_of
from jaxttp.adapters import check_per_sample, from_equinox, from_linen, from_nnx, output_shape

KEY = jax.random.key(0)
X = jax.random.normal(jax.random.key(1), (5, 3))
FLAX = {"dtype": jnp.float64, "param_dtype": jnp.float64}


def assert_close(left, right):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-12, atol=1e-12), left, right)


def snapshot(tree):
    """Values that survive in-place changes of the module they came from."""
    return [np.array(leaf) for leaf in jax.tree.leaves(jax.tree.map(raw, tree))]


def raw(leaf):
    is_key = jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    return jax.random.key_data(leaf) if is_key else leaf


def statistics(key, features):
    """Running averages that are neither the initial ones nor those of any batch here."""
    first, second = jax.random.split(key)
    return jax.random.normal(first, (features,)), 1 + jax.random.uniform(second, (features,))


# --- networks -------------------------------------------------------------------------------------


class NNXNet(nnx.Module):
    def __init__(self, rngs, classes=2):
        self.first = nnx.Linear(3, 4, rngs=rngs, **FLAX)
        self.norm = nnx.BatchNorm(4, rngs=rngs, **FLAX)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        self.last = nnx.Linear(4, classes, rngs=rngs, **FLAX)
        mean, var = statistics(KEY, 4)
        # Flax would keep them in float32 and round what passes through them.
        self.norm.mean, self.norm.var = nnx.BatchStat(mean), nnx.BatchStat(var)

    def __call__(self, x):
        return self.last(self.dropout(nnx.relu(self.norm(self.first(x)))))


class NNXWithArgument(NNXNet):
    def __call__(self, x, *, train, rngs):
        x = nnx.relu(self.norm(self.first(x), use_running_average=not train))
        return self.last(self.dropout(x, deterministic=not train, rngs=rngs))


class NNXHardCoded(NNXNet):
    def __call__(self, x):
        x = nnx.relu(self.norm(self.first(x), use_running_average=False))
        return self.last(self.dropout(x, deterministic=False))


class NNXNotPytree(nnx.Module, pytree=False):
    def __init__(self, rngs):
        self.parts = [NNXHardCoded(rngs)]

    def __call__(self, x, is_training):
        return self.parts[0](x)


NNX_NETWORKS = [NNXNet, NNXWithArgument, NNXHardCoded, NNXNotPytree]


def nnx_oracle(network, x):
    """The same network with its evaluation mode written out by hand."""
    network = network.parts[0] if isinstance(network, NNXNotPytree) else network
    hidden = network.first(x)
    mean, var, scale, bias = (
        getattr(network.norm, name)[...][None] for name in ("mean", "var", "scale", "bias")
    )
    normal = (hidden - mean) / jnp.sqrt(var + network.norm.epsilon)
    return network.last(nnx.relu(normal * scale + bias))


class LinenNet(nn.Module):
    """Training mode at the constructor, at the call, or by an argument, by the name of `how`."""

    how: str
    classes: int = 2

    @nn.compact
    def __call__(self, x, train: bool = True):
        x = nn.Dense(4, **FLAX)(x)
        if self.how == "constructor":
            x = nn.BatchNorm(use_running_average=False, **FLAX)(x)
            x = nn.Dropout(0.5, deterministic=False)(nn.relu(x))
        elif self.how == "call":
            x = nn.BatchNorm(**FLAX)(x, use_running_average=False)
            x = nn.Dropout(0.5)(nn.relu(x), deterministic=False)
        elif self.how == "positional":
            x = nn.BatchNorm(**FLAX)(x, False)
            x = nn.Dropout(0.5)(nn.relu(x), False)
        else:
            x = nn.BatchNorm(use_running_average=not train, **FLAX)(x)
            x = nn.Dropout(0.5, deterministic=not train)(nn.relu(x))
        return nn.Dense(self.classes, **FLAX)(x)


def linen_variables(module, *args):
    variables = module.init({"params": KEY, "dropout": KEY}, X, *args)
    mean, var = statistics(KEY, 4)
    flat = traverse_util.flatten_dict(variables)
    for path, leaf in flat.items():
        flat[path] = {"mean": mean, "var": var}.get(path[-1], leaf)
    return traverse_util.unflatten_dict(flat)


class EquinoxNet(eqx.Module):
    first: eqx.nn.Linear
    norm: eqx.nn.BatchNorm
    dropout: eqx.nn.Dropout
    last: eqx.nn.Linear

    def __init__(self, key):
        first, last = jax.random.split(key)
        self.first = eqx.nn.Linear(3, 4, key=first)
        self.norm = eqx.nn.BatchNorm(4, "batch", mode="batch")
        self.dropout = eqx.nn.Dropout(0.5)
        self.last = eqx.nn.Linear(4, 2, key=last)

    def __call__(self, x, state, key):
        x, state = self.norm(self.first(x), state)
        return self.last(self.dropout(jax.nn.relu(x), key=key)), state


def equinox_net():
    network, state = eqx.nn.make_with_state(EquinoxNet)(KEY)
    # A few training steps fill the running averages.
    train = jax.vmap(network, axis_name="batch", in_axes=(0, None, None), out_axes=(0, None))
    for _ in range(3):
        _, state = train(X, state, KEY)
    return network, state


def linen_model():
    linen = LinenNet("constructor")
    return from_linen(linen, linen_variables(linen))


MODELS = {
    "nnx": lambda: from_nnx(NNXNet(nnx.Rngs(0))),
    "linen": linen_model,
    "equinox": lambda: from_equinox(*equinox_net()),
}


@pytest.fixture(params=MODELS)
def model(request):
    return MODELS[request.param]()


# --- what every adapter promises ------------------------------------------------------------------


def test_outputs_are_those_of_a_pure_function_of_each_sample(model):
    apply_fn, params = model
    assert all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(params))
    assert all(jnp.issubdtype(leaf.dtype, jnp.floating) for leaf in jax.tree.leaves(params))
    # Two dense layers, a scale and a bias: 3*4 + 4 + 4 + 4 + 4*2 + 2; no running average.
    assert sum(leaf.size for leaf in jax.tree.leaves(params)) == 34
    outputs = apply_fn(params, X)
    assert output_shape(apply_fn, params, X) == outputs.shape == (5, 2)
    assert_close(apply_fn(params, X[:1]), outputs[:1])
    assert_close(apply_fn(params, X[::-1]), outputs[::-1])


# --- Flax NNX -------------------------------------------------------------------------------------


@pytest.mark.parametrize("network", NNX_NETWORKS)
def test_nnx_is_in_evaluation_mode_whatever_was_hard_coded_and_not_mutated(network):
    module = network(nnx.Rngs(0))
    inner = module.parts[0] if network is NNXNotPytree else module
    before, classes = snapshot(nnx.state(module)), (type(inner), type(inner.norm))
    apply_fn, params = from_nnx(module)
    assert_close(apply_fn(params, X), nnx_oracle(module, X))
    jax.grad(lambda params: apply_fn(params, X).sum())(params)
    jax.tree.map(np.testing.assert_array_equal, snapshot(nnx.state(module)), before)
    assert (type(inner), type(inner.norm)) == classes
    assert inner.norm.use_running_average is False
    assert inner.dropout.deterministic is False


class NNXLists(nnx.Module):
    """Lists in lists, dictionaries with integer keys, a shared kernel."""

    def __init__(self, rngs):
        def layer():
            return nnx.Linear(3, 3, rngs=rngs, **FLAX)

        self.blocks = nnx.List([nnx.List([layer(), layer()]) for _ in range(2)])
        self.table = nnx.data({10: layer(), 2: layer()})
        self.gain = nnx.data((nnx.Param(jnp.ones((1, 3))), nnx.Param(jnp.ones((1, 3), jnp.int32))))
        self.offset = jnp.full((1, 3), 0.5)
        self.tied = self.blocks[0][1]
        self.blocks[1][0].kernel = self.blocks[0][0].kernel

    def __call__(self, x):
        for first, second in self.blocks:
            x = jnp.tanh(second(first(x)))
        return self.tied(self.table[2](x) + 2 * self.table[10](x)) * self.gain[0] + self.offset


def test_nnx_lists_integer_keys_and_tied_weights():
    module = NNXLists(nnx.Rngs(0))
    apply_fn, params = from_nnx(module)
    assert_close(apply_fn(params, X), module(X))
    flat = traverse_util.flatten_dict(params, sep=".")
    assert {"blocks.1.1.kernel", "table.2.bias", "table.10.bias", "gain.0"} <= set(flat)
    # 6 layers of kernel and bias, one kernel shared, one gain; integers are no parameters.
    assert len(flat) == 12 - 1 + 1
    assert "blocks.1.0.kernel" not in flat
    assert not any(name.startswith(("tied", "gain.1", "offset")) for name in flat)
    assert all(jnp.any(leaf != 0) for leaf in jax.tree.leaves(jax.jacrev(apply_fn)(params, X)))


# --- Flax Linen -----------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["constructor", "call", "positional", "argument"])
def test_linen_is_in_evaluation_mode_whatever_was_hard_coded(how):
    module = LinenNet(how)
    variables = linen_variables(module)
    apply_fn, params = from_linen(module, variables)
    expected = LinenNet("argument").apply(variables, X, train=False)
    assert_close(apply_fn(params, X), expected)
    assert jax.tree.structure(params) == jax.tree.structure(variables["params"])


def test_linen_submodules_given_as_attributes_are_not_mutated():
    class Wrapper(nn.Module):
        norm: nn.Module

        def __call__(self, x):
            return self.norm(x)

    norm = nn.BatchNorm(use_running_average=False, **FLAX)
    module = Wrapper(norm)
    variables = module.init(KEY, X)
    before = snapshot(variables)
    apply_fn, params = from_linen(module, variables)
    # Running averages of a fresh layer: mean 0, variance 1. Flax keeps them in float32: rtol 1e-6.
    np.testing.assert_allclose(apply_fn(params, X), X / jnp.sqrt(1 + norm.epsilon), rtol=1e-6)
    assert norm.use_running_average is False
    jax.tree.map(np.testing.assert_array_equal, snapshot(variables), before)


def test_linen_takes_frozen_boxed_and_bound():
    class Network(nn.Module):
        @nn.compact
        def __call__(self, x):
            init = nn.with_partitioning(nn.initializers.lecun_normal(), (None, "model"))
            return nn.Dense(2, kernel_init=init, **FLAX)(x)

    variables = core.freeze(Network().init(KEY, X))
    apply_fn, params = from_linen(Network().bind(variables), variables)
    assert type(params) is dict
    assert params["Dense_0"]["kernel"].shape == (3, 2)
    assert_close(apply_fn(params, X), Network().apply(variables, X))


def test_linen_incomplete_variables():
    module = LinenNet("constructor")
    variables = linen_variables(module)
    with pytest.raises(ValueError, match=r"no collection 'params', only \['Dense_0'"):
        from_linen(module, {k: v for k, v in variables["params"].items() if "Norm" not in k})
    with pytest.raises(TypeError, match="variables must be the dict of collections"):
        from_linen(module, [variables])
    apply_fn, params = from_linen(module, {"params": variables["params"]})
    with pytest.raises(ValueError, match=r"variables lacks a collection.*batch_stats"):
        apply_fn(params, X)


# --- Equinox --------------------------------------------------------------------------------------


def test_equinox_state_missing_or_wrong():
    network, state = equinox_net()
    with pytest.raises(ValueError, match=r"state is missing.*make_with_state"):
        from_equinox(network)
    with pytest.raises(TypeError, match=r"state must be an equinox\.nn\.State; got dict"):
        from_equinox(network, {"mean": 0})
    assert from_equinox(network, state).apply_fn is not None


def test_equinox_state_that_is_written_in_inference_too():
    """Writing to an `eqx.nn.State` spoils the old one: neither the user's nor ours may be it."""

    class Counter(eqx.Module):
        linear: eqx.nn.Linear
        index: eqx.nn.StateIndex

        def __init__(self):
            self.linear = eqx.nn.Linear(3, 2, key=KEY)
            self.index = eqx.nn.StateIndex(jnp.array(0))

        def __call__(self, x, state):
            return self.linear(x), state.set(self.index, state.get(self.index) + 1)

    network, state = eqx.nn.make_with_state(Counter)()
    apply_fn, params = from_equinox(network, state)
    for _ in range(2):
        assert_close(apply_fn(params, X), jax.vmap(network.linear)(X))
    assert state.get(network.index) == 0
    state.set(network.index, jnp.array(7))
    assert_close(apply_fn(params, X), jax.vmap(network.linear)(X))


# --- wrong kinds of input -------------------------------------------------------------------------

WRONG = {
    "another library": (lambda: from_nnx(nn.Dense(2)), r"Dense is of flax\.linen: .*from_linen"),
    "its class": (lambda: from_linen(eqx.nn.Linear, {}), r"Linear is of equinox: .*from_equinox"),
    "a class": (lambda: from_nnx(nnx.Linear), r"module is the class Linear; give an instance"),
    "a function": (lambda: from_nnx(lambda params, x: x), "needs no adapter"),
    "a number": (lambda: from_equinox(3), r"instance of equinox\.Module; got int"),
    "a list of layers": (lambda: from_nnx(nnx.List([])), "List has no __call__"),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_kinds_are_refused(case):
    call, message = WRONG[case]
    with pytest.raises(TypeError, match=message):
        call()


# --- check_per_sample and output_shape ------------------------------------------------------------


class HandWrittenNorm(nnx.Module):
    """Statistics of the batch, that no switch turns off."""

    def __init__(self, rngs, head=None):
        self.first = nnx.Linear(3, 4, rngs=rngs, **FLAX)
        head = head or nnx.initializers.lecun_normal()
        self.last = nnx.Linear(4, 2, kernel_init=head, rngs=rngs, **FLAX)

    def __call__(self, x):
        x = self.first(x)
        x = (x - x.mean(axis=0, keepdims=True)) / (x.std(axis=0, keepdims=True) + 1e-3)
        return self.last(nnx.relu(x))


def test_hand_written_batch_statistics_are_refused():
    apply_fn, params = from_nnx(HandWrittenNorm(nnx.Rngs(0)))
    with pytest.raises(ValueError, match=r"^network: an output depends .* no per-example kernel"):
        check_per_sample(apply_fn, params, X, name="network")
    check_per_sample(apply_fn, params, X[:1])  # a single sample has no companions


def test_last_layer_of_zeros_hides_nothing():
    """All outputs are zero, yet the gradients, hence the kernel, mix the samples."""
    apply_fn, params = from_nnx(HandWrittenNorm(nnx.Rngs(0), nnx.initializers.zeros_init()))
    assert not jnp.any(apply_fn(params, X))
    with pytest.raises(ValueError, match="depends on the other samples"):
        check_per_sample(apply_fn, params, X)
    zero_head = NNXNet(nnx.Rngs(0))
    zero_head.last.kernel[...] = jnp.zeros((4, 2))
    check_per_sample(*from_nnx(zero_head), X)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float64])
def test_rounding_is_no_dependence(dtype):
    """Wide sums in every precision: the same program on the same row, hence no false alarm."""
    keys = jax.random.split(KEY, 3)
    params = [jax.random.normal(key, (512, 512), dtype) / 16 for key in keys]
    x = jax.random.normal(KEY, (12, 512), dtype)

    def apply_fn(params, x):
        for weight in params:
            x = jax.nn.gelu(x @ weight)
        return x

    check_per_sample(apply_fn, params, x)
    assert output_shape(apply_fn, params, x) == (12, 512)

    def leaky(params, x):  # a tenth of the neighbour's output
        return apply_fn(params, x) + 0.1 * jnp.roll(apply_fn(params, x), 1, axis=0)

    with pytest.raises(ValueError, match="depends on the other samples"):
        check_per_sample(leaky, params, x)


def test_check_skips_what_is_not_known_and_works_inside_jit():
    apply_fn, params = from_nnx(HandWrittenNorm(nnx.Rngs(0)))

    def traced(params, x):
        check_per_sample(apply_fn, params, x)
        return apply_fn(params, x)

    assert jax.jit(traced)(params, X).shape == (5, 2)
    check_per_sample(apply_fn, params, jnp.ones((4, 3)))  # equal rows: nothing to tell
    check_per_sample(apply_fn, params, jnp.ones((0, 3)))

    @jax.jit
    def known(scale):
        check_per_sample(apply_fn, params, X)
        return scale

    with pytest.raises(ValueError, match="depends on the other samples"):
        known(1.0)

    @jax.jit
    def closes_over_a_tracer(scale):
        check_per_sample(lambda params, x: scale * apply_fn(params, x), params, X)
        return scale

    assert closes_over_a_tracer(1.0) == 1.0


BAD_OUTPUTS = {
    "(N,)": (lambda p, x: x[:, 0], r"returned \(5,\).*add an axis with outputs\[:, None\]"),
    "(N, T, C)": (lambda p, x: x[:, :, None], r"returned \(5, 3, 1\). Flatten to \(N, C\)"),
    "mean over the batch": (lambda p, x: x.mean(0), r"one row for every row of x.*\(3,\)"),
    "integers": (lambda p, x: x.astype(int), r"floating-point.*int64 of shape \(5, 3\)"),
    "tuple": (lambda p, x: (x, x), r"one array \(N, C\); it returned a tuple. Select"),
}


@pytest.mark.parametrize("case", BAD_OUTPUTS)
def test_wrong_outputs_are_refused(case):
    apply_fn, message = BAD_OUTPUTS[case]
    with pytest.raises(ValueError, match=r"^apply_fn must return.*" + message):
        check_per_sample(apply_fn, None, X)


# --- what was changed is said ---------------------------------------------------------------------


def test_layers_in_evaluation_mode_are_named():
    """By NNX and Equinox before the first call, by Linen once it was traced."""
    expected = {"1 BatchNorm on running averages", "1 dropout (0.5) off"}
    assert set(notes_of(from_nnx(NNXNet(nnx.Rngs(0))).apply_fn)) == expected
    assert set(notes_of(from_equinox(*equinox_net()).apply_fn)) == expected
    linen = linen_model()
    assert notes_of(linen.apply_fn) == ()
    for _ in range(2):  # not counted again
        jax.eval_shape(linen.apply_fn, linen.params, X)
        assert set(notes_of(linen.apply_fn)) == expected
    assert notes_of(from_equinox(eqx.nn.Linear(3, 2, key=KEY)).apply_fn) == ()


class TwoInputs(nn.Module):
    @nn.compact
    def __call__(self, ids, mask, train: bool):
        rows = nn.Embed(7, 4)(ids) * mask[..., None]
        rows = nn.Dropout(0.5)(rows, deterministic=not train)
        return nn.Dense(3)(rows.sum(1) / mask.sum(1, keepdims=True))


class TwoInputsEquinox(eqx.Module):
    embed: eqx.nn.Embedding
    out: eqx.nn.Linear

    def __call__(self, ids, mask):
        rows = jax.vmap(self.embed)(ids) * mask[..., None]
        return self.out(rows.sum(0) / mask.sum())


IDS = jnp.array([[1, 2, 0], [3, 4, 5], [6, 0, 0]])
TOKENS = {"ids": IDS, "mask": (IDS > 0).astype(jnp.float32)}


def two_inputs(library):
    if library == "linen":
        module = TwoInputs()
        return from_linen(module, module.init(KEY, **TOKENS, train=False))
    keys = jax.random.split(KEY)
    layers = eqx.nn.Embedding(7, 4, key=keys[0]), eqx.nn.Linear(4, 3, key=keys[1])
    return from_equinox(TwoInputsEquinox(*layers))


@pytest.mark.parametrize("library", ["linen", "equinox"])
def test_several_inputs_go_by_name_or_in_order(library):
    apply_fn, params = two_inputs(library)
    outputs = apply_fn(params, TOKENS)
    assert outputs.shape == (3, 3)
    np.testing.assert_array_equal(outputs, apply_fn(params, tuple(TOKENS.values())))
    changed = IDS.at[0, 2].set(6)  # padding, which the mask leaves out
    np.testing.assert_array_equal(outputs, apply_fn(params, TOKENS | {"ids": changed}))
    for wrong, words in (
        (IDS, r"inputs of the module's call, ids, mask: .*; got one \w+"),
        ({"ids": IDS}, r"got a mapping with \['ids'\]"),
        ((IDS,), "got a tuple of 1"),
    ):
        with pytest.raises(TypeError, match=words):
            apply_fn(params, wrong)


def test_dropout_that_is_left_on_is_refused_by_whatever_takes_single_samples():
    """Row 0 does not see its companions, but copies of it get masks of their own."""

    def dropped(w, x):
        outputs = jnp.tanh(x @ w)
        return jnp.where(jax.random.bernoulli(KEY, 0.5, outputs.shape), outputs, 0.0)

    w, words = jnp.ones((3, 4)), "apply_fn: copies of one sample give different outputs, as with"
    for refusing in (check_per_sample, jaxttp.empirical_ntk):
        with pytest.raises(ValueError, match=words):
            refusing(dropped, w, X)


def test_a_network_that_mixes_samples_has_no_kernel_of_its_own():
    """By samples one at a time its statistics would be those of one sample, silently."""
    mixing = lambda w, x: (x @ w) - jnp.mean(x @ w, axis=0, keepdims=True)  # noqa: E731
    w, y = jnp.ones((3, 2)), jnp.arange(len(X)) % 2
    for refusing in (
        lambda: jaxttp.empirical_ntk(mixing, w, X),
        lambda: jaxttp.conditioning.curvature_operator(mixing, w, X),
        lambda: jaxttp.dynamics.diagonal_noise(mixing, w, X, y, loss="cross_entropy"),
    ):
        with pytest.raises(ValueError, match="depends on the other samples"):
            refusing()
    # Products of the batch as a whole are those of its own Jacobian.
    assert jaxttp.ntk_operator(mixing, w, X).mv(jnp.ones((len(X), 2))).shape == (len(X), 2)


def test_parameters_and_outputs_that_no_kernel_is_of():
    linear = lambda w, x: x @ w  # noqa: E731
    with pytest.raises(ValueError, match="params holds complex numbers at its only leaf"):
        jaxttp.empirical_ntk(lambda w, x: (x @ w).real, jnp.ones((3, 2), complex), X)
    with pytest.raises(TypeError, match="params must be an array of numbers; got str"):
        jaxttp.empirical_ntk(linear, "weights", X)
    with pytest.raises(ValueError, match=r"must return outputs \(N, C\).*returned \(\d+, 0\)"):
        jaxttp.empirical_ntk(lambda w, x: (x @ w)[:, :0], jnp.ones((3, 2)), X)
