"""Programs that a forecast will need, compiled in a second thread while the kernel's is.

What a first forecast of a large network waits for is the compiler, which uses one core. The
kernel's program is half of it; products with J^T, the stability limit and the recursion are most of
the rest, and their shapes are known before the kernel is.
"""

import contextlib
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from typing import Any

import jax
import jax.numpy as jnp

from jaxttp._checks import is_concrete
from jaxttp._threads import _cores, settle
from jaxttp.dynamics._network import compile_network
from jaxttp.dynamics.optimizers import HeavyBall
from jaxttp.dynamics.recursion import compile_recursion
from jaxttp.dynamics.stability import compile_limit
from jaxttp.forecast.descent import Descent
from jaxttp.forecast.problem import Problem

KEPT = 64
"""Forecasts that are remembered, so that what is compiled is not lowered again."""
_known: OrderedDict[Hashable, None] = OrderedDict()


@contextlib.contextmanager
def compiling_ahead(problem: Problem, descent: Descent, *, follows: bool = True) -> Iterator[None]:
    """Compile what follows the kernel while the block computes it; nothing is computed here.

    Where it fails, or there is one core, everything is compiled when it is needed, as ever.

    Args:
        problem: network and data.
        descent: the training.
        follows: whether it will be followed by the recursion on that kernel.
    """
    follows = follows and descent.batch_size is None and problem.x_test is None
    key = _key(problem, descent, follows)
    if key is None or key in _known or _cores() < 2:
        yield
        return
    _known[key] = None
    while len(_known) > KEPT:
        _known.popitem(last=False)
    settle()  # the policy of threads is set by the main thread, or not at all
    settings: Any = jax.config
    context = settings.jax_enable_x64, settings.jax_numpy_dtype_promotion
    worker = threading.Thread(target=_compile, args=(problem, descent, follows, *context))
    worker.start()
    try:
        yield
    finally:
        worker.join()


def _key(problem: Problem, descent: Descent, follows: bool) -> Hashable | None:
    """What the programs depend on; None where nothing is to be compiled ahead."""
    leaves = jax.tree.leaves((problem.weights, problem.x, problem.f0))
    if not all(map(is_concrete, leaves)) or not isinstance(descent.optimizer, HeavyBall):
        return None
    shapes = tuple((jnp.shape(leaf), str(jnp.result_type(leaf))) for leaf in leaves)
    key = (problem.network, problem.loss, shapes, descent.steps, descent.batch_size, follows)
    try:
        hash(key)
    except TypeError:
        return None
    return key


def _compile(problem: Problem, descent: Descent, follows: bool, x64: bool, promotion: Any) -> None:
    """In the settings of the thread that asked; what fails here fails there again, with words."""
    f0, targets = problem.f0, problem.targets
    kernel = jax.ShapeDtypeStruct((*f0.shape, *f0.shape), f0.dtype)
    optimizer: Any = descent.stepper  # a `HeavyBall`, `_key` saw to it
    programs: list[Callable[[], Any]] = []
    if descent.batch_size is None:  # else products with J^T go by batches
        pull: Any = compile_network(problem.network)[1]
        programs.append(lambda: pull.lower(problem.weights, problem.x, f0).compile())
    programs.append(lambda: compile_limit(kernel, f0, targets, problem.loss))
    if follows:
        common = {"loss": problem.loss, "steps": descent.steps}
        programs.append(lambda: compile_recursion(optimizer, kernel, f0, targets, **common))
    with jax.enable_x64(x64), jax.numpy_dtype_promotion(promotion):
        for program in programs:
            with contextlib.suppress(Exception):
                program()
