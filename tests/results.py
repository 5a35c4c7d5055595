"""One small result of every public type, made once a process."""

import dataclasses
import functools
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import jaxttp
from jaxttp import conditioning, dynamics, forecast, gauss_newton, ntk, representation
from jaxttp.models import MLP
from jaxttp.pipeline import (
    ConditionSettings,
    Settings,
    StepSettings,
    condition,
    fine_tuning_task,
    gauss_newton_task,
    report_task,
    sweep_task,
    task_spectrum,
    train_task,
)
from tests import tiny
from tests.models.texts import WORDS, write_model

STEPS = 20
MAKERS: dict[str, Callable[[], Any]] = {}


def maker(function):
    """A function that is called once; its name is the type's, behind the module's where needed."""
    MAKERS[function.__name__] = found = functools.cache(function)
    return found


@functools.cache
def problem():
    """A network with two hidden layers on three clouds of points."""
    draw = np.random.default_rng(0)
    y = np.arange(24) % 3
    x = draw.normal(size=(24, 5)).astype(np.float32) + 1.5 * np.eye(3, 5, dtype=np.float32)[y]
    return *jaxttp.from_nnx(MLP((5, 16, 16, 3), rngs=nnx.Rngs(0))), jnp.asarray(x), jnp.asarray(y)


@functools.cache
def kernel():
    return jaxttp.empirical_ntk(*problem()[:3])


def outputs():
    apply_fn, params, x, _ = problem()
    return apply_fn(params, x)


def moved(function, **options):
    return function(kernel(), outputs(), problem()[3], loss="cross_entropy", **options)


@functools.cache
def WEIGHTS():
    return conditioning.gaussian_weights((4, 6, 5, 3), key=jax.random.key(0))


@maker
def Prediction():
    return jaxttp.predict_training_time(*problem(), learning_rate=0.1, steps=STEPS, relinearize=2)


@maker
def TaskReport():
    return report_task(tiny.SETTINGS, verify=True)


@maker
def Cost():
    return Prediction().cost


@maker
def Forecast():
    return tiny.verified()


@maker
def TaskRun():
    return train_task(dataclasses.replace(tiny.SETTINGS, relinearize="auto"))


@maker
def Sweep():
    settings = jaxttp.grid(learning_rate=(0.1, 0.3, 1.0, 3.0), momentum=(0.0, 0.9), steps=STEPS)
    return jaxttp.sweep(*problem(), settings, relinearize=0)


@maker
def Race():
    settings = jaxttp.grid(learning_rate=(0.1, 0.3, 1.0, 3.0), momentum=(0.0, 0.9), steps=STEPS)
    return jaxttp.race(*problem(), settings, target_loss=0.5)


@maker
def TaskSweep():
    return sweep_task(
        Settings(data="wine", samples_per_class=4, steps=15, relinearize=0), time_steps=False
    )


@maker
def Comparison():
    starts = {
        "all": jaxttp.Candidate(*problem()[:2]),
        "head": jaxttp.Candidate(*problem()[:2], trainable=lambda path: path.startswith("head")),
    }
    return jaxttp.compare(starts, *problem()[2:], steps=STEPS, time_steps=False, relinearize=0)


@maker
def Explanation():
    return Comparison().explanations[0]


@maker
def OnlineForecast():
    apply_fn, params, x, y = problem()
    setting = forecast.Hyperparameters(0.3, steps=STEPS)
    watch = jaxttp.Online(apply_fn, params, x, y, setting)
    jaxttp.train(apply_fn, params, x, y, loss="cross_entropy", optimizer=setting.optimizer(),
                 steps=6, callback=watch)  # fmt: skip
    return watch.forecast()


@maker
def WallClock():
    return jaxttp.wall_clock(
        *problem(), steps={0.01: 15, 0.1: 8}, horizon=STEPS, optimizer=optax.sgd(0.1), device="A100"
    )


@maker
def TrainingRun():
    return jaxttp.train(
        *problem(), loss="cross_entropy", optimizer=optax.sgd(0.3), steps=STEPS
    )  # fmt: skip


@maker
def StepTime():
    return jaxttp.time_step(*problem(), loss="cross_entropy", optimizer=optax.sgd(0.3))


@maker
def Eigensystem():
    return ntk.eigendecomposition(kernel())


@maker
def PowerLaw():
    return ntk.fit_power_law(Eigensystem().values)


@maker
def SpectralDensity():
    return ntk.spectral_density(kernel(), key=jax.random.key(0))


@maker
def ClassSeparation():
    components = ntk.gradient_components(Eigensystem(), 6)
    return ntk.class_separation(components, problem()[3], classes=3, over="component")


@maker
def ClassSketch():
    return jaxttp.class_sketch(*problem()[:3], key=jax.random.key(0))


@maker
def KernelPlan():
    return jaxttp.ntk_plan(*problem()[:3])


@maker
def TaskSpectrum():
    return task_spectrum(Settings(data="wine", samples_per_class=4))


@maker
def Trajectory():
    ts = jnp.linspace(0.0, 60.0, 31)
    return moved(dynamics.gradient_flow, learning_rate=0.3, ts=ts)


@maker
def Diffusion():
    return moved(dynamics.diffusion, learning_rate=0.3, batch_size=6, steps=STEPS,
                 key=jax.random.key(0), paths=8)  # fmt: skip


@maker
def FineTuning():
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_model(folder, "llama-lm")
        (folder / "corpus.txt").write_text(" ".join(WORDS[4:] * 150))
        chosen = Settings(model=name, learning_rate=0.1, steps=200, batch_size=8)
        return fine_tuning_task(chosen, text=str(folder / "corpus.txt"), sequence_length=8)


@maker
def StaleGradientForecast():
    apply_fn, params, x, y = problem()
    return forecast.stale_gradient_forecast(
        apply_fn, params, x, y, x_watched=x[:6], y_watched=y[:6], optimizer=optax.adam(0.003),
        steps=80, batch_size=6, key=jax.random.key(0), fraction=0.6,
    )  # fmt: skip


@maker
def WeightSpaceTrajectory():
    return dynamics.weight_space(
        *problem(), loss="cross_entropy", optimizer=optax.adam(0.01), steps=STEPS
    )


@maker
def RelinearizedTrajectory():
    apply_fn, params, x, y = problem()
    return dynamics.relinearized_recursion(
        apply_fn, params, x, y, loss="cross_entropy", optimizer=optax.sgd(0.3), steps=STEPS,
        kernel_fn=lambda w: jaxttp.empirical_ntk(apply_fn, w, x), rebuilds=2,
    )  # fmt: skip


@maker
def TwoFactorTrajectory():
    draw = np.random.default_rng(0)
    f, w = draw.normal(size=(12, 5)) * 0.1, draw.normal(size=(5, 4)) * 0.1
    ts = jnp.linspace(0.0, 60.0, 41)
    return dynamics.two_factor_flow(f, w, np.arange(12) % 4, learning_rate=0.05, ts=ts)


@maker
def TwoFactorObservables():
    path = TwoFactorTrajectory()
    return dynamics.two_factor_observables(
        path.f[20], path.w[20], np.arange(12) % 4, learning_rate=0.05
    )


@maker
def ConditionNumber():
    return conditioning.condition_number(conditioning.gauss_newton_linear(WEIGHTS()))


@maker
def ConditionSweep():
    return conditioning.sweep("depth", (2, 3, 4), inputs=4, outputs=2, width=6,
                              key=jax.random.key(0))  # fmt: skip


@maker
def Bounds():
    return conditioning.linear_bound(WEIGHTS())


@maker
def LinearPoint():
    return conditioning.linear_point(WEIGHTS())


@maker
def LayerSpectra():
    return conditioning.layer_spectra(WEIGHTS())


@maker
def RankSensitivity():
    return conditioning.rank_sensitivity(ConditionNumber())


@maker
def Conditioning():
    return condition(ConditionSettings(data="wine", width=20))


@maker
def Geometry():
    features = np.random.default_rng(0).normal(size=(40, 12)) * np.arange(1.0, 13) ** -0.7
    return representation.representation_geometry(features)


@maker
def CKATable():
    draw = np.random.default_rng(0)
    first = draw.normal(size=(30, 6))
    layers = {"input": first, "hidden": np.maximum(first, 0), "output": first[:, :2]}
    return representation.cka_table(layers)


@maker
def StepInfo():
    draw = np.random.default_rng(0)
    w, n = draw.normal(size=(2, 2, 3, 16)) * 0.1, draw.normal(size=(2, 2, 16, 3))
    x = draw.normal(size=(8, 6))
    return gauss_newton.gauss_newton_direction(w, n, x, x * 0.1, return_info=True)[1]


@maker
def StepForecast():
    return gauss_newton.forecast_steps(outputs(), problem()[3], loss="cross_entropy",
                                       learning_rate=0.5, steps=8)  # fmt: skip


@maker
def TaskSteps():
    return gauss_newton_task(StepSettings(data="wine", samples_per_class=4, steps=3, bottleneck=32))
