"""The number of directions of features, and how their variance decays over the directions.

All measures are functions of the singular values sigma_1 >= sigma_2 >= ... of the features
Z (N, h), or of the eigenvalues lambda_i = sigma_i^2 / N of their second moments (of their
covariance, when centered). They are invariant to rotations, reflections, scaling and the order of
the samples; centered ones are invariant to shifts, too. All are computed in float64.
"""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax.typing import ArrayLike
from jaxtyping import Array, Float

from jaxttp._core.arrays import as_double, double
from jaxttp._core.checks import check_choice, refuse
from jaxttp._core.results import RESULT, describe
from jaxttp._core.xla_cpu.threads import decompose
from jaxttp.ntk.spectrum import PowerLaw, fit_power_law

NORMALIZATIONS = ("singular_values", "eigenvalues")


def singular_values(features: ArrayLike, *, center: bool = False) -> Float[Array, " r"]:
    """Singular values of the features, largest first, over all their directions.

    Args:
        features: (N, h), or (N, ...), flattened to (N, h).
        center: subtract the mean of the samples first; then sigma^2 / N are the eigenvalues of the
            covariance.

    Returns:
        min(N, h) values in float64.

    Raises:
        ValueError: features that are empty, constant over the samples, or not finite.

    Example:
        >>> import numpy as np
        >>> singular_values(np.array([[3.0, 0.0], [0.0, 4.0]])).tolist()
        [4.0, 3.0]
    """
    with double():
        rows = feature_rows("features", features)
        if center:
            rows = rows - jnp.mean(rows, axis=0, keepdims=True)
        return decompose(jnp.linalg.svd, rows, compute_uv=False)


def rankme(
    features: ArrayLike,
    *,
    normalization: str = "singular_values",
    center: bool = False,
) -> Float[Array, ""]:
    """The effective rank, exp of the entropy of the normalized spectrum; between 1 and min(N, h).

        exp(-sum_i p_i log p_i)

    Args:
        features: (N, h) or (N, ...).
        normalization: "singular_values" for p_i = sigma_i / sum(sigma), the effective rank of Roy
            and Vetterli that RankMe uses; "eigenvalues" for p_i = sigma_i^2 / sum(sigma^2), the
            entropy of the covariance, smaller and used for language models under the same name.
        center: subtract the mean first. RankMe does not.

    Returns:
        A scalar.

    Raises:
        ValueError: features that are empty, constant or not finite, an unknown normalization.

    Example:
        >>> import numpy as np
        >>> z = np.diag([3.0, 1.0])
        >>> round(float(rankme(z)), 3), round(float(rankme(z, normalization="eigenvalues")), 3)
        (1.755, 1.384)

    Source:
        Garrido et al. 2023, RankMe, eq (1)-(2), without its 1e-7 added to every p_i; Roy and
        Vetterli 2007.
    """
    check_choice("normalization", normalization, NORMALIZATIONS)
    with double():
        return _entropy_rank(singular_values(features, center=center), normalization)


def _entropy_rank(sigma: Array, normalization: str) -> Array:
    weights = sigma if normalization == "singular_values" else sigma**2
    p = weights / jnp.sum(weights)
    return jnp.exp(-jnp.sum(jnp.where(p > 0, p * jnp.log(jnp.where(p > 0, p, 1.0)), 0.0)))


def participation_ratio(features: ArrayLike, *, center: bool = True) -> Float[Array, ""]:
    """(sum_i lambda_i)^2 / sum_i lambda_i^2, the number of directions if all were equal.

    Args:
        features: (N, h) or (N, ...).
        center: subtract the mean first (eigenvalues of the covariance, the usual definition).

    Returns:
        A scalar between 1 and the rank.

    Raises:
        ValueError: features that are empty, constant or not finite.

    Example:
        >>> import numpy as np
        >>> float(participation_ratio(np.array([[1.0, 0], [-1, 0], [0, 1], [0, -1]])))
        2.0

    Source:
        Gao et al. 2017, "A theory of multineuronal dimensionality".
    """
    with double():
        return _participation(singular_values(features, center=center))


def _participation(sigma: Array) -> Array:
    values = (sigma / sigma[0]) ** 2
    return jnp.sum(values) ** 2 / jnp.sum(values**2)


def alpha_req(
    features: ArrayLike,
    *,
    window: tuple[int, int] | None = None,
    center: bool = True,
) -> PowerLaw:
    """The slope alpha of lambda_i ~ i^-alpha over a window of ranks.

    Below 1 the variance lies in the tail, well above 1 in a few directions.

    Args:
        features: (N, h) or (N, ...).
        window: first and last rank of the fit, from 1, both included. None for K/10 to K/2 with
            K the number of singular values: state it, alpha depends on it.
        center: subtract the mean first (the eigenvalues of the covariance).

    Returns:
        A `jaxttp.ntk.PowerLaw`: `exponent` is alpha, `window` the ranks that were used,
        `r_squared` how good the line is.

    Raises:
        ValueError: features that are empty, constant or not finite; a window that holds fewer than
            two ranks, or reaches beyond the rank of the features.

    Example:
        >>> import numpy as np
        >>> q, _ = np.linalg.qr(np.random.default_rng(0).standard_normal((50, 20)))
        >>> law = alpha_req(q * np.arange(1, 21) ** -0.6, center=False, window=(1, 20))
        >>> round(float(law.exponent), 6), round(float(law.r_squared), 6), law.window
        (1.2, 1.0, (1, 20))

    Source:
        Agrawal et al. 2022, alpha-ReQ.
    """
    with double():
        return _power_law(singular_values(features, center=center), jnp.shape(features)[0], window)


def _power_law(sigma: Array, count: int, window: tuple[int, int] | None) -> PowerLaw:
    values = sigma**2 / count
    size = values.shape[0]
    if window is None and size < 2:
        raise ValueError(f"features have {size} direction(s); a slope needs at least two.")
    first, last = window if window is not None else (max(1, size // 10), max(2, size // 2))
    if 1 <= first < last <= size:  # fit_power_law raises for other windows
        beyond = values[last - 1] <= size * 2.0**-52 * values[0]
        text = f"features have a rank below {last}, where the window ends; give a window that ends "
        values = refuse(values, beyond, text + "earlier.")
    return fit_power_law(values, window=(first, last))


class Geometry(NamedTuple):
    """All measures of one set of features, with or without centering.

    Attributes:
        singular_values: largest first.
        rankme: with p_i = sigma_i / sum(sigma).
        entropy_rank: with p_i = sigma_i^2 / sum(sigma^2).
        participation_ratio: (sum lambda)^2 / sum lambda^2.
        alpha: the power law of the eigenvalues, with its window and goodness.
    """

    singular_values: Array
    rankme: Array
    entropy_rank: Array
    participation_ratio: Array
    alpha: PowerLaw

    plot, _repr_html_, __repr__ = RESULT

    def __str__(self) -> str:
        if jnp.ndim(self.rankme) > 0:
            return describe(self)
        first, last = self.alpha.window
        return (
            f"RankMe {float(self.rankme):.4g} (singular values), {float(self.entropy_rank):.4g} "
            f"(eigenvalues); participation ratio {float(self.participation_ratio):.4g}; alpha "
            f"{float(self.alpha.exponent):.3g} over ranks {first}-{last} "
            f"(R^2 {float(self.alpha.r_squared):.3g})"
        )


def representation_geometry(
    features: ArrayLike,
    *,
    center: bool = True,
    window: tuple[int, int] | None = None,
) -> Geometry:
    """Every measure here from one decomposition.

    Args:
        features: (N, h) or (N, ...).
        center: subtract the mean first, for all measures alike.
        window: ranks of the power law, as in `alpha_req`.

    Returns:
        A `Geometry`, which prints itself.

    Raises:
        ValueError: as the single measures.

    Example:
        >>> import numpy as np
        >>> print(representation_geometry(np.diag([4.0, 2.0, 1.0]), center=False, window=(1, 3)))
        RankMe 2.6 (singular values), 1.95 (eigenvalues); participation ratio 1.615;
        alpha 2.47 over ranks 1-3 (R^2 0.978)
    """
    with double():
        sigma = singular_values(features, center=center)
        return Geometry(
            sigma,
            _entropy_rank(sigma, "singular_values"),
            _entropy_rank(sigma, "eigenvalues"),
            _participation(sigma),
            _power_law(sigma, jnp.shape(features)[0], window),
        )


def feature_rows(name: str, value: Any) -> Array:
    """Samples (N, ...) as float64 rows (N, h) that are not all the same; call it inside `double`.

    Features that differ by no more than rounding have no directions.
    """
    rows = as_double(name, value)
    if rows.ndim < 2:
        raise ValueError(f"{name} must be (N, h), a sample a row; got shape {rows.shape}.")
    rows = rows.reshape(rows.shape[0], -1)
    constant = jnp.max(jnp.abs(rows - rows[:1])) <= 16 * 2.0**-52 * jnp.max(jnp.abs(rows))
    text = (
        f"{name} must differ between samples, but all are the same: nothing can be said of their "
        "directions. Give more samples, or look for dead units."
    )
    return refuse(rows, constant, text)
