"""KFAC by kfac-jax, with a JAX that it can read."""

from typing import Any

import jax
import kfac_jax
import numpy as np

from experiments.bench.peers.protocol import Options, Prepared, Problem, serve
from experiments.bench.peers.reversible import NO_ANSWER, arrays, forward, half_squared_error


def _kfac(problem: Problem) -> tuple[Any, Any, Any]:
    """Its optimiser with everything adaptive, as its README has it; the weights as a list."""
    w, v, readout, x, targets = arrays(problem)

    def loss(w: Any, batch: Any) -> Any:
        x, targets = batch
        f = forward(w, v, readout, x)
        kfac_jax.register_squared_error_loss(f, targets)
        return half_squared_error(f, targets)

    optimizer = kfac_jax.Optimizer(
        jax.value_and_grad(loss), l2_reg=0.0, use_adaptive_learning_rate=True,
        use_adaptive_momentum=True, use_adaptive_damping=True, initial_damping=1.0,
        multi_device=False, num_burnin_steps=0,
    )  # fmt: skip
    return optimizer, [[half for half in block] for block in w], (x, targets)


def _copy(tree: Any) -> Any:
    return jax.tree.map(lambda leaf: leaf.copy() if isinstance(leaf, jax.Array) else leaf, tree)


def kfac_step(problem: Problem, options: Options) -> Prepared:
    """One step of KFAC on the same batch; it overwrites what it is given, which is copied."""
    optimizer, w, batch = _kfac(problem)
    key = jax.random.PRNGKey(0)
    state = optimizer.init(w, key, batch)

    def call() -> Any:
        found = optimizer.step(_copy(w), _copy(state), key, batch=batch, global_step_int=0)
        return jax.block_until_ready(found)

    return Prepared(call, lambda _: NO_ANSWER)


def kfac_fit(problem: Problem, options: Options) -> Prepared:
    """Steps of KFAC until the loss is below "target", "most" at most."""
    optimizer, start, batch = _kfac(problem)
    key = jax.random.PRNGKey(0)

    def call() -> Any:
        w = _copy(start)
        state = optimizer.init(w, key, batch)
        for count in range(options["most"]):
            w, state, stats = optimizer.step(w, state, key, batch=batch, global_step_int=count)
            if float(stats["loss"]) < options["target"]:
                break
        return {"loss": np.asarray(float(stats["loss"])), "steps": np.asarray(count + 1)}

    return Prepared(call, lambda found: found)


WORKS = {"kfac_step": kfac_step, "kfac_fit": kfac_fit}

if __name__ == "__main__":
    serve(WORKS, ("kfac-jax", "jax", "jaxlib"))
