"""LEAD: checkpoints by where a fresh head's logits would go (Hu et al. 2024), without training.

The linearised squared-error flow of a random head's outputs, with one rate for all samples of a
class: what `jaxttp.dynamics.closed_form` follows exactly, by a number a class.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Array, Float

from jaxttp._core.checks import check_integer, check_integers, check_key, check_known, check_number
from jaxttp._core.double import double
from jaxttp.representation._inputs import as_rows
from jaxttp.representation.transfer import known_labels

WIDTHS = (1024, 2048)
"""Hidden layers of the random head."""


def lead(
    features: ArrayLike,
    y: Any,
    *,
    key: Array,
    time: float | None = None,
    samples: int = 64,
    widths: tuple[int, ...] = WIDTHS,
) -> float:
    """The log-likelihood of labels after a random head's flow, a sample (LEAD).

        (1/N) sum_i log p_i(y_i),   p_i = (1 - e^(-time l_k)) onehot(y_i) + e^(-time l_k) p_i(0)

    with k the class of sample i, l_k of `lead_speeds`, and p(0) what a linear classifier says.

    Args:
        features: F, (N, h) or (N, ...), known values.
        y: integer labels (N,), at least two of them different.
        key: a `jax.random.key`, for the head's weights and the samples.
        time: eta t, above 0, the same for all checkpoints that are held against each other; when
            None 1 / mean l_k, by which the speed of these features does not count.
        samples: of a class, at most, to know l_k by.
        widths: hidden layers of the head.

    Returns:
        A number, at most 0; the larger, the better.

    Raises:
        ValueError: shapes, a single label, numbers out of range, what is not finite.

    Example:
        >>> import jax, numpy as np
        >>> good, y = np.array([[1.0, 1], [1.1, 1], [-0.9, 1], [-1.0, 1]]), np.array([0, 0, 1, 1])
        >>> bad, key = np.array([[1.0, 1], [-1.1, 1], [0.9, 1], [-1.0, 1]]), jax.random.key(0)
        >>> lead(good, y, key=key) > lead(bad, y, key=key)
        True

    Source:
        Hu et al. 2024, "LEAD: exploring logit space evolution for model selection", eq. (7). The
        paper's text was not at hand; this follows public descriptions of its Algorithm 1, which
        leave eta open. p(0) are one-vs-rest linear support vector machines on standardised
        features (scikit-learn), their values through a softmax.
    """
    check_known(features=features, y=y, key=key, time=time)
    if time is not None:
        check_number("time", time, above=0.0)
    speeds = lead_speeds(features, y, key=key, samples=samples, widths=widths)
    with double():
        rows = np.asarray(as_rows("features", features))
    labels = known_labels(y, len(rows))
    values = _classifier(rows, labels)
    values = values - values.max(axis=1, keepdims=True)
    first = np.exp(values) / np.exp(values).sum(axis=1, keepdims=True)
    left = np.exp(-(1.0 / speeds.mean() if time is None else time) * speeds)[labels]
    return float(np.mean(np.log1p(-left * (1.0 - first[np.arange(len(labels)), labels]))))


def lead_speeds(
    features: ArrayLike,
    y: Any,
    *,
    key: Array,
    samples: int = 64,
    widths: tuple[int, ...] = WIDTHS,
) -> Float[np.ndarray, " k"]:
    """The mean eigenvalue of each class's kernel of a random head's summed outputs.

        l_k = mean over samples i of class k of |grad_w sum_j F_j(x_i)|^2

    Args:
        features: F, (N, h) or (N, ...), known values.
        y: integer labels (N,), at least two of them different.
        key: a `jax.random.key`, for the head's weights and the samples.
        samples: of a class, at most.
        widths: hidden layers of the head: ReLU, He's normal weights, biases of 0.

    Returns:
        (K,), in the order of the labels.

    Raises:
        ValueError: as `lead`.

    Example:
        >>> import jax, numpy as np
        >>> small, y = np.array([[1.0], [1.1], [0.1], [0.2]]), np.array([0, 0, 1, 1])
        >>> found = lead_speeds(small, y, key=jax.random.key(0))
        >>> bool(found[0] > found[1])
        True

    Source:
        Hu et al. 2024, eq. (17) of the supplement, by descriptions; see `lead`.
    """
    check_known(features=features, y=y, key=key)
    check_key(key, optional=False)
    check_integer("samples", samples, at_least=1)
    widths = check_integers("widths", widths)
    with double():
        rows = np.asarray(as_rows("features", features))
        labels = known_labels(y, len(rows))
        classes = int(labels.max()) + 1
        if classes < 2:
            raise ValueError("y must hold at least two different labels; all samples have one.")
        draw, head = jax.random.split(key)
        order = np.asarray(jax.random.permutation(draw, len(rows)))
        chosen = [order[labels[order] == k][:samples] for k in range(classes)]
        norms = np.asarray(_gradient_norms(jnp.asarray(rows), head, (*widths, classes)))
    return np.array([norms[some].mean() for some in chosen])


def _gradient_norms(rows: Array, key: Array, widths: tuple[int, ...]) -> Array:
    """Squared norms (N,) of the gradients of a random head's summed outputs.

    A layer's part is |a|^2 |d|^2 of what goes into it and comes back to it, and |d|^2 of its bias.
    """
    inputs, weights, active = [], [], []
    for one, width in zip(jax.random.split(key, len(widths)), widths, strict=True):
        h = rows.shape[1]
        weight = jax.random.normal(one, (h, width), rows.dtype) * (2.0 / h) ** 0.5
        inputs.append(rows)
        weights.append(weight)
        before = jnp.matmul(rows, weight, precision="highest")
        active.append(before > 0)
        rows = jnp.maximum(before, 0.0)
    back = jnp.ones_like(rows)  # of the outputs, which no ReLU follows
    total = jnp.zeros(len(rows), rows.dtype)
    for place in reversed(range(len(widths))):
        total = total + (jnp.sum(inputs[place] ** 2, axis=1) + 1.0) * jnp.sum(back**2, axis=1)
        if place:
            back = jnp.matmul(back, weights[place].T, precision="highest") * active[place - 1]
    return total


def _classifier(rows: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """The values of one-vs-rest linear support vector machines (N, K)."""
    from sklearn.multiclass import OneVsRestClassifier
    from sklearn.preprocessing import StandardScaler
    from sklearn.svm import LinearSVC

    scaled = StandardScaler().fit_transform(rows)
    machine = OneVsRestClassifier(LinearSVC(random_state=0, max_iter=10000)).fit(scaled, labels)
    values = machine.decision_function(scaled)
    return np.stack([-values, values], axis=1) if values.ndim == 1 else values
