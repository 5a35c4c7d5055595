import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxttp import predict_training_time, training_time
from jaxttp.dynamics.weight_space import weight_space
from jaxttp.forecast.uncertainty import steps_band, steps_uncertainty
from jaxttp.pipeline import Settings, build_task
from tests.draws import normal, split


@pytest.fixture(scope="module")
def job():
    keys = split(3, 4)
    x, x_test = normal(keys[0], (12, 4)), normal(keys[1], (6, 4))
    truth = normal(keys[2], (4, 3))
    params = {"a": normal(keys[3], (4, 8), 1 / 2), "b": jnp.ones((8, 3)) / 8}

    def apply_fn(w, x):
        return jnp.tanh(x @ w["a"]) @ w["b"]

    label = lambda x: jnp.argmax(x @ truth, axis=1)  # noqa: E731
    return apply_fn, params, x, label(x), x_test, label(x_test)


def predict(job, **options):
    options = {"steps": 30, "relinearize": 0} | options
    if "optimizer" not in options:
        options = {"learning_rate": 0.3} | options
    return predict_training_time(*job[:4], **options)


@pytest.mark.slow
@pytest.mark.parametrize("dynamics", ["recursion", "ode", "weight_space"])
def test_test_curves_of_the_training_samples_are_the_training_curves(job, dynamics):
    got = predict(job, dynamics=dynamics, x_test=job[2], y_test=job[3])
    np.testing.assert_allclose(got.test_loss, got.loss, atol=1e-7)
    np.testing.assert_allclose(got.test_error, got.error, atol=1e-12)
    other = predict(job, dynamics=dynamics, x_test=job[4], y_test=job[5])
    assert float(other.test_loss[-1]) < float(other.test_loss[0])
    assert "test   loss" in str(other)


@pytest.mark.slow
def test_adam_goes_to_weight_space_by_itself(job):
    got = predict(job, optimizer=optax.adam(0.02))
    want = weight_space(*job[:4], loss="cross_entropy", optimizer=optax.adam(0.02), steps=30)
    assert got.dynamics == "weight_space"
    np.testing.assert_allclose(got.outputs, want.train, atol=1e-12)
    assert got.trust is None  # the network confirms thirty small steps
    with pytest.raises(ValueError, match="weight_space"):
        predict(job, optimizer=optax.adam(0.02), dynamics="recursion")


@pytest.mark.slow
def test_sde_gives_bands(job, key):
    got = predict(job, dynamics="sde", batch_size=3, key=key, paths=8)
    assert got.loss_band.shape == (2, 31)
    assert bool(jnp.all(got.loss_band[0] <= got.loss_band[1] + 1e-12))
    assert got.steps_band == {}  # one kernel is not enough for this rate, and `trust` says so
    assert "(" not in str(got).splitlines()[1]
    calm = predict(job, dynamics="sde", batch_size=3, key=key, paths=8, learning_rate=0.01)
    assert calm.trust is None
    for threshold, (low, high) in calm.steps_band.items():
        assert low <= calm.steps[threshold] <= high
    assert "(" in str(calm).splitlines()[1]


@pytest.mark.slow
@pytest.mark.parametrize("loss", ["cross_entropy", "squared_error"])
def test_an_sde_beyond_the_limit_is_no_exception(job, key, loss):
    y = job[3] if loss == "cross_entropy" else jax.nn.one_hot(job[3], 3)
    got = predict_training_time(
        *job[:3], y, relinearize=0, loss=loss, learning_rate=1e6, steps=30, dynamics="sde",
        batch_size=3, key=key, paths=4,
    )  # fmt: skip
    assert not got.stable
    assert set(got.steps.values()) == {-1}
    assert got.steps_band is None
    assert bool(jnp.all(jnp.isfinite(got.loss)))
    assert "diverges" in str(got)


@pytest.mark.slow
def test_adaptive_kernels_come_with_an_uncertainty(job):
    got = predict(job, relinearize="auto", tolerance=0.005)
    assert got.cost.kernels > 2
    assert min(got.steps_uncertainty.values()) >= 1
    assert got.loss_uncertainty.shape == (31,)
    assert "±" in str(got)


def test_bands_and_uncertainties_of_known_curves():
    line = np.linspace(1.0, 0.0, 101)
    assert steps_band(jnp.stack([jnp.asarray(line)] * 3), 0.5) == (51, 51, 51)
    # a rise of the whole curve but its last value by 0.1 delays the crossing
    moved = steps_uncertainty(line, np.r_[np.full(100, 0.1), 0.0], 0.5)
    assert 4 <= moved <= 11


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"dynamics": "sde"}, "batch_size"),
        ({"relinearize": "some"}, "relinearize"),
        ({"relinearize": 2, "dynamics": "ode"}, "relinearize"),
        ({"x_test": np.zeros((2, 4))}, "y_test"),
    ],
)
def test_bad_input_names_the_argument(job, change, words):
    with pytest.raises(ValueError, match=words):
        predict(job, **change)


@pytest.mark.slow
def test_a_wide_sketch_forecasts_nearly_what_the_exact_kernel_does(job):
    # With equal columns in b no gradient reaches a, and a sketch that keeps b apart is exact.
    b = normal(4, (8, 3), 1 / 8)
    job = (job[0], job[1] | {"b": b}, *job[2:])
    common = {"momentum": 0.5, "x_test": job[2][:3], "y_test": job[3][:3]}
    exact = predict(job, **common)
    keys = split(0, 2)
    errors = []
    for dim in (50, 5000):
        found = predict(job, sketch_dim=dim, key=keys[0], **common)
        assert found.hyperparameters["sketch_dim"] == dim
        # These test samples are training samples: one projection serves both kernels.
        alone = jnp.mean(jnp.stack([row_loss(found.outputs[t], job[3]) for t in (0, -1)]), axis=1)
        np.testing.assert_allclose(found.test_loss[np.array([0, -1])], alone, rtol=1e-9)
        errors.append(float(jnp.max(jnp.abs(found.loss - exact.loss))))
    assert errors[1] < 0.05 * float(exact.loss[0])  # entries are right to about 1/sqrt(5000)
    assert errors[1] < errors[0]
    again = predict(job, sketch_dim=50, key=keys[0], **common)
    other = predict(job, sketch_dim=50, key=keys[1], **common)
    assert not np.array_equal(other.loss, again.loss)


@pytest.mark.slow
def test_a_sketch_of_4000_is_within_two_steps_on_the_main_job():
    task = build_task(Settings())
    options = {"loss": task.loss, "learning_rate": 0.005}
    exact = predict_training_time(*task.model, task.x, task.y, relinearize=0, **options)
    found = predict_training_time(
        *task.model,
        task.x,
        task.y,
        sketch_dim=4000,
        key=jax.random.key(2),
        relinearize=0,
        **options,
    )
    for threshold, steps in exact.steps.items():
        assert abs(found.steps[threshold] - steps) <= 2  # the required figure


def row_loss(f, y):
    return -jax.nn.log_softmax(f)[jnp.arange(3), y[:3]]


def test_a_sketch_needs_a_key_and_a_size(job):
    with pytest.raises(ValueError, match="sketch_dim=10 needs key"):
        predict(job, sketch_dim=10)
    with pytest.raises(ValueError, match="sketch_dim must be an integer"):
        predict(job, sketch_dim=0, key=jax.random.key(0))


@pytest.mark.slow
def test_times_by_other_definitions(job):
    got = predict(job)
    error = predict(job, metric="error", thresholds=(0.3,))
    by_error = got.read(0.3, metric="error")
    assert error.steps == by_error == {0.3: int(training_time(got.error, 0.3))}
    assert "% of the error's drop" in str(error)
    flat = got.read((0.05, 0.2), rule="plateau", window=4)
    assert flat == {
        e: int(training_time(got.loss, e, rule="plateau", window=4)) for e in (0.05, 0.2)
    }
    assert predict(job, rule="plateau", window=4, thresholds=(0.05, 0.2)).steps == flat
    level = float(got.loss[7]) + 1e-9
    assert got.read(level, rule="absolute") == {level: 7}
    assert got.read(0.1, smooth=5) == {0.1: int(training_time(got.loss, 0.1, smooth=5))}
    assert predict(job, learning_rate=1e4).read(0.1) == {0.1: -1}
    with pytest.raises(ValueError, match="metric='accuracy' is not known"):
        got.read(0.1, metric="accuracy")
    with pytest.raises(ValueError, match="metric='accuracy' is not known"):
        predict(job, metric="accuracy")
